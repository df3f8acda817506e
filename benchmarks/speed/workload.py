"""The workload and the report of every contender: models, clients and rounds.

This module imports only PyTorch, so that contenders in other environments can share it.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor, nn

CLASSES, EXAMPLES, BATCH, LEARNING_RATE = 10, 50, 10, 0.05
"""``EXAMPLES`` is the number of images of a client."""
CLIPPING_NORM, NOISE_MULTIPLIER = 1.0, 0.1
ACCELERATOR_MEMORY = 2**36
"""Bytes for one batch of trainings on an accelerator."""
POOL = 60_000
"""Number of different images, as in MNIST; the fifty of a client are a part of them."""


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


def resnet() -> nn.Module:
    """Return ResNet-18 for images of 3×32×32, with GroupNorm: 11,173,962 parameters."""
    from torchvision.models import resnet18

    model: nn.Module = resnet18(
        num_classes=CLASSES, norm_layer=lambda channels: nn.GroupNorm(min(32, channels), channels)
    )
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def wide(hidden: int) -> nn.Module:
    """Return a perceptron with a hidden layer of any width, for the growth with parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)
    )


MODELS = {
    "lr": logistic_regression,
    "mlp": perceptron,
    "cnn": convolutional,
    "resnet": resnet,
}


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
    device: str = "cpu"

    def build(self) -> nn.Module:
        """Return a fresh model; ``wide-100`` has a hidden layer of 100."""
        name, _, width = self.model.partition("-")
        return wide(int(width)) if name == "wide" else MODELS[name]()

    def arguments(self) -> list[str]:
        """Return the arguments for which `parse` returns this workload."""
        return [f"--{field.name}={getattr(self, field.name)}" for field in fields(self)]


def parse(arguments: Sequence[str] | None = None) -> Workload:
    """Return the workload of arguments (the command line's), and set the number of threads."""
    parser = argparse.ArgumentParser()
    for field in fields(Workload):
        kind = type(field.default)
        parser.add_argument(
            f"--{field.name}", type=kind if kind is not bool else lambda text: text == "True"
        )
    options = vars(parser.parse_args(arguments))
    workload = Workload(**{name: value for name, value in options.items() if value is not None})
    torch.set_num_threads(workload.threads)
    return workload


@cache
def pool(model: str, device: str) -> tuple[Tensor, Tensor]:
    """Return random images of the size that a model takes, and labels."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, 32, 32) if model == "resnet" else (1, 28, 28)
    images = torch.randn(POOL, *shape, generator=generator)
    return images.to(device), torch.randint(CLASSES, (POOL,), generator=generator).to(device)


def examples(workload: Workload, client: int) -> tuple[Tensor, Tensor]:
    """Return fifty images and labels, views of a pool on the workload's device."""
    images, labels = pool(workload.model, workload.device)
    start = client * EXAMPLES % POOL
    return images[start : start + EXAMPLES], labels[start : start + EXAMPLES]


def train_in_place(
    model: nn.Module,
    features: Tensor,
    targets: Tensor,
    *,
    batch_size: int = BATCH,
    learning_rate: float = LEARNING_RATE,
) -> None:
    """Train for one epoch of SGD, written in plain PyTorch."""
    parameters = list(model.parameters())
    order = torch.randperm(len(features), device=features.device)
    for rows in torch.split(order, batch_size):
        loss = nn.functional.cross_entropy(model(features[rows]), targets[rows])
        for parameter, slope in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.data.sub_(slope, alpha=learning_rate)


class Clock:
    """The times at which a run began and its rounds ended."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def tick(self) -> None:
        """Note the end of a round, and of all work of an accelerator."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds of each round."""
        return [end - begin for begin, end in itertools.pairwise(self.ends)]

    def report(self) -> None:
        """Print milliseconds a round, without the first: the last line of a contender's output."""
        rounds = [1e3 * seconds for seconds in self.seconds()[1:]]
        print(json.dumps({"ms": statistics.median(rounds), "rounds": rounds}), flush=True)
