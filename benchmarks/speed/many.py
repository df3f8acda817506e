"""Local trainings of many clients as one batch, against one by one.

    python -m benchmarks.speed.many

100 clients of 50 examples each, one epoch of SGD in batches of 10, on one thread. Both in one
process, by turns; the fastest of three.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from flower_ext.data import ClientData, Examples
from flower_ext.reporting.report import table
from flower_ext.training import Job, LocalTraining, Task, train, train_many

CLIENTS, EXAMPLES, CLASSES, TURNS = 100, 50, 10, 3
TRAINING = LocalTraining(epochs=1, batch_size=10, learning_rate=0.1)
MODELS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "logistic regression, 784 features": (784, lambda: nn.Linear(784, CLASSES)),
    "MLP 784-64-10": (
        784,
        lambda: nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, CLASSES)),
    ),
    "logistic regression, 20 features": (20, lambda: nn.Linear(20, CLASSES)),
}


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rows = []
    for name, (features, build) in MODELS.items():
        clients = [examples(client, features) for client in range(CLIENTS)]
        task = Task(model=build, data=no_partitions, device="cpu")
        alone, together = [], []
        for _ in range(TURNS):
            alone.append(seconds(one_by_one, task, jobs(task, clients)))
            together.append(seconds(train_many, task, jobs(task, clients)))
        rows.append(
            (
                name,
                f"{1e3 * min(alone):.0f}",
                f"{1e3 * min(together):.0f}",
                f"{min(alone) / min(together):.1f}",
            )
        )
    print(table(("model", "one by one, ms", "batch, ms", "times as fast"), rows))


def examples(client: int, features: int) -> Examples:
    """Random data of one client."""
    generator = torch.Generator().manual_seed(client)
    return Examples(
        features=torch.randn(EXAMPLES, features, generator=generator),
        targets=torch.randint(CLASSES, (EXAMPLES,), generator=generator),
    )


def jobs(task: Task, clients: list[Examples]) -> list[Job]:
    """One job a client, with a fresh batch order."""
    start = task.initial_params(0)
    return [
        Job(
            params=start,
            examples=own,
            training=TRAINING,
            generator=torch.Generator().manual_seed(client),
        )
        for client, own in enumerate(clients)
    ]


def no_partitions(partition: int) -> ClientData:
    """Jobs carry their examples; the task has none."""
    raise LookupError(partition)


def one_by_one(task: Task, waiting: list[Job]) -> None:
    """What a batch replaces."""
    for job in waiting:
        train(task, job.params, job.examples, job.training, generator=job.generator)


def seconds(run: Callable[..., object], *arguments: object) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
