"""The workload and the report of every contender: models, clients and rounds.

This module imports only PyTorch, so that contenders in other environments can share it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

CLASSES, EXAMPLES, BATCH, LEARNING_RATE = 10, 50, 10, 0.05
CLIPPING_NORM, NOISE_MULTIPLIER = 1.0, 0.1
POOL = 60_000
"""Images of which every client holds fifty: as many as MNIST has."""


def logistic_regression() -> nn.Module:
    """Return a model of 7,850 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, CLASSES))


def perceptron() -> nn.Module:
    """Return a model of 50,890 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def convolutional() -> nn.Module:
    """Return a model of 147,146 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Linear(256, CLASSES),
    )


def wide(hidden: int) -> nn.Module:
    """Return a perceptron with a hidden layer of any width, for the growth with parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)
    )


MODELS = {"lr": logistic_regression, "mlp": perceptron, "cnn": convolutional}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One epoch of SGD on every client of a cohort, round after round."""

    model: str = "lr"
    clients: int = 1_000
    cohort: int = 100
    rounds: int = 6
    private: bool = False
    threads: int = 1
    workers: int = 1

    def build(self) -> nn.Module:
        """Return a fresh model; ``wide-100`` has a hidden layer of 100."""
        name, _, width = self.model.partition("-")
        return wide(int(width)) if name == "wide" else MODELS[name]()

    def arguments(self) -> list[str]:
        """Return the arguments for which `parse` returns this workload."""
        return [f"--{field.name}={getattr(self, field.name)}" for field in fields(self)]


def parse() -> Workload:
    """Return the workload of the command line, and set the number of threads."""
    parser = argparse.ArgumentParser()
    for field in fields(Workload):
        kind = type(field.default)
        parser.add_argument(
            f"--{field.name}", type=kind if kind is not bool else lambda text: text == "True"
        )
    options = vars(parser.parse_args())
    workload = Workload(**{name: value for name, value in options.items() if value is not None})
    torch.set_num_threads(workload.threads)
    return workload


_pool: list[Tensor] = []


def examples(client: int) -> tuple[Tensor, Tensor]:
    """Return fifty images and labels, views of a pool."""
    if not _pool:
        generator = torch.Generator().manual_seed(0)
        _pool.append(torch.randn(POOL, 1, 28, 28, generator=generator))
        _pool.append(torch.randint(CLASSES, (POOL,), generator=generator))
    start = client * EXAMPLES % POOL
    return _pool[0][start : start + EXAMPLES], _pool[1][start : start + EXAMPLES]


def train_in_place(model: nn.Module, client: int) -> None:
    """Train for one epoch of plain PyTorch."""
    features, targets = examples(client)
    parameters = list(model.parameters())
    order = torch.randperm(EXAMPLES)
    for start in range(0, EXAMPLES, BATCH):
        rows = order[start : start + BATCH]
        loss = nn.functional.cross_entropy(model(features[rows]), targets[rows])
        for parameter, slope in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.data.sub_(slope, alpha=LEARNING_RATE)


class Clock:
    """The ends of all rounds."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def tick(self) -> None:
        """Note the end of a round."""
        self.ends.append(time.perf_counter())

    def report(self) -> None:
        """Print milliseconds a round, without the first: the last line of a contender's output."""
        rounds = [1e3 * (b - a) for a, b in zip(self.ends, self.ends[1:], strict=False)][1:]
        print(json.dumps({"ms": statistics.median(rounds), "rounds": rounds}), flush=True)
