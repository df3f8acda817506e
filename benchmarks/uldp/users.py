"""Time of training every user of every silo, in batches and in a loop over users.

    python -m benchmarks.uldp.users --data-folder DATA

The silos' work in one round of ULDP-AVG on MNIST: train, clip, weigh and add. It has 10,000 users
in 5 silos, a CNN of 19,988 parameters and one thread. The benchmark compares the client code with
all users, the same code with one user at a time, and a loop written by hand with a copy of the
model and an optimizer for each user. Both loops are timed on the same random users and
extrapolated. The variants take turns in one process, and the fastest time of each counts. Seconds
are of the processor, which other work on the machine changes less. It takes about two minutes.
"""

from __future__ import annotations

import argparse
import copy
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn.functional import cross_entropy

from benchmarks.uldp.app import load_silos
from flower_ext.algorithms.uldp.silo_training import SiloJob, WeightedTotal, add_users
from flower_ext.data import SiloData
from flower_ext.runs.page import table
from flower_ext.training import LocalTraining, Params, Task
from flower_ext.training.models import mnist_cnn

CLIPPING_NORM = 0.1


class Peak:
    """The peak of this process's memory while the block runs, above the memory at its start."""

    def __enter__(self) -> Peak:
        self._process = psutil.Process()
        self._before = self._most = self._process.memory_info().rss
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self._most = max(self._most, self._process.memory_info().rss)

    @property
    def megabytes(self) -> float:
        return (self._most - self._before) / 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.uldp.users",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data-folder", type=Path, help="where MNIST is")
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--silos", type=int, default=5)
    parser.add_argument("--distribution", default="uniform", choices=("uniform", "zipf"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--sample", type=int, default=500, help="trainings timed in the loops")
    parser.add_argument("--memory-limit", type=int, default=64, help="MiB of a batch of models")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    silos = load_silos(
        "mnist",
        arguments.data_folder,
        num_users=arguments.users,
        num_silos=arguments.silos,
        distribution=arguments.distribution,
    )
    task = Task(model=mnist_cnn, data=lambda silo: silos[silo], device="cpu")
    jobs = jobs_of(task, silos, arguments.users, arguments.epochs)
    everyone = [(silo, user) for silo, job in enumerate(jobs) for user in job.users]
    order = torch.randperm(len(everyone), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [everyone[at] for at in order[: arguments.sample]]
    few = only(jobs, chosen)

    def batches(given: Sequence[SiloJob]) -> list[Any]:
        limit = arguments.memory_limit * 2**20
        totals = [
            WeightedTotal(dict(job.params), CLIPPING_NORM, [1 / len(silos)] * arguments.users)
            for job in given
        ]
        fresh = [replace(job, total=total) for job, total in zip(given, totals, strict=True)]
        add_users(task, fresh, trained=lambda name: True, memory_limit=limit)
        return [total.value for total in totals]

    def one_at_a_time() -> list[Any]:
        alone = (replace(jobs[silo], users={user: jobs[silo].users[user]}) for silo, user in chosen)
        return [batches([job])[0] for job in alone]

    apart = largest_difference(batches(few), one_at_a_time(), [silo for silo, _ in chosen])
    ways: dict[str, Callable[[], object]] = {
        "batches of users": lambda: batches(jobs),
        "the same code, one user at a time": one_at_a_time,
        "by hand, one user at a time": lambda: by_hand(task, jobs, chosen),
    }
    seconds, megabytes = dict.fromkeys(ways, math.inf), dict.fromkeys(ways, 0.0)
    for _ in range(arguments.turns):
        for name, work in ways.items():
            with Peak() as peak:
                started = time.process_time()
                work()
                took = time.process_time() - started
            scale = 1.0 if name == "batches of users" else len(everyone) / len(chosen)
            seconds[name] = min(seconds[name], took * scale)
            megabytes[name] = max(megabytes[name], peak.megabytes)
    ours = seconds["batches of users"]
    rows = [
        (
            name,
            f"{seconds[name]:.1f}",
            f"{1e6 * seconds[name] / len(everyone):,.0f}",
            f"{seconds[name] / ours:.1f}",
            f"{megabytes[name]:.0f}",
        )
        for name in ways
    ]
    print(table(("", "CPU s a round", "µs a training", "times ours", "MB at most"), rows))
    records = sum(len(silo.train) for silo in silos)
    print(
        f"\n{arguments.users:,} users, {arguments.silos} silos, {arguments.distribution}: "
        f"{len(everyone):,} trainings, {records / len(everyone):.1f} records each, "
        f"{arguments.epochs} epochs. Loops timed on {len(chosen)} of them. Limit of a batch: "
        f"{arguments.memory_limit} MiB. Sums differ by at most {apart:.1e}."
    )


def jobs_of(task: Task, silos: Sequence[SiloData], users: int, epochs: int) -> list[SiloJob]:
    """Return the silos' jobs in the first round, with equal weights."""
    start = task.initial_params(1)
    made = []
    for number, silo in enumerate(silos):
        generator = torch.Generator().manual_seed(number)
        made.append(
            SiloJob(
                params=start,
                examples=silo.train,
                training=LocalTraining(epochs=epochs, batch_size=64, learning_rate=0.05),
                generator=generator,
                users=silo.by_user(),
                seeds=torch.randint(2**63 - 1, (users,), generator=generator).tolist(),
                total=WeightedTotal(start, CLIPPING_NORM, [1 / len(silos)] * users),
            )
        )
    return made


def only(jobs: Sequence[SiloJob], chosen: Sequence[tuple[int, int]]) -> list[SiloJob]:
    """Return the same jobs with only the chosen users."""
    kept: list[list[int]] = [[] for _ in jobs]
    for silo, user in chosen:
        kept[silo].append(user)
    return [
        replace(job, users={user: job.users[user] for user in own})
        for job, own in zip(jobs, kept, strict=True)
    ]


def by_hand(task: Task, jobs: Sequence[SiloJob], chosen: Sequence[tuple[int, int]]) -> list[Params]:
    """Train with a copy of the model and an optimizer for each user."""
    model = task.model()
    model.load_state_dict(jobs[0].params)
    start = [p.detach().clone() for p in model.parameters()]
    sums = [[torch.zeros_like(p, dtype=torch.float64) for p in start] for _ in jobs]
    for silo, user in chosen:
        job, own = jobs[silo], copy.deepcopy(model)
        data, training = job.users[user], job.training
        optimizer = torch.optim.SGD(own.parameters(), lr=training.learning_rate)
        for _ in range(training.epochs):
            for rows in torch.split(torch.randperm(len(data)), training.batch_size):
                optimizer.zero_grad()
                loss = cross_entropy(own(data.features[rows]), data.targets[rows])
                torch.autograd.backward(loss)
                optimizer.step()
        with torch.no_grad():
            update = [p - s for p, s in zip(own.parameters(), start, strict=True)]
            norm = torch.stack([part.norm() for part in update]).norm()
            factor = min(1.0, CLIPPING_NORM / float(norm)) / len(jobs)
            for total, part in zip(sums[silo], update, strict=True):
                total += factor * part
    return [dict(zip(jobs[0].params, total, strict=True)) for total in sums]


def largest_difference(
    together: Sequence[Any],
    alone: Sequence[Any],
    silos: Sequence[int],
) -> float:
    """Return the largest difference of a coordinate between sums of batches and of single users."""
    worst = 0.0
    for silo, total in enumerate(together):
        for name, value in total.value.items():
            parts = [one.value[name] for one, at in zip(alone, silos, strict=True) if at == silo]
            worst = max(worst, float((value - torch.stack(parts).sum(0)).abs().max()))
    return worst


if __name__ == "__main__":
    main()
