"""One local training: `train` sets up the problem, takes the steps, and returns the whole model.

The job decides which steps `train` takes:

==========================  ==============================================================
the job has                 its steps
==========================  ==============================================================
usual settings              `sgd_step`: SGD with momentum, SAM, or another optimizer
``noise``                   `noised_step`: clips each example's gradient, and adds noise
a ``tolerance`` above 0     steps of `newton`, up to the exact minimiser
==========================  ==============================================================

Sharpness-aware minimisation follows Zhang et al. (DP²-FedSAM), Eqs. 11–12: the gradient g over the
*trained* parameters gives the perturbation p = q g/‖g‖₂, and the step uses the gradient at w + p.
With radius q = 0 this is SGD, and a step costs one pass instead of two.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from flower_ext.data import Examples, trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.training.dp.dp_sgd import noised_step
from flower_ext.training.index_limits import on_device
from flower_ext.training.isolation import draws_seed, seeded
from flower_ext.training.job import DECAYING, OPTIMIZERS, SGD, Job, LocalTraining, batch_rows
from flower_ext.training.params import Params, clone
from flower_ext.training.problem import LocalProblem, gradient, local_problem
from flower_ext.training.task import Task
from flower_ext.training.trials.single_rows import fewest_rows

Step = Callable[[Tree, Tree], None]
"""A function of a mini-batch's features and targets that moves weights, in place, by one step."""
MOST_PARAMETERS = 4096
_MOST_ITERATIONS = 100
_SHORTEST_STEP = 2.0**-60


def train(task: Task, job: Job, *, trained: Callable[[str], bool] = lambda name: True) -> Params:
    """Train the parameters that ``trained`` selects; all others are frozen.

    Returns
    -------
    Params
        The whole model after training, on the devices of ``job.params``: trained parameters, frozen
        ones, and buffers.

    Raises
    ------
    ValueError
        ``trained`` selects nothing, or there are no examples. With ``noise`` also: examples have
        no gradient of their own (see `ClippedGradient`), or the settings are not plain SGD.
    NotConverged
        ``training.tolerance`` cannot be reached.
    """
    if len(job.examples) == 0:
        raise InvalidValue("cannot train on a client without examples: leave the client out")
    with seeded(draws_seed(job.generator), task.torch_device()):
        tolerance = 0.0 if job.noise else job.training.tolerance
        dtype = torch.float64 if tolerance else None
        problem = local_problem(task, job.params, trained=trained, terms=job.objective, dtype=dtype)
        if tolerance:
            data = on_device(task, job.examples)
            weights = newton(problem.loss_at, problem.start, data, tolerance=tolerance)
        else:
            weights = clone(problem.start)
            if job.noise is None:
                step = sgd_step(problem, weights, job.training)
            else:
                step = noised_step(task, job, problem, weights)
            for x, y in job_batches(task, job):
                step(x, y)
    return problem.whole(weights, like=job.params)


def job_batches(task: Task, job: Job) -> Iterator[tuple[Tree, Tree]]:
    """Yield the shuffled mini-batches of a job, as features and targets, on the task's device."""
    device, size = task.torch_device(), job.training.batch_size
    # With noise, `ClippedGradient` lets an example with an unusable integer count as zero. Without
    # noise, `on_device` refuses such an example.
    data = job.examples.to(device) if job.noise else on_device(task, job.examples)
    fewest = 1 if job.noise else fewest_rows(task, data, size)
    for rows in batch_rows(len(data), job.training, job.generator, fewest=fewest):
        chosen = trees.rows((data.features, data.targets), rows.to(device))
        # Detach the tensors, so that the model's in-place operations stay out of later gradients.
        yield trees.mapped(Tensor.detach, chosen)


