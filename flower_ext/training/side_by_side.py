"""Run the functions of many clients, and group the trainings that these functions yield.

An error of one client does not stop the others.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from flower_ext.errors import InvalidValue
from flower_ext.training.batched.form import MEMORY_LIMIT
from flower_ext.training.batched.many import attempt_groups, train_each
from flower_ext.training.isolation import isolated
from flower_ext.training.job import Job
from flower_ext.training.task import Task

T = TypeVar("T")


def check_whole(params: Mapping[str, torch.Tensor], task: Task) -> None:
    """Refuse ``params`` that lack a part of the model, and a `Training` in place of parameters."""
    check_yielded(params)
    if not params.keys() >= task.shapes.keys():
        missing = sorted(task.shapes.keys() - params.keys())
        raise InvalidValue.tellable(
            f"parameters {missing} of the model are missing: with personal=... the server sends "
            "only the shared part. The method must add the client's own part from work.memory, or "
            "in the client's first round from work.initial_params(). If the method has no personal "
            "part, leave out personal="
        )


def check_yielded(model: object) -> None:
    """Refuse a `Training` in place of a trained model: the method lacks a ``yield``."""
    if isinstance(model, Training):
        raise InvalidValue.tellable(
            "got a `Training` instead of a trained model: write model = yield work.train(...)"
        )


@dataclass(kw_only=True)
class Training:
    """A local training that a method waits for: ``model = yield work.train(...)``.

    Parameters
    ----------
    task, job, trained
        The arguments of `train`.
    solve : Callable
        Runs the jobs of many such trainings at once, and returns one result per job, in order.
        The method receives its job's result.
    returns_params : bool
        True if ``solve`` adds no noise of its own, and returns parameters like those of the job.
        The job's parameters can then replace the result of a failed training.

    Raises
    ------
    ValueError
        The job's ``params`` are not the whole model.
    """

    task: Task
    job: Job
    trained: Callable[[str], bool]
    solve: Callable[..., Iterable[Any]] = train_each
    returns_params: bool = False

    def __post_init__(self) -> None:
        check_whole(self.job.params, self.task)

    @property
    def without_noise(self) -> bool:
        """True if the training returns parameters, and adds no noise to them."""
        return self.job.noise is None and self.returns_params

    @property
    def group(self) -> Hashable:
        """Key of this training's group: trainings with equal keys run together."""
        names = frozenset(filter(self.trained, self.job.params))
        return self.solve, names, self.job.noise is None


Steps = Generator[Training, Any, T]
"""A generator that yields trainings, receives the trained models, and returns a ``T``."""


def completed(run: T | Steps[T]) -> Steps[T]:
    """Yield the trainings of ``run``, and return its result; return ``run`` if it is a result."""
    return (yield from run) if isinstance(run, Generator) else run


def side_by_side(
    runs: Iterable[Steps[T] | Exception], *, memory_limit: int = MEMORY_LIMIT
) -> list[T | Exception]:
    """Run all ``runs`` to their ends; return the value of each, or the error of a run that fails.

    The function groups the trainings that several runs yield. It gives a run its trained model as
    soon as the model is ready: the model is then still in the processor's caches, and the models
    that follow occupy no memory yet. An error in a training is raised in the run that yielded it,
    and all other runs continue. A run without trainings ends before the next run begins.
    """
    results: dict[int, T | Exception] = {}
    waiting: dict[Hashable, list[tuple[int, Steps[T], Training]]] = defaultdict(list)

    def advance(index: int, steps: Steps[T], model: Any) -> None:
        try:
            with isolated():
                failed = isinstance(model, Exception)
                training = steps.throw(model) if failed else steps.send(model)
                # The property `group` calls a function of the method, which may raise, too.
                waiting[training.group].append((index, steps, training))
        except StopIteration as end:
            results[index] = end.value
        except Exception as error:  # an error of this run alone, of any type
            results[index] = error

    for index, run in enumerate(runs):
        if isinstance(run, Exception):
            results[index] = run
        else:
            advance(index, run, None)
    while waiting:
        groups = [*waiting.values()]
        waiting.clear()
        for members in groups:
            trainings = [training for *_, training in members]
            solve = partial(_solved, trainings[0], memory_limit)
            for (number,), model in attempt_groups(solve, [training.job for training in trainings]):
                index, steps, _ = members[number]
                advance(index, steps, model)
    return [results[index] for index in sorted(results)]


def _solved(
    training: Training, memory_limit: int, jobs: Sequence[Job]
) -> Iterator[tuple[list[int], Any]]:
    options = {"trained": training.trained, "memory_limit": memory_limit}
    results = training.solve(training.task, jobs, **options)
    return (([number], result) for number, result in enumerate(results))
