"""Train many jobs, in groups where that is faster.

Each job gets the result that `train` gives, up to the order of floating-point sums. `choice`
decides which jobs train together, and in which form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch

from flower_ext.data import Examples, trees
from flower_ext.errors import InvalidValue
from flower_ext.training.batched.choice import assigned
from flower_ext.training.batched.form import MEMORY_LIMIT
from flower_ext.training.isolation import isolated
from flower_ext.training.job import Job, LocalTraining
from flower_ext.training.local import train
from flower_ext.training.params import Params
from flower_ext.training.task import Task

R = TypeVar("R")
Work = TypeVar("Work", bound=Job)

_TYPICAL_ROWS = 32


def attempt_groups(
    solve: Callable[[list[Work]], Iterable[tuple[Sequence[int], R]]], jobs: Sequence[Work]
) -> Iterator[tuple[list[int], R | Exception]]:
    """Train jobs, and find those that raise errors.

    For jobs that trained together without an error, the function yields their indices and their
    joint result. For a job that raises an error, it yields this job's index and the error.

    One record can make a training raise an error, for example by a label out of range. The function
    then trains the jobs that have no result yet once more, half of them at a time. They draw the
    same mini-batches again. If trainings are batch-invariant, the error changes no bit of another
    job's result.

    Parameters
    ----------
    solve : Callable
        Yields results of jobs as `train_groups` does; it may raise an error.
    jobs : sequence of Job
        Each has a generator of its own.
    """
    states = [job.generator.get_state() for job in jobs]
    parts = [[*range(len(jobs))]]
    while parts:
        members = parts.pop()
        for index in members:
            jobs[index].generator.set_state(states[index])
        unsolved = {*members}
        try:
            results = iter(solve([jobs[index] for index in members]))
            while unsolved:
                with isolated():
                    group, result = next(results)
                solved = [members[index] for index in group]
                unsolved -= {*solved}
                yield solved, result
        except Exception as error:  # a model or a loss may raise anything for a record
            left = sorted(unsolved)
            if len(left) == 1:
                yield left, error
            else:
                half = len(left) // 2
                parts += [left[half:], left[:half]]


def train_each(
    task: Task,
    jobs: Sequence[Job],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    memory_limit: int = MEMORY_LIMIT,
    batch_invariant: bool = False,
) -> Iterator[Params]:
    """Train each job as `train` does; yield the models in order, each as soon as it is ready.

    For a job without examples, the function yields the job's parameters unchanged. Jobs train one
    by one if they cannot train together, or if training together would not be faster. Use each
    model immediately: it is still in the processor's caches, and memory stays bounded.

    Parameters
    ----------
    memory_limit : int
        Most bytes for parameters, gradients, examples and activations of a group, by an estimate.
    batch_invariant : bool
        As for `train_groups`.

    Raises
    ------
    ValueError, NotConverged
        `train` raises one of these.
    """
    models = {i: dict(job.params) for i, job in enumerate(jobs) if not len(job.examples)}
    numbers = [i for i in range(len(jobs)) if i not in models]
    groups = train_groups(
        task,
        [jobs[i] for i in numbers],
        trained=trained,
        memory_limit=memory_limit,
        batch_invariant=batch_invariant,
    )
    for due in range(len(jobs)):
        while due not in models:
            group, rows = next(groups)
            separate = {n: [p.contiguous() for p in part.unbind()] for n, part in rows.items()}
            for row, index in enumerate(numbers[number] for number in group):
                # A group has no rows of tensors that no job trains. Take the job's own tensors.
                models[index] = {
                    name: separate[name][row] if name in separate else p
                    for name, p in jobs[index].params.items()
                }
        yield models.pop(due)


train_invariantly = partial(train_each, batch_invariant=True)


def train_groups(
    task: Task,
    jobs: Sequence[Job],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    memory_limit: int = MEMORY_LIMIT,
    batch_invariant: bool = False,
) -> Iterator[tuple[list[int], Params]]:
    """Train as `train_each` does, but yield the models of a whole group at a time.

    Each group is a pair: the indices of its jobs, and their parameters by name. Row k of each
    tensor belongs to the k-th of these indices. The caller may change the tensors. Parameters and
    buffers that no job of a group trains may be absent. A caller that needs only sums over models
    never holds more than one group.

    Parameters
    ----------
    batch_invariant : bool
        If True, no bit of a model depends on other jobs; models for which no form promises this
        train one by one. If False, a model's rounding depends on the other jobs, and unstable
        training amplifies rounding errors. A privacy guarantee needs True if it assumes that the
        data of one job change no other job's model.
    """
    if any(len(job.examples) == 0 for job in jobs):
        raise InvalidValue("cannot train on a client without examples: leave the client out")
    for group, form in assigned(task, jobs, memory_limit, batch_invariant=batch_invariant):
        members = [jobs[index] for index in group]
        if form is not None:
            yield group, form.train(members, trained)
            continue
        model = train(task, members[0], trained=trained)
        # Copies, because untrained parameters may be the job's own.
        yield group, {name: p.clone().unsqueeze(0) for name, p in model.items()}


def trains_one_by_one(task: Task, example: Examples, training: LocalTraining) -> bool:
    """Return True if `train_groups` with ``batch_invariant`` trains models like these one by one.

    Only shapes and types of ``example`` matter. The answer may differ for other mini-batch sizes.
    """
    rows = min(training.batch_size, _TYPICAL_ROWS)
    examples = Examples(*trees.zeros((example.features, example.targets), rows))
    params, generator = task.initial_params(0), torch.Generator()
    job = Job(params=params, examples=examples, training=training, generator=generator)
    ((_, form),) = assigned(task, [job], MEMORY_LIMIT, batch_invariant=True)
    return form is None
