"""Measure the cost of a secure sum, here and in Flower's legacy SecAgg+, on this machine.

    python -m benchmarks.secure_sum [--full]

One round in one process, modulo 2^32, every tenth client lost after sharing. CPU seconds, the
client's without training, but with clipping, rounding and discrete noise; SecAgg+ only rounds.
``--full`` adds 1,000 clients and 10 million parameters.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Annotated

import cryptography
import flwr
import numpy as np
import typer

from benchmarks.secure_sum import legacy, ours
from flower_ext.runs.page import table

GRAPHS = {10: (9, 5), 100: (21, 11), 300: (36, 21), 1000: (45, 26)}  # γ = δ = 0.1; 10: complete


def main(
    full: Annotated[bool, typer.Option("--full", help="1,000 clients, 10^7 parameters")] = False,
    output: Annotated[Path, typer.Option(help="where the table goes")] = Path("runs/secure_sum"),
) -> None:
    """Print the table and write it."""
    lengths = [10_000, 100_000, 667_402, *([10_000_000] if full else [])]
    rows = []
    for members, (neighbours, threshold) in GRAPHS.items():
        if members == 1000 and not full:
            continue
        for length in lengths:
            here = ours.round_cost(members, neighbours, threshold, length)
            client, server = legacy.round_cost(members, neighbours, threshold, length)
            rows.append(
                [
                    f"{members:,}",
                    f"{length:,}",
                    f"{here.client:.4f}",
                    f"{here.noising:.4f}",
                    f"{client:.4f}",
                    f"{client / here.client:.1f}",
                    f"{here.server:.3f}",
                    f"{server:.3f}",
                    f"{server / here.server:.0f}",
                    f"{here.extra_bytes:,.0f}",
                ]
            )
            print(" | ".join(rows[-1]), flush=True)
    head = ["clients", "parameters", "client, s", "of it noise", "SecAgg+", "times"]
    head += ["server, s", "SecAgg+ (from one mask)", "times", "bytes a client beside its vector"]
    versions = f"flwr {flwr.__version__}, cryptography {cryptography.__version__}"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {versions}, NumPy {np.__version__}"
    page = f"# Secure sums\n\n{machine}\n\n{table(head, rows)}\n"
    output.mkdir(parents=True, exist_ok=True)
    (output / "table.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    typer.run(main)
