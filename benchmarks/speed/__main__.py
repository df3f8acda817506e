"""A round of federated averaging: milliseconds and memory, beside pfl-research and Flower.

    python -m benchmarks speed [--pfl PYTHON] [--full] [--only lr] [--contender pfl] [--turns 2]

A round draws 100 of 1,000 clients. Each client holds 50 images (28×28) and trains for one epoch of
SGD in batches of 10 on one thread. All contenders run with and without central DP. ``--full`` adds
rounds of 1,000 of 10,000 clients. Two workers and the contenders on Ray may use every core.
``--device cuda`` trains on a GPU, where the examples are beforehand.

pfl-research needs another environment: run ``python -m venv pfl; pfl/bin/pip install pfl torch``,
then name its Python by ``--pfl pfl/bin/python``.

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

from benchmarks.speed.contest import HERE, Contender, by_turns, contenders
from benchmarks.speed.growth import growth
from benchmarks.speed.turns import Measured
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
    turns: Annotated[int, typer.Option(help="runs of each contender")] = 2,
    rounds: Annotated[int, typer.Option(help="rounds a run, the first not counted")] = 8,
    timeout: Annotated[float, typer.Option(help="seconds a run may take")] = 900.0,
    output: Annotated[Path, typer.Option(help="where tables go")] = Path("runs/speed"),
) -> None:
    """Print the tables, and write them."""
    models = only or [*NAMES][:3]
    for name in models:
        if name not in MODELS:
            raise typer.BadParameter(f"{name!r}: expected one of {', '.join(MODELS)}")
    output.mkdir(parents=True, exist_ok=True)
    chosen_contenders = [
        candidate
        for candidate in contenders(pfl)
        if not contender
        or candidate.name == OURS
        or any(part in candidate.name for part in contender)
    ]
    parts = [
        f"{machine()} The smallest time and the largest memory of {turns} turns of {rounds} rounds."
    ]

    def write(part: str) -> None:
        parts.append(part)
        (output / "speed.md").write_text("\n\n".join(parts) + "\n")
        print(f"{part}\n", flush=True)

    print(f"{parts[0]}\n", flush=True)
    small: Contests = {}
    for name in models:
        workloads = [
            Workload(model=name, private=dp, rounds=rounds, device=device) for dp in (False, True)
        ]
        small[name] = [
            by_turns(chosen_contenders, workload, turns=turns, timeout=timeout)
            for workload in workloads
        ]
    write(f"{title(100, 1_000)}, without and with central DP:\n\n{times(chosen_contenders, small)}")
    write(f"Peak memory in MB, without and with central DP:\n\n{memory(chosen_contenders, small)}")
    if full:
        # Flower's FedAvg alone stands for Ray here.
        large_contenders = [
            candidate
            for candidate in chosen_contenders
            if "Ray" not in candidate.name or "Flower" in candidate.name
        ]
        large: Contests = {}
        for name in models:
            workload = Workload(model=name, clients=10_000, cohort=1_000, rounds=8, device=device)
            large[name] = [by_turns(large_contenders, workload, turns=1, timeout=timeout)]
        write(f"{title(1_000, 10_000)}, without privacy:\n\n{times(large_contenders, large)}")
        write(f"Peak memory in MB:\n\n{memory(large_contenders, large)}")
    if device == "cpu":
        write(growth(rounds))
    print(f"written to {output}")


def title(cohort: int, clients: int) -> str:
    """Name a table by the size of its rounds."""
    return f"{cohort:,} of {clients:,} clients a round; milliseconds a round (times ours)"


def times(chosen: Sequence[Contender], contests: Contests) -> str:
    """Return a table of milliseconds a round, and how many times ours they are."""

    def cell(measured: Measured, ours: Measured | None) -> str:
        took = f"{measured.milliseconds:,.{1 if measured.milliseconds < 1_000 else 0}f}"
        return f"{took} ({measured.milliseconds / ours.milliseconds:.2f})" if ours else took

    return _table(chosen, contests, cell)


def memory(chosen: Sequence[Contender], contests: Contests) -> str:
    """Return a table of megabytes at the peak."""
    return _table(chosen, contests, lambda measured, ours: f"{measured.megabytes:,.0f}")


def _table(chosen: Sequence[Contender], contests: Contests, cell: Callable[..., str]) -> str:
    """Return a row for each contender, with a cell for each model and privacy."""

    def cells(name: str, contests: Sequence[Mapping[str, Measured]]) -> str:
        return " / ".join(
            cell(measured[name], measured.get(OURS)) if name in measured else "–"
            for measured in contests
        )

    rows = [
        (contender.name, *(cells(contender.name, contest) for contest in contests.values()))
        for contender in chosen
    ]
    return table((processor(), *(NAMES[name] for name in contests)), rows)


def processor() -> str:
    """Return the processor's name from ``/proc/cpuinfo``, or a less exact one from Python."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def machine() -> str:
    """Describe the measured versions, the machine, and its other work."""
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
