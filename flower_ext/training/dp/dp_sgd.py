"""DP-SGD: clip every example's gradient and noise their sum (see `clipped_gradient`).

Source: Abadi et al. (2016), Algorithm 1, with Poisson sampling and a public divisor
(`train_dp_sgd`), or in passes over all examples (`train_clipped_steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flower_ext.checks import (
    require_count,
    require_not_negative,
    require_positive,
    require_rate,
)
from flower_ext.data import Examples, trees
from flower_ext.errors import InvalidValue
from flower_ext.privacy import NoiseSource
from flower_ext.training.dp.clipped_gradient import ClippedGradient
from flower_ext.training.local import SGD, Job, batches, gradient
from flower_ext.training.params import Params
from flower_ext.training.problem import local_problem
from flower_ext.training.seeding import draws_seed, seeded
from flower_ext.training.task import Task


@dataclass(frozen=True, kw_only=True)
class DpSgdTraining:
    """Settings of DP-SGD on the records of one silo or client.

    Parameters
    ----------
    steps : int
    sampling_rate : float
        Probability with which a step samples each record, independently (Poisson).
    batch_size : float
        Divisor of the noised sum: a public number, usually the expected batch size.
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
        require_count("steps", self.steps)
        require_rate("sampling_rate", self.sampling_rate)
        for name in ("batch_size", "learning_rate", "clipping_norm"):
            require_positive(name, getattr(self, name))
        require_not_negative("noise_multiplier", self.noise_multiplier)


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
    Every step releases the sum of clipped gradients with noise of standard deviation σC. A record
    moves that sum by at most C. Only ``sampling`` knows which records took part in a step.

    Parameters
    ----------
    sampling : numpy.random.Generator
        Draws the records of every step, and a seed of the model's own draws, such as dropout:
        `privacy.secure_generator`, or a seeded one in simulation.
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
    clipped_gradient = ClippedGradient(
        task,
        list(weights),
        clipping_norm=training.clipping_norm,
        batch_size=training.batch_size,
    )
    stddev = training.noise_multiplier * training.clipping_norm
    # A record that joins moves others to places with other dropout masks: these must be as secret
    # as the sample, while torch's own generator usually begins at a known seed.
    draws = int(sampling.integers(2**62))
    with seeded(draws, devices=problem.device.type != "cpu"):
        for _ in range(training.steps):
            sample = np.flatnonzero(sampling.random(len(data)) < training.sampling_rate)
            rows = torch.from_numpy(sample).to(problem.device)
            point = {**problem.rest, **weights}
            slope = clipped_gradient(point, *trees.rows((data.features, data.targets), rows))
            for name, noised in noise.add_gaussian(slope, stddev).items():
                weights[name].sub_(noised, alpha=training.learning_rate / training.batch_size)
    return problem.whole(weights, like=params)


@dataclass(frozen=True, kw_only=True)
class StepNoise:
    """Protection of the records in each step of a local training.

    Parameters
    ----------
    clipping_norm : float
        L2 bound G on one record's gradient over all trained parameters.
    stddev : float
        Noise that every step adds to each weight, in the unit of the weights.
    source : NoiseSource
    """

    clipping_norm: float
    stddev: float
    source: NoiseSource

    def __post_init__(self) -> None:
        require_positive("clipping_norm", self.clipping_norm)
        require_not_negative("stddev", self.stddev)


@dataclass(kw_only=True)
class ClippedJob(Job):
    """A local training by clipped and noised steps; its terms must not depend on any record."""

    noise: StepNoise


def train_clipped_steps(
    task: Task, job: ClippedJob, trained: Callable[[str], bool] = lambda name: True
) -> Params:
    """Return the model after steps w ← w − η ((1/B) Σ clip(∇F̂(w; record), G) + ∇terms) + z.

    Guarantees
    ----------
    Mini-batches come in passes, in an order that depends on no record, and all steps divide by the
    same B. So a record moves a step that uses it by at most 2ηG/B, and each step adds
    N(0, stddev² I).

    Raises
    ------
    ValueError
        As `train_dp_sgd`; also if the training asks for more than plain steps.
    """
    training, noise = job.training, job.noise
    for name in ("momentum", "sam_radius", "tolerance"):
        if getattr(training, name):
            raise InvalidValue(f"{name}={getattr(training, name)!r}: expected 0 with clipped steps")
    if training.optimizer != SGD:
        raise InvalidValue(f"optimizer={training.optimizer!r}: expected {SGD!r} with clipped steps")
    if len(job.examples) == 0:
        raise InvalidValue("cannot train on a client without examples: leave it out")
    terms = job.objective
    problem = local_problem(task, job.params, trained=trained)
    weights = {name: w.clone() for name, w in problem.start.items()}
    clipped_gradient = ClippedGradient(
        task,
        list(weights),
        clipping_norm=noise.clipping_norm,
        batch_size=training.batch_size,
    )
    size = min(training.batch_size, len(job.examples))

    def added(point: Params) -> Tensor:
        return torch.stack([term(point) for term in terms]).sum()

    data = job.examples.to(problem.device)
    draws = draws_seed(job.generator)
    for number, (x, y) in enumerate(batches(data, training, job.generator)):
        with seeded(draws + number, devices=problem.device.type != "cpu"):
            step = clipped_gradient({**problem.rest, **weights}, x, y)
        pull = gradient(added, weights) if terms else {}
        moved = {}
        for name, w in weights.items():  # in float64 until noise covers the effect of rounding
            moved[name] = w.double().sub_(step[name], alpha=training.learning_rate / size)
            if terms:
                moved[name].sub_(pull[name], alpha=training.learning_rate)
        noised = noise.source.add_gaussian(moved, noise.stddev)
        weights = {name: noised[name].to(w.dtype) for name, w in weights.items()}
    return problem.whole(weights, like=job.params)
