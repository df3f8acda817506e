"""Shared parts of Upcycled-FL's tables and figures: methods, scales, and the grid search."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.runs import Config, Experiment, preset_settings
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
ACCURACY = "accuracy_pooled"
"""Accuracy over all test examples, as in the paper."""
SETTINGS = preset_settings("upcycled-fl", "upcycled-table1-syniid") | {"noise-stddev": 1.0}
"""The paper's settings of Table 1 on Syn(iid); tables and figures change data and stragglers."""
PARAMETERS: dict[str, tuple[str, tuple[float, ...]]] = {
    "fedavgm": ("server-momentum", (0.3, 0.5, 0.9)),
    "fedprox": ("proximal-weight", (0.01, 0.1, 1.0)),
    "scaffold": ("server-learning-rate", (0.5, 1.0, 1.5)),
    "feddyn": ("regularization", (0.01, 0.1, 1.0)),
    "fedyogi": ("server-learning-rate", (0.02, 0.05, 0.1)),
}
"""The parameter of a method that ``--method-parameters`` searches, and its values.

pFedMe's λ stays at its default.
"""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The part of the paper's experiments to run.

    Parameters
    ----------
    training_rounds : int
        Training rounds of Tables 1 and 3; the upcycled version has twice as many visible rounds.
    search_rounds : int
        Training rounds of a run of the search.
    joint_search : bool
        True to search the whole grid of learning rates and coefficients; see `search`.
    method_parameters : bool
        True to search `PARAMETERS` together with the learning rate of the plain method.
    as_printed : bool
        True to run Figures 3 and 4 with the paper's settings. Otherwise they run with settings
        under which the bounds can hold.
    private_learning_rates, clipping_norms : tuple[float, ...]
        Learning rates to search for Figures 3 and 4, and every τ of their output perturbation.
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
    method_parameters: bool
    methods: tuple[str, ...] = tuple(METHODS)
    learning_rates: tuple[float, ...]
    coefficients: tuple[float, ...]
    private_datasets: tuple[str, ...]
    private_methods: tuple[str, ...]
    as_printed: bool
    private_learning_rates: tuple[float, ...]
    clipping_norms: tuple[float, ...]
    private_seeds: tuple[int, ...]
    private_rounds: int
    timed_rounds: int


SYNTHETIC = {
    "synthetic-iid": "syniid",
    "synthetic-0-0": "syn00",
    "synthetic-0.5-0.5": "syn05",
    "synthetic-1-1": "syn11",
}
"""The paper's synthetic sets, and their names in presets."""
DEVICES = {**dict.fromkeys(SYNTHETIC, 30), "letters": 50}
"""The number of devices of each data set."""
DEFAULT = Scale(
    datasets=tuple(SYNTHETIC),
    straggler_ratios=(0.9,),
    training_rounds=30,
    search_rounds=30,
    joint_search=False,
    method_parameters=False,
    learning_rates=(0.003, 0.03, 0.2),
    coefficients=(0.1, 0.5, 0.9),
    private_datasets=("synthetic-iid",),
    private_methods=("fedavg", "fedprox", "scaffold"),
    as_printed=False,
    private_learning_rates=(0.05,),
    clipping_norms=(5.0,),
    private_seeds=(1, 2, 3, 4),
    private_rounds=30,
    timed_rounds=10,
)
FULL = Scale(
    datasets=tuple(SYNTHETIC),
    straggler_ratios=(0.9, 0.3),
    training_rounds=80,
    search_rounds=80,
    joint_search=True,
    method_parameters=True,
    learning_rates=(0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    coefficients=(0.1, 0.3, 0.5, 0.7, 0.9),
    private_datasets=tuple(SYNTHETIC),
    private_methods=tuple(METHODS),
    as_printed=True,
    private_learning_rates=(0.003, 0.03, 0.1),
    clipping_norms=(2.0, 4.0),
    private_seeds=tuple(range(1, 9)),
    private_rounds=80,
    timed_rounds=80,
)


def method_config(method: str) -> Config:
    """Return the settings of a method; FedYogi needs a larger server step than Flower's default."""
    return {"method": method, "server-learning-rate": 0.05 if method == "fedyogi" else 0.0}


def table_config(dataset: str, method: str, straggler_ratio: float) -> Config:
    """Return the paper's settings of a method in Table 1 or, with 30 % stragglers, Table 3."""
    table = 3 if straggler_ratio == 0.3 else 1
    name = f"upcycled-table{table}-{SYNTHETIC.get(dataset, 'syniid')}"
    settings = preset_settings("upcycled-fl", name, method=method)
    changes: Config = {
        "dataset": dataset,
        "clients": DEVICES[dataset],
        "straggler-ratio": straggler_ratio,
    }
    return {**settings, **method_config(method), **changes}


def evaluations(visible_rounds: int) -> int:
    """Return the number of rounds between ten evaluations.

    It is even, so that evaluations see extrapolated models, too.
    """
    return max(2, visible_rounds // 10 // 2 * 2)


def mean_of_last_evaluations(run: RunDirectory, metric: str) -> float:
    """Return the mean of the last three evaluations, which varies less than the very last one.

    It is NaN if training diverged so far that no score was finite.
    """
    values = run.metrics().series(metric)[1][-3:]
    return sum(values) / len(values) if values else math.nan


class TwinSettings(NamedTuple):
    """The settings of one method, plain and upcycled."""

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
    parameters: Mapping[str, tuple[str, Sequence[float]]] = MappingProxyType({}),
) -> dict[str, TwinSettings]:
    """Return the best settings of each method: plain, and upcycled with the best coefficient.

    Every setting is tried under one seed that no reported run has. The clients' test examples judge
    it, as in the paper, whose data have no validation part.

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
        Metric of the rounds that the search maximises, or minimises if it is a loss.
    parameters : Mapping[str, (str, Sequence[float])]
        Another setting and its values, by the name of a method. The search tries them jointly with
        the learning rate of the plain method; the upcycled method takes the plain method's best.
    """
    sign = -1 if metric.startswith("loss") else 1

    def best(trials: Mapping[str, Sequence[Config]], upcycled: bool) -> dict[str, Config]:
        length = in_rounds({"upcycled": upcycled}, rounds[upcycled])
        chosen = experiment.best(
            {f"{name}-{upcycled:d}": tried for name, tried in trials.items()},
            lambda run: sign * mean_of_last_evaluations(run, metric),
            "upcycled" if upcycled else "plain",
            fixed={f"{name}-{upcycled:d}": {**pairs[name], **length} for name in pairs},
        )
        return {name: chosen[f"{name}-{upcycled:d}"] for name in pairs}

    def values(name: str) -> Sequence[Config]:
        setting, tried = parameters.get(str(pairs[name]["method"]), ("", ()))
        return [{setting: value} for value in tried] or [{}]

    plain = best(
        {
            name: [
                {"learning-rate": rate, "coefficient": 0.5, **value}
                for rate, value in product(learning_rates, values(name))
            ]
            for name in pairs
        },
        False,
    )
    grid = {
        name: [
            {**plain[name], "learning-rate": rate, "coefficient": coefficient}
            for rate, coefficient in product(
                learning_rates if jointly else [plain[name]["learning-rate"]], coefficients
            )
        ]
        for name in pairs
    }
    upcycled = best(grid, True)
    return {
        name: TwinSettings({"upcycled": False, **plain[name]}, {"upcycled": True, **upcycled[name]})
        for name in pairs
    }


def in_rounds(choice: Config, rounds: int) -> Config:
    """Return settings for a run of this length."""
    return {**choice, "rounds": rounds, "evaluate-every": evaluations(rounds)}
