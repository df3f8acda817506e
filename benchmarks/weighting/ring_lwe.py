"""Private weighting over ring-LWE: the cost of a round, an epoch and a set-up.

    python -m benchmarks ring-lwe [--large] [--curve] [--paillier 20000]

One round runs in one process. Every user has records in every silo, and N_max = 2000. The table has
CPU seconds of all threads of one silo: transforms and products of its users' updates (adding), then
randomness, masks and words (finishing). All silos do the same work, so the fastest one counts. An
epoch lasts until other users are drawn; its columns are the costs of the server and of silo 0.

* ``--large`` adds 11,181,642 parameters, the size of ResNet-18.
* ``--curve`` adds 1,000 and 10,000 users. It takes ten minutes.
* ``--paillier`` adds the protocol over Paillier with that many coordinates, beside ring-LWE with as
  many; 20,000 take a quarter of an hour.
"""

import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.command_line import command_parser
from benchmarks.weighting import paillier
from benchmarks.weighting.lattice_round import Cost, round_cost
from flower_ext.runs.page import table

RESNET_18 = 11_181_642
CURVE = [{"coordinates": 147_000, "users": users, "silos": 3} for users in (100, 1000, 10_000)]
HEADER = [
    "protocol",
    "d",
    "users",
    "silos",
    "draw",
    "threads",
    "a silo, CPU s",
    "adding, finishing",
]
HEADER += ["elapsed, s", "server, CPU s", "MB up", "MB down, an epoch", "largest error, C"]
HEADER += ["plain sum, CPU s", "set-up: server, silo 0", "epoch: server, silo 0"]


def _row(case: Mapping[str, int], cost: Cost) -> list[str]:
    return [
        "ring-LWE",
        f"{case['coordinates']:,}",
        f"{case['users']:,}",
        f"{case['silos']}",
        f"1 of {case['draw_choices']}, hidden" if "draw_choices" in case else "–",
        f"{case.get('workers', 1)}",
        f"{cost.silo:.3f}",
        f"{cost.adding:.3f}, {cost.finishing:.3f}",
        f"{cost.elapsed:.3f}",
        f"{cost.closing:.3f}",
        f"{cost.up / 1e6:.2f}",
        f"{cost.down / 1e6:.2f}",
        "–" if "draw_choices" in case else f"{cost.largest_error:.1e}",
        f"{cost.plain:.3f}",
        f"{cost.set_up_server:.1f}, {cost.set_up_silo:.1f}",
        f"{cost.weights_server:.2f}, {cost.weights_silo:.2f}",
    ]


def _paillier_row(coordinates: int) -> list[str]:
    settings = replace(paillier.BASE, coordinates=coordinates)
    cost = paillier.Parties(settings).round(1)
    silo = cost.silos / settings.silos
    cells = ["Paillier", f"{coordinates:,}", "100", "3", "–", "1", f"{silo:.0f}", "–", "–"]
    return [*cells, f"{cost.server:.0f}", f"{cost.upload / 1e6:.2f}", *["–"] * 5]


def main() -> None:
    """Measure each case; print the table and write it."""
    parser = command_parser(__doc__)
    parser.add_argument("--large", action="store_true", help="11,181,642 parameters")
    parser.add_argument("--curve", action="store_true", help="1,000 and 10,000 users")
    parser.add_argument("--paillier", type=int, default=0, help="coordinates over Paillier, if any")
    parser.add_argument("--output", type=Path, default="runs/lattice", help="folder of the table")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    million = {"coordinates": 1_000_000, "users": 100, "silos": 5}
    cases = [
        {"coordinates": 20_000, "users": 100, "silos": 5},
        {"coordinates": 147_000, "users": 100, "silos": 5},
        million,
        {**million, "workers": 2},
        {**million, "draw_choices": 10},
    ]
    if arguments.large:
        cases.append({"coordinates": RESNET_18, "users": 100, "silos": 3, "workers": 2})
    if arguments.curve:
        cases += CURVE
    if arguments.paillier:
        cases.append({"coordinates": arguments.paillier, "users": 100, "silos": 3})
    arguments.output.mkdir(parents=True, exist_ok=True)
    round_cost(coordinates=5000, users=2, silos=2)  # compiles
    rows = []
    for case in cases:
        rows.append(_row(case, round_cost(**case)))
        print(" | ".join(rows[-1]), flush=True)
    if arguments.paillier:
        rows.append(_paillier_row(arguments.paillier))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, NumPy {np.__version__}"
    page = f"# Private weighting over ring-LWE\n\n{machine}\n\n{table(HEADER, rows)}\n"
    (arguments.output / "table.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
