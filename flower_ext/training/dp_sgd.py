"""DP-SGD: every example's gradient clipped, their sum noised, in one backward pass.

What went in and out of every layer is kept: it gives the norm of each example's whole gradient, and
the sum of the clipped ones (`per_example`). Examples pass in small groups that stay in the caches.

Source: Abadi et al. (2016), Algorithm 1, with Poisson sampling and a public divisor
(`train_dp_sgd`), or in passes over all examples (`train_clipped_steps`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from logging import getLogger

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from flower_ext.data import Examples
from flower_ext.privacy import NoiseSource
from flower_ext.training.local import Job, batches, gradient, local_problem, spared
from flower_ext.training.many import MEMORY_LIMIT
from flower_ext.training.params import Params, clone, shaken
from flower_ext.training.per_example import LAYERS, Parts, Rows, is_known
from flower_ext.training.task import Task
from flower_ext.training.unfused import unfuse

log = getLogger("flwr")

_TOGETHER = 64
"""Examples that pass together where gradients of single examples are written down."""
_MARGIN = 1.0 - 1e-5
"""Room for the rounding of norms and products in single precision."""
_TRIED, _ALIKE = 3, 1e-3
"""Random examples on which one pass is tried out, and how far off rounding may be."""
_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)
"""Modules that do something else each time."""

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class DpSgdTraining:
    """How DP-SGD trains on the records of one silo or client.

    Parameters
    ----------
    steps : int
    sampling_rate : float
        Probability with which a step takes each record, independently (Poisson).
    batch_size : float
        What the noised sum is divided by: a public number, usually the expected one.
    learning_rate : float
    clipping_norm : float
        L2 bound C on one record's gradient over all trained parameters.
    noise_multiplier : float
        σ: every step's sum carries N(0, (σC)² I).
    """

    steps: int
    sampling_rate: float
    batch_size: float
    learning_rate: float
    clipping_norm: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        def require(name: str, ok: bool, expected: str) -> None:
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {expected}")

        require("steps", self.steps >= 0, "an integer >= 0")
        require("sampling_rate", 0 < self.sampling_rate <= 1, "a number in (0, 1]")
        for name in ("batch_size", "learning_rate", "clipping_norm"):
            require(name, 0 < getattr(self, name) < math.inf, "a finite number > 0")
        require("noise_multiplier", 0 <= self.noise_multiplier < math.inf, "a finite number >= 0")


def train_dp_sgd(
    task: Task,
    params: Mapping[str, Tensor],
    examples: Examples,
    training: DpSgdTraining,
    *,
    trained: Callable[[str], bool] = lambda name: True,
    sampling: np.random.Generator,
    noise: NoiseSource,
) -> Params:
    """Train the parameters that ``trained`` selects; all others are frozen.

    Guarantees
    ----------
    Every step releases the sum of clipped gradients with noise of standard deviation σC; a record
    moves that sum by at most C. Who took part in a step is known only to ``sampling``.

    Parameters
    ----------
    sampling : numpy.random.Generator
        Draws the records of every step: `privacy.secure_generator`, or a seeded one in simulation.
    noise : NoiseSource

    Raises
    ------
    ValueError
        ``trained`` selects nothing, or examples of this task or model have no gradient of their
        own (see `ClippedGradient`).
    """
    problem = local_problem(task, params, trained=trained)
    data = examples.to(problem.device)
    weights = {name: w.clone() for name, w in problem.start.items()}
    clipped_gradient = ClippedGradient(task, list(weights), clipping_norm=training.clipping_norm)
    stddev = training.noise_multiplier * training.clipping_norm
    for _ in range(training.steps):
        drawn = np.flatnonzero(sampling.random(len(data)) < training.sampling_rate)
        rows = torch.from_numpy(drawn).to(problem.device)
        point = {**problem.rest, **weights}
        slope = clipped_gradient(point, data.features[rows], data.targets[rows])
        for name, noised in noise.add_gaussian(slope, stddev).items():
            weights[name].sub_(noised, alpha=training.learning_rate / training.batch_size)
    return problem.whole(weights, like=params)


@dataclass(frozen=True, kw_only=True)
class StepNoise:
    """What protects the records in each step of a local training.

    Parameters
    ----------
    clipping_norm : float
        L2 bound G on one record's gradient over all trained parameters.
    stddev : float
        Of the noise that every step adds to each weight: in the unit of the weights.
    source : NoiseSource
    """

    clipping_norm: float
    stddev: float
    source: NoiseSource

    def __post_init__(self) -> None:
        if not 0 < self.clipping_norm < math.inf:
            raise ValueError(f"clipping_norm={self.clipping_norm!r}: expected a finite number > 0")
        if not 0 <= self.stddev < math.inf:
            raise ValueError(f"stddev={self.stddev!r}: expected a finite number >= 0")


@dataclass(frozen=True, kw_only=True)
class ClippedJob(Job):
    """A local training by clipped and noised steps; its terms must depend on no record."""

    noise: StepNoise


def train_clipped_steps(
    task: Task,
    jobs: Sequence[ClippedJob],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    memory_limit: int = MEMORY_LIMIT,
) -> list[Params]:
    """Each job's model after its steps w ← w − η ((1/B) Σ clip(∇F̂(w; record), G) + ∇terms) + z.

    Guarantees
    ----------
    Mini-batches come in passes, in an order that depends on no record; all steps divide by the same
    B. So a record moves a step that uses it by at most 2ηG/B, and each step adds N(0, stddev² I).

    Raises
    ------
    ValueError
        As `train_dp_sgd`; or the training asks for more than plain steps.
    """
    return [_clipped_steps(task, job, trained) for job in jobs]


def _clipped_steps(task: Task, job: ClippedJob, trained: Callable[[str], bool]) -> Params:
    training, noise = job.training, job.noise
    for name in ("momentum", "sam_radius", "tolerance"):
        if getattr(training, name):
            raise ValueError(f"{name}={getattr(training, name)!r}: expected 0 with clipped steps")
    if len(job.examples) == 0:
        raise ValueError("cannot train on a client without examples")
    terms = job.objective
    problem = local_problem(task, job.params, trained=trained)
    weights = {name: w.clone() for name, w in problem.start.items()}
    clipped_gradient = ClippedGradient(task, list(weights), clipping_norm=noise.clipping_norm)
    size = min(training.batch_size, len(job.examples))

    def added(point: Params) -> Tensor:
        return torch.stack([term(point) for term in terms]).sum()

    data = job.examples.to(problem.device)
    for x, y in batches(data, training, job.generator):
        step = clipped_gradient({**problem.rest, **weights}, x, y)
        pull = gradient(added, weights) if terms else {}
        moved = {}
        for name, w in weights.items():  # in float64 until noise covers what rounding does
            moved[name] = w.double().sub_(step[name], alpha=training.learning_rate / size)
            if terms:
                moved[name].sub_(pull[name], alpha=training.learning_rate)
        noised = noise.source.add_gaussian(moved, noise.stddev)
        weights = {name: noised[name].to(w.dtype) for name, w in weights.items()}
    return problem.whole(weights, like=job.params)


class ClippedGradient:
    """Sum over examples of their gradients, each clipped to ``clipping_norm``.

    An example's gradient is that of its own loss, as if there were no others. One that is not
    finite counts as zero: were it an error, that alone would tell of a record.

    Parameters
    ----------
    names : list of str
        The parameters that are trained: the norm is taken over all of these together.
    clipping_norm : float

    Raises
    ------
    ValueError
        The loss compares examples, or the model has batch normalisation.
    """

    def __init__(self, task: Task, names: list[str], *, clipping_norm: float) -> None:
        if task.compares_examples:
            raise ValueError(
                "the loss compares examples, so that none has a gradient of its own to clip: "
                "DP-SGD needs a loss that is a mean over examples"
            )
        self.task, self.names, self.clipping_norm = task, names, clipping_norm
        self.model = task.model().to(task.torch_device()).train().requires_grad_(False)
        # Faster for convolutions on a CPU, and for pooling above all.
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.params = self.model.state_dict()
        for name, module in self.model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise ValueError(
                    f"{name!r} is batch normalisation, by which every example moves every "
                    "gradient: use GroupNorm (flower_ext.training.replace_batch_norm)"
                )
            if getattr(module, "inplace", False):  # it would overwrite what a layer put out
                module.inplace = False
        layers = {name.rpartition(".")[0] for name in names}
        self.layers = {name: self.model.get_submodule(name) for name in layers}
        self.in_one_pass: bool | None = None if all(map(is_known, self.layers.values())) else False
        """Whether layers tell examples apart; None until there are some (see `_tells_apart`)."""
        written = any(type(layer) is not nn.Linear for layer in self.layers.values())
        self.together = _TOGETHER if written else 16 * _TOGETHER

    def __call__(self, params: Mapping[str, Tensor], features: Tensor, targets: Tensor) -> Params:
        """At ``params`` (the whole model), on (examples, …); zero for no examples."""
        summed = {name: torch.zeros_like(params[name]) for name in self.names}
        if len(features) == 0:
            return summed
        for name, own in self.params.items():
            own.copy_(params[name])
        if self.in_one_pass is None:
            self.in_one_pass = self._tells_apart(features)
        gradients = self._in_one_pass if self.in_one_pass else self._one_by_one
        groups = (torch.split(part, self.together) for part in (features, targets))
        for x, y in zip(*groups, strict=True):
            parts = gradients(spared(self.task, x), y, self.task.loss)
            norms = reduce(torch.add, [part.squares() for part in parts.values()]).sqrt()
            factors = (self.clipping_norm * _MARGIN / norms.clamp_min(1e-30)).clamp_max(1.0)
            if not bool((sound := norms.isfinite()).all()):
                parts = {name: part.only(sound) for name, part in parts.items()}
                factors = factors.where(sound, 0.0)
            for name, part in parts.items():
                summed[name] += part.total(factors).view_as(summed[name])
        return summed

    def _tells_apart(self, features: Tensor) -> bool:
        """Whether one pass finds every example's own gradient.

        It does not where a layer sees patches or times as rows, is used twice, or examples mix.
        Tried out on random examples, so that it depends on nobody's data, and with random weights:
        below a head that begins at zero all slopes are zero, and tell nothing.
        """
        generator, shape = torch.Generator().manual_seed(0), features.shape[1:]
        x = torch.randn(_TRIED, *shape, generator=generator)
        if not features.is_floating_point():
            x = x > 0
        x = x.to(features.device, features.dtype)
        random = [m for m in self.model.modules() if isinstance(m, _RANDOM)]
        for module in random:
            module.eval()
        weights = dict(self.model.named_parameters())
        kept = clone(weights)
        for name, weight in shaken(weights, generator).items():
            weights[name].copy_(weight)
        try:
            with torch.no_grad():
                outputs = torch.cat([self.model(x[i : i + 1]) for i in range(_TRIED)])
            directions = torch.randn(outputs.shape, generator=generator).to(outputs)
            together = self._in_one_pass(x, directions, _along)
            for row in range(_TRIED):
                only = torch.eye(_TRIED).to(outputs)[row]
                alone = partial(self._alone, _along, x[row], directions[row])
                own = gradient(alone, {name: self.params[name] for name in self.names})
                for name, part in together.items():
                    difference = part.total(only).flatten() - own[name].flatten()
                    largest = float(own[name].abs().max())
                    if not (largest > 0 and float(difference.abs().max()) <= _ALIKE * largest):
                        return False
        except Exception:  # whatever a model makes of being taken apart
            log.debug("examples pass one by one", exc_info=True)
            return False
        finally:
            for module in random:
                module.train()
            for name, weight in kept.items():
                weights[name].copy_(weight)
        return True

    def _in_one_pass(self, x: Tensor, y: Tensor, loss: Loss) -> Parts:
        came_in: dict[str, Tensor] = {}
        went_out: dict[str, Tensor] = {}

        def keep(name: str, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            came_in[name] = inputs[0].detach()
            went_out[name] = output if output.requires_grad else output.requires_grad_()
            return output

        hooks = [m.register_forward_hook(partial(keep, name)) for name, m in self.layers.items()]
        try:
            outputs = self.model(x)
        finally:
            for hook in hooks:
                hook.remove()
        slopes = torch.autograd.grad(_summed(loss, outputs, y), list(went_out.values()))
        parts = {}
        for layer, slope in zip(went_out, slopes, strict=True):
            module = self.layers[layer]
            for leaf, part in LAYERS[type(module)](module, came_in[layer], slope).items():
                parts[f"{layer}.{leaf}"] = part
        return {name: parts[name] for name in self.names}

    def _one_by_one(self, x: Tensor, y: Tensor, loss: Loss) -> Parts:
        """Any other model: every example's own gradient, by vmap."""
        with suppress(ValueError):  # an unusual layer, which vmap may know or say that it does not
            unfuse(self.model)
        chosen = {name: self.params[name] for name in self.names}

        def own(x: Tensor, y: Tensor) -> Params:
            found: Params = grad(partial(self._alone, loss, x, y))(chosen)
            return found

        each = vmap(own, randomness="different")(x, y)
        return {name: Rows(gradient) for name, gradient in each.items()}

    def _alone(self, loss: Loss, x: Tensor, y: Tensor, chosen: Params) -> Tensor:
        """The loss of one example, without the dimension of examples, at ``chosen`` parameters."""
        outputs = functional_call(self.model, {**self.params, **chosen}, (x.unsqueeze(0),))
        return loss(outputs, y.unsqueeze(0))


def _summed(loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """Σ loss of one example alone: a mean may weigh examples by what the others are."""
    if loss is functional.cross_entropy and outputs.dim() == 2:
        return functional.cross_entropy(outputs, y, reduction="sum")

    def alone(output: Tensor, target: Tensor) -> Tensor:
        return loss(output.unsqueeze(0), target.unsqueeze(0))

    return vmap(alone)(outputs, y).sum()


def _along(outputs: Tensor, directions: Tensor) -> Tensor:
    return (outputs * directions).sum()
