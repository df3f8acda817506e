"""Interfaces: of a form of many trainings, and of a form of many models at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flower_ext.training.dropout import Draws
from flower_ext.training.local import Job
from flower_ext.training.params import Params


class Form(Protocol):
    """A way to train jobs whose examples have one shape and type."""

    def groups(self, jobs: Sequence[Job], memory_limit: int) -> Iterable[list[int]]:
        """Yield the indices of those jobs that it trains, as groups to train together."""

    def minimise(self, jobs: Sequence[Job], trained: Callable[[str], bool]) -> Params:
        """Return what `local.train` makes of the parameters of a group, in rows, one a job.

        Raises
        ------
        ValueError
            ``trained`` selects nothing.
        """


Loss = Callable[[Tensor], Tensor]
"""A number from the outputs of K models, of shape (K, batch, …)."""


@dataclass(frozen=True)
class Target:
    """Where the gradient of one parameter goes: ``tensor ← keep · tensor + factor · gradient``."""

    tensor: Tensor
    keep: float = 0.0
    factor: float = 1.0

    def add(self, gradient: Tensor) -> None:
        """Take a gradient."""
        if self.keep == 0:
            torch.mul(gradient, self.factor, out=self.tensor)
            return
        if self.keep != 1:
            self.tensor.mul_(self.keep)
        self.tensor.add_(gradient, alpha=self.factor)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Take the gradient a @ b, which is not written anywhere else."""
        self.tensor.baddbmm_(a, b, beta=self.keep, alpha=self.factor)


class ManyModels(Protocol):
    """One architecture with many sets of parameters."""

    parameters: list[str]
    """Names of the model's parameters."""
    fewest: int
    """Models below which one after the other is faster."""
    steady: bool
    """Whether no model is known to depend on which others there are, not even by its rounding."""
    draws: bool
    """Whether a model draws random numbers."""

    def stack(self, many: Sequence[Tensor]) -> Tensor:
        """Return one parameter of many models as one tensor."""

    def gradient(
        self,
        params: Mapping[str, Tensor],
        x: Tensor,
        loss: Loss,
        targets: Mapping[str, Target],
        draws: Draws | None = None,
    ) -> None:
        """Send the gradient of ``loss`` to ``targets``, by parameter name.

        Parameters
        ----------
        params : Mapping[str, Tensor]
            Of K models, each with a first dimension of K. Those without a target are frozen.
        x : Tensor
            Mini-batches (K, batch, …).
        loss : Callable[[Tensor], Tensor]
        targets : Mapping[str, Target]
        draws : Draws, optional
            What the models draw, if they do.
        """


def stacked(many: Sequence[Tensor]) -> Tensor:
    """As `torch.stack`, but faster where all are the same object: models that start alike."""
    one = many[0]
    if any(other is not one for other in many):
        return torch.stack(list(many))
    return one.unsqueeze(0).repeat(len(many), *(1 for _ in one.shape))
