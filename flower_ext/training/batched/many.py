"""Train many jobs, in groups where that is faster.

Each job gets the result that `local.train` gives, up to the order of floating-point sums. The first
form of this table that accepts a job trains it. If the caller asks for batch invariance, no bit of
a job's result depends on the jobs that train together with it.

===============  ===============  ===============  ===============  =============================
form             with batch       several jobs,    a single job,    models that it accepts
                 invariance       no invariance    no invariance
===============  ===============  ===============  ===============  =============================
of a plug-in     if it promises   yes              if it is faster  known layers without a trial,
                 invariance                                         other layers after one
`ConstantShape`  yes              no               no               those that `consists_of_rows`
                                                                    and trials allow
`Stacked`        no               if it is faster  no               any, after a trial
`local.train`    yes              yes              yes              any
===============  ===============  ===============  ===============  =============================

`local.train` also trains the jobs for which `why_never_together` returns a reason. The process
remembers the outcome of each trial.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from logging import getLogger
from typing import TypeVar

from torch import Tensor

from flower_ext import plugins
from flower_ext.errors import InvalidValue
from flower_ext.training.batched.constant_shape import (
    ConstantShape,
    Shape,
    consists_of_rows,
    jobs_for_trial,
)
from flower_ext.training.batched.form import GROUP, MEMORY_LIMIT, Form, longest_first
from flower_ext.training.batched.stack import Stacked
from flower_ext.training.isolation import isolated
from flower_ext.training.job import SGD, Job
from flower_ext.training.kind import TrainingKind, kind_of
from flower_ext.training.local import train
from flower_ext.training.params import Params
from flower_ext.training.problem import Linear, Proximal
from flower_ext.training.task import Task
from flower_ext.training.trials.single_rows import refusing_layer
from flower_ext.training.trials.trainings import (
    random_job,
    why_bits_differ,
    why_changed_by_pass,
    why_models_differ,
)

R = TypeVar("R")
Work = TypeVar("Work", bound=Job)

log = getLogger("flwr")


def attempt_groups(
    solve: Callable[[list[Work]], Iterable[tuple[Sequence[int], R]]], jobs: Sequence[Work]
) -> Iterator[tuple[list[int], R | Exception]]:
    """Train jobs, and find those that raise errors.

    For jobs that trained together without an error, the function yields their indices and their
    joint result. For a job that raises an error, it yields this job's index and the error.

    One record can make a training raise an error, for example by a label out of range. The function
    then starts again with the jobs that have no result yet, half of them at a time. Jobs draw the
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
                parts += [left[half:], left[:half]]  # the first half runs next


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
        Largest estimated number of bytes for a group's parameters, gradients, examples and
        activations together.
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
        If True, no bit of a model depends on other jobs. If no `Form` promises this for a model,
        its jobs train one by one. If False, a model's rounding depends on the other jobs, and
        unstable training amplifies rounding errors. Set True if a privacy guarantee assumes that
        the data of one job change no other job's model.
    """
    if any(len(job.examples) == 0 for job in jobs):
        raise InvalidValue("cannot train on a client without examples: leave the client out")
    for group, form in assign_forms(task, jobs, memory_limit, batch_invariant=batch_invariant):
        members = [jobs[index] for index in group]
        if form is not None:
            yield group, form.train(members, trained)
            continue
        model = train(task, members[0], trained=trained)
        # Copies, because untrained parameters may be the job's own.
        yield group, {name: p.clone().unsqueeze(0) for name, p in model.items()}


def assign_forms(
    task: Task, jobs: Sequence[Job], memory_limit: int, *, batch_invariant: bool
) -> Iterator[tuple[list[int], Form | None]]:
    """Yield groups of jobs that train together, as pairs of the jobs' indices and their form.

    A job that `local.train` must train alone forms a group by itself, with None as its form.
    """
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
            if not left:
                break
        yield from (([index], None) for index in longest_first(jobs, left))


def _forms(task: Task, jobs: Sequence[Job], *, batch_invariant: bool) -> Iterator[Form]:
    """Yield forms for jobs whose examples have one shape and type, the fastest form first."""
    if why_never_together(jobs) is not None:
        return
    examples = jobs[0].examples
    training_kind = kind_of(task, examples.features, examples.targets, jobs[0].params)
    # With batch invariance, a single job must train as it would in a group.
    lone = len(jobs) == 1 and not batch_invariant
    for form_for in plugins.offered(GROUP):
        form = form_for(task, jobs[0])
        if form is None or (batch_invariant and not form.batch_invariant):
            continue
        if (form.gains_alone(jobs[0]) or not lone) and _is_sound(form, training_kind):
            yield form
    if batch_invariant:
        if consists_of_rows(training_kind) and why_not_stacked(training_kind) is None:
            yield from _of_constant_shape(training_kind, jobs)
    elif not lone and why_not_stacked(training_kind) is None:
        yield Stacked(task)


def _of_constant_shape(training_kind: TrainingKind, jobs: Sequence[Job]) -> Iterator[Form]:
    """Yield a `ConstantShape` for each job's `Shape`, if a trial finds its stacks invariant."""
    form = ConstantShape(training_kind, Shape.of(random_job(training_kind, 3)))
    if _is_sound(form, training_kind):
        for shape in dict.fromkeys(map(Shape.of, jobs)):
            if stack_rounds_alike(training_kind, shape):
                yield ConstantShape(training_kind, shape)


