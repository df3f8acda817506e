"""Private weighting as in Uldp-FL's Figures 11 and 12: its parts' times, and their growth.

    python -m benchmarks weighting-figures --data-folder DATA --output RESULTS

Figure 11: HeartDisease and TcgaBrca with 10 and 100 users, zipf, over Paillier with 3,072-bit keys,
two rounds in one process. Figure 12: 3 silos, with 20 users and 16 to 10,000 parameters, or with
16 parameters and 10 to 40 users; beside it the same rounds over ring-LWE. The paper also has
larger models. The benchmark takes some minutes; seconds are of the processor, on one thread.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.command_line import experiment_parser
from benchmarks.report.rows import store_rows
from benchmarks.runs import Experiment, app_module
from benchmarks.weighting.dialogue import timed
from benchmarks.weighting.lattice_round import round_cost
from benchmarks.weighting.paillier import BASE, Parties
from benchmarks.weighting.rounds import PARTS
from flower_ext.runs.page import table
from flower_ext.secure.weighting.paillier import generate_key

DATASETS = ("heart-disease", "tcga-brca")
USERS = (10, 100)
PARAMETERS = (16, 100, 1_000, 10_000)
SIZES = [(20, count) for count in PARAMETERS] + [(count, 16) for count in (10, 30, 40)]
"""(users, parameters) of Figure 12."""
Row = Sequence[object]


def main() -> None:
    """Measure both figures, write their tables and keep their rows."""
    arguments = experiment_parser(__doc__).parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    experiment = Experiment.of(arguments, "uldp-fl", {"distribution": "zipf"})
    header, rows = runs(experiment)
    store_rows("uldp-fl-figure-11", header, rows, folder=experiment.folder)
    experiment.write("figure-11", "# Figure 11", table(header, rows))
    header, rows = growth()
    store_rows("uldp-fl-figure-12", header, rows, folder=experiment.folder)
    experiment.write("figure-12", "# Figure 12", table(header, rows))


def runs(experiment: Experiment) -> tuple[list[str], list[Row]]:
    """Return the seconds of each part of a run, by data set and number of users."""
    describe = app_module("uldp-fl", "silos").describe_silos
    cases = {
        (dataset, users): experiment.config(
            f"figure-11/{dataset}-{users}",
            {
                "dataset": dataset,
                "num-silos": describe(dataset).num_silos,
                "num-users": users,
                "method": "uldp-avg-private",
                "rounds": 2,
                "evaluate-every": 0,
            },
        )
        for dataset in DATASETS
        for users in USERS
    }
    rows: list[Row] = []
    for (dataset, users), run in zip(
        cases, experiment.run([*cases.values()], "Figure 11"), strict=True
    ):
        rounds = run.metrics()
        parts = [rounds.total(column) for column in PARTS.values()]
        whole = rounds.total("training_seconds")
        silos = (whole - sum(parts)) / len(rounds) / describe(dataset).num_silos
        setup, encrypting, decrypting = parts
        server = [(encrypting / len(rounds)), (decrypting / len(rounds))]
        cells = (f"{value:.2f}" for value in (setup, *server, silos))
        rows.append((dataset, users, *cells))
    columns = ("set-up, s", "server encrypts, s a round", "server decrypts, s a round")
    return ["data", "users", *columns, "a silo, s a round"], rows


def growth() -> tuple[list[str], list[Row]]:
    """Return the seconds of a round by users and parameters, over Paillier and ring-LWE."""
    key = generate_key()
    base = replace(BASE, silos=3)
    round_cost(coordinates=5000, users=2, silos=2)  # compiles
    rows: list[Row] = []
    for users, parameters in SIZES:
        settings = replace(base, users=users, coordinates=parameters)
        parties, setup = timed(Parties, settings, key)
        over_paillier = parties.round(1)
        over_ring_lwe = round_cost(coordinates=parameters, users=users, silos=3)
        seconds = (setup, over_paillier.silos / 3, over_paillier.server)
        cells = (f"{value:.2f}" for value in seconds)
        ring_lwe = (f"{over_ring_lwe.silo:.4f}", f"{over_ring_lwe.closing:.4f}")
        rows.append((users, f"{parameters:,}", *cells, *ring_lwe))
    paillier_columns = ("set-up, s", "a silo, s", "server, s")
    return ["users", "parameters", *paillier_columns, "ring-LWE, a silo", "ring-LWE, server"], rows


if __name__ == "__main__":
    main()
