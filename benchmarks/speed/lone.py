"""One local training, against the loop that one would write by hand.

    python -m benchmarks.speed.lone

A client holds 50 images and trains for one epoch of SGD in batches of 10, from the model that a
server sent. The bare loop keeps one model and copies the numbers into it. One thread; by turns of
twenty clients, each way first as often as any other; medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.speed.workload import (
    BATCH,
    CLASSES,
    LEARNING_RATE,
    MODELS,
    examples,
    train_in_place,
)
from flower_ext.data import ClientData, Examples
from flower_ext.runs.page import table
from flower_ext.training import Job, LocalTraining, Params, Task, train, train_each

TURNS, CLIENTS = 30, 20
TRAINING = LocalTraining(epochs=1, batch_size=BATCH, learning_rate=LEARNING_RATE)


def dropping() -> nn.Module:
    """A perceptron with dropout, 50,890 parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, CLASSES)
    )


class Own(nn.Module):
    """A perceptron as one's own class, 50,890 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(784, 64), nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        scores: torch.Tensor = self.last(torch.relu(self.first(x.flatten(1))))
        return scores


CASES: dict[str, Callable[[], nn.Module]] = {
    "logistic regression, 7,850": MODELS["lr"],
    "perceptron, 50,890": MODELS["mlp"],
    "perceptron of one's own class": Own,
    "with dropout, 50,890": dropping,
    "convolutional, 147,146": MODELS["cnn"],
}


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    columns = ("model, parameters", "bare loop, µs", "train, µs", "train_each, µs", "ratios")
    print(table(columns, [row(name, build) for name, build in CASES.items()]))


def row(name: str, build: Callable[[], nn.Module]) -> tuple[str, ...]:
    """Microseconds of one training, each way; and how many times the bare loop's they are."""
    task = Task(model=build, data=no_partitions, device="cpu")
    start, model = task.initial_params(0), build()

    def bare(client: int) -> Params:
        for parameter, value in zip(model.parameters(), start.values(), strict=True):
            parameter.data.copy_(value)
        train_in_place(model, client)
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    def job(client: int) -> Job:
        own, random = Examples(*examples(client)), torch.Generator().manual_seed(client)
        return Job(params=start, examples=own, training=TRAINING, generator=random)

    def alone(client: int) -> Params:
        return train(task, job(client))

    def as_one_of_many(client: int) -> Params:
        (trained,) = train_each(task, [job(client)])
        return trained

    ways = [bare, alone, as_one_of_many]
    took: dict[Callable[[int], Params], list[float]] = {way: [] for way in ways}
    for turn in range(-1, TURNS):  # the first one prepares what is kept
        for way in ways[turn % 3 :] + ways[: turn % 3]:
            started = time.perf_counter()
            for client in range(CLIENTS):
                way(client)
            if turn >= 0:
                took[way].append((time.perf_counter() - started) / CLIENTS)
    plain, *ours = (1e6 * statistics.median(took[way]) for way in ways)
    ratios = ", ".join(f"{one / plain:.2f}" for one in ours)
    return name, f"{plain:,.0f}", *(f"{one:,.0f}" for one in ours), ratios


def no_partitions(partition: int) -> ClientData:
    """Jobs carry their examples; the task has none."""
    raise LookupError(partition)


if __name__ == "__main__":
    main()
