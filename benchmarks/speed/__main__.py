"""Time of a round of federated averaging, here and elsewhere, on this machine.

    python -m benchmarks.speed [--pfl PYTHON] [--full] [--only lr] [--contender pfl] [--turns 2]

1,000 clients of 50 images (28×28), 100 a round, one epoch of SGD in batches of 10, one thread;
with and without central DP. ``--full`` adds 10,000 clients, 1,000 a round. pfl-research needs
another environment: ``python -m venv pfl; pfl/bin/pip install pfl torch``, then
``--pfl pfl/bin/python``. Ray's two contenders may use every core.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.speed import growth
from benchmarks.speed.contest import Contender, Measured, by_turns, contenders
from benchmarks.speed.workload import MODELS, Workload
from flower_ext.runs.page import table

OURS = "vectorised, in process"
NAMES = {
    "lr": "logistic regression, 7,850",
    "mlp": "perceptron, 50,890",
    "cnn": "convolutional, 147,146",
}


def main(
    pfl: Annotated[Path | None, typer.Option(help="Python with pfl installed")] = None,
    full: Annotated[bool, typer.Option("--full", help="10,000 clients as well")] = False,
    only: Annotated[list[str] | None, typer.Option(help="lr, mlp or cnn; all by default")] = None,
    contender: Annotated[
        list[str] | None, typer.Option(help="part of a name; ours and all others by default")
    ] = None,
    turns: Annotated[int, typer.Option(help="runs of each contender; the best counts")] = 2,
    rounds: Annotated[int, typer.Option(help="rounds a run, the first not counted")] = 8,
    timeout: Annotated[float, typer.Option(help="seconds a run may take")] = 900.0,
    output: Annotated[Path, typer.Option(help="where table and figures go")] = Path("runs/speed"),
) -> None:
    """Print the table; write it and the growth plot."""
    chosen = only or list(MODELS)
    for name in chosen:
        if name not in MODELS:
            raise typer.BadParameter(f"{name!r}: expected one of {', '.join(MODELS)}")
    output.mkdir(parents=True, exist_ok=True)
    every = [
        one
        for one in contenders(pfl)
        if not contender or one.name == OURS or any(part in one.name for part in contender)
    ]
    parts = [f"# Speed\n\n{machine()}\n"]
    for name in chosen:
        for private in (False, True):
            workload = Workload(model=name, private=private, rounds=rounds)
            parts.append(contest(workload, every, turns=turns, timeout=timeout))
            print(parts[-1])
    if full:
        here = [one for one in every if "Ray" not in one.name or "Flower" in one.name]
        for name in chosen:
            large = Workload(model=name, clients=10_000, cohort=1_000, rounds=3)
            parts.append(contest(large, here, turns=1, timeout=timeout))
            print(parts[-1])
    for name in chosen:
        both = Workload(model=name, rounds=rounds)
        one, two = (
            every[0].run(replace(both, workers=workers), timeout=timeout) for workers in (1, 2)
        )
        if one and two:
            ratio = one.milliseconds / two.milliseconds
            parts.append(f"{NAMES[name]} parameters, two workers: {ratio:.2f} times as fast.\n")
            print(parts[-1])
    parts.append(growth.draw(output, rounds=rounds))
    (output / "speed.md").write_text("\n".join(parts))
    print(f"{parts[-1]}\nwritten to {output}")


def contest(workload: Workload, every: Sequence[Contender], *, turns: int, timeout: float) -> str:
    """One workload's table."""
    measured = by_turns(every, workload, turns=turns, timeout=timeout)
    privacy = "central DP" if workload.private else "no privacy"
    title = (
        f"## {NAMES[workload.model]} parameters · {workload.cohort:,} of {workload.clients:,} "
        f"clients a round · {privacy}\n"
    )
    return f"{title}\n{rows(measured)}\n"


def rows(measured: Mapping[str, Measured]) -> str:
    """Milliseconds, how many times ours they are, and memory."""
    ours = measured[OURS].milliseconds if OURS in measured else float("nan")
    return table(
        ("", "ms a round", "times ours", "peak MB"),
        [
            (name, f"{m.milliseconds:,.1f}", f"{m.milliseconds / ours:.2f}", f"{m.megabytes:,.0f}")
            for name, m in measured.items()
        ],
    )


def machine() -> str:
    """Processor, versions, and its speed limit as measured now."""
    return (
        f"{platform.machine()}, {torch.get_num_threads()} cores, Python "
        f"{platform.python_version()}, torch {torch.__version__}; matrix product of 2,048² on one "
        f"thread: {gemm_peak():.0f} GFLOP/s."
    )


def gemm_peak(size: int = 2048, turns: int = 5) -> float:
    """Billions of floating-point operations a second of the largest matrix products."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(turns):
        started = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - started)
    torch.set_num_threads(threads)
    return 2 * size**3 / best / 1e9


if __name__ == "__main__":
    typer.run(main)
