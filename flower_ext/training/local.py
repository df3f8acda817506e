"""Local training of one model by SGD or SAM on a chosen part of its parameters.

Sharpness-aware minimisation follows Zhang et al. (DP²-FedSAM), Eqs. 11–12: the gradient g over
the *trained* parameters gives the perturbation p = q g/‖g‖₂; the step then uses the gradient at
w + p. With radius q = 0 this is SGD and costs one pass a step instead of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flower_ext.data import Examples
from flower_ext.training.objective import Term
from flower_ext.training.params import Params, to_device
from flower_ext.training.task import Task


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How one part of a model is trained on one client in one round.

    Parameters
    ----------
    epochs : int
        Passes over the client's training examples; 0 leaves the part as it is.
    steps : int, optional
        Number of mini-batches instead of ``epochs``.
    batch_size : int
    learning_rate : float
        In round 1; round t uses ``learning_rate * learning_rate_decay**(t-1)``.
    momentum : float
        Heavy-ball momentum in [0, 1), started afresh in every local training.
    sam_radius : float
        Perturbation radius q of sharpness-aware minimisation; 0 is plain SGD.
    """

    epochs: int = 2
    steps: int | None = None
    batch_size: int = 32
    learning_rate: float = 0.1
    learning_rate_decay: float = 1.0
    momentum: float = 0.0
    sam_radius: float = 0.0

    def __post_init__(self) -> None:
        def require(name: str, ok: bool, expected: str) -> None:
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {expected}")

        require("epochs", self.epochs >= 0, "an integer >= 0")
        require("steps", self.steps is None or self.steps >= 0, "an integer >= 0 or None")
        require("batch_size", self.batch_size >= 1, "an integer >= 1")
        require("learning_rate", 0 < self.learning_rate < math.inf, "a finite number > 0")
        require("learning_rate_decay", 0 < self.learning_rate_decay <= 1, "a number in (0, 1]")
        require("momentum", 0 <= self.momentum < 1, "a number in [0, 1)")
        require("sam_radius", 0 <= self.sam_radius < math.inf, "a finite number >= 0")

    def in_round(self, server_round: int) -> LocalTraining:
        """The same training with the learning rate of round ``server_round`` (from 1)."""
        rate = self.learning_rate * self.learning_rate_decay ** (server_round - 1)
        return replace(self, learning_rate=rate, learning_rate_decay=1.0)


def batches(
    examples: Examples, training: LocalTraining, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled mini-batches for as many epochs, or steps, as ``training`` asks for."""
    size = training.batch_size
    per_epoch = math.ceil(len(examples) / size)
    total = training.epochs * per_epoch if training.steps is None else training.steps
    for step in range(total):
        if step % per_epoch == 0:
            order = torch.randperm(len(examples), generator=generator)
            order = order.to(examples.targets.device)
        chosen = order[step % per_epoch * size :][:size]
        yield examples.features[chosen], examples.targets[chosen]


def perturbation(gradient: Sequence[Tensor], radius: float) -> list[Tensor]:
    """SAM's ascent step q g/‖g‖₂, the norm taken over all of ``gradient`` (Eq. 11)."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradient]))
    scale = torch.where(norm > 0, radius / norm, 0.0)  # no direction to climb at a flat point
    return [scale * g for g in gradient]


def minimise(
    loss_at: Callable[[Params, Tensor, Tensor], Tensor],
    start: Mapping[str, Tensor],
    examples: Examples,
    training: LocalTraining,
    generator: torch.Generator,
) -> Params:
    """SGD with momentum, or SAM, from ``start``; ``loss_at(params, x, y)`` is a scalar."""
    names = list(start)
    weights = [tensor.detach().clone() for tensor in start.values()]
    velocity = [torch.zeros_like(w) for w in weights]

    def gradient_at(point: Sequence[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        leaves = [w.detach().requires_grad_() for w in point]
        loss = loss_at(dict(zip(names, leaves, strict=True)), x, y)
        return list(torch.autograd.grad(loss, leaves))

    for x, y in batches(examples, training, generator):
        gradient = gradient_at(weights, x, y)
        if training.sam_radius > 0:
            ascent = perturbation(gradient, training.sam_radius)
            climbed = [w + p for w, p in zip(weights, ascent, strict=True)]
            gradient = gradient_at(climbed, x, y)
        for w, v, g in zip(weights, velocity, gradient, strict=True):
            v.mul_(training.momentum).add_(g)
            w.sub_(v, alpha=training.learning_rate)
    return dict(zip(names, weights, strict=True))


def train(
    task: Task,
    params: Mapping[str, Tensor],
    examples: Examples,
    training: LocalTraining,
    *,
    trained: Callable[[str], bool] = lambda name: True,
    terms: Sequence[Term] = (),
    generator: torch.Generator,
) -> Params:
    """Train the parameters that ``trained`` selects; all others are frozen.

    Returns
    -------
    Params
        The whole model after training: trained parameters, frozen ones, and buffers.

    Raises
    ------
    ValueError
        ``trained`` selects nothing, or there are no examples.
    """
    device = task.torch_device()
    model = task.model().to(device).train()
    everything = to_device(params, device)
    learnable = {name for name, _ in model.named_parameters()}
    start = {name: p for name, p in everything.items() if name in learnable and trained(name)}
    if not start:
        raise ValueError("trained selects no parameter of the model")
    if len(examples) == 0:
        raise ValueError("cannot train on a client without examples")
    # Buffers (if any) are updated in place by the model; copies keep the caller's untouched.
    rest = {name: p.clone() for name, p in everything.items() if name not in start}

    def loss_at(chosen: Params, x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(model, {**rest, **chosen}, (x,))
        value = task.loss(outputs, y)
        for term in terms:
            value = value + term(chosen)
        return value

    moved = minimise(loss_at, start, examples.to(device), training, generator)
    return {name: moved.get(name, rest.get(name, everything[name])) for name in params}


@torch.no_grad()
def evaluate(
    task: Task, params: Mapping[str, Tensor], examples: Examples, *, batch_size: int = 1024
) -> dict[str, float]:
    """Mean loss and the task's metrics of a model on ``examples``."""
    device = task.torch_device()
    model: nn.Module = task.model().to(device).eval()
    weights = to_device(params, device)
    examples = examples.to(device)
    outputs = torch.cat(
        [functional_call(model, weights, (x,)) for x in torch.split(examples.features, batch_size)]
    )
    targets = examples.targets
    scores = {name: float(metric(outputs, targets)) for name, metric in task.metrics.items()}
    return {"loss": float(task.loss(outputs, targets)), **scores}
