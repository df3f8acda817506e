"""One step of DP-SGD at batch 256: gradients clipped record by record, against a plain step.

    python -m benchmarks.speed.dp_sgd

Opacus means its `GradSampleModule`, whose hooks write down every record's gradient. Each contender
is a process of its own on one thread, for five seconds a turn; the fastest of all steps counts.
Memory is what the process grew by while it took them.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.speed.workload import CLASSES, convolutional, logistic_regression, perceptron
from flower_ext.data import ClientData
from flower_ext.runs.report import table
from flower_ext.training import ClippedGradient, Task
from flower_ext.training.models import cifar10_cnn, mnist_cnn

BATCH, SECONDS, TURNS, CLIPPING_NORM = 256, 5.0, 3, 1.0
GREY, COLOUR = (1, 28, 28), (3, 32, 32)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "logistic regression, 7,850": (logistic_regression, GREY),
    "perceptron, 50,890": (perceptron, GREY),
    "convolutional, 19,988": (mnist_cnn, GREY),
    "convolutional, 147,146": (convolutional, GREY),
    "convolutional, 667,402": (cifar10_cnn, COLOUR),
}
CONTENDERS = ("plain", "ours", "opacus")


def main() -> None:
    """Print the table; with two arguments be one contender on one model."""
    if len(sys.argv) == 3:
        compete(sys.argv[1], *MODELS[sys.argv[2]])
        return
    rows = []
    for model in MODELS:
        best = {name: (float("inf"), 0.0) for name in CONTENDERS}
        for _ in range(TURNS):
            for name in CONTENDERS:
                seconds, megabytes = one_run(name, model)
                best[name] = (min(best[name][0], seconds), max(best[name][1], megabytes))
        (plain, _), (ours, own), (opacus, theirs) = (best[name] for name in CONTENDERS)
        rows.append(
            (
                model,
                *(f"{1e3 * best[name][0]:.1f}" for name in CONTENDERS),
                f"{ours / plain:.2f}",
                f"{opacus / ours:.2f}",
                f"{own / max(theirs, 1.0):.2f}",
            )
        )
    header = ("model", "plain, ms", "ours, ms", "Opacus, ms")
    print(table((*header, "ours / plain", "Opacus / ours", "memory, ours / Opacus"), rows))


def one_run(contender: str, model: str) -> tuple[float, float]:
    """Seconds a step and megabytes, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.speed.dp_sgd", contender, model]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, megabytes = json.loads(done.stdout.splitlines()[-1])
    return seconds, megabytes


def compete(contender: str, build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Take steps; print the fastest, and by how much memory grew."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, *shape, generator=generator)
    y = torch.randint(CLASSES, (BATCH,), generator=generator)
    step = {"plain": plain, "ours": ours, "opacus": opacus}[contender](build, x, y)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    best = float("inf")
    end = time.perf_counter() + SECONDS
    while (started := time.perf_counter()) < end:
        step()
        best = min(best, time.perf_counter() - started)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
    print(json.dumps([best, grown]))


def plain(build: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor) -> Callable[[], object]:
    """The gradient of the mean loss."""
    model = build()
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(nn.functional.cross_entropy(model(x), y), parameters)


def ours(build: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor) -> Callable[[], object]:
    """`ClippedGradient`."""

    def no_partitions(partition: int) -> ClientData:
        raise LookupError(partition)

    task = Task(model=build, data=no_partitions, device="cpu")
    params = task.initial_params(0)
    clipped = ClippedGradient(task, list(params), clipping_norm=CLIPPING_NORM)
    return lambda: clipped(params, x, y)


def opacus(
    build: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor
) -> Callable[[], object]:
    """Gradients of single records by hooks; norms, clipping and sum as its optimiser does."""
    from opacus import GradSampleModule

    model = GradSampleModule(build())
    parameters = list(model.parameters())

    def step() -> list[torch.Tensor]:
        torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
        own = [p.grad_sample for p in parameters]
        norms = torch.stack([g.flatten(1).norm(2, dim=-1) for g in own], dim=1).norm(2, dim=1)
        factors = (CLIPPING_NORM / (norms + 1e-6)).clamp(max=1.0)
        summed = [torch.einsum("i,i...", factors, g) for g in own]
        for p in parameters:
            p.grad_sample = p.grad = None
        return summed

    return step


if __name__ == "__main__":
    main()
