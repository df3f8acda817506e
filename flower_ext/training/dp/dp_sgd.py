"""DP-SGD: clip every example's gradient, in the fastest way of `passes`, and add noise to the sum.

Source: Abadi et al. (2016), Algorithm 1. `train_dp_sgd` samples the records of each step by Poisson
sampling, and divides the noised sum by a public number. `noised_step` does not sample: each epoch
divides all records into mini-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import count
from logging import ERROR, WARNING, getLogger

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from flower_ext.checks import Positive
from flower_ext.data import Examples, trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.privacy import DpSgd, NoiseSource
from flower_ext.training.dp.passes import MOST_STORED, Passes, Way
from flower_ext.training.index_limits import usable_rows
from flower_ext.training.isolation import attempted, draws_seed, seeded
from flower_ext.training.job import Job
from flower_ext.training.params import Params, clone
from flower_ext.training.problem import LocalProblem, Term, gradient, local_problem
from flower_ext.training.single_examples.layers import Parts
from flower_ext.training.task import Task

log = getLogger("flwr")

_MARGIN = 1.0 - 1e-5
"""Factor on the clipping norm. It covers the rounding errors of norms, which are computed partly in
single precision."""


@dataclass(frozen=True, kw_only=True)
class DpSgdTraining(DpSgd):
    """Settings of DP-SGD on the records of one silo or client.

    Parameters
    ----------
    noise_multiplier, sampling_rate, steps
        As in `DpSgd`, for one local training.
    batch_size : float
        Divisor of the noised sum: a public number, usually the expected batch size.
    learning_rate : float
    clipping_norm : float
        L2 bound C on one record's gradient over all trained parameters.
    """

    batch_size: Positive
    learning_rate: Positive
    clipping_norm: Positive


def train_dp_sgd(
    task: Task,
    params: Mapping[str, Tensor],
    examples: Examples,
    training: DpSgdTraining,
    *,
    sampling: np.random.Generator,
    noise: NoiseSource,
) -> Params:
    """Train a model by DP-SGD; every step draws a new sample of records.

    Guarantees
    ----------
    Every step releases the sum of clipped gradients with noise of standard deviation σC, where σ is
    the noise multiplier and C the clipping norm. Adding or removing a record moves the sum by at
    most C. Only ``sampling`` knows which records took part in a step.

    Parameters
    ----------
    sampling : numpy.random.Generator
        Draws the records of every step, and a seed for the model's own random draws, such as
        dropout. Use `privacy.secure_generator`, or a seeded generator in simulations.
    noise : NoiseSource

    Raises
    ------
    ValueError
        An example has no gradient of its own with this loss or model (see `ClippedGradient`).
    """
    problem = local_problem(task, params)
    weights, data = clone(problem.start), examples.to(problem.device)
    norm, size = training.clipping_norm, training.batch_size
    step = _step(
        ClippedGradient(task, [*weights], clipping_norm=norm, batch_size=size),
        problem,
        weights,
        divisor=size,
        stddev=training.noise_multiplier * norm,
        noise=noise,
        learning_rate=training.learning_rate,
        # An added record moves other records to places with other dropout masks, so the masks must
        # be as secret as the sample. Torch's own generator is not secret: it usually begins at a
        # known seed.
        seed=int(sampling.integers(2**62)),
    )
    for _ in range(training.steps):
        sample = np.flatnonzero(sampling.random(len(data)) < training.sampling_rate)
        rows = torch.from_numpy(sample).to(problem.device)
        step(*trees.rows((data.features, data.targets), rows))
    return problem.whole(weights, like=params)


def noised_step(
    task: Task, job: Job, problem: LocalProblem, weights: Params
) -> Callable[[Tree, Tree], None]:
    """Return a function that moves ``weights`` by one noised step on a mini-batch.

    The step is w ← w − η ((1/B) Σ clip(∇F̂(w; record), G) + ∇terms) + z. The sum is over the
    mini-batch. F̂ is the loss of one record, η the learning rate, G the clipping norm, and B the
    batch size, or the number of examples if that is smaller.

    Guarantees
    ----------
    Each pass over the examples divides them into mini-batches, in an order that depends on no
    record, and all steps divide by the same B. Replacing a record therefore moves a step that uses
    it by at most 2ηG/B. Each step adds noise z from N(0, stddev² I).
    """
    training, noise = job.training, job.noise
    assert noise is not None
    training.require_plain_sgd(
        "training", "each step is clipped and noised", besides=("proximal_weight",)
    )
    norm, size = noise.clipping_norm, min(training.batch_size, len(job.examples))
    return _step(
        ClippedGradient(task, [*weights], clipping_norm=norm, batch_size=training.batch_size),
        problem,
        weights,
        divisor=size,
        # The step multiplies its noise by η / size. The weights get noise of ``noise.stddev``.
        stddev=noise.stddev * size / training.learning_rate,
        noise=noise.source,
        learning_rate=training.learning_rate,
        seed=draws_seed(job.generator),
        terms=job.objective,
    )


def _step(
    clipped_gradient: ClippedGradient,
    problem: LocalProblem,
    weights: Params,
    *,
    divisor: float,
    stddev: float,
    noise: NoiseSource,
    learning_rate: float,
    seed: int,
    terms: Sequence[Term] = (),
) -> Callable[[Tree, Tree], None]:
    """Return the step w ← w − η ((Σ clipped gradients + noise)/divisor + ∇terms) on a mini-batch.

    η is the learning rate. Step k (from 0) seeds the model's own random draws by ``seed + k``.
    """
    seeds = count(seed)

    def sum_of_terms(point: Params) -> Tensor:
        return torch.stack([term(point) for term in terms]).sum()

    def step(x: Tree, y: Tree) -> None:
        with seeded(next(seeds), problem.device):
            summed = clipped_gradient({**problem.rest, **weights}, x, y)
        pull_of_terms = gradient(sum_of_terms, weights) if terms else {}
        for name, noised in noise.add_gaussian(summed, stddev).items():
            weights[name].sub_(noised, alpha=learning_rate / divisor)
            if terms:
                weights[name].sub_(pull_of_terms[name], alpha=learning_rate)

    return step


class ClippedGradient:
    """Sum over examples of their gradients, each clipped to ``clipping_norm``, in float64.

    An example's gradient is the gradient of this example's loss, as if there were no other example.
    It counts as zero if it is not finite, or if the example's loss raises an error, because an
    error message would reveal something about that record.

    Parameters
    ----------
    names : list of str
        The trained parameters; the norm is taken over all of them together.
    clipping_norm : float
    batch_size : float
        The usual number of examples of a call. It must be public, because it sets how many
        examples pass together.

    Raises
    ------
    ValueError
        The constructor raises it if the loss compares examples, or if a layer mixes them (see
        `model_of_single_examples`). A call raises it in three cases: the model or the loss
        remembers an example; the features have another floating-point type than the model's
        numbers; or the model cannot learn from one example alone (see `why_not_one_by_one`).
    """

    def __init__(
        self, task: Task, names: list[str], *, clipping_norm: float, batch_size: float = MOST_STORED
    ) -> None:
        if task.compares_examples:
            raise InvalidValue(
                "the loss compares examples, so no example has a gradient of its own to clip: "
                "DP-SGD needs a loss that is a mean over examples"
            )
        self.task, self.names, self.clipping_norm = task, names, clipping_norm
        self.passes = Passes(task, names, batch_size)
        self.way: Way | None = None
        """The way to find gradients, which the first call chooses."""
        self._logged: set[int] = set()
        self._device = task.torch_device()

    def __call__(self, params: Mapping[str, Tensor], features: Tree, targets: Tree) -> Params:
        """Return the sum of the examples' clipped gradients at ``params``, which are a whole model.

        Without examples, the sum is 0.
        """
        summed = {name: torch.zeros_like(params[name], dtype=torch.float64) for name in self.names}
        for name, parameter in self.passes.params.items():
            parameter.copy_(params[name])
        # Only the first training of a process runs trials. Seed the generators, so that the trials'
        # draws do not change the draws of this training.
        with seeded(0, self._device):
            way = self.way = self.way or self.passes.fastest_way(features, targets)
        if trees.length(features) == 0:
            return summed
        any_valid = False
        for x, y in trees.split((features, targets), self.passes.width(way)):
            parts, valid = self._gradients(way, x, y)
            if parts:
                self._add(summed, parts, valid)
                any_valid = any_valid or bool(valid.any())
        if not any_valid:
            text = "the loss raises an error for every example: check the task and the data"
            self._log_once(ERROR, text)
        return summed

    def _add(self, summed: Params, parts: Parts, valid: Tensor) -> None:
        """Clip each ``valid`` example's gradient, and add it to ``summed`` if it is finite."""
        # One norm over all parameters: a bound for each layer alone would allow a longer gradient.
        norms = reduce(torch.add, [part.squares() for part in parts.values()]).sqrt()
        # The smallest norm is 1e-30, because a gradient of zero would divide by zero.
        factors = (self.clipping_norm * _MARGIN / norms.clamp_min(1e-30)).clamp_max(1.0)
        factors = factors.where(valid, 0.0)
        # A factor of zero does not remove gradients that are not finite, because 0 · NaN is NaN.
        if not bool((finite := norms.isfinite()).all()):
            parts = {name: part.only(finite) for name, part in parts.items()}
            factors = factors.where(finite, 0.0)
        for name, part in parts.items():
            summed[name] += part.total(factors).view_as(summed[name])

    def _gradients(self, way: Way, x: Tree, y: Tree) -> tuple[Parts, Tensor]:
        """Return the gradients from one pass, and a bool per example: False if its loss fails.

        If all losses fail, there are no gradients.
        """
        device, width = trees.first(x).device, self.passes.width(way)
        # One seed for all passes over these examples, so that a repeated pass draws the same masks.
        seed = int(torch.randint(2**62, (1,)))
        valid = torch.ones(trees.length(x), dtype=torch.bool, device=device)
        if device.type != "cpu" and not (usable := usable_rows(self.task, x, y)).all():
            valid = usable.to(device)
            x, y = _with_stand_ins(x, y, valid)
        parts = self._try_pass(way, x, y, seed) if valid.any() else {}
        if parts is None:
            # One example's error ends the whole pass. Find that example, so that the others count.
            valid = valid & torch.tensor(self._which_pass(way, x, y, seed), device=device)
            x, y = _with_stand_ins(x, y, valid)
            parts = self._try_pass(way, x, y, seed)
        # The copies that fill the pass are not valid.
        return parts or {}, functional.pad(valid, (0, width - len(valid)))

    def _which_pass(self, way: Way, x: Tree, y: Tree, seed: int) -> list[bool]:
        """Return one bool for each example: False if its loss raises an error.

        Halving finds one failing example among n in about 2 log₂ n passes.
        """
        if self._try_pass(way, x, y, seed) is not None:
            return [True] * trees.length(x)
        if trees.length(x) == 1:
            self._log_once(WARNING, "an example's loss raises an error, so it counts as zero")
            return [False]
        halves = trees.split((x, y), -(-trees.length(x) // 2))
        return [valid for x, y in halves for valid in self._which_pass(way, x, y, seed)]

    def _try_pass(self, way: Way, x: Tree, y: Tree, seed: int) -> Parts | None:
        """Return the gradients from one pass over these examples; None if it raises an error."""
        more = self.passes.width(way) - trees.length(x)

        def widened(leaf: Tensor) -> Tensor:  # a copy, into which the model may write
            return torch.cat([leaf, leaf[:1].expand(more, *leaf.shape[1:])])

        # Random draws, such as dropout, depend only on the seed and on an example's place.
        with seeded(seed, self._device):
            parts = attempted(self.passes.gradients, way, *trees.mapped(widened, (x, y)))
        if isinstance(parts, Exception):
            log.debug("a pass of examples raises an error", exc_info=parts)
            return None
        return parts

    def _log_once(self, level: int, message: str) -> None:
        """Log a message once, on the client's own machine. The server does not see it."""
        if level not in self._logged:
            self._logged.add(level)
            log.log(level, message)


def _with_stand_ins(x: Tree, y: Tree, valid: Tensor) -> tuple[Tree, Tree]:
    """Replace every example that is not ``valid`` by the first valid one."""
    # The valid examples stay in place, so that dropout draws the same numbers for them.
    rows, first_valid = torch.arange(len(valid), device=valid.device), valid.int().argmax()
    stood_in: tuple[Tree, Tree] = trees.rows((x, y), rows.where(valid, first_valid))
    return stood_in
