"""Many local trainings, together where that is faster.

The results are those of `train` for each job, up to the order of floating-point sums. Jobs train
in the form of a plug-in if one takes them (`form`), else in a batch (`descent`). Models that a
batch would change train one by one (`batchable`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from flower_ext import plugins
from flower_ext.data import Examples, trees
from flower_ext.errors import InvalidValue
from flower_ext.training.batched.batchable import trains_alike, why_apart, why_unusual
from flower_ext.training.batched.descent import unstacked
from flower_ext.training.batched.form import GROUP, MEMORY_LIMIT, Form, OfferedForm
from flower_ext.training.batched.grouping import InBatches, alike
from flower_ext.training.isolation import isolated
from flower_ext.training.local import Job, LocalTraining, train_job
from flower_ext.training.model_templates import template_of
from flower_ext.training.params import Params
from flower_ext.training.task import Task

_TYPICAL_ROWS = 32


def train_each(
    task: Task,
    jobs: Sequence[Job],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    memory_limit: int = MEMORY_LIMIT,
    steady: bool = False,
) -> Iterator[Params]:
    """Train each job as `train` does; yield each model as soon as it and those before are ready.

    Jobs that cannot be trained together, or would not gain by it, are trained one by one. Consume
    each model immediately: it is still in the processor's caches, and memory stays bounded.

    Parameters
    ----------
    memory_limit : int
        Bytes for parameters, gradients, examples and activations of one batch (estimated).
    steady : bool
        The option of `train_groups`.

    Raises
    ------
    ValueError, NotConverged
        As `train`.
    """
    if len(jobs) == 1 and not steady and _goes_alone(task, jobs[0]):
        yield train_job(task, jobs[0], trained=trained)
        return
    models: dict[int, Params] = {}
    due = 0
    groups = train_groups(task, jobs, trained=trained, memory_limit=memory_limit, steady=steady)
    for group, rows in groups:
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
    steady: bool = False,
) -> Iterator[tuple[list[int], Params]]:
    """Train as `train_each`, batch by batch: yield the indices of jobs, and their stacked models.

    Each parameter has a first dimension of these jobs, and the caller may change it. Parameters and
    buffers that no job of a batch trains may be absent. A caller that needs only sums over models
    never holds more than one batch of them.

    Parameters
    ----------
    steady : bool
        Keep every model from depending on other jobs, even by its rounding, which unstable training
        amplifies. A guarantee that bounds jobs one by one needs this. Models that may depend on
        those beside them train one by one (see `batchable`), and so do large ones, which gain
        little in such a batch.
    """
    if any(len(job.examples) == 0 for job in jobs):
        raise InvalidValue("cannot train on a client without examples: leave it out")
    for members in alike(jobs):
        similar = [jobs[index] for index in members]
        for group, rows in _train_alike(task, similar, trained, memory_limit, steady):
            yield [members[index] for index in group], rows


def train_surely(
    task: Task,
    jobs: Sequence[Callable[[], Job]],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    memory_limit: int = MEMORY_LIMIT,
) -> Iterator[tuple[list[int], Params | Exception]]:
    """Train steadily (see `train_groups`); for each job that raises, yield its error.

    One record can make a training raise, for example by a label out of range. That changes no other
    model in any bit: jobs that an error leaves untrained restart, half of them at a time, and a
    steady training does not depend on the jobs beside it.

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
            groups = train_groups(
                task, made, trained=trained, memory_limit=memory_limit, steady=True
            )
            while untrained:
                with isolated():
                    group, rows = next(groups)
                finished = [members[index] for index in group]
                untrained = [index for index in untrained if index not in set(finished)]
                yield finished, rows
        except Exception as error:  # a model or a loss may raise anything for a record
            if len(untrained) == 1:
                yield untrained, error
            else:
                half = len(untrained) // 2
                parts += [untrained[half:], untrained[:half]]


def _train_alike(
    task: Task,
    jobs: Sequence[Job],
    trained: Callable[[str], bool],
    memory_limit: int,
    steady: bool,
) -> Iterator[tuple[list[int], Params]]:
    left = [*range(len(jobs))]
    for form in _forms(task, jobs, steady):
        taken: set[int] = set()
        for part in form.groups([jobs[index] for index in left], memory_limit):
            group = [left[index] for index in part]
            taken.update(group)
            yield group, form.minimise([jobs[index] for index in group], trained)
        left = [index for index in left if index not in taken]
        if not left:
            return


def _forms(task: Task, jobs: Sequence[Job], steady: bool) -> Iterator[Form]:
    """Yield forms for jobs that are alike, the fastest first; the last one takes all the rest."""
    alone = len(jobs) == 1 and not steady
    if (why_unusual(jobs) if alone else why_apart(task, jobs)) is None:
        for form in _offered(task, jobs[0]):
            if form.gains_alone(jobs[0]) if alone else form.batch_invariant or not steady:
                yield form
        if not alone and not steady:
            yield InBatches(task)
    yield Alone(task)


def _offered(task: Task, job: Job) -> Iterator[OfferedForm]:
    """Yield the forms of plug-ins for models like that of ``job``."""
    for form_for in plugins.offered(GROUP):
        if (form := form_for(task, job)) is None:
            continue
        # Known layers show all that they do, so the cost of a trial can be saved.
        template = template_of(task.factory, task.torch_device())
        if (template is not None and template.known) or trains_alike(task, job, form):
            yield form


def _goes_alone(task: Task, job: Job, *, steady: bool = False) -> bool:
    """Return True if only `Alone` takes a single job."""
    forms = _forms(task, [job], steady)
    return isinstance(next(f for f in forms if any(f.groups([job], MEMORY_LIMIT))), Alone)


class Alone:
    """Trainings one by one (a `Form`)."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def groups(self, jobs: Sequence[Job], memory_limit: int) -> list[list[int]]:
        """Return all jobs, the longest first."""
        order = sorted(range(len(jobs)), key=lambda i: (-jobs[i].num_steps, -len(jobs[i].examples)))
        return [[index] for index in order]

    def minimise(self, jobs: Sequence[Job], trained: Callable[[str], bool]) -> Params:
        """Train one job, as `Form.minimise` does."""
        (job,) = jobs
        model = train_job(self.task, job, trained=trained)
        # Copies, because untrained parameters may be the job's own.
        return {name: p.clone().unsqueeze(0) for name, p in model.items()}


def trains_apart(task: Task, example: Examples, training: LocalTraining) -> bool:
    """Return True if `train_groups` with ``steady`` trains models like these one by one.

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
    return _goes_alone(task, job, steady=True)
