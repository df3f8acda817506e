"""Statistics of people in several silos: how often 95 % intervals cover the exact numbers.

    python -m benchmarks statistics --data-folder DATA [--runs 200] [--epsilon 0.5]

Each run is a real round of `UserStatistics` with secure noise, in this process. HeartDisease has
four centres, in which every row is a person. Of Creditcard, 5,000 rows are dealt to 2,000 people
and five silos at random. All statistics of a data set are released together.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from benchmarks.command_line import command_parser
from flower_ext.data import Examples, SiloData, find_files
from flower_ext.data.datasets import read_bytes
from flower_ext.federation import FederatedStrategy, InProcessGrid
from flower_ext.privacy import FullParticipation, ReleasePlan
from flower_ext.runs.page import table
from flower_ext_consortium.statistics import (
    Estimate,
    JointStatistics,
    Statistic,
    UserStatistics,
    estimates,
    read_statistics,
    statistics_task,
)
from flower_ext_consortium.statistics.release import RELEASED

HEART = "mean age 20:90; variance pressure 80:220; histogram age 20:90:7; quantiles age 20:90"
CARD = "mean amount 0:500; variance v1 -10:10; histogram v1 -10:10:8; quantiles v1 -10:10"
CENTRES = ("cleveland", "hungarian", "switzerland", "va")
Columns = dict[str, NDArray[np.float64]]


def heart_disease(folder: Path | None) -> list[tuple[Columns, NDArray[np.int64]]]:
    """Return the four centres' ages and blood pressures; every row has a user of its own."""
    names = [tuple(f"heart_disease/processed.{centre}.data" for centre in CENTRES)]
    silos, first = [], 0
    for path in find_files("heart-disease", names, folder):
        rows = [line.replace("?", "nan").split(",") for line in path.read_text().split()]
        numbers = np.array(rows, dtype=np.float64)
        users = np.arange(first, first + len(numbers))
        silos.append(({"age": numbers[:, 0], "pressure": numbers[:, 3]}, users))
        first += len(numbers)
    return silos


def creditcard(folder: Path | None) -> list[tuple[Columns, NDArray[np.int64]]]:
    """Return 5,000 transactions of 2,000 users in five silos."""
    files = [("creditcard/creditcard_subset.csv",), ("creditcard/creditcard.csv",)]
    (path,) = find_files("creditcard", files, folder)
    header, *lines = read_bytes(path).decode().splitlines()
    places = [header.replace('"', "").split(",").index(name) for name in ("Amount", "V1")]
    rng = np.random.default_rng(1)
    chosen = rng.choice(len(lines), size=5000, replace=False)
    fields = [lines[row].replace('"', "").split(",") for row in chosen]
    numbers = np.array([[float(row[place]) for place in places] for row in fields])
    users, silo = rng.integers(2000, size=5000), rng.integers(5, size=5000)
    return [
        ({"amount": numbers[silo == s, 0], "v1": numbers[silo == s, 1]}, users[silo == s])
        for s in range(5)
    ]


def main() -> None:
    """Print for each statistic the share of its intervals that cover the exact number."""
    parser = command_parser(__doc__)
    parser.add_argument("--data-folder", type=Path, help="folder of the data sets")
    parser.add_argument("--runs", type=int, default=200, help="rounds of each data set")
    parser.add_argument("--epsilon", type=float, default=0.5, help="ε of one round")
    arguments = parser.parse_args()
    rest = arguments.data_folder, arguments.runs, arguments.epsilon
    rows = []
    for name, load, text in (
        ("HeartDisease", heart_disease, HEART),
        ("Creditcard", creditcard, CARD),
    ):
        rows += [(name, *row) for row in coverage(load, read_statistics(text), *rest)]
    print(table(("data set", "statistic", "intervals", "covered", "mean standard error"), rows))


Rounds = Callable[[ReleasePlan], dict[Statistic, list[Estimate]]]


def rounds_of(
    silos: Sequence[tuple[Columns, NDArray[np.int64]]], joint: JointStatistics
) -> tuple[int, Rounds]:
    """Return the number of users, and a function that releases the statistics under a plan."""
    users = 1 + max(int(owners.max()) for _, owners in silos)

    def data(silo: int) -> SiloData:
        columns, owners = silos[silo]
        rows = Examples(
            {name: torch.from_numpy(column) for name, column in columns.items()},
            torch.zeros(len(owners), dtype=torch.long),
        )
        return SiloData(train=rows, test=rows.subset([]), owners=torch.from_numpy(owners))

    task, method = statistics_task(joint, data), UserStatistics(num_silos=len(silos))
    app, rng = UserStatistics.client_app(task), np.random.default_rng(0)

    def released(plan: ReleasePlan) -> dict[Statistic, list[Estimate]]:
        strategy = FederatedStrategy(method, plan, evaluate_every=0)
        initial = ArrayRecord(task.initial_params(0))
        arrays = strategy.start(InProcessGrid(app, len(silos)), initial, num_rounds=1).arrays
        model = {RELEASED: arrays.to_torch_state_dict()[RELEASED].numpy()}
        return estimates(joint, model, method=method, plan=plan, rng=rng)

    return users, released


def terms_of(users: int) -> dict[str, Any]:
    """Return the terms of all plans but for the noise."""
    return {
        "sampling": FullParticipation(users),
        "rounds": 1,
        "delta": 1e-5,
        "clipping_norm": 1.0,
    }


def coverage(
    load: Callable[[Path | None], list[tuple[Columns, NDArray[np.int64]]]],
    joint: JointStatistics,
    folder: Path | None,
    runs: int,
    epsilon: float,
) -> list[tuple[str, str, str, str]]:
    """Return each statistic's title, intervals, share that covers, and mean standard error."""
    users, released = rounds_of(load(folder), joint)
    terms = terms_of(users)
    exact = released(ReleasePlan(noise_multiplier=1e-5, **terms))
    plan = ReleasePlan.for_target(epsilon=epsilon, **terms)
    covered: dict[str, list[bool]] = {}
    errors: dict[str, list[float]] = {}
    for _ in range(runs):
        for statistic, noised in released(plan).items():
            for each, truth in zip(noised, exact[statistic], strict=True):
                covered.setdefault(statistic.title, []).append(
                    each.lower <= truth.value <= each.upper
                )
                errors.setdefault(statistic.title, []).append(each.standard_error)
    return [
        (title, f"{len(hits)}", f"{np.mean(hits):.3f}", f"{np.nanmean(errors[title]):.3g}")
        for title, hits in covered.items()
    ]


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    main()
