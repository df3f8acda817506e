"""Shared parts of Upcycled-FL's tables and figures: methods, scales, and the grid search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from benchmarks.runs import Config, Experiment, paper
from flower_ext.runs import RunDirectory

METHODS = {
    "fedavg": "FedAvg",
    "fedavgm": "FedAvgM",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "feddyn": "FedDyn",
    "pfedme": "pFedMe",
    "fedyogi": "FedYogi",
}
SETTINGS = paper("upcycled-fl", "upcycled-table1-syniid") | {"noise-stddev": 1.0}
"""The paper's settings of Table 1 on Syn(iid); tables and figures change data and stragglers."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Part of the paper's experiments that is run.

    Parameters
    ----------
    training_rounds : int
        Training rounds of Tables 1 and 3; the upcycled version has twice as many visible rounds.
    search_rounds : int
        Training rounds while searching.
    joint_search : bool
        See `search`.
    private_rounds : int
        Visible rounds of Figures 3 and 4, for plain and upcycled.
    timed_rounds : int
        Visible rounds of Table 5, for plain and upcycled.
    """

    datasets: tuple[str, ...]
    straggler_ratios: tuple[float, ...]
    seeds: tuple[int, ...] = (1, 2, 3, 4)
    training_rounds: int
    search_rounds: int
    joint_search: bool
    learning_rates: tuple[float, ...]
    coefficients: tuple[float, ...]
    private_datasets: tuple[str, ...]
    private_methods: tuple[str, ...]
    private_rounds: int
    timed_rounds: int


SYNTHETIC = ("synthetic-iid", "synthetic-0-0", "synthetic-0.5-0.5", "synthetic-1-1")
DEVICES = {**dict.fromkeys(SYNTHETIC, 30), "letters": 50}
"""The number of devices of each data set."""
DEFAULT = Scale(
    datasets=SYNTHETIC,
    straggler_ratios=(0.9,),
    training_rounds=30,
    search_rounds=30,
    joint_search=False,
    learning_rates=(0.003, 0.03, 0.2),
    coefficients=(0.1, 0.5, 0.9),
    private_datasets=("synthetic-iid",),
    private_methods=("fedavg", "fedprox", "scaffold"),
    private_rounds=30,
    timed_rounds=10,
)
FULL = Scale(
    datasets=(*SYNTHETIC, "letters"),
    straggler_ratios=(0.9, 0.3),
    training_rounds=80,
    search_rounds=80,
    joint_search=True,
    learning_rates=(0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2),
    coefficients=(0.1, 0.3, 0.5, 0.7, 0.9),
    private_datasets=SYNTHETIC,
    private_methods=tuple(METHODS),
    private_rounds=80,
    timed_rounds=80,
)


def method_config(method: str) -> Config:
    """Return the settings of a method; FedYogi needs a larger server step than Flower's default."""
    return {"method": method, "server-learning-rate": 0.05 if method == "fedyogi" else 0.0}


def evaluations(visible_rounds: int) -> int:
    """Return the rounds between ten evaluations; even, to show extrapolated models."""
    return max(2, visible_rounds // 10 // 2 * 2)


def late(run: RunDirectory, metric: str) -> float:
    """Return the mean of the last three evaluations, which varies less than the very last one.

    It is NaN if training diverged so far that no score was finite.
    """
    values = run.series(metric)[1][-3:]
    return sum(values) / len(values) if values else math.nan


class Twins(NamedTuple):
    """Settings, or runs, of one method: plain and upcycled."""

    plain: Config
    upcycled: Config


def search(
    experiment: Experiment,
    pairs: Mapping[str, Config],
    *,
    rounds: tuple[int, int],
    learning_rates: Sequence[float],
    coefficients: Sequence[float],
    jointly: bool,
    metric: str,
) -> dict[str, Twins]:
    """Return the best learning rate of each plain method, and rate and coefficient when upcycled.

    Every setting is tried under one seed of its own. The clients' test examples judge it, as in the
    paper, whose data have no validation part.

    Parameters
    ----------
    pairs : Mapping[str, Config]
        Settings of each pair to compare, by name.
    rounds : (int, int)
        Visible rounds, plain and upcycled.
    jointly : bool
        Search the whole grid of learning rates and coefficients, instead of coefficients at the
        learning rate of the plain method.
    metric : str
        One of the rounds' metrics; a loss is minimised.
    """
    sign = -1 if metric.startswith("loss") else 1

    def best(
        grid: Mapping[str, Sequence[tuple[float, float]]], upcycled: bool
    ) -> dict[str, Config]:
        trials: dict[str, list[Config]] = {
            name: [{"learning-rate": rate, "coefficient": c} for rate, c in grid[name]]
            for name in pairs
        }
        length = in_rounds({"upcycled": upcycled}, rounds[upcycled])
        chosen = experiment.best(
            {f"{name}-{upcycled:d}": tried for name, tried in trials.items()},
            lambda run: sign * late(run, metric),
            "upcycled" if upcycled else "plain",
            fixed={f"{name}-{upcycled:d}": {**pairs[name], **length} for name in pairs},
        )
        return {name: {**length, **chosen[f"{name}-{upcycled:d}"]} for name in pairs}

    plain = best({name: [(rate, 0.5) for rate in learning_rates] for name in pairs}, False)
    grid = {
        name: [
            *product(
                learning_rates if jointly else [float(plain[name]["learning-rate"])], coefficients
            )
        ]
        for name in pairs
    }
    upcycled = best(grid, True)
    return {name: Twins(plain[name], upcycled[name]) for name in pairs}


def in_rounds(choice: Config, rounds: int) -> Config:
    """Return settings for a run of this length."""
    return {**choice, "rounds": rounds, "evaluate-every": evaluations(rounds)}
