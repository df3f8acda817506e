"""A round of federated averaging: milliseconds and memory, beside pfl-research and Flower.

    python -m benchmarks speed [--pfl PYTHON] [--full] [--only lr] [--contender pfl] [--turns 2]

1,000 clients of 50 images (28×28), 100 a round, one epoch of SGD in batches of 10, one thread;
with and without central DP. ``--full`` adds 10,000 clients, 1,000 a round. pfl-research needs
another environment: ``python -m venv pfl; pfl/bin/pip install pfl torch``, then
``--pfl pfl/bin/python``. Two workers and Ray's contenders may use every core. ``--device cuda``
trains on a GPU, which already has the examples.

The tables are those of ``docs/speed.md``, for one processor.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer

from benchmarks.speed.contest import HERE, Contender, Measured, by_turns, contenders
from benchmarks.speed.growth import growth
from benchmarks.speed.workload import MODELS, Workload
from flower_ext.runs.page import table

OURS = "vectorised, in process"
NAMES = {
    "lr": "logistic regression, 7,850",
    "mlp": "perceptron, 50,890",
    "cnn": "convolutional, 147,146",
    "resnet": "ResNet-18, 11,173,962",
}
Contests = dict[str, list[dict[str, Measured]]]
"""For each model, the contenders' measurements without and with central DP."""


def main(
    pfl: Annotated[Path | None, typer.Option(help="Python with pfl installed")] = None,
    full: Annotated[bool, typer.Option("--full", help="10,000 clients as well")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="lr, mlp, cnn or resnet; the first three by default")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    contender: Annotated[
        list[str] | None, typer.Option(help="part of a name; ours and all others by default")
    ] = None,
    turns: Annotated[int, typer.Option(help="runs of each contender; the best counts")] = 2,
    rounds: Annotated[int, typer.Option(help="rounds a run, the first not counted")] = 8,
    timeout: Annotated[float, typer.Option(help="seconds a run may take")] = 900.0,
    output: Annotated[Path, typer.Option(help="where tables go")] = Path("runs/speed"),
) -> None:
    """Print the tables, and write them."""
    chosen = only or [*NAMES][:3]
    for name in chosen:
        if name not in MODELS:
            raise typer.BadParameter(f"{name!r}: expected one of {', '.join(MODELS)}")
    output.mkdir(parents=True, exist_ok=True)
    every = [
        one
        for one in contenders(pfl)
        if not contender or one.name == OURS or any(part in one.name for part in contender)
    ]
    parts = [f"{machine()} The better of {turns} turns of {rounds} rounds."]

    def write(part: str) -> None:
        parts.append(part)
        (output / "speed.md").write_text("\n\n".join(parts) + "\n")
        print(f"{part}\n", flush=True)

    print(f"{parts[0]}\n", flush=True)
    small: Contests = {}
    for name in chosen:
        workloads = [
            Workload(model=name, private=dp, rounds=rounds, device=device) for dp in (False, True)
        ]
        small[name] = [by_turns(every, one, turns=turns, timeout=timeout) for one in workloads]
    write(f"{title(100, 1_000)}, without and with central DP:\n\n{times(every, small)}")
    write(f"Peak memory in MB, without and with central DP:\n\n{memory(every, small)}")
    if full:
        here = [one for one in every if "Ray" not in one.name or "Flower" in one.name]
        large: Contests = {}
        for name in chosen:
            workload = Workload(model=name, clients=10_000, cohort=1_000, rounds=8, device=device)
            large[name] = [by_turns(here, workload, turns=1, timeout=timeout)]
        write(f"{title(1_000, 10_000)}, without privacy:\n\n{times(here, large)}")
        write(f"Peak memory in MB:\n\n{memory(here, large)}")
    if device == "cpu":
        write(growth(rounds))
    print(f"written to {output}")


def title(cohort: int, clients: int) -> str:
    """Name a table by the size of its rounds."""
    return f"{cohort:,} of {clients:,} clients a round; milliseconds a round (times ours)"


def times(every: Sequence[Contender], contests: Contests) -> str:
    """Return a table of milliseconds a round, and how many times ours they are."""

    def cell(one: Measured, ours: Measured | None) -> str:
        took = f"{one.milliseconds:,.{1 if one.milliseconds < 1_000 else 0}f}"
        return f"{took} ({one.milliseconds / ours.milliseconds:.2f})" if ours else took

    return _rows(every, contests, cell)


def memory(every: Sequence[Contender], contests: Contests) -> str:
    """Return a table of megabytes at the peak."""
    return _rows(every, contests, lambda one, ours: f"{one.megabytes:,.0f}")


def _rows(every: Sequence[Contender], contests: Contests, cell: Callable[..., str]) -> str:
    def cells(name: str, contests: Sequence[Mapping[str, Measured]]) -> str:
        return " / ".join(
            cell(measured[name], measured.get(OURS)) if name in measured else "–"
            for measured in contests
        )

    rows = [
        (one.name, *(cells(one.name, contest) for contest in contests.values())) for one in every
    ]
    return table((processor(), *(NAMES[name] for name in contests)), rows)


def processor() -> str:
    """Return the processor's name, as its system tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def machine() -> str:
    """Describe what is measured, and where: versions, cores, and other work."""
    others = psutil.cpu_percent(interval=2.0)
    return (
        f"flower-ext {version('flower-ext')}{_commit()} on {processor()}, {psutil.cpu_count()} "
        f"cores of which other work took {others:.0f} % before the run, Python "
        f"{platform.python_version()}, torch {torch.__version__}."
    )


def _commit() -> str:
    """Return the commit of the measured code; empty outside of a repository."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f" ({described.stdout.strip()})"


if __name__ == "__main__":
    typer.run(main)
