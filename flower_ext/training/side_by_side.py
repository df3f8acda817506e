"""Functions of many clients that wait for trainings: these are batched, errors stay with one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from flower_ext.errors import InvalidValue, tellable
from flower_ext.training.batched.grouping import MEMORY_LIMIT
from flower_ext.training.batched.many import train_each
from flower_ext.training.dp.dp_sgd import ClippedJob, StepNoise, train_clipped_steps
from flower_ext.training.local import Job
from flower_ext.training.params import Params
from flower_ext.training.task import Task

T = TypeVar("T")
R = TypeVar("R")


def check_whole(params: Mapping[str, torch.Tensor], task: Task) -> None:
    """Refuse a part of a model where the whole is trained or evaluated; and what is no model yet.

    Raises
    ------
    ValueError
        Names what is missing, and where a client may have it from.
    """
    check_yielded(params)
    if missing := sorted(set(task.shapes) - set(params)):
        raise tellable(
            InvalidValue(
                f"{missing} of the model are missing: with personal=... the server sends the "
                "shared part alone, and the method adds the client's own from work.memory, or at "
                "first from work.initial_params(); a method without personal parts takes no "
                "personal="
            )
        )


def check_yielded(model: object) -> None:
    """Refuse a training in place of the model that it leads to.

    Raises
    ------
    ValueError
        The ``yield`` before ``work.train(...)`` is missing.
    """
    if isinstance(model, Training):
        raise tellable(
            InvalidValue("a training in place of a model: write model = yield work.train(...)")
        )


@dataclass(frozen=True, kw_only=True)
class Training:
    """A local training that a method waits for: ``model = yield work.train(...)``.

    ``solve`` does many of them at once: what each is sent back, in their order.

    Raises
    ------
    ValueError
        The job's ``params`` are not the whole model.
    """

    task: Task
    job: Job
    trained: Callable[[str], bool]
    solve: Callable[..., Iterable[Any]] = train_each

    def __post_init__(self) -> None:
        check_whole(self.job.params, self.task)

    @property
    def names(self) -> frozenset[str]:
        """Parameters that are trained."""
        return frozenset(filter(self.trained, self.job.params))

    @property
    def without_noise(self) -> bool:
        """True where training adds no noise of its own to the model."""
        return self.solve in (train_each, _train_steadily)


def local_training(
    task: Task,
    job: Job,
    trained: Callable[[str], bool],
    *,
    noise: StepNoise | None = None,
    steady: bool = False,
) -> Training:
    """Return the training of a part of a model on one client's examples.

    A client without examples is sent back what it had. With ``noise`` every step is clipped and
    noised; ``steady`` is that of `train_groups`.
    """
    if len(job.examples) == 0:
        return Training(task=task, job=job, trained=trained, solve=_untrained)
    if noise is None:
        solve = _train_steadily if steady else train_each
        return Training(task=task, job=job, trained=trained, solve=solve)
    clipped = ClippedJob(**vars(job), noise=noise)
    return Training(task=task, job=clipped, trained=trained, solve=train_clipped_steps)


def _train_steadily(task: Task, jobs: Sequence[Job], **settings: Any) -> Iterator[Params]:
    return train_each(task, jobs, steady=True, **settings)


def _untrained(task: Task, jobs: Sequence[Job], **settings: Any) -> list[Params]:
    return [dict(job.params) for job in jobs]


Steps = Generator[Training, Any, T]
"""A function that yields trainings, is sent the trained models, and returns a ``T``."""


def side_by_side(
    runs: Sequence[T | Steps[T] | Exception],
    finish: Callable[[int, T], R],
    *,
    memory_limit: int = MEMORY_LIMIT,
) -> list[R | Exception]:
    """What ``finish`` makes of each run: of its number, and of what it returns; or its error.

    The trainings that runs wait for are batched. Each run is finished as soon as it has ended,
    while its numbers are in the processor's caches and before the next models are there. An error
    of one training is raised in its own run, and all others go on.
    """
    results: dict[int, R | Exception] = {}
    waiting: dict[int, tuple[Steps[T], Training]] = {}

    def go_on(index: int, steps: Steps[T], trained: Any) -> None:
        try:
            if isinstance(trained, Exception):
                waiting[index] = steps, steps.throw(trained)
            else:
                waiting[index] = steps, steps.send(trained)
        except StopIteration as end:
            results[index] = attempted(finish, index, end.value)
        except Exception as error:  # its own, whatever it is
            results[index] = error

    for index, run in enumerate(runs):
        if isinstance(run, Generator):
            go_on(index, run, None)
        elif isinstance(run, Exception):
            results[index] = run
        else:
            results[index] = attempted(finish, index, run)
    while waiting:
        alike = defaultdict(list)
        for index, (_, training) in waiting.items():
            alike[training.solve, training.names].append(index)
        for members in alike.values():
            asked = [waiting.pop(index) for index in members]
            solved = _solved([training for _, training in asked], memory_limit)
            for index, (steps, _), trained in zip(members, asked, solved, strict=True):
                go_on(index, steps, trained)
    return [results[index] for index in sorted(results)]


def attempted(step: Callable[..., R], *given: Any) -> R | Exception:
    """Return what one client's step makes, or its error, which is no other client's."""
    try:
        return step(*given)
    except Exception as error:  # whatever a client's data or a method make of it
        return error


def _solved(trainings: Sequence[Training], memory_limit: int) -> Iterator[Any]:
    """What each training makes, or its error.

    A batch that raises may do so for one of them: those without a model then train one by one,
    from the same batches of examples.
    """
    first, jobs, done = trainings[0], [training.job for training in trainings], 0
    states = [job.generator.get_state() for job in jobs]
    solve = partial(first.solve, first.task, trained=first.trained, memory_limit=memory_limit)
    try:
        for model in solve(jobs):
            yield model
            done += 1
    except Exception as error:  # whose it is shows when each trains alone
        if len(jobs) == 1:
            yield error
            return
    for job, state in zip(jobs[done:], states[done:], strict=True):
        job.generator.set_state(state)
        made = attempted(lambda job=job: [*solve([job])])
        yield made if isinstance(made, Exception) else made[0]
