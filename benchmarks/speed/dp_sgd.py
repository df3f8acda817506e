"""A step of DP-SGD: time and memory, beside a plain step and Opacus.

    python -m benchmarks dp-sgd [PARTS OF NAMES] [--device cuda]

A batch has 256 images or 64 texts. *Opacus* is its `GradSampleModule`, whose hooks write down the
gradient of every record. *Ghost* is its ghost clipping, with two backward passes.

Each contender takes steps for five seconds a turn, in its own process and on one thread; the
fastest of all its steps counts. Memory is by how much the process grew meanwhile, or the peak of
the accelerator's memory; the largest of all turns counts.
"""

import json
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.command_line import command_parser
from benchmarks.speed.texts import Adapted, Causal, Transformer, padded_texts, texts, tokens
from benchmarks.speed.trainings import no_partitions
from benchmarks.speed.turns import Measured, best_of
from benchmarks.speed.workload import (
    CLASSES,
    convolutional,
    logistic_regression,
    perceptron,
    resnet,
)
from flower_ext.data import trees
from flower_ext.runs.page import table
from flower_ext.training import ClippedGradient, Task
from flower_ext.training.models import build
from flower_ext.training.models.calls import call_model

BATCH, TEXTS = 256, 64
"""Images and texts of a batch."""
SECONDS, ACCELERATOR_SECONDS = 5.0, 1.0
"""Seconds of a turn."""
TURNS, CLIPPING_NORM = 3, 1.0
Features = Tensor | tuple[Tensor, ...]


def images(*shape: int) -> Tensor:
    """Return a batch of random images."""
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(0))


GREY, COLOUR = partial(images, 1, 28, 28), partial(images, 3, 32, 32)
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Features]]] = {
    "logistic regression, 7,850": (logistic_regression, GREY),
    "perceptron, 50,890": (perceptron, GREY),
    "convolutional, 19,988": (partial(build, "mnist-cnn"), GREY),
    "convolutional, 147,146": (convolutional, GREY),
    "convolutional, 667,402": (partial(build, "cifar10-cnn"), COLOUR),
    "transformer, 232,714": (Transformer, partial(texts, TEXTS)),
    "BERT with LoRA, 4,746 of them": (Adapted, partial(padded_texts, TEXTS)),
    "GPT-NeoX, 133,248": (Causal, partial(tokens, TEXTS)),
    "GPT-NeoX with LoRA, 4,608 of them": (partial(Causal, rank=4), partial(tokens, TEXTS)),
}
LARGE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Features]]] = {
    "ResNet-18, 11,173,962": (resnet, COLOUR),
    "GPT-NeoX of 0.3 billion with LoRA": (
        partial(Causal, rank=4, width=1024, layers=24, heads=16),
        partial(tokens, TEXTS),
    ),
}
"""Models for an accelerator only."""
CONTENDERS = ("plain", "ours", "opacus", "ghost")


def main() -> None:
    """Print the table, of models with a part of a name."""
    parser = command_parser(__doc__)
    parser.add_argument("parts", nargs="*", default=[""], help="parts of models' names")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--contender", choices=CONTENDERS, help="run it alone; print its numbers")
    parser.add_argument("--turns", type=int, default=TURNS, help="runs of each contender")
    arguments = parser.parse_args()
    parts, device = arguments.parts, arguments.device
    if arguments.contender:
        (name,) = parts
        print(
            json.dumps(compete(arguments.contender, *(MODELS | LARGE)[name], torch.device(device)))
        )
        return
    rows = []
    models = MODELS if device == "cpu" else MODELS | LARGE
    for model in (name for name in models if any(part in name for part in parts)):
        ways = {name: partial(one_run, name, model, device) for name in CONTENDERS}
        best = dict.fromkeys(CONTENDERS, Measured(math.inf, 0.0)) | best_of(arguments.turns, ways)
        ours, memory = best["ours"].milliseconds, best["ours"].megabytes
        print(model, best, file=sys.stderr, flush=True)
        others = [best[name] for name in CONTENDERS[2:]]
        rows.append(
            (
                model,
                *(f"{measured.milliseconds:.1f}" for measured in best.values()),
                f"{ours / best['plain'].milliseconds:.2f}",
                *(f"{measured.milliseconds / ours:.2f}" for measured in others),
                *(_ratio(memory, measured.megabytes) for measured in others),
            )
        )
    header = ("model", "plain, ms", "ours, ms", "Opacus, ms", "ghost, ms")
    ratios = ("ours / plain", "Opacus / ours", "ghost / ours")
    print(table((*header, *ratios, "memory, ours / Opacus", "memory, ours / ghost"), rows))


def _ratio(ours: float, theirs: float) -> str:
    """Return ``ours / theirs`` as text; a dash for a contender that failed or grew below 1 MB."""
    return f"{ours / theirs:.2f}" if min(ours, theirs) >= 1 else "–"


