"""Examples in memory, as clients train and test on them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue


@dataclass(frozen=True)
class Examples:
    """Features and targets, row by row.

    Parameters
    ----------
    features : Tensor, tuple or Mapping of str
        A tensor (n, …), passed to the model as ``model(features)``; or a tuple or mapping of
        such tensors, passed as ``model(*features)`` or ``model(**features)``.
    targets : Tensor, tuple or Mapping of str
        A tensor (n, …), or a tuple or mapping of such tensors, which loss and metrics read.

    Raises
    ------
    TypeError, ValueError
        A part is not a tensor, or has a different number of rows; the message names it.
    """

    features: Tree
    targets: Tree
    _count: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        features, targets = self.features, self.targets
        # This short cut for plain tensors takes a third of the time of the checks below. It pays,
        # because a client makes its examples anew in every round.
        plain = isinstance(features, Tensor) and isinstance(targets, Tensor)
        if plain and features.shape and targets.shape:
            count = features.shape[0]
            if count == targets.shape[0]:
                object.__setattr__(self, "_count", count)
                return
        leaves: list[tuple[str, Tensor]] = []
        for name in ("features", "targets"):
            tree = trees.checked(name, getattr(self, name))
            object.__setattr__(self, name, tree)
            leaves += trees.named(name, tree)
        for name, rows in leaves:
            if not rows.shape:
                raise InvalidValue(f"{name} are a single number: expected one row per example")
        first, most = leaves[0][0], leaves[0][1].shape[0]
        for name, rows in leaves:
            if (count := rows.shape[0]) != most:
                raise InvalidValue(
                    f"{most} rows of {first} but {count} rows of {name}: expected equally many"
                )
        object.__setattr__(self, "_count", most)

    def __len__(self) -> int:
        return self._count

    @property
    def row_type(self) -> tuple[Hashable, ...]:
        """Shape and type of one example's features, and of its target."""
        return trees.row_type(self.features), trees.row_type(self.targets)

    def subset(self, indices: np.ndarray | Sequence[int]) -> Examples:
        """Return the rows at ``indices``, in this order.

        Raises
        ------
        TypeError
            The indices are not integers, for example a mask of booleans.
        """
        rows = np.asarray(indices)
        if rows.size and rows.dtype.kind not in "iu":
            raise TypeError(
                f"indices of type {rows.dtype}: expected integers; turn a mask of booleans into "
                "integers by np.flatnonzero(mask)"
            )
        chosen = torch.from_numpy(rows.astype(np.int64))
        return Examples(*trees.rows((self.features, self.targets), chosen))

    def to(self, device: torch.device) -> Examples:
        """Return the same examples on ``device``."""
        if all(trees.first(part).device == device for part in (self.features, self.targets)):
            return self
        return Examples(*trees.to((self.features, self.targets), device))


@dataclass(frozen=True, kw_only=True)
class ClientData:
    """The data of one client."""

    train: Examples
    test: Examples

    def __post_init__(self) -> None:
        for name, part in (("train", self.train), ("test", self.test)):
            if not isinstance(part, Examples):
                raise TypeError(f"{name} of type {type(part).__name__}: expected Examples")


def within_unit_ball(clients: Sequence[ClientData]) -> list[ClientData]:
    """Return the clients' data with each record's features x scaled to x / max(1, ‖x‖₂).

    Objective perturbation requires features of norm at most 1. The factor of a record depends on
    its own norm alone, so changing one record changes no other. A record that is scaled gets a norm
    slightly below 1, so that rounding cannot raise the norm above 1.

    Raises
    ------
    ValueError
        Features are not a single tensor of floating-point numbers.
    """

    def scaled(examples: Examples) -> Examples:
        features = examples.features
        if not (isinstance(features, Tensor) and features.is_floating_point()):
            raise InvalidValue(
                "features: expected one tensor of floating-point numbers, because objective "
                "perturbation needs features of norm at most 1"
            )
        norms = torch.linalg.vector_norm(features.flatten(1).double(), dim=1)
        margin = max(1e-6, torch.finfo(features.dtype).eps)
        divisors = torch.where(norms > 1, norms * (1 + margin), 1.0)
        divisors = divisors.view(-1, *[1] * (features.dim() - 1))
        return Examples((features.double() / divisors).to(features.dtype), examples.targets)

    return [ClientData(train=scaled(data.train), test=scaled(data.test)) for data in clients]
