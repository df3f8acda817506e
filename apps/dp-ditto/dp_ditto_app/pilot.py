"""A pilot run: full-gradient descent without noise, to estimate constants of the losses."""

from collections.abc import Sequence

import numpy as np
import torch

from dp_ditto_app.loss_constants import LossConstants, estimate_constants
from flower_ext.checks import require_positive
from flower_ext.data import Examples, trees
from flower_ext.errors import InvalidValue
from flower_ext.training.params import Params
from flower_ext.training.problem import LocalProblem, gradient, local_problem
from flower_ext.training.task import Task

_LARGEST = 2**28
"""Largest count of numbers in the gradients that a pilot run keeps: 2 GiB."""


def pilot_run(
    task: Task,
    start: Params,
    clients: Sequence[Examples],
    *,
    rounds: int,
    learning_rate: float,
) -> LossConstants:
    """Estimate the losses' constants by descending the mean loss and each client's own loss.

    The run needs all records in one process, so use it on a simulation or on public stand-in
    records only. The run adds no noise, and no guarantee covers its result. Numbers have double
    precision.

    Parameters
    ----------
    task : Task
    start : Params
        w⁰; the run trains all of its parameters.
    clients : Sequence[Examples]
        The training records of each client.
    rounds : int
        Number of steps of the shared model, and of each client's own model, at least 2.
    learning_rate : float
        Learning rate of all these models.

    Raises
    ------
    InvalidValue
        A parameter is out of range, the gradients need too much memory, or `estimate_constants`
        refuses the numbers.
    """
    if rounds < 2:
        raise InvalidValue(f"rounds={rounds!r} of the pilot: expected an integer >= 2")
    require_positive("learning_rate", learning_rate)
    if not clients:
        raise InvalidValue("clients=[]: expected the records of at least one client")
    problem = local_problem(task, start, dtype=torch.float64)
    shared = _flatten(problem.start)
    _check_memory(rounds, len(clients), len(shared))
    data = [_double(client, problem.device) for client in clients]
    alone = [shared.clone() for _ in data]
    models, losses, gradients = [], [], []
    for step in range(rounds + 1):
        values, slopes = zip(
            *(_loss_and_gradient(problem, shared, client) for client in data), strict=True
        )
        models.append(shared.cpu().numpy())
        losses.append(float(np.mean(values)))
        gradients.append(torch.stack(slopes).cpu().numpy())
        if step < rounds:
            shared = shared - learning_rate * torch.stack(slopes).mean(dim=0)
            alone = [
                weights - learning_rate * _loss_and_gradient(problem, weights, client)[1]
                for weights, client in zip(alone, data, strict=True)
            ]
    return estimate_constants(
        models=models,
        gradients=gradients,
        losses=losses,
        local_optima=[weights.cpu().numpy() for weights in alone],
    )


def _check_memory(rounds: int, clients: int, weights: int) -> None:
    """Refuse a pilot run whose gradients need too much memory."""
    count = (rounds + 1) * clients * weights
    if count > _LARGEST:
        raise InvalidValue(
            f"{rounds} rounds, {clients} clients and {weights} weights: a pilot run keeps all "
            f"gradients, which take {count / _LARGEST:.3g} times its memory limit; take fewer "
            "rounds or a smaller model"
        )


def _loss_and_gradient(
    problem: LocalProblem, weights: torch.Tensor, client: Examples
) -> tuple[float, torch.Tensor]:
    """Return F_n and ∇F_n at flat weights."""
    losses = []

    def loss(params: Params) -> torch.Tensor:
        value = problem.loss_at(params, client.features, client.targets)
        losses.append(float(value.detach()))
        return value

    pieces = torch.split(weights, [start.numel() for start in problem.start.values()])
    params = {
        name: piece.view(start.shape)
        for (name, start), piece in zip(problem.start.items(), pieces, strict=True)
    }
    slopes = gradient(loss, params)
    return losses[0], _flatten({name: slopes[name] for name in problem.start})


def _flatten(params: Params) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in params.values()])


def _double(examples: Examples, device: torch.device) -> Examples:
    """Convert floating-point features to double precision; leave others, such as words."""
    examples = examples.to(device)
    return Examples(features=trees.double(examples.features), targets=examples.targets)
