"""Many local trainings, together where that is faster.

The results are those of `train` for each job, up to the order of floating-point sums. A job trains
by a plug-in's form (`form`) if one takes it. Otherwise it trains in a batch: one of `batches`, or
of `invariant` if no bit may depend on other jobs. A model that a batch would change (`batchable`)
trains by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from flower_ext import plugins
from flower_ext.data import Examples, trees
from flower_ext.errors import InvalidValue
from flower_ext.training.batched.batchable import trains_alike, why_never_batched
from flower_ext.training.batched.batches import Batches, longest_first
from flower_ext.training.batched.descent import unstacked
from flower_ext.training.batched.form import GROUP, MEMORY_LIMIT, Form
from flower_ext.training.batched.invariant import invariant_batches
from flower_ext.training.isolation import isolated
from flower_ext.training.job import Job, LocalTraining
from flower_ext.training.local import train
from flower_ext.training.params import Params
from flower_ext.training.task import Task

_TYPICAL_ROWS = 32


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
        models |= zip(group, unstacked(rows, [jobs[index] for index in group]), strict=True)
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
    for group, form in _assigned(task, jobs, memory_limit, batch_invariant=batch_invariant):
        yield group, form.minimise([jobs[index] for index in group], trained)


def _assigned(
    task: Task, jobs: Sequence[Job], memory_limit: int, *, batch_invariant: bool
) -> Iterator[tuple[list[int], Form]]:
    """Yield groups of jobs, each with the fastest form that trains it as `train` does."""
    alike = defaultdict(list)
    for index, job in enumerate(jobs):
        alike[job.examples.row_type].append(index)
    for left in alike.values():
        for form in _forms(task, [jobs[index] for index in left], batch_invariant=batch_invariant):
            # A form gets the jobs that the forms before it left, and numbers these from 0.
            parts = form.groups([jobs[index] for index in left], memory_limit)
            groups = [[left[index] for index in part] for part in parts]
            yield from ((group, form) for group in groups)
            taken = {index for group in groups for index in group}
            left = [index for index in left if index not in taken]


def attempt_groups(
    task: Task,
    jobs: Sequence[Callable[[], Job]],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    memory_limit: int = MEMORY_LIMIT,
) -> Iterator[tuple[list[int], Params | Exception]]:
    """Train as `train_groups` does, batch-invariantly; for each job that raises, yield its error.

    One record can make a training raise, for example by a label out of range. Such an error changes
    no bit of another model: the jobs that it leaves untrained restart, half of them at a time, and
    no training depends on the jobs beside it.

    Parameters
    ----------
    jobs : sequence of Callable[[], Job]
        Each makes its job, with the same generator state every time.
    """
    parts = [[*range(len(jobs))]]
    while parts:
        members = parts.pop()
        untrained = [*members]
        made = [jobs[index]() for index in members]
        try:
            batches = train_groups(
                task, made, trained=trained, memory_limit=memory_limit, batch_invariant=True
            )
            while untrained:
                with isolated():
                    group, rows = next(batches)
                finished = [members[index] for index in group]
                untrained = [index for index in untrained if index not in set(finished)]
                yield finished, rows
        except Exception as error:  # a model or a loss may raise anything for a record
            if len(untrained) == 1:
                yield untrained, error
            else:
                half = len(untrained) // 2
                parts += [untrained[half:], untrained[:half]]


def _forms(task: Task, jobs: Sequence[Job], *, batch_invariant: bool) -> Iterator[Form]:
    """Yield the forms for jobs that are alike, the fastest first; the last one takes every job."""
    if why_never_batched(jobs) is None:
        for form_for in plugins.offered(GROUP):
            form = form_for(task, jobs[0])
            if form is None or (batch_invariant and not form.batch_invariant):
                continue
            # A lone job must train as it would in a group, unless its bits may depend on the group.
            if len(jobs) == 1 and not batch_invariant and not form.gains_alone(jobs[0]):
                continue
            # The types of known layers tell all that they do, so no trial is needed.
            if task.factory.facts.known or trains_alike(task, jobs[0], form):
                yield form
        batches = invariant_batches(task, jobs[0]) if batch_invariant else Batches(task)
        if batches is not None:
            yield batches
    yield OneByOne(task)


@dataclass(frozen=True)
class OneByOne(Form):
    """Trainings by `train`, the longest first."""

    task: Task
    batch_invariant = True

    def groups(self, jobs: Sequence[Job], memory_limit: int) -> Iterator[list[int]]:
        """Yield each job by itself."""
        return ([index] for index in longest_first(jobs, range(len(jobs))))

    def minimise(self, jobs: Sequence[Job], trained: Callable[[str], bool]) -> Params:
        """Return the model of a group of one, as `Form.minimise` does."""
        model = train(self.task, jobs[0], trained=trained)
        # Copies, because untrained parameters may be the job's own.
        return {name: p.clone().unsqueeze(0) for name, p in model.items()}


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
    ((_, form),) = _assigned(task, [job], MEMORY_LIMIT, batch_invariant=True)
    return isinstance(form, OneByOne)