def sgd_step(problem: LocalProblem, weights: Params, training: LocalTraining) -> Step:
    """Return a function that moves ``weights`` by one step of SGD, SAM or another optimizer.

    ``training`` holds the learning rate and all other settings of the step.
    """
    tensors = [*weights.values()]
    velocity = [torch.zeros_like(w) for w in tensors if training.momentum > 0]
    optimizer = None
    if training.optimizer != SGD:
        # Pass 0 as well, because torch's default for AdamW is 0.01.
        decay = {"weight_decay": training.weight_decay} if training.optimizer in DECAYING else {}
        optimizer = OPTIMIZERS[training.optimizer](tensors, lr=training.learning_rate, **decay)

    def step(x: Tree, y: Tree) -> None:
        slopes = gradient(problem.loss_at, weights, x, y)
        if training.sam_radius > 0:
            ascent = perturbation([*slopes.values()], training.sam_radius)
            climbed = {n: w + p for (n, w), p in zip(weights.items(), ascent, strict=True)}
            with problem.preserved_buffers():  # each mini-batch counts once in running statistics
                slopes = gradient(problem.loss_at, climbed, x, y)
        if optimizer is not None:
            for name, w in weights.items():
                w.grad = slopes[name]
            optimizer.step()
            return
        moved = [*slopes.values()]
        if velocity:
            torch._foreach_mul_(velocity, training.momentum)
            torch._foreach_add_(velocity, moved)
            moved = velocity
        torch._foreach_add_(tensors, moved, alpha=-training.learning_rate)

    return step


def perturbation(gradient: Sequence[Tensor], radius: float) -> list[Tensor]:
    """Return SAM's ascent step radius · g/‖g‖₂, where g is all of ``gradient`` (Eq. 11)."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradient]))
    scale = torch.where(norm > 0, radius / norm, 0.0)  # a flat point has no ascent direction
    return [scale * g for g in gradient]


class NotConverged(ArithmeticError):
    """Newton's method found no point where the norm of the gradient is within the tolerance."""


def newton(
    loss_at: Callable[[Params, Tree, Tree], Tensor],
    start: Mapping[str, Tensor],
    examples: Examples,
    *,
    tolerance: float,
) -> Params:
    """Return a point where the gradient of ``loss_at(params, x, y)`` has norm ≤ ``tolerance``.

    Some privacy proofs use the stability of a minimiser, or the density of a perturbed minimiser.
    They need the minimiser itself, not the result of some epochs of SGD. If the objective is
    μ-strongly convex, a point whose gradient has norm g lies within g/μ of the minimiser. The
    method is Newton's, in float64.

    Parameters
    ----------
    start : Mapping[str, Tensor]
        float64, at most 4,096 numbers in all, because a step solves for the whole Hessian.
    tolerance : float
        Largest L2 norm of the gradient over all examples.

    Raises
    ------
    NotConverged
        The method does not reach such a point, because the objective is not strongly convex, or
        because ``tolerance`` is below the resolution of float64.
    ValueError
        There are too many parameters.
    """
    sizes = [p.numel() for p in start.values()]
    if sum(sizes) > MOST_PARAMETERS:
        raise InvalidValue(
            f"tolerance above 0 with {sum(sizes)} parameters: Newton's method takes at most "
            f"{MOST_PARAMETERS}; train by SGD (tolerance=0)"
        )
    x = trees.double(examples.features)

    def parts(flat: Tensor) -> Params:
        pairs = zip(start.items(), torch.split(flat, sizes), strict=True)
        return {name: part.view_as(p) for (name, p), part in pairs}

    def loss(flat: Tensor) -> Tensor:
        return loss_at(parts(flat), x, examples.targets)

    point = torch.cat([p.detach().reshape(-1) for p in start.values()])
    norm = math.inf
    for _ in range(_MOST_ITERATIONS):
        slope, value = torch.func.grad_and_value(loss)(point)
        norm = float(torch.linalg.vector_norm(slope))
        if norm <= tolerance:
            return parts(point)
        # `solve_ex` reports a singular Hessian, where `solve` would raise an error.
        step, failed = torch.linalg.solve_ex(torch.func.hessian(loss)(point), slope)
        descent = float(slope @ step)
        if bool(failed) or not descent > 0:
            break
        # Armijo's rule, with a tolerance for the rounding of the values.
        length, highest = 1.0, float(value) + 1e-14 * (1 + abs(float(value)))
        while length > _SHORTEST_STEP:
            # A step out of the domain of a logarithm, where the loss is NaN, is too long as well.
            if float(loss(point - length * step)) <= highest - 1e-4 * length * descent:
                break
            length /= 2
        point = point - length * step
    raise NotConverged(
        f"the gradient's norm stays at {norm:.3g}, above tolerance={tolerance:g}: expected a "
        "strongly convex objective; set proximal_weight above 0, or raise the tolerance"
    )
