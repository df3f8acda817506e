"""Many local trainings, together where that is faster.

What comes out is what `train` makes of the jobs one by one, up to the order of floating-point sums.
Networks of dense layers train as compiled code (`dense`), other models in a batch (`descent`), and
those that a batch would change one by one (`batchable`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from flower_ext.data import Examples
from flower_ext.training.batched import dense
from flower_ext.training.batched.batchable import depends_on_company, in_company, why_apart
from flower_ext.training.batched.descent import IGNORED, Stack, form_for, unstacked
from flower_ext.training.local import Job, LocalTraining, train
from flower_ext.training.params import Params
from flower_ext.training.task import Task

MEMORY_LIMIT = 2**30
"""Bytes that one batch of trainings may take, unless the caller says otherwise."""
_CACHE = 12 * 2**20
"""Bytes of parameters and activations in a batch on a CPU: more leave its caches."""
_LEAST_TOGETHER = 8
_TOGETHER_ELSEWHERE = 4096
_TYPICAL_ROWS = 32


def train_many(
    task: Task,
    jobs: Sequence[Job],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    memory_limit: int = MEMORY_LIMIT,
) -> list[Params]:
    """What `train` returns for each job, in their order.

    Jobs that cannot be trained together, or would not gain by it, are trained one by one.

    Parameters
    ----------
    memory_limit : int
        Bytes for parameters, gradients, examples and activations of one batch (estimated).

    Raises
    ------
    ValueError, NotConverged
        As `train`.
    """
    return list(train_each(task, jobs, trained=trained, memory_limit=memory_limit))


def train_each(
    task: Task,
    jobs: Sequence[Job],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    memory_limit: int = MEMORY_LIMIT,
    steady: bool = False,
) -> Iterator[Params]:
    """As `train_many`, but each model as soon as it and those before it are there.

    Who uses a model at once finds it in the processor's caches, and need not hold all of them.
    ``steady`` is that of `train_groups`.
    """
    ready: dict[int, Params] = {}
    done = 0
    found = train_groups(task, jobs, trained=trained, memory_limit=memory_limit, steady=steady)
    for group, rows in found:
        ready |= zip(group, unstacked(rows, [jobs[index] for index in group]), strict=True)
        while done in ready:
            yield ready.pop(done)
            done += 1


def train_groups(
    task: Task,
    jobs: Sequence[Job],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    memory_limit: int = MEMORY_LIMIT,
    steady: bool = False,
) -> Iterator[tuple[list[int], Params]]:
    """What `train_many` trains, batch by batch: the indices of jobs, and their models in rows.

    Each parameter has a first dimension of these jobs; it is the caller's to change. What no job of
    a batch trains, buffers too, may be missing. Who needs sums over models rather than the models
    never holds more than one batch of them.

    Parameters
    ----------
    steady : bool
        Keep every model from depending on the other jobs, even by its rounding, which unstable
        training amplifies: for jobs that a guarantee bounds one by one. Costs time where jobs
        differ in their numbers of examples, and trains one by one what may depend on its company
        (see `batchable`).
    """
    if any(len(job.examples) == 0 for job in jobs):
        raise ValueError("cannot train on a client without examples")
    for members in _alike(jobs):
        alike = [jobs[index] for index in members]
        for group, rows in _train_alike(task, alike, trained, memory_limit, steady):
            yield [members[index] for index in group], rows


def train_surely(
    task: Task,
    jobs: Sequence[Callable[[], Job]],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    memory_limit: int = MEMORY_LIMIT,
) -> Iterator[tuple[list[int], Params | Exception]]:
    """Train steadily (see `train_groups`), and yield its error for each job that raises.

    One record can make a training raise: a label out of range is enough. No other model changes by
    that in any bit: those that an error leaves untrained begin anew, half of them at a time, and a
    steady training does not depend on its company.

    Parameters
    ----------
    jobs : sequence of Callable[[], Job]
        Each makes its job, with the same generator every time.
    """
    parts = [[*range(len(jobs))]]
    while parts:
        left = parts.pop()
        own = [jobs[index]() for index in left]
        numbers = [*left]
        try:
            for group, rows in train_groups(
                task, own, trained=trained, memory_limit=memory_limit, steady=True
            ):
                done = [numbers[index] for index in group]
                left = [index for index in left if index not in set(done)]
                yield done, rows
        except Exception as error:  # whatever a model or a loss makes of a record
            if len(left) == 1:
                yield left, error
            else:
                parts += [left[len(left) // 2 :], left[: len(left) // 2]]


def _train_alike(
    task: Task,
    jobs: Sequence[Job],
    trained: Callable[[str], bool],
    memory_limit: int,
    steady: bool,
) -> Iterator[tuple[list[int], Params]]:
    others = [*range(len(jobs))]
    may_share = (steady or len(jobs) > 1) and why_apart(task, jobs) is None
    network = dense.network(task, jobs[0]) if may_share else None
    if network is not None:
        fit = network.takes(jobs)
        own, others = [i for i in others if fit[i]], [i for i in others if not fit[i]]
        size = network.together(memory_limit)
        for start in range(0, len(own), size):
            group = own[start : start + size]
            yield group, network.minimise([jobs[index] for index in group], trained)
    apart = (steady or len(others) > 1) and why_apart(task, jobs, steady=steady) is not None
    for part in _groups(task, [jobs[index] for index in others], memory_limit, steady=steady):
        group = [others[index] for index in part]
        chosen = [jobs[index] for index in group]
        alone = apart or (depends_on_company(task, chosen[0]) if steady else len(chosen) == 1)
        if alone:
            for index, job in zip(group, chosen, strict=True):
                yield [index], _trained_alone(task, job, trained)
        else:
            like = chosen[0].params
            rows = Stack(task, in_company(chosen) if steady else chosen, trained).minimise()
            yield (
                group,
                {n: w[: len(chosen)].to(like[n].device, like[n].dtype) for n, w in rows.items()},
            )


def trains_apart(task: Task, example: Examples, training: LocalTraining) -> bool:
    """Return True if `train_groups` trains models like these one by one where ``steady``.

    Of ``example`` only shapes and types count. Mini-batches of other sizes may be judged otherwise.
    """
    rows = min(training.batch_size, _TYPICAL_ROWS)
    features, targets = (
        part[:1].expand(rows, *part.shape[1:]) for part in (example.features, example.targets)
    )
    job = Job(
        params=task.initial_params(0),
        examples=Examples(features, targets),
        training=training,
        generator=torch.Generator(),
    )
    if why_apart(task, [job]) is None and dense.network(task, job) is not None:
        return False
    return why_apart(task, [job], steady=True) is not None or depends_on_company(task, job)


def _trained_alone(task: Task, job: Job, trained: Callable[[str], bool]) -> Params:
    model = train(
        task,
        job.params,
        job.examples,
        job.training,
        trained=trained,
        terms=job.terms,
        generator=job.generator,
    )
    # Copies, as what was not trained may be the job's own.
    return {name: p.clone().unsqueeze(0) for name, p in model.items()}


def groups(task: Task, jobs: Sequence[Job], memory_limit: int = MEMORY_LIMIT) -> list[list[int]]:
    """Which jobs are best trained together: their indices, the longest first in each group.

    All of a group have examples of one shape and type. A batch narrows as its jobs end, so those
    that would outlast all others are groups of one. Of equally long ones those with as many
    examples are neighbours, so that less is padded.
    """
    return [
        [members[index] for index in group]
        for members in _alike(jobs)
        for group in _groups(task, [jobs[index] for index in members], memory_limit)
    ]


def _alike(jobs: Sequence[Job]) -> list[list[int]]:
    """Jobs whose examples have one shape and type."""
    alike = defaultdict(list)
    for index, job in enumerate(jobs):
        alike[job.examples.form].append(index)
    return [*alike.values()]


def _groups(
    task: Task, jobs: Sequence[Job], memory_limit: int, *, steady: bool = False
) -> list[list[int]]:
    """As `groups`, for jobs that are alike; if ``steady``, none changes how others are padded."""

    def kind(index: int) -> tuple[float, ...]:
        """Return the size and, if ``steady``, all else that changes how a batch computes."""
        job = jobs[index]
        if not steady:
            return (-len(job.examples),)
        training, ignores = job.training, IGNORED in job.examples.targets
        ways = (training.momentum > 0, training.sam_radius > 0, bool(job.objective))
        return -job.num_steps, -len(job.examples), training.batch_size, ignores, *ways

    order = sorted(range(len(jobs)), key=lambda i: (-jobs[i].num_steps, *kind(i)))
    steps = [jobs[i].num_steps for i in order]
    lonely = len(jobs)
    if (steady or len(jobs) > 1) and jobs and why_apart(task, jobs, steady=steady) is None:
        fewest = 0 if steady else form_for(task, jobs[0]).fewest
        worth = (i for i in range(len(jobs)) if sum(steps[i:]) >= fewest * max(steps[i], 1))
        lonely = next(worth, len(jobs))
    chosen = [[index] for index in order[:lonely]]
    of_one_kind = groupby(order[lonely:], kind if steady else lambda index: None)
    for left in ([*members] for _, members in of_one_kind):
        while left:
            size = together(task, jobs[left[0]], memory_limit)
            chosen.append(left[:size])
            left = left[size:]
    return chosen


def together(task: Task, job: Job, memory_limit: int) -> int:
    """How many jobs like this one fit into ``memory_limit`` bytes; at least one."""
    numbers = sum(p.numel() for p in job.params.values())
    features = job.examples.features
    batch = min(job.training.batch_size, len(features))
    activations = batch * _activations(task.model, features.shape[1:], features.dtype)
    most = _TOGETHER_ELSEWHERE
    if task.torch_device().type == "cpu":
        most = max(_LEAST_TOGETHER, _CACHE // (4 * (numbers + activations)))
    # Weights, their gradient, velocity, terms and SAM's second point; what layers keep for their
    # backward pass, and its own.
    needed = 4 * (8 * numbers + features.numel() + 3 * activations)
    return int(max(1, min(most, memory_limit // needed)))


@lru_cache(maxsize=64)
def _activations(build: Callable[[], nn.Module], shape: torch.Size, dtype: torch.dtype) -> int:
    """Numbers that the layers put out for one example, and the example's own."""
    count = 2 * math.prod(shape)

    def add(module: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        nonlocal count
        if isinstance(module, nn.RNNBase):  # a step keeps gates, their slopes and its states
            steps = inputs[0].numel() // module.input_size
            gates = sum(len(p) for n, p in module.named_parameters() if n.startswith("weight_hh"))
            count += 3 * steps * gates
        elif isinstance(output, Tensor):
            count += output.numel()

    model = build()
    for module in model.modules():
        module.register_forward_hook(add)
    with torch.no_grad():
        model(torch.zeros((2, *shape), dtype=dtype))  # one alone may be too few
    return count // 2