def _is_sound(form: Form, training_kind: TrainingKind) -> bool:
    """Return True if the form gives the results of `local.train` for jobs of this kind."""
    # The type of a known layer determines what it computes, so no trial is needed.
    return training_kind.task.factory.facts.known or trains_alike(training_kind, form)


def why_never_together(jobs: Sequence[Job]) -> str | None:
    """Return why these jobs must train one by one, whatever their model; None if they need not."""
    for part in ("features", "targets"):
        if not isinstance(getattr(jobs[0].examples, part), Tensor):
            return f"{part} are not a single tensor"
    if any(job.noise is not None for job in jobs):
        return "each step clips gradients and adds noise"
    if any(job.training.tolerance for job in jobs):
        return "tolerance is above 0, which asks for the exact minimiser"
    if any(job.training.optimizer != SGD for job in jobs):
        return "the optimizer is not SGD"
    if any(type(term) not in (Proximal, Linear) for job in jobs for term in job.terms):
        return "the objective has a term other than Proximal and Linear"
    return None


@lru_cache(maxsize=64)
def why_not_stacked(training_kind: TrainingKind) -> str | None:
    """Return why models of this kind cannot train in a stack; None if they can."""
    reason = why_models_differ(training_kind, Stacked(training_kind.task).train, train)
    if reason is None and (layer := refusing_layer(training_kind)):
        reason = f"{layer} refuses a mini-batch of a single row"
    if reason:
        log.info("local trainings run one by one: %s", reason)
    return reason


@lru_cache(maxsize=64)
def trains_alike(training_kind: TrainingKind, form: Form) -> bool:
    """Return True if a trial finds that a form trains models of this kind as `local.train` does.

    The function also returns False for a model whose forward pass changes its own state. A model
    that counts its passes, for example, might begin to use the count after the trial has ended.
    """
    if why_changed_by_pass(training_kind):
        return False
    return not why_models_differ(training_kind, form.train, train)


@lru_cache(maxsize=256)
def stack_rounds_alike(training_kind: TrainingKind, shape: Shape) -> bool:
    """Return True if a trial finds that no bit of a model depends on the rest of its stack."""
    form, count = ConstantShape(training_kind, shape), jobs_for_trial(training_kind.device)
    try:
        reason = why_bits_differ(
            training_kind, form.train, shape.settings, terms=shape.has_terms, count=count
        )
    except RuntimeError as error:  # an accelerator lacks a deterministic kernel, or memory
        reason = str(error)
    if reason:
        log.info("local trainings run one by one: %s", reason)
    return reason is None
