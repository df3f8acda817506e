"""Secure sums: processor time and bytes, beside Flower's legacy SecAgg+.

    python -m benchmarks secure-sums

Each row is one round in its own process, with every tenth client lost after sharing. Times are
processor seconds; a client's time excludes its training. The experiment takes half an hour.
``--most 1000000`` skips the largest vectors, and ``--clients 100`` all larger cohorts.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from typing import Annotated, Any

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
    # Imported after our run, whose peak of memory excludes it.
    from benchmarks.secure_sum import legacy

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


def main(
    most: Annotated[int, typer.Option(help="leaves longer vectors out")] = LENGTHS[-1],
    clients: Annotated[int, typer.Option(help="leaves larger cohorts out")] = COHORTS[-1],
) -> None:
    """Measure, and print the table."""
    rows = []
    for members in COHORTS:
        for length in LENGTHS:
            if length <= most and members <= clients:
                words = ["-m", "benchmarks.secure_sum", "--one", f"{members}", f"{length}"]
                point = subprocess.run(
                    [sys.executable, *words], stdout=subprocess.PIPE, text=True, check=True
                )
                rows.append(row_of(json.loads(point.stdout.splitlines()[-1])))
                print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    print(f"{_machine()}\n\n{table(HEAD, rows)}")


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
