"""Seconds for the local trainings of one round: together, and one by one."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from flower_ext.data import ClientData, Examples
from flower_ext.runs.page import table
from flower_ext.training import Job, LocalTraining, Task, train, train_each
from flower_ext.training.models import HeadedModel

WIDTH, CLASSES, CLIENTS, EXAMPLES, TURNS = 1280, 10, 20, 540, 3


class Adapter(nn.Module):
    """The app's adapter, with a bottleneck of 16 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return adapted features."""
        up: torch.Tensor = self.up(torch.relu(self.down(x)))
        return x + up


def build(extractor: Callable[[], nn.Module]) -> nn.Module:
    """Return an extractor with a head."""
    return HeadedModel(extractor(), nn.Linear(WIDTH, CLASSES))


def timing() -> str:
    """Time 20 clients with 540 pictures each, one epoch; the fastest of three turns counts."""
    torch.set_num_threads(1)
    rows = []
    for name, extractor, radius in (
        ("head, SGD", nn.Identity, 0.0),
        ("adapter, SGD", Adapter, 0.0),
        ("adapter, SAM", Adapter, 0.05),
    ):
        task = Task(model=partial(build, extractor), data=_no_partitions, device="cpu")
        training = LocalTraining(epochs=1, batch_size=32, learning_rate=0.01, sam_radius=radius)
        together, alone = [], []
        for _ in range(TURNS):
            together.append(_seconds(_in_batches, task, _jobs(task, training)))
            alone.append(_seconds(_one_by_one, task, _jobs(task, training)))
        rows.append((name, f"{min(together):.2f}", f"{min(alone):.2f}"))
    return table(("trains", "together, s", "one by one, s"), rows)


def _examples(client: int) -> Examples:
    generator = torch.Generator().manual_seed(client)
    features = torch.randn(EXAMPLES, WIDTH, generator=generator)
    return Examples(features, torch.randint(CLASSES, (EXAMPLES,), generator=generator))


def _jobs(task: Task, training: LocalTraining) -> list[Job]:
    start = task.initial_params(0)
    return [
        Job(
            params=start,
            examples=_examples(client),
            training=training,
            generator=torch.Generator().manual_seed(client),
        )
        for client in range(CLIENTS)
    ]


def _one_by_one(task: Task, waiting: list[Job]) -> None:
    for job in waiting:
        train(task, job)


def _in_batches(task: Task, waiting: list[Job]) -> None:
    for _ in train_each(task, waiting):
        pass


def _no_partitions(partition: int) -> ClientData:
    raise LookupError(partition)


def _seconds(run: Callable[..., object], *arguments: object) -> float:
    started = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - started
