"""Train one model: by SGD, SAM or another optimiser, exactly, or in noised steps.

Sharpness-aware minimisation follows Zhang et al. (DP²-FedSAM), Eqs. 11–12: the gradient g over the
*trained* parameters gives the perturbation p = q g/‖g‖₂, and the step uses the gradient at w + p.
With radius q = 0 this is SGD, which costs one pass per step instead of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.training.dp.dp_sgd import train_clipped_steps
from flower_ext.training.job import OPTIMIZERS, SGD, Job, LocalTraining, job_batches
from flower_ext.training.newton import newton
from flower_ext.training.params import Params, clone
from flower_ext.training.problem import LocalProblem, gradient, local_problem
from flower_ext.training.seeding import seeded_by
from flower_ext.training.task import Task


def perturbation(gradient: Sequence[Tensor], radius: float) -> list[Tensor]:
    """Return SAM's ascent step q g/‖g‖₂, with the norm over all of ``gradient`` (Eq. 11)."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradient]))
    scale = torch.where(norm > 0, radius / norm, 0.0)  # a flat point has no ascent direction
    return [scale * g for g in gradient]


def minimise(
    problem: LocalProblem, mini_batches: Iterable[tuple[Tree, Tree]], training: LocalTraining
) -> Params:
    """Descend from the problem's start by SGD with momentum, another optimiser, or SAM."""
    params = clone(problem.start)
    weights = [*params.values()]
    velocity = [torch.zeros_like(w) for w in weights if training.momentum > 0]
    optimizer = _other_optimizer(training, params)
    for x, y in mini_batches:
        slopes = gradient(problem.loss_at, params, x, y)
        if training.sam_radius > 0:
            ascent = perturbation([*slopes.values()], training.sam_radius)
            climbed = {n: w + p for (n, w), p in zip(params.items(), ascent, strict=True)}
            with problem.still():  # each mini-batch counts once in running statistics
                slopes = gradient(problem.loss_at, climbed, x, y)
        if optimizer is not None:
            for name, w in params.items():
                w.grad = slopes[name]
            optimizer.step()
            continue
        step = [*slopes.values()]
        if velocity:
            torch._foreach_mul_(velocity, training.momentum)
            torch._foreach_add_(velocity, step)
            step = velocity
        torch._foreach_add_(weights, step, alpha=-training.learning_rate)
    return params


def _other_optimizer(
    training: LocalTraining, weights: Mapping[str, Tensor]
) -> torch.optim.Optimizer | None:
    if training.optimizer == SGD:
        return None
    options: dict[str, float] = {"lr": training.learning_rate}
    if training.weight_decay:
        options["weight_decay"] = training.weight_decay
    return OPTIMIZERS[training.optimizer]([*weights.values()], **options)


def train(task: Task, job: Job, *, trained: Callable[[str], bool] = lambda name: True) -> Params:
    """Train the parameters that ``trained`` selects; all others are frozen.

    Steps are those of `minimise`, or of `train_clipped_steps` if the job has noise. With a
    ``tolerance`` above 0, `newton` finds the exact minimiser.

    Returns
    -------
    Params
        The whole model after training, on the devices of ``job.params``: trained parameters, frozen
        ones, and buffers.

    Raises
    ------
    ValueError
        ``trained`` selects nothing, or there are no examples.
    NotConverged
        ``training.tolerance`` cannot be reached.
    """
    if len(job.examples) == 0:
        raise InvalidValue("cannot train on a client without examples: leave it out")
    if job.noise is not None:
        return train_clipped_steps(task, job, trained)
    training = job.training
    dtype = torch.float64 if training.tolerance else None
    with seeded_by(job.generator, task.torch_device()):
        problem = local_problem(task, job.params, trained=trained, terms=job.objective, dtype=dtype)
        if training.tolerance:
            data = job.examples.to(problem.device)
            moved = newton(problem.loss_at, problem.start, data, tolerance=training.tolerance)
        else:
            moved = minimise(problem, job_batches(task, job), training)
    return problem.whole(moved, like=job.params)