def one_run(contender: str, model: str, device: str) -> Measured | None:
    """Measure a contender's step; print why and return None if the contender fails.

    On a CPU, the contender runs in its own process.
    """
    if device != "cpu":  # an accelerator's allocator counts only what is in use
        try:
            seconds, megabytes = compete(contender, *(MODELS | LARGE)[model], torch.device(device))
        except Exception as error:
            print(f"{contender}, {model}: {error}"[:300], file=sys.stderr)
            return None
        return Measured(1e3 * seconds, megabytes)
    module = (sys.executable, "-m", "benchmarks.speed.dp_sgd", model)
    options = ("--contender", contender)
    done = subprocess.run([*module, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{contender}, {model}: {done.stderr[-300:]}", file=sys.stderr)
        return None
    seconds, megabytes = json.loads(done.stdout.splitlines()[-1])
    return Measured(1e3 * seconds, megabytes)


def compete(
    contender: str,
    build: Callable[[], nn.Module],
    features: Callable[[], Features],
    device: torch.device,
) -> tuple[float, float]:
    """Take steps; return the seconds of the fastest, and by how many megabytes memory grew."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    x, draw = trees.to(features(), device), torch.Generator().manual_seed(0)
    y = torch.randint(CLASSES, (trees.length(x),), generator=draw).to(device)
    if getattr(build, "func", build) is Causal:
        y = trees.first(x)[:, 1:]
    makers: dict[str, Callable[..., Callable[[], object]]] = {
        "plain": plain,
        "ours": ours,
        "opacus": opacus,
        "ghost": ghost,
    }
    few = torch.arange(4, device=device)
    make = partial(makers[contender], lambda: build().to(device))
    make(trees.rows(x, few), y[few])()  # a first step imports modules
    step = make(x, y)
    forget_peak(device)
    before = peak_megabytes(device)
    step()  # the first step compiles
    best = float("inf")
    end = time.perf_counter() + (SECONDS if device.type == "cpu" else ACCELERATOR_SECONDS)
    while (started := time.perf_counter()) < end:
        step()
        if device.type != "cpu":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best, peak_megabytes(device) - before


class TextLoss(nn.CrossEntropyLoss):
    """Cross-entropy whose unreduced values are one per text: Opacus expects one per example."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = super().forward(outputs, targets)
        return losses.flatten(1).mean(dim=1) if losses.dim() > 1 else losses


def forget_peak(device: torch.device) -> None:
    """Let `peak_megabytes` leave out what imports have taken so far."""
    if device.type != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    Path("/proc/self/clear_refs").write_text("5")


def peak_megabytes(device: torch.device) -> float:
    """Return the peak of memory of an accelerator, or of this process on Linux."""
    if device.type != "cpu":
        return torch.cuda.max_memory_allocated(device) / 1e6
    lines = Path("/proc/self/status").read_text().splitlines()
    kibibytes = int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
    return kibibytes * 1024 / 1e6


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]


def plain(build: Callable[[], nn.Module], x: Features, y: Tensor) -> Callable[[], object]:
    """Return a step that computes the gradient of the mean loss."""
    model = build()
    parameters = trained(model)
    return lambda: torch.autograd.grad(
        nn.functional.cross_entropy(call_model(model, x), y), parameters
    )


def ours(build: Callable[[], nn.Module], x: Features, y: Tensor) -> Callable[[], object]:
    """Return a step of `ClippedGradient`."""
    task = Task(model=build, data=no_partitions, device=str(y.device))
    params = {name: value.to(y.device) for name, value in task.initial_params(0).items()}
    clipped = ClippedGradient(task, list(params), clipping_norm=CLIPPING_NORM, batch_size=len(y))
    return lambda: clipped(params, x, y)


def opacus(build: Callable[[], nn.Module], x: Features, y: Tensor) -> Callable[[], object]:
    """Return a step by hooks; norms, clipping and sum are as in Opacus' optimizer."""
    from opacus import GradSampleModule

    model = GradSampleModule(build())
    parameters: list[Any] = trained(model)

    def step() -> list[Tensor]:
        torch.autograd.backward(nn.functional.cross_entropy(call_model(model, x), y))
        samples = [p.grad_sample for p in parameters]
        norms = torch.stack([g.flatten(1).norm(2, dim=-1) for g in samples], dim=1).norm(2, dim=1)
        factors = (CLIPPING_NORM / (norms + 1e-6)).clamp(max=1.0)
        summed = [torch.einsum("i,i...", factors, g) for g in samples]
        for p in parameters:
            p.grad_sample = p.grad = None
        return summed

    return step


def ghost(build: Callable[[], nn.Module], x: Features, y: Tensor) -> Callable[[], object]:
    """Return a step of two backward passes: one for norms, one for the sum."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model = GradSampleModuleFastGradientClipping(
        build(), max_grad_norm=CLIPPING_NORM, use_ghost_clipping=True
    )
    steps = DPOptimizerFastGradientClipping(
        torch.optim.SGD(trained(model), lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=CLIPPING_NORM,
        expected_batch_size=len(y),
    )
    loss = DPLossFastGradientClipping(model, steps, TextLoss(), "mean")

    def step() -> None:
        steps.zero_grad()
        loss(call_model(model, x), y).backward()

    return step


if __name__ == "__main__":
    main()
