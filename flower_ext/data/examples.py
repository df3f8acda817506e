"""Examples in memory: the form in which clients train and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Examples:
    """``features`` (n, …) and ``targets`` (n,), row by row."""

    features: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if len(self.features) != len(self.targets):
            raise ValueError(f"{len(self.features)} features but {len(self.targets)} targets")

    def __len__(self) -> int:
        return len(self.targets)

    def subset(self, indices: np.ndarray | Sequence[int]) -> Examples:
        """The rows at ``indices``, in their order.

        Raises
        ------
        TypeError
            The indices are no integers, such as a mask of booleans.
        """
        rows = np.asarray(indices)
        if rows.size and rows.dtype.kind not in "iu":
            raise TypeError(
                f"indices of type {rows.dtype}: expected integers (np.flatnonzero(mask))"
            )
        chosen = torch.from_numpy(rows.astype(np.int64))
        return Examples(self.features[chosen], self.targets[chosen])

    def to(self, device: torch.device) -> Examples:
        """The same examples on ``device``."""
        return Examples(self.features.to(device), self.targets.to(device))


@dataclass(frozen=True, kw_only=True)
class ClientData:
    """What one client holds."""

    train: Examples
    test: Examples
