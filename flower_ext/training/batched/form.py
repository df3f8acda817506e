"""Interfaces of forms: ways to train many jobs, or to compute many models at once.

A plug-in offers a form of its own as the entry point of a `FormFactory`, in the group `GROUP`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flower_ext.training.dropout import Draws
from flower_ext.training.local import Job
from flower_ext.training.params import Params
from flower_ext.training.task import Task

MEMORY_LIMIT = 2**30
"""Bytes that one batch of trainings may take, unless the caller chooses another limit."""
GROUP = "flower_ext.forms"
"""Entry points of plug-ins that offer a form."""


class Form(Protocol):
    """A way to train jobs whose examples have one shape and type."""

    def groups(self, jobs: Sequence[Job], memory_limit: int) -> Iterable[list[int]]:
        """Yield the indices of the jobs that this form trains, as groups to train together."""

    def minimise(self, jobs: Sequence[Job], trained: Callable[[str], bool]) -> Params:
        """Return the parameters of a group after `local.train`, stacked, with one row per job.

        Raises
        ------
        ValueError
            ``trained`` selects nothing.
        """


class OfferedForm(Form, Protocol):
    """A form of a plug-in.

    It must train every job that it takes as `local.train` does, up to the order of sums. A trial
    with random jobs compares both for every model whose code the package does not know.
    """

    batch_invariant: bool
    """True if no bit of a model depends on the jobs that train beside it. A guarantee for each user
    rests on this promise, which no trial checks."""

    def __hash__(self) -> int:
        """Return a hash, by which the process remembers whether a trial found it sound."""

    def gains_alone(self, job: Job) -> bool:
        """Return True if a single job trains no more slowly than by PyTorch."""


FormFactory = Callable[[Task, Job], OfferedForm | None]
"""Returns the form for jobs like the given one. The same form serves all jobs of a kind, so that it
is tried only once. None if the plug-in cannot train them, or not faster."""

Loss = Callable[[Tensor], Tensor]
"""A function from the outputs of K models, of shape (K, batch, …), to a number."""


@dataclass(frozen=True)
class Target:
    """Destination of a parameter's gradient: ``tensor ← keep · tensor + factor · gradient``."""

    tensor: Tensor
    keep: float = 0.0
    factor: float = 1.0

    def add(self, gradient: Tensor) -> None:
        """Add a gradient."""
        if self.keep == 0:
            torch.mul(gradient, self.factor, out=self.tensor)
            return
        if self.keep != 1:
            self.tensor.mul_(self.keep)
        self.tensor.add_(gradient, alpha=self.factor)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add the gradient a @ b, without a tensor for the product itself."""
        self.tensor.baddbmm_(a, b, beta=self.keep, alpha=self.factor)


class ManyModels(Protocol):
    """One architecture with many sets of parameters."""

    parameters: list[str]
    """Names of the model's parameters."""
    fewest: int
    """Smallest number of models for which a batch is faster than one by one."""
    batch_invariant: bool
    """True if no model is known to depend on the other models, not even by its rounding."""
    draws: bool
    """True if a model draws random numbers."""

    def stack(self, many: Sequence[Tensor]) -> Tensor:
        """Stack the values that many models have for one parameter.

        The result's first dimension numbers the models.
        """

    def gradient(
        self,
        params: Mapping[str, Tensor],
        x: Tensor,
        loss: Loss,
        targets: Mapping[str, Target],
        draws: Draws | None = None,
    ) -> None:
        """Compute the gradient of ``loss`` and write it to ``targets``.

        Parameters
        ----------
        params : Mapping[str, Tensor]
            Parameters of K models by name, each with a first dimension of K.
        x : Tensor
            Mini-batches (K, batch, …).
        loss : Callable[[Tensor], Tensor]
        targets : Mapping[str, Target]
            Destinations of the gradient by parameter name. A parameter without a destination is
            frozen: no gradient is computed for it.
        draws : Draws, optional
            Random numbers, for models whose `draws` is true.
        """


def stacked(many: Sequence[Tensor]) -> Tensor:
    """Stack tensors as `torch.stack` does, but faster if all are one object (a common start)."""
    one = many[0]
    if any(other is not one for other in many):
        return torch.stack(list(many))
    return one.unsqueeze(0).repeat(len(many), *(1 for _ in one.shape))
