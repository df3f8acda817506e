"""A pilot run: full-gradient descent without noise, to estimate constants of the losses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flower_ext.checks import require_positive
from flower_ext.data import Examples, trees
from flower_ext.errors import InvalidValue
from flower_ext.planning import PilotEstimates, estimate_problem
from flower_ext.training.local import gradient
from flower_ext.training.params import Params
from flower_ext.training.problem import local_problem
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
) -> PilotEstimates:
    """Descend the mean loss of all clients, and each client's own loss, for ``rounds`` steps.

    The run needs all records in one process, so use it on a simulation or on public stand-in
    records only. It adds no noise, and no guarantee covers its result. It computes in double
    precision.

    Parameters
    ----------
    task : Task
    start : Params
        w⁰; the run trains all of its parameters.
    clients : Sequence[Examples]
        The training records of each client.
    rounds : int
        Number of steps of the shared model, and of each client's own model.
    learning_rate : float
        Learning rate of all these models.

    Raises
    ------
    InvalidValue
        A parameter is out of range, the gradients need too much memory, or `estimate_problem`
        refuses the numbers.
    """
    if rounds < 2:
        raise InvalidValue(f"rounds={rounds!r} of the pilot: expected an integer >= 2")
    require_positive("learning_rate", learning_rate)
    if not clients:
        raise InvalidValue("clients=[]: expected the records of at least one client")
    problem = local_problem(task, start, dtype=torch.float64)
    names = list(problem.start)
    w = torch.cat([problem.start[name].flatten() for name in names])
    kept = (rounds + 1) * len(clients) * len(w)
    if kept > _LARGEST:
        raise InvalidValue(
            f"{rounds} rounds, {len(clients)} clients and {len(w)} weights: a pilot run keeps all "
            f"gradients, and these exceed its memory limit {kept / _LARGEST:.3g} times; take fewer "
            "rounds or a smaller model"
        )
    shapes = [problem.start[name].shape for name in names]
    data = [_double(client, problem.device) for client in clients]

    def at(flat: torch.Tensor, client: Examples) -> tuple[float, torch.Tensor]:
        """F_n and ∇F_n."""
        pieces = torch.split(flat, [shape.numel() for shape in shapes])
        point = {n: p.view(s) for n, p, s in zip(names, pieces, shapes, strict=True)}
        losses = []

        def loss(params: Params) -> torch.Tensor:
            value = problem.loss_at(params, client.features, client.targets)
            losses.append(float(value.detach()))
            return value

        slope = gradient(loss, point)
        return losses[0], torch.cat([slope[name].flatten() for name in names])

    own, models, losses, gradients = [w.clone() for _ in data], [], [], []
    for step in range(rounds + 1):
        found = [at(w, client) for client in data]
        slopes = torch.stack([slope for _, slope in found])
        models.append(w.cpu().numpy())
        losses.append(float(np.mean([value for value, _ in found])))
        gradients.append(slopes.cpu().numpy())
        if step < rounds:
            w = w - learning_rate * slopes.mean(dim=0)
            own = [u - learning_rate * at(u, c)[1] for u, c in zip(own, data, strict=True)]
    return estimate_problem(
        models=models,
        gradients=gradients,
        losses=losses,
        local_optima=[u.cpu().numpy() for u in own],
    )


def _double(examples: Examples, device: torch.device) -> Examples:
    """Convert floating-point features to double precision; leave others, such as words."""
    examples = examples.to(device)
    return Examples(features=trees.double(examples.features), targets=examples.targets)
