"""Local trainings: a batch of them, one by one, and a loop of plain PyTorch written by hand.

    python -m benchmarks trainings [PART OF A NAME] [--device cuda]

* *Clients* hold 50 examples each and train for one epoch of SGD in batches of 10.
* *Tiny* trainings stand for people inside a silo: they hold one to three examples and train for
  two epochs.
* *People, norms and dropout* stand for fraud detection: each holds 30 to 100 rows of a table and
  trains in batches of 32.
* *Batch-invariant* means that no bit of a training depends on the others in its batch. Guarantees
  that bound each update need this.

The loop written by hand keeps one model and copies each training's parameters into it.

The ways run in turn, and the fastest of three runs counts. On a CPU, training uses one thread and
processor time is measured, because other work disturbs it less. On an accelerator, wall time is
measured over two runs, the loop by hand has all its data there before the clock starts, and there
are 1,000 clients, or 128 clients of ResNet-18 with GroupNorm and images of 3×32×32.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from benchmarks.command_line import command_parser
from benchmarks.speed.turns import Measured, best_of
from benchmarks.speed.workload import (
    ACCELERATOR_MEMORY,
    CLASSES,
    convolutional,
    logistic_regression,
    perceptron,
    resnet,
    train_in_place,
)
from flower_ext.data import ClientData, Examples
from flower_ext.runs.page import table
from flower_ext.training import Job, LocalTraining, Task, train, train_each
from flower_ext.training.batched.form import MEMORY_LIMIT
from flower_ext.training.models import build

TURNS, ACCELERATOR_TURNS = 3, 2
"""Runs of each way; the fastest one counts."""
TIMED, ACCELERATOR_TIMED = 100, 20
"""Trainings that are timed one by one; few are enough, because each takes as long as any other."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A number of trainings of one model."""

    name: str
    build: Callable[[], nn.Module]
    trainings: int
    examples: tuple[int, ...]
    epochs: int
    shape: tuple[int, ...] = (1, 28, 28)
    batch_size: int = 10
    batch_invariant: bool = False

    def jobs(self, task: Task, limit: int) -> list[Job]:
        """Return up to ``limit`` jobs with random examples, each with a fresh batch order."""
        classes = self.build()(torch.zeros(2, *self.shape)).shape[1]
        start = task.initial_params(0)
        training = LocalTraining(epochs=self.epochs, batch_size=self.batch_size, learning_rate=0.05)
        jobs = []
        for client in range(min(limit, self.trainings)):
            draw = torch.Generator().manual_seed(client)
            count = self.examples[client % len(self.examples)]
            examples = Examples(
                features=torch.randn(count, *self.shape, generator=draw),
                targets=torch.randint(classes, (count,), generator=draw),
            )
            job = Job(params=start, examples=examples, training=training, generator=draw)
            jobs.append(job)
        return jobs


