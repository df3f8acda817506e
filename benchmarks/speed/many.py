"""Local trainings together, against the same one by one; clients, and many tiny trainings.

    python -m benchmarks.speed.many

Clients hold 50 examples each, one epoch of SGD in batches of 10; sequences are the rows of their
images. Tiny ones (users inside a silo) hold one to three and train for two epochs. One thread; by
turns; the fastest of three.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

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


def small_perceptron() -> nn.Module:
    """19,885 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 25), nn.ReLU(), nn.Linear(25, CLASSES))


class Sequences(nn.Module):
    """A recurrent layer over the 28 rows of an image, and a dense one."""

    def __init__(self, kind: Callable[..., nn.RNNBase], neurons: int) -> None:
        super().__init__()
        self.recurrent = kind(28, neurons, batch_first=True)
        self.head = nn.Linear(neurons, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Scores, of the last state."""
        outputs, _ = self.recurrent(x.squeeze(1))
        return cast(Tensor, self.head(outputs[:, -1]))


CASES = [
    Case(name="clients, " + name, build=build, trainings=100, examples=(50,), epochs=1)
    for name, build in (
        ("logistic regression, 7,850", logistic_regression),
        ("perceptron, 50,890", perceptron),
        ("convolutional, 147,146", convolutional),
        ("LSTM of 32, 8,266", partial(Sequences, nn.LSTM, 32)),
        ("GRU of 64, 18,698", partial(Sequences, nn.GRU, 64)),
    )
] + [
    Case(name="tiny, " + name, build=build, trainings=10_000, examples=(1, 2, 3), epochs=2)
    for name, build in (
        ("perceptron, 19,885", small_perceptron),
        ("convolutional, 19,988", mnist_cnn),
    )
]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    columns = ("trainings, parameters", "one by one, µs", "together, µs", "ratio")
    print(table(columns, map(row, CASES)))


def row(case: Case) -> tuple[str, str, str, str]:
    """Microseconds a training, both ways."""
    task = Task(model=case.build, data=no_partitions, device="cpu")
    data = [examples(i, case.examples[i % len(case.examples)]) for i in range(case.trainings)]
    few = [jobs_of(task, data[:ALONE], case.epochs) for _ in range(TURNS)]
    all_ = [jobs_of(task, data, case.epochs) for _ in range(TURNS)]
    alone, together = [], []
    for some, every in zip(few, all_, strict=True):
        alone.append(seconds(one_by_one, task, some) / len(some))
        together.append(seconds(in_batches, task, every) / len(every))
    return (
        case.name,
        f"{1e6 * min(alone):,.0f}",
        f"{1e6 * min(together):,.0f}",
        f"{min(alone) / min(together):.1f}",
    )


def examples(client: int, count: int) -> Examples:
    """Random images of one client."""
    generator = torch.Generator().manual_seed(client)
    return Examples(
        features=torch.randn(count, 1, 28, 28, generator=generator),
        targets=torch.randint(CLASSES, (count,), generator=generator),
    )


def jobs_of(task: Task, data: list[Examples], epochs: int) -> list[Job]:
    """One job a client, with a fresh batch order."""
    start = task.initial_params(0)
    return [
        Job(
            params=start,
            examples=own,
            training=LocalTraining(epochs=epochs, batch_size=10, learning_rate=0.05),
            generator=torch.Generator().manual_seed(client),
        )
        for client, own in enumerate(data)
    ]


def no_partitions(partition: int) -> ClientData:
    """Jobs carry their examples; the task has none."""
    raise LookupError(partition)


def one_by_one(task: Task, waiting: list[Job]) -> None:
    """What a batch replaces."""
    for job in waiting:
        train(task, job.params, job.examples, job.training, generator=job.generator)


def in_batches(task: Task, waiting: list[Job]) -> None:
    """Each model is dropped at once, as who adds them up would."""
    for _ in train_each(task, waiting):
        pass


def seconds(run: Callable[..., object], *arguments: object) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
