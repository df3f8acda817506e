"""Measure private weighting over ring-LWE on this machine.

    python -m benchmarks.lattice [--large] [--users 1000] [--paillier 20000]

One round runs in one process. Every user has records in every silo, and N_max = 2000. The table has
CPU seconds of all threads of one silo: transforms and products of its users' updates (adding), then
randomness, masks and words (finishing). All silos do the same work, so the fastest one counts.
``--large`` adds 11,181,642 parameters, the size of ResNet-18. ``--users`` adds a row with that many
users. ``--paillier`` adds the protocol over Paillier with that many coordinates; 20,000 take a
quarter of an hour.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.lattice import paillier
from benchmarks.lattice.runs import Cost, round_cost
from flower_ext.runs.page import table
from flower_ext.secure.weighting.lattice import ring

RESNET_18 = 11_181_642
HEAD = ["d", "users", "silos", "threads", "a silo, CPU s", "adding", "finishing", "elapsed, s"]
HEAD += ["server, CPU s", "MB up", "MB down, an epoch", "largest error, C", "plain sum, CPU s"]
HEAD += ["set-up: server, silo 0", "epoch: server, silo"]


def _row(facts: dict[str, int], cost: Cost) -> list[str]:
    return [
        f"{facts['coordinates']:,}",
        f"{facts['users']:,}",
        f"{facts['silos']}",
        f"{facts.get('workers', 1)}",
        f"{cost.silo:.3f}",
        f"{cost.adding:.3f}",
        f"{cost.finishing:.3f}",
        f"{cost.elapsed:.3f}",
        f"{cost.closing:.3f}",
        f"{cost.up / 1e6:.2f}",
        f"{cost.down / 1e6:.2f}",
        f"{cost.largest_error:.1e}",
        f"{cost.plain:.3f}",
        f"{cost.set_up_server:.1f}, {cost.set_up_silo:.1f}",
        f"{cost.weights_server:.2f}, {cost.weights_silo:.2f}",
    ]


def main(
    large: Annotated[bool, typer.Option("--large", help="11,181,642 parameters")] = False,
    users: Annotated[list[int] | None, typer.Option(help="a row with so many users")] = None,
    with_paillier: Annotated[
        int, typer.Option("--paillier", help="coordinates over Paillier, if any")
    ] = 0,
    output: Annotated[Path, typer.Option(help="where the table goes")] = Path("runs/lattice"),
) -> None:
    """Print the table and write it."""
    cases = [
        {"coordinates": 20_000, "users": 100, "silos": 5},
        {"coordinates": 147_000, "users": 100, "silos": 5},
        {"coordinates": 1_000_000, "users": 100, "silos": 5},
        {"coordinates": 1_000_000, "users": 100, "silos": 5, "workers": 2},
    ]
    cases += [{"coordinates": 147_000, "users": many, "silos": 3} for many in users or ()]
    if large:
        cases.append({"coordinates": RESNET_18, "users": 100, "silos": 3, "workers": 2})
    round_cost(coordinates=5000, users=2, silos=2)  # compiles
    rows = []
    for facts in cases:
        rows.append(_row(facts, round_cost(**facts)))
        print(" | ".join(rows[-1]), flush=True)
    compiled = ring.work.__name__.rpartition(".")[2]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, NumPy {np.__version__}, {compiled}"
    page = f"# Private weighting over ring-LWE\n\n{machine}\n\n{table(HEAD, rows)}\n"
    if with_paillier:
        silo, server, up = paillier.round_cost(coordinates=with_paillier, users=100, silos=3)
        page += f"\nOver Paillier, {with_paillier:,} coordinates, 100 users, 3 silos: "
        page += f"a silo {silo:.0f} CPU s, server {server:.0f} CPU s, {up / 1e6:.1f} MB up.\n"
    output.mkdir(parents=True, exist_ok=True)
    (output / "table.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    typer.run(main)
