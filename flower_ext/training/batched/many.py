"""Many local trainings, together where that is faster.

The results are those of `train` for each job, up to the order of floating-point sums. `choice`
says which jobs train together, and by which form. Each function rests on the next one:
`attempt_jobs` and `attempt_groups` tell apart the jobs that raise, `train_jobs` accepts jobs
without examples, `train_each` yields one model after another, and `train_groups` trains batch by
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import compress
from typing import Any, TypeVar

import torch

from flower_ext.data import Examples, trees
from flower_ext.errors import InvalidValue
from flower_ext.training.batched.choice import assigned
from flower_ext.training.batched.form import MEMORY_LIMIT
from flower_ext.training.batched.one_by_one import OneByOne
from flower_ext.training.isolation import isolated
from flower_ext.training.job import Job, LocalTraining
from flower_ext.training.params import Params
from flower_ext.training.task import Task

R = TypeVar("R")
Work = TypeVar("Work", bound=Job)

_TYPICAL_ROWS = 32


def attempt_jobs(
    solve: Callable[[Sequence[Work]], Iterable[R]], jobs: Sequence[Work]
) -> Iterator[tuple[int, R | Exception]]:
    """Yield each job's index with its result or error; ``solve`` yields a result for each job."""

    def solve_numbered(members: Sequence[Work]) -> Iterator[tuple[list[int], R]]:
        return (([number], result) for number, result in enumerate(solve(members)))

    return ((index, result) for (index,), result in attempt_groups(solve_numbered, jobs))


def attempt_groups(
    solve: Callable[[list[Work]], Iterable[tuple[Sequence[int], R]]], jobs: Sequence[Work]
) -> Iterator[tuple[list[int], R | Exception]]:
    """Yield indices of jobs with their results, and each job that raises with its error.

    One record can make a training raise, for example by a label out of range. The jobs that an
    error leaves without a result restart, half of them at a time, and draw the same mini-batches
    again. If trainings are batch-invariant, such an error changes no bit of another job's result.

    Parameters
    ----------
    solve : Callable
        Yields results of jobs as `train_groups` does; it may raise.
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


def train_jobs(task: Task, jobs: Sequence[Job], **settings: Any) -> Iterator[Params]:
    """Train as `train_each`; a job without examples gets its parameters back unchanged."""
    has_examples = [len(job.examples) > 0 for job in jobs]
    models = train_each(task, [*compress(jobs, has_examples)], **settings)
    pairs = zip(jobs, has_examples, strict=True)
    return (next(models) if trains else dict(job.params) for job, trains in pairs)


train_invariantly = partial(train_jobs, batch_invariant=True)


def train_each(
    task: Task,
    jobs: Sequence[Job],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    memory_limit: int = MEMORY_LIMIT,
    batch_invariant: bool = False,
) -> Iterator[Params]:
    """Train each job as `train` does; yield each model as soon as it and those before are ready.

    Jobs that cannot be trained together, or would not gain by it, are trained one by one. Consume
    each model immediately: it is still in the processor's caches, and memory stays bounded.

    Parameters
    ----------
    memory_limit : int
        Bytes for parameters, gradients, examples and activations of one batch (estimated).
    batch_invariant : bool
        The option of `train_groups`.

    Raises
    ------
    ValueError, NotConverged
        As `train`.
    """
    models: dict[int, Params] = {}
    due = 0
    for group, rows in train_groups(
        task, jobs, trained=trained, memory_limit=memory_limit, batch_invariant=batch_invariant
    ):
        separate = {name: [p.contiguous() for p in part.unbind()] for name, part in rows.items()}
        for row, index in enumerate(group):
            # A group has no rows of what no job trains: the job's own tensors stand for it.
            models[index] = {
                name: separate[name][row] if name in separate else p
                for name, p in jobs[index].params.items()
            }
        while due in models:
            yield models.pop(due)
            due += 1


def train_groups(
    task: Task,
    jobs: Sequence[Job],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    memory_limit: int = MEMORY_LIMIT,
    batch_invariant: bool = False,
) -> Iterator[tuple[list[int], Params]]:
    """Train as `train_each`, batch by batch: yield the indices of jobs, and their stacked models.

    The first dimension of each parameter numbers these jobs, and the caller may change the arrays.
    Parameters and buffers that no job of a batch trains may be absent. A caller that needs only
    sums over models never holds more than one batch of them.

    Parameters
    ----------
    batch_invariant : bool
        Keep every model from depending on other jobs, even by its rounding, which unstable training
        amplifies. A guarantee that bounds jobs one by one needs this. Models that no form trains
        in this way train one by one.
    """
    if any(len(job.examples) == 0 for job in jobs):
        raise InvalidValue("cannot train on a client without examples: leave it out")
    for group, form in assigned(task, jobs, memory_limit, batch_invariant=batch_invariant):
        yield group, form.train([jobs[index] for index in group], trained)


def trains_one_by_one(task: Task, example: Examples, training: LocalTraining) -> bool:
    """Return True if `train_groups` with ``batch_invariant`` trains models like these one by one.

    Only shapes and types of ``example`` matter. The answer may differ for other mini-batch sizes.
    """
    rows = min(training.batch_size, _TYPICAL_ROWS)
    features, targets = (
        trees.mapped(lambda leaf: leaf.new_zeros((rows, *leaf.shape[1:])), part)
        for part in (example.features, example.targets)
    )
    job = Job(
        params=task.initial_params(0),
        examples=Examples(features, targets),
        training=training,
        generator=torch.Generator(),
    )
    ((_, form),) = assigned(task, [job], MEMORY_LIMIT, batch_invariant=True)
    return isinstance(form, OneByOne)
