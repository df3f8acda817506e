"""Measure the cost of a secure sum, here and in Flower's legacy SecAgg+, on this machine.

    python -m benchmarks.secure_sum

Draw ``secure-sums.svg``, write its numbers next to it, and print a table. Each point is one round
in its own process, with every tenth client lost after sharing. Times are CPU seconds; a client's
time excludes its training. The benchmark takes half an hour. ``--most 1000000`` skips the largest
vectors.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import numpy as np
import typer

from flower_ext.runs.page import table

COHORTS, LENGTHS = (10, 30, 100, 300, 1_000), (10_000, 100_000, 667_402, 10_000_000)
HEAD = (
    "clients",
    "parameters",
    "client, s",
    "of it noise",
    "SecAgg+",
    "times",
    "server, s",
    "SecAgg+",
    "times",
    "bytes a number",
    "SecAgg+",
    "other bytes",
    "peak MB",
)


def measure(members: int, length: int) -> dict[str, Any]:
    """Run both protocols in this process."""
    from benchmarks.secure_sum import ours

    here = ours.round_cost(members, length)
    from benchmarks.secure_sum import (
        legacy,
    )  # after our run, whose peak of memory excludes its imports

    logging.getLogger("flwr").setLevel(logging.ERROR)

    parameters = ours.mechanism_of(members).sum_parameters
    there = legacy.round_cost(members, parameters.neighbors, parameters.threshold, length)
    return {"members": members, "length": length, "ours": asdict(here), "legacy": asdict(there)}


def row_of(point: dict[str, Any]) -> list[str]:
    """Return a point as a row of the table; computed times are marked by ~."""
    here, there, length = point["ours"], point["legacy"], point["length"]
    computed = "" if there["run"] else "~"
    return [
        f"{point['members']:,}",
        f"{length:,}",
        f"{here['client']:.3g}",
        f"{here['noising']:.2g}",
        f"{there['client']:.3g}",
        f"{there['client'] / here['client']:.1f}",
        f"{here['server']:.3g}",
        f"{computed}{there['server']:.3g}",
        f"{computed}{there['server'] / here['server']:.0f}",
        f"{here['vector_bytes'] / length:.2f}",
        f"{there['vector_bytes'] / length:.2f}",
        f"{here['extra_bytes']:,.0f}",
        f"{here['megabytes']:,.0f}",
    ]


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Draw the seconds of a client and of the server over the cohort, one line per length."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), sharex=True)
    for place, (axis, who) in enumerate(zip(axes, ("client", "server"), strict=True)):
        for color, length in zip(plt.cm.viridis(np.linspace(0, 0.85, 4)), LENGTHS, strict=True):
            own = [point for point in points if point["length"] == length]
            cohorts = [point["members"] for point in own]
            label = f"{length:,} parameters" if not place else None
            here = [point["ours"][who] for point in own]
            there = [point["legacy"][who] for point in own]
            axis.plot(cohorts, here, color=color, marker="o", label=label)
            axis.plot(cohorts, there, color=color, linestyle=":")
            for run, fill in ((True, color), (False, "white")):
                shown = [
                    n for n, one in enumerate(own) if run == (one["legacy"]["run"] or not place)
                ]
                axis.scatter(
                    [cohorts[n] for n in shown],
                    [there[n] for n in shown],
                    marker="s",
                    edgecolors=[color],
                    facecolors=[fill],
                    zorder=3,
                )
        axis.set(xscale="log", yscale="log", xlabel="clients a round", title=f"CPU seconds, {who}")
        axis.grid(alpha=0.3)
    axes[1].plot([], [], color="gray", marker="o", label="flower_ext")
    axes[1].plot([], [], color="gray", linestyle=":", marker="s", label="SecAgg+")
    axes[1].scatter([], [], marker="s", edgecolors="gray", facecolors="white", label="computed")
    figure.legend(loc="lower center", ncols=4, fontsize=8)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    with plt.rc_context({"svg.hashsalt": "secure-sums", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(
    output: Annotated[Path, typer.Option(help="where figure and table go")] = Path(
        "runs/secure_sum"
    ),
    most: Annotated[int, typer.Option(help="leaves longer vectors out")] = LENGTHS[-1],
) -> None:
    """Measure, draw, and print the table."""
    output.mkdir(parents=True, exist_ok=True)
    points = []
    for length in LENGTHS:
        for members in COHORTS:
            if length > most:
                continue
            one = [
                sys.executable,
                "-m",
                "benchmarks.secure_sum",
                "--one",
                f"{members}",
                f"{length}",
            ]
            done = subprocess.run(one, stdout=subprocess.PIPE, text=True, check=True)
            points.append(json.loads(done.stdout.splitlines()[-1]))
            print(" | ".join(row_of(points[-1])), flush=True)
            (output / "points.json").write_text(json.dumps(points, indent=1), encoding="utf-8")
    points.sort(key=lambda point: (point["members"], point["length"]))
    rows = [row_of(point) for point in points]
    with (output / "secure-sums.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([HEAD, *rows])
    draw(points, output / "secure-sums.svg")
    page = f"# Secure sums\n\n{_machine()}\n\n{table(HEAD, rows)}\n"
    (output / "table.md").write_text(page, encoding="utf-8")
    print(page)


def _machine() -> str:
    import cryptography
    import flwr

    versions = f"flwr {flwr.__version__}, cryptography {cryptography.__version__}"
    return f"{platform.machine()}, {os.cpu_count()} cores, {versions}, NumPy {np.__version__}"


if __name__ == "__main__":
    if "--one" in sys.argv:
        print(json.dumps(measure(*map(int, sys.argv[2:]))), flush=True)
    else:
        typer.run(main)
