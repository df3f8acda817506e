"""Growth of a round's cost with registered clients, cohort and parameters."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.speed.contest import Contender, Measured, contenders
from benchmarks.speed.workload import Workload
from flower_ext.runs.page import table

CLIENTS = (1_000, 3_000, 10_000)
COHORTS = (100, 300, 1_000)
HIDDEN = (10, 32, 100, 320)


def draw(folder: Path, *, rounds: int) -> str:
    """Measure, draw ``growth.svg`` with its numbers beside it, and return a table."""
    ours = contenders(None)[0]
    axes_of = {
        "registered clients": [Workload(clients=n, rounds=rounds) for n in CLIENTS],
        "clients a round": [Workload(clients=10_000, cohort=n, rounds=rounds) for n in COHORTS],
        "parameters": [Workload(model=f"wide-{width}", rounds=rounds) for width in HIDDEN],
    }
    lines = {label: _measured(ours, label, sweep) for label, sweep in axes_of.items()}
    figure, axes = plt.subplots(1, len(lines), figsize=(4 * len(lines), 3.2), sharey=False)
    for axis, (label, line) in zip(axes, lines.items(), strict=True):
        axis.plot([size for size, _ in line], [m.milliseconds for _, m in line], marker="o")
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel="ms a round")
    figure.tight_layout()
    figure.savefig(folder / "growth.svg")
    plt.close(figure)
    rows = [
        (label, f"{size:,}", f"{m.milliseconds:.1f}", f"{m.megabytes:.0f}")
        for label, line in lines.items()
        for size, m in line
    ]
    header = ("what grows", "to", "ms a round", "peak MB")
    with (folder / "growth.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return f"## Growth\n\n{table(header, rows)}\n"


def _measured(ours: Contender, label: str, sweep: list[Workload]) -> list[tuple[int, Measured]]:
    line = []
    for workload in sweep:
        size = {
            "registered clients": workload.clients,
            "clients a round": workload.cohort,
            "parameters": sum(p.numel() for p in workload.build().parameters()),
        }[label]
        if (found := ours.run(workload, timeout=900)) is not None:
            line.append((size, found))
    return line
