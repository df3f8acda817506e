"""Many local trainings, together where that is faster.

The results are those of `train` for each job, up to the order of floating-point sums. Chains of
dense layers and convolutions train as compiled code (`network`), other models in a batch
(`descent`). Models that a batch would change train one by one (`batchable`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from flower_ext.data import Examples, trees
from flower_ext.errors import InvalidValue
from flower_ext.training.batched.batchable import trains_alike, why_apart, why_unusual
from flower_ext.training.batched.descent import unstacked
from flower_ext.training.batched.form import Form
from flower_ext.training.batched.grouping import MEMORY_LIMIT, InBatches, alike
from flower_ext.training.batched.network import CompiledNetwork, compiled
from flower_ext.training.isolation import isolated
from flower_ext.training.local import Job, LocalTraining, train_job
from flower_ext.training.model_templates import template_of
from flower_ext.training.params import Params
from flower_ext.training.task import Task

_TYPICAL_ROWS = 32


def train_many(
    task: Task,
    jobs: Sequence[Job],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    memory_limit: int = MEMORY_LIMIT,
) -> list[Params]:
    """Train each job as `train` does; return the models in the order of the jobs.

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
    """Train as `train_many`, but yield each model as soon as it and those before it are ready.

    Consume each model immediately: it is still in the processor's caches, and memory stays bounded.
    ``steady`` is the option of `train_groups`.
    """
    if len(jobs) == 1 and not steady and _goes_alone(task, jobs[0]):
        yield train_job(task, jobs[0], trained=trained)
        return
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
    """Train as `train_many`, batch by batch: yield the indices of jobs, and their stacked models.

    Each parameter has a first dimension of these jobs, and the caller may change it. Parameters and
    buffers that no job of a batch trains may be absent. A caller that needs only sums over models
    never holds more than one batch of them.

    Parameters
    ----------
    steady : bool
        Keep every model from depending on other jobs, even by its rounding, which unstable training
        amplifies. A guarantee that bounds jobs one by one needs this. It costs time if jobs differ
        in their numbers of examples, and models that may depend on their company train one by one
        (see `batchable`).
    """
    if any(len(job.examples) == 0 for job in jobs):
        raise InvalidValue("cannot train on a client without examples: leave it out")
    for members in alike(jobs):
        own = [jobs[index] for index in members]
        for group, rows in _train_alike(task, own, trained, memory_limit, steady):
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
    steady training does not depend on its company.

    Parameters
    ----------
    jobs : sequence of Callable[[], Job]
        Each makes its job, with the same generator state every time.
    """
    parts = [[*range(len(jobs))]]
    while parts:
        left = parts.pop()
        own = [jobs[index]() for index in left]
        numbers = [*left]
        try:
            groups = train_groups(
                task, own, trained=trained, memory_limit=memory_limit, steady=True
            )
            while left:
                with isolated():
                    group, rows = next(groups)
                done = [numbers[index] for index in group]
                left = [index for index in left if index not in set(done)]
                yield done, rows
        except Exception as error:  # a model or a loss may raise anything for a record
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
    if len(jobs) == 1 and not steady:
        found = _compiled(task, jobs[0]) if why_unusual(jobs) is None else None
        if found is not None and found.gains_alone(jobs[0]):
            yield found
    elif why_apart(task, jobs) is None:
        found = _compiled(task, jobs[0])
        if found is not None:
            yield found
        if not steady or why_apart(task, jobs, steady=True) is None:
            yield InBatches(task, steady=steady)
    yield Alone(task)


def _compiled(task: Task, job: Job) -> CompiledNetwork | None:
    """Return the compiled form of models like that of ``job``, if there is one that acts alike."""
    if (found := compiled(task, job)) is None:
        return None
    # Known layers show all that they do, so the cost of a trial can be saved.
    template = template_of(task.factory, task.torch_device())
    known = template is not None and template.known
    return found if known or trains_alike(task, job, found) else None


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