def small_perceptron() -> nn.Module:
    """Return a perceptron of 19,885 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 25), nn.ReLU(), nn.Linear(25, CLASSES))


def fraud() -> nn.Module:
    """Return a model of 6,530 parameters: 30 features, two blocks of 64 neurons, two classes."""

    def block(inputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, 64), nn.GroupNorm(8, 64), nn.ReLU(), nn.Dropout(0.2)]

    return nn.Sequential(*block(30), *block(64), nn.Linear(64, 2))


FRAUD = Case(
    name="1,000 people, norms and dropout, 6,530",
    build=fraud,
    trainings=1_000,
    examples=tuple(range(30, 101)),
    epochs=2,
    shape=(30,),
    batch_size=32,
)
CASES = [
    Case(name="clients, " + name, build=build, trainings=100, examples=(50,), epochs=1)
    for name, build in (
        ("logistic regression, 7,850", logistic_regression),
        ("perceptron, 50,890", perceptron),
        ("convolutional, 147,146", convolutional),
    )
]
CASES += [
    Case(name="tiny, " + name, build=build, trainings=10_000, examples=(1, 2, 3), epochs=2)
    for name, build in (
        ("perceptron, 19,885", small_perceptron),
        ("convolutional, 19,988", partial(build, "mnist-cnn")),
    )
]
CASES += [FRAUD, replace(FRAUD, name=f"{FRAUD.name}, batch-invariant", batch_invariant=True)]
ACCELERATOR_CASES = [
    replace(case, trainings=1_000, name=f"{case.name}{suffix}", batch_invariant=bool(suffix))
    for case in CASES[1:3]
    for suffix in ("", ", batch-invariant")
]
ACCELERATOR_CASES += [
    Case(
        name=f"clients, ResNet-18, 11,173,962{suffix}",
        build=resnet,
        trainings=128,
        examples=(50,),
        epochs=1,
        shape=(3, 32, 32),
        batch_invariant=bool(suffix),
    )
    for suffix in ("", ", batch-invariant")
]


def main() -> None:
    """Print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("part", nargs="?", default="", help="part of a name")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    part, device = arguments.part, arguments.device
    torch.set_num_threads(1)
    columns = ("trainings, parameters", "by hand, µs", "one by one, µs", "together, µs")
    cases = CASES if device == "cpu" else ACCELERATOR_CASES
    rows = []
    for case in (case for case in cases if part in case.name):
        rows.append(row(case, torch.device(device)))
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    print(table((*columns, "one by one / together", "by hand / together"), rows))


def row(case: Case, device: torch.device) -> tuple[str, ...]:
    """Return the microseconds of a training, each way, and their ratios."""
    task = Task(model=case.build, data=no_partitions, device=str(device))
    model = case.build().to(device)
    on_cpu = device.type == "cpu"
    timed = TIMED if on_cpu else ACCELERATOR_TIMED

    def measured(jobs: list[Job], way: Callable[[list[Job]], object]) -> Measured:
        """Measure the milliseconds of one job."""
        started = seconds_on(device)
        way(jobs)
        return Measured(1e3 * (seconds_on(device) - started) / len(jobs))

    def manually() -> Measured:
        jobs = case.jobs(task, timed)
        jobs = [replace(job, examples=job.examples.to(device)) for job in jobs]
        return measured(jobs, lambda jobs: by_hand(model, jobs))

    def one_by_one() -> Measured:
        return measured(case.jobs(task, timed), lambda jobs: [train(task, job) for job in jobs])

    def together() -> Measured:
        jobs = case.jobs(task, case.trainings)
        return measured(jobs, lambda jobs: in_batches(task, jobs, case.batch_invariant))

    turns = TURNS if on_cpu else ACCELERATOR_TURNS
    ways = {"by hand": manually, "one by one": one_by_one, "in batches": together}
    best = {name: one.milliseconds for name, one in best_of(turns, ways).items()}
    ratios = (best[name] / best["in batches"] for name in ("one by one", "by hand"))
    times = (f"{1e3 * milliseconds:,.0f}" for milliseconds in best.values())
    return case.name, *times, *(f"{ratio:.1f}" for ratio in ratios)


def seconds_on(device: torch.device) -> float:
    """Return this process's CPU seconds, or the wall time after all work of an accelerator."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def no_partitions(partition: int) -> ClientData:
    """Refuse every partition: jobs carry their examples, so the task has none."""
    raise LookupError(partition)


def by_hand(model: nn.Module, jobs: list[Job]) -> None:
    """Train one model in place, from each job's parameters."""
    for job in jobs:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(job.params[name])
        training, data = job.training, job.examples
        for _ in range(training.epochs):
            train_in_place(
                model,
                data.features,
                data.targets,
                batch_size=training.batch_size,
                learning_rate=training.learning_rate,
            )


def in_batches(task: Task, jobs: list[Job], batch_invariant: bool) -> None:
    """Train all jobs, and drop each model at once, as a caller does that adds the models up."""
    limit = MEMORY_LIMIT if task.torch_device().type == "cpu" else ACCELERATOR_MEMORY
    for _ in train_each(task, jobs, batch_invariant=batch_invariant, memory_limit=limit):
        pass


if __name__ == "__main__":
    main()
