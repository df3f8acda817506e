"""Local trainings together, against the same one by one; clients, and many tiny trainings.

    python -m benchmarks.speed.many

Clients hold 50 examples each, one epoch of SGD in batches of 10; sequences are the rows of their
images. Tiny ones (users inside a silo) hold one to three and train for two epochs. Users with norms
and dropout hold 30 to 100 rows of a table, in batches of 32, as for fraud; *apart*: no bit of one
depends on the others, as where a guarantee bounds each update. One thread; by turns; the fastest of
three.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.speed.workload import convolutional, logistic_regression, perceptron
from flower_ext.data import ClientData, Examples
from flower_ext.runs.page import table
from flower_ext.training import Job, LocalTraining, Task, train, train_each
from flower_ext.training.models import mnist_cnn

CLASSES, TURNS = 10, 3
ALONE = 100
"""Trainings that are timed one by one: each takes as long as any other."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """So many trainings of one model."""

    name: str
    build: Callable[[], nn.Module]
    trainings: int
    examples: tuple[int, ...]
    epochs: int
    shape: tuple[int, ...] = (1, 28, 28)
    batch_size: int = 10
    steady: bool = False


def small_perceptron() -> nn.Module:
    """19,885 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 25), nn.ReLU(), nn.Linear(25, CLASSES))


def fraud() -> nn.Module:
    """Two blocks of 64 neurons on 30 features, and two classes: 6,530 parameters."""

    def block(wide: int) -> list[nn.Module]:
        return [nn.Linear(wide, 64), nn.GroupNorm(8, 64), nn.ReLU(), nn.Dropout(0.2)]

    return nn.Sequential(*block(30), *block(64), nn.Linear(64, 2))


CASES = [
    Case(name="clients, " + name, build=build, trainings=100, examples=(50,), epochs=1)
    for name, build in (
        ("logistic regression, 7,850", logistic_regression),
        ("perceptron, 50,890", perceptron),
        ("convolutional, 147,146", convolutional),
    )
] + [
    Case(name="tiny, " + name, build=build, trainings=10_000, examples=(1, 2, 3), epochs=2)
    for name, build in (
        ("perceptron, 19,885", small_perceptron),
        ("convolutional, 19,988", mnist_cnn),
    )
]
CASES += [
    Case(
        name=f"{count:,} users{way}, norms and dropout, 6,530",
        build=fraud,
        trainings=count,
        examples=tuple(range(30, 101)),
        epochs=2,
        shape=(30,),
        batch_size=32,
        steady=bool(way),
    )
    for count in (100, 1_000)
    for way in ("", " apart")
]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    columns = ("trainings, parameters", "one by one, µs", "together, µs", "ratio")
    print(table(columns, map(row, CASES)))


def row(case: Case) -> tuple[str, str, str, str]:
    """Microseconds a training, both ways."""
    task = Task(model=case.build, data=no_partitions, device="cpu")
    classes = case.build()(torch.zeros(2, *case.shape)).shape[1]
    sizes = [case.examples[i % len(case.examples)] for i in range(case.trainings)]
    data = [examples(i, size, case.shape, classes) for i, size in enumerate(sizes)]
    few = [jobs_of(task, data[:ALONE], case) for _ in range(TURNS)]
    all_ = [jobs_of(task, data, case) for _ in range(TURNS)]
    alone, together = [], []
    for some, every in zip(few, all_, strict=True):
        alone.append(seconds(one_by_one, task, some) / len(some))
        together.append(seconds(in_batches, task, every, case.steady) / len(every))
    return (
        case.name,
        f"{1e6 * min(alone):,.0f}",
        f"{1e6 * min(together):,.0f}",
        f"{min(alone) / min(together):.1f}",
    )


def examples(client: int, count: int, shape: tuple[int, ...], classes: int) -> Examples:
    """Random numbers of one client."""
    generator = torch.Generator().manual_seed(client)
    return Examples(
        features=torch.randn(count, *shape, generator=generator),
        targets=torch.randint(classes, (count,), generator=generator),
    )


def jobs_of(task: Task, data: list[Examples], case: Case) -> list[Job]:
    """One job a client, with a fresh batch order."""
    start = task.initial_params(0)
    training = LocalTraining(epochs=case.epochs, batch_size=case.batch_size, learning_rate=0.05)
    return [
        Job(
            params=start,
            examples=own,
            training=training,
            generator=torch.Generator().manual_seed(client),
        )
        for client, own in enumerate(data)
    ]


def no_partitions(partition: int) -> ClientData:
    """Jobs carry their examples; the task has none."""
    raise LookupError(partition)


def one_by_one(task: Task, waiting: list[Job]) -> None:
    """Train jobs one after the other, which a batch replaces."""
    for job in waiting:
        train(task, job)


def in_batches(task: Task, waiting: list[Job], steady: bool) -> None:
    """Each model is dropped at once, as who adds them up would."""
    for _ in train_each(task, waiting, steady=steady):
        pass


def seconds(run: Callable[..., object], *arguments: object) -> float:
    """Return the seconds of one call."""
    started = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
