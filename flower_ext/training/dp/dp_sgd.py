"""DP-SGD: clip every example's gradient, and add noise to the sum (see `clipped_gradient`).

Source: Abadi et al. (2016), Algorithm 1. `train_dp_sgd` samples the records of each step by Poisson
sampling, and divides the noised sum by a public number. `noised_step` does not sample: each epoch
divides all records into mini-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from flower_ext.checks import Positive
from flower_ext.data import Examples, trees
from flower_ext.data.trees import Tree
from flower_ext.privacy import DpSgd, NoiseSource
from flower_ext.training.dp.clipped_gradient import ClippedGradient
from flower_ext.training.isolation import draws_seed, seeded
from flower_ext.training.job import Job
from flower_ext.training.params import Params, clone
from flower_ext.training.problem import LocalProblem, Term, gradient, local_problem
from flower_ext.training.task import Task


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
    Every step releases the sum of clipped gradients with noise of standard deviation σC. A record
    moves that sum by at most C. Only ``sampling`` knows which records took part in a step.

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
    step = _step(
        task,
        problem,
        weights,
        clipping_norm=training.clipping_norm,
        batch_size=training.batch_size,
        divisor=training.batch_size,
        stddev=training.noise_multiplier * training.clipping_norm,
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
    mini-batch. F̂ is the loss of one record, η the learning rate, B the batch size, and G the
    clipping norm.

    Guarantees
    ----------
    Each pass over the examples divides them into mini-batches, in an order that depends on no
    record, and all steps divide by the same B. A record therefore moves a step that uses it by at
    most 2ηG/B. Each step adds noise z from N(0, stddev² I).
    """
    training, noise = job.training, job.noise
    assert noise is not None
    training.require_plain_sgd(
        "training", "each step is clipped and noised", besides=("proximal_weight",)
    )
    size = min(training.batch_size, len(job.examples))
    return _step(
        task,
        problem,
        weights,
        clipping_norm=noise.clipping_norm,
        batch_size=training.batch_size,
        divisor=size,
        stddev=noise.stddev * size / training.learning_rate,
        noise=noise.source,
        learning_rate=training.learning_rate,
        seed=draws_seed(job.generator),
        terms=job.objective,
    )


def _step(
    task: Task,
    problem: LocalProblem,
    weights: Params,
    *,
    clipping_norm: float,
    batch_size: float,
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
    clipped_gradient = ClippedGradient(
        task, list(weights), clipping_norm=clipping_norm, batch_size=batch_size
    )
    seeds = count(seed)

    def added(point: Params) -> Tensor:
        return torch.stack([term(point) for term in terms]).sum()

    def step(x: Tree, y: Tree) -> None:
        with seeded(next(seeds), devices=problem.device.type != "cpu"):
            summed = clipped_gradient({**problem.rest, **weights}, x, y)
        pulls = gradient(added, weights) if terms else {}
        for name, noised in noise.add_gaussian(summed, stddev).items():
            weights[name].sub_(noised, alpha=learning_rate / divisor)
            if terms:
                weights[name].sub_(pulls[name], alpha=learning_rate)

    return step
