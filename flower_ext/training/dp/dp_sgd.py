"""DP-SGD: clip every example's gradient and noise their sum (see `clipped_gradient`).

Source: Abadi et al. (2016), Algorithm 1, with Poisson sampling and a public divisor
(`train_dp_sgd`), or in passes over all examples (`train_clipped_steps`). Both take the steps of
`_descend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flower_ext.checks import require_positive
from flower_ext.data import Examples, trees
from flower_ext.data.trees import Tree
from flower_ext.privacy import DpSgd, NoiseSource
from flower_ext.training.dp.clipped_gradient import ClippedGradient
from flower_ext.training.job import Job, batches
from flower_ext.training.params import Params
from flower_ext.training.problem import LocalProblem, Term, gradient, local_problem
from flower_ext.training.seeding import draws_seed, seeded
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

    batch_size: float
    learning_rate: float
    clipping_norm: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_size", "learning_rate", "clipping_norm"):
            require_positive(name, getattr(self, name))


def train_dp_sgd(
    task: Task,
    params: Mapping[str, Tensor],
    examples: Examples,
    training: DpSgdTraining,
    *,
    sampling: np.random.Generator,
    noise: NoiseSource,
) -> Params:
    """Train a model on records that every step samples anew.

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
        Examples of this task or model have no gradient of their own (see `ClippedGradient`).
    """
    problem = local_problem(task, params)
    data = examples.to(problem.device)
    clipped_gradient = ClippedGradient(
        task,
        list(problem.start),
        clipping_norm=training.clipping_norm,
        batch_size=training.batch_size,
    )
    # An added record moves other records to places with other dropout masks, so the masks must be
    # as secret as the sample. Torch's own generator usually begins at a known seed.
    draws = int(sampling.integers(2**62))

    def samples() -> Iterator[tuple[Tree, Tree]]:
        for _ in range(training.steps):
            sample = np.flatnonzero(sampling.random(len(data)) < training.sampling_rate)
            rows = torch.from_numpy(sample).to(problem.device)
            yield trees.rows((data.features, data.targets), rows)

    weights = _descend(
        problem,
        samples(),
        clipped_gradient,
        stddev=training.noise_multiplier * training.clipping_norm,
        noise=noise,
        learning_rate=training.learning_rate,
        batch_size=training.batch_size,
        draws=draws,
    )
    return problem.whole(weights, like=params)


def train_clipped_steps(
    task: Task,
    job: Job,
    trained: Callable[[str], bool] = lambda name: True,
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
        ``trained`` selects nothing, examples have no gradient of their own (see `ClippedGradient`),
        or the training asks for more than plain steps.
    """
    training, noise = job.training, job.noise
    assert noise is not None
    training.require_plain_sgd(
        "training", "each step is clipped and noised", besides=("proximal_weight",)
    )
    problem = local_problem(task, job.params, trained=trained)
    clipped_gradient = ClippedGradient(
        task,
        list(problem.start),
        clipping_norm=noise.clipping_norm,
        batch_size=training.batch_size,
    )
    size = min(training.batch_size, len(job.examples))
    draws = draws_seed(job.generator)
    weights = _descend(
        problem,
        batches(job.examples.to(problem.device), training, job.generator),
        clipped_gradient,
        stddev=noise.stddev * size / training.learning_rate,
        noise=noise.source,
        learning_rate=training.learning_rate,
        batch_size=size,
        draws=draws,
        terms=job.objective,
    )
    return problem.whole(weights, like=job.params)


def _descend(
    problem: LocalProblem,
    mini_batches: Iterable[tuple[Tree, Tree]],
    clipped_gradient: ClippedGradient,
    *,
    stddev: float,
    noise: NoiseSource,
    learning_rate: float,
    batch_size: float,
    draws: int,
    terms: Sequence[Term] = (),
) -> Params:
    """Return the trained part after steps w ← w − η ((Σ clipped gradients + noise)/B + ∇terms).

    ``draws`` seeds the model's own random draws, such as dropout.
    """
    weights = {name: w.clone() for name, w in problem.start.items()}

    def added(point: Params) -> Tensor:
        return torch.stack([term(point) for term in terms]).sum()

    for number, (x, y) in enumerate(mini_batches):
        with seeded(draws + number, devices=problem.device.type != "cpu"):
            summed = clipped_gradient({**problem.rest, **weights}, x, y)
        pulls = gradient(added, weights) if terms else {}
        for name, noised in noise.add_gaussian(summed, stddev).items():
            weights[name].sub_(noised, alpha=learning_rate / batch_size)
            if terms:
                weights[name].sub_(pulls[name], alpha=learning_rate)
    return weights
