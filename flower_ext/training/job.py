"""The description of a local training: its settings, its initial model, and its mini-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature

import torch
from torch import Tensor

from flower_ext.checks import (
    Checked,
    Count,
    CountOrZero,
    Fraction,
    FractionBelowOne,
    NotNegative,
    Positive,
    require_one_of,
)
from flower_ext.data import Examples
from flower_ext.errors import InvalidValue
from flower_ext.privacy import NoiseSource
from flower_ext.training.problem import Proximal, Term

SGD = "SGD"
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    name: optimizer
    for name, optimizer in vars(torch.optim).items()
    if isinstance(optimizer, type)
    and issubclass(optimizer, torch.optim.Optimizer)
    # Steps of these optimizers need more than a gradient, or another kind of gradient.
    and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
}
"""Optimizers of `torch.optim` whose steps need only a dense gradient, by name."""
DECAYING = {n for n, o in OPTIMIZERS.items() if "weight_decay" in signature(o).parameters} - {SGD}
"""Names of the optimizers for which `LocalTraining` takes a weight decay."""


@dataclass(frozen=True, kw_only=True)
class LocalTraining(Checked):
    """Settings for training one part of a model on one client in one round.

    Parameters
    ----------
    epochs : int
        Passes over the client's training examples; with 0 the part stays unchanged.
    steps : int, optional
        Number of mini-batches. If given, ``epochs`` does not count.
    batch_size : int
    learning_rate : float
        In round 1; round t uses ``learning_rate * learning_rate_decay**(t-1)``.
    momentum : float
        Heavy-ball momentum in [0, 1), reset at the start of every local training.
    sam_radius : float
        Perturbation radius q of sharpness-aware minimisation; 0 is plain SGD.
    proximal_weight : float
        μ of the term (μ/2)‖w − w₀‖² around the parameters that training starts from (FedProx).
    optimizer : str
        ``"SGD"``, or the name of another class of `torch.optim` that steps by a gradient, such as
        ``"AdamW"``. It starts afresh in every local training, with torch's defaults. Methods
        whose theorem or control variate assumes steps of SGD refuse other optimizers.
    weight_decay : float
        Weight decay of an optimizer other than SGD and Rprop; 0 is none, unlike torch's AdamW.
    tolerance : float
        If above 0, training finds the exact minimiser: a point where the norm of the gradient
        is at most this number (see `newton`). ``sam_radius`` and ``optimizer`` must then keep their
        defaults, and of the other settings only ``proximal_weight`` has an effect. Set a tolerance
        only for small strongly convex problems.
    """

    epochs: CountOrZero = 2
    steps: CountOrZero | None = None
    batch_size: Count = 32
    learning_rate: Positive = 0.1
    learning_rate_decay: Fraction = 1.0
    momentum: FractionBelowOne = 0.0
    sam_radius: NotNegative = 0.0
    proximal_weight: NotNegative = 0.0
    optimizer: str = SGD
    weight_decay: NotNegative = 0.0
    tolerance: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tolerance and self.sam_radius:
            raise InvalidValue(
                f"tolerance={self.tolerance!r}: expected 0 with sam_radius={self.sam_radius!r}, "
                "because training with a tolerance finds the exact minimiser, without such steps"
            )
        require_one_of("optimizer", self.optimizer, sorted(OPTIMIZERS))
        unused = () if self.optimizer == SGD else ("momentum", "tolerance")
        for name in unused if self.optimizer in DECAYING else (*unused, "weight_decay"):
            if value := getattr(self, name):
                raise InvalidValue(
                    f"{name}={value!r}: expected 0 with optimizer={self.optimizer!r}"
                )

    def require_plain_sgd(self, phase: str, because: str, *, besides: Collection[str] = ()) -> None:
        """Refuse settings that plain SGD does not have, except those in ``besides``.

        The error names this training by ``phase``, and gives ``because`` as the reason.

        Raises
        ------
        InvalidValue
            Such a setting is in use.
        """
        for name in ("momentum", "sam_radius", "proximal_weight", "tolerance", "optimizer"):
            value = getattr(self, name)
            if value not in (0, SGD) and name not in besides:
                raise InvalidValue(f"{phase}.{name}={value!r}: leave it out, because {because}")

    def in_round(self, number: int) -> LocalTraining:
        """Return the same training with the learning rate of training round ``number`` (from 1)."""
        rate = self.learning_rate * self.learning_rate_decay ** (number - 1)
        return replace(self, learning_rate=rate, learning_rate_decay=1.0)

    def num_steps(self, num_examples: int) -> int:
        """Return the number of mini-batches of one local training; 0 without examples."""
        if self.steps is not None:
            return self.steps if num_examples else 0
        return self.epochs * math.ceil(num_examples / self.batch_size)

    def effective_steps(self, num_examples: int) -> float:
        """Return how many steps without momentum would move the model as far as this training.

        The comparison assumes that all gradients are equal. Without momentum, the result is the
        number of steps K. With momentum β, a gradient also acts in all later steps. The result is
        then the sum of (1 − βᵏ) / (1 − β) over k = 1 … K.
        """
        steps, beta = self.num_steps(num_examples), self.momentum
        return (steps - beta * (1 - beta**steps) / (1 - beta)) / (1 - beta)


@dataclass(frozen=True, kw_only=True)
class StepNoise(Checked):
    """Clipping and noise that protect the records in each step of a local training.

    Parameters
    ----------
    clipping_norm : float
        L2 bound G on one record's gradient over all trained parameters.
    stddev : float
        Standard deviation of the noise that every step adds to each weight, in the weights' unit.
    source : NoiseSource
    """

    clipping_norm: Positive
    stddev: NotNegative
    source: NoiseSource


@dataclass(kw_only=True)
class Job:
    """One local training: its initial model, its examples and its settings.

    ``generator`` draws the mini-batches. Its state also determines the model's own random numbers,
    such as those of dropout. With ``noise``, every step clips each example's gradient and adds
    noise. In that case ``terms`` must not depend on any record.
    """

    params: Mapping[str, Tensor]
    examples: Examples
    training: LocalTraining
    generator: torch.Generator
    terms: Sequence[Term] = ()
    noise: StepNoise | None = None

    @property
    def objective(self) -> Sequence[Term]:
        """All terms that are added to the loss: ``terms``, and the proximal term if it is set."""
        if not self.training.proximal_weight:
            return self.terms
        return [*self.terms, Proximal(weight=self.training.proximal_weight, anchor=self.params)]

    @property
    def num_steps(self) -> int:
        """Number of mini-batches of the job."""
        return self.training.num_steps(len(self.examples))


def batch_rows(
    count: int, training: LocalTraining, generator: torch.Generator, *, fewest: int = 1
) -> Iterator[Tensor]:
    """Yield the row numbers of each shuffled mini-batch of ``count`` examples, on the CPU.

    If the last mini-batch of an epoch would have fewer than ``fewest`` rows, the last two
    mini-batches share their rows evenly. The number of steps stays the same.
    """
    left = training.num_steps(count)
    while left > 0:
        order = torch.randperm(count, generator=generator)
        parts = [*torch.split(order, training.batch_size)]
        if len(parts) > 1 and len(parts[-1]) < fewest:
            both = torch.cat(parts[-2:])
            half = len(both) // 2
            # Of three rows, each of the two mini-batches gets two, so they share a row.
            parts[-2:] = both[: len(both) - half], both[-max(half, fewest) :]
        yield from parts[:left]
        left -= len(parts)
