"""What the figures of Uldp-FL share: methods, their settings, scales, and the search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runs import Config, Experiment, settings
from flower_ext.algorithms.uldp import theory_learning_rate
from flower_ext.runs import RunDirectory

APP = Path(__file__).parents[2] / "apps" / "uldp-fl"
METHODS: dict[str, Config] = {
    "DEFAULT": {"method": "default"},
    "ULDP-NAIVE": {"method": "uldp-naive"},
    "ULDP-GROUP-2": {"method": "uldp-group", "group-size": "2"},
    "ULDP-GROUP-8": {"method": "uldp-group", "group-size": "8"},
    "ULDP-GROUP-median": {"method": "uldp-group", "group-size": "median"},
    "ULDP-GROUP-max": {"method": "uldp-group", "group-size": "max"},
    "ULDP-SGD": {"method": "uldp-sgd"},
    "ULDP-AVG": {"method": "uldp-avg"},
    "ULDP-AVG-w": {"method": "uldp-avg-w"},
}
SHARED = {
    "ULDP-GROUP-2": "ULDP-GROUP-8",
    "ULDP-GROUP-median": "ULDP-GROUP-8",
    "ULDP-GROUP-max": "ULDP-GROUP-8",
}
"""Methods that take the settings found for another one."""
NOISE_MULTIPLIER, DELTA, CLIPPING_NORM = 5.0, 1e-5, 0.1
BATCH = 64
SEARCH_SEED = 1001
"""Tried settings see other allocations, initial models and noise than reported ones."""
SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Server rates that are tried for ULDP-SGD, as shares of theory's: the last of these."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A data set, how users share it, and how long it is trained.

    Parameters
    ----------
    metric : str
        Of the rounds' metrics, besides the loss.
    records : int
        For training, about: what a silo holds of them sets the rate of DP-SGD.
    learning_rates : tuple of float
        Tried ones, each with two values of another setting.
    search_seeds : int
        Runs whose mean loss decides between settings.
    rounds, search_rounds, epochs : int
        Scaled down.
    full_rounds, full_epochs, full_learning_rate, record_clipping_norm
        Of the authors' scripts; ``averaging_epochs`` are those of ULDP-AVG.
    """

    dataset: str
    metric: str
    records: int
    silos: int
    users: int
    distribution: str = "zipf"
    labels_per_user: int = 0
    learning_rates: tuple[float, ...] = (0.05, 0.2)
    search_seeds: int = 1
    rounds: int
    search_rounds: int
    epochs: int
    full_rounds: int
    full_epochs: int = 50
    averaging_epochs: int = 50
    full_learning_rate: float = 0.01
    record_clipping_norm: float = 0.1
    averaging_rate: float = 10.0

    @property
    def name(self) -> str:
        """In titles and folders."""
        labels = f"-{self.labels_per_user}-labels" if self.labels_per_user else ""
        return f"{self.dataset}-{self.users}-{self.distribution}{labels}"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of the paper's experiments is run.

    Parameters
    ----------
    rounds : int
        0 for each problem's own.
    all_panels : bool
        Whether a data set is shown under each of the paper's numbers of users and distributions.
    """

    full: bool
    seeds: int
    rounds: int = 0
    all_panels: bool = False

    def length(self, problem: Problem) -> int:
        """Rounds of a reported run."""
        return self.rounds or (problem.full_rounds if self.full else problem.rounds)


DEFAULT = Scale(full=False, seeds=3)
FULL = Scale(full=True, seeds=5, all_panels=True)


def base_config(data_folder: str) -> Config:
    """The paper's noise and the app's defaults."""
    return settings(APP) | {
        "data-folder": str(Path(data_folder).absolute()) if data_folder else "",
        "noise-multiplier": NOISE_MULTIPLIER,
        "delta": DELTA,
        "clipping-norm": CLIPPING_NORM,
        "batch-size": BATCH,
        "records-figure": False,
    }


def of_problem(problem: Problem, rounds: int) -> Config:
    """Data and length of a run; about ten evaluations."""
    return {
        "dataset": problem.dataset,
        "num-silos": problem.silos,
        "num-users": problem.users,
        "distribution": problem.distribution,
        "labels-per-user": problem.labels_per_user,
        "rounds": rounds,
        "evaluate-every": max(1, rounds // 10),
    }


def candidates(problem: Problem, label: str) -> list[Config]:
    """As many of each method, scaled down; server rates of averages are shares of theory's.

    ULDP-NAIVE's noise is as large as its clipping norm whatever that is, so only how far the server
    moves is left to choose. DP-SGD takes larger steps, as what it averages is clipped.
    """
    epochs: Config = {"local-epochs": problem.epochs}
    if label == "ULDP-SGD":
        shares = SHARES[-2 * len(problem.learning_rates) :]
        return [averaging(problem, 1, share) for share in shares]
    second: dict[str, Sequence[Config]] = {
        "DEFAULT": [{"server-learning-rate": rate} for rate in (1.0, 1.5)],
        "ULDP-NAIVE": [{"server-learning-rate": rate} for rate in (0.01, 0.1)],
        "ULDP-GROUP-8": [{"record-clipping-norm": norm} for norm in (0.1, 1.0)],
    }
    averages = [averaging(problem, problem.epochs, share) for share in (0.3, 1.0)]
    second |= {"ULDP-AVG": averages, "ULDP-AVG-w": averages}
    factor = 4 if label == "ULDP-GROUP-8" else 1
    return [
        {**epochs, "learning-rate": factor * rate, **more}
        for rate in problem.learning_rates
        for more in second[label]
    ]


def averaging(problem: Problem, epochs: int, share: float) -> Config:
    """A share of the server's learning rate in the paper's theory."""
    rate = theory_learning_rate(num_silos=problem.silos, num_users=problem.users, epochs=epochs)
    return {"server-learning-rate": round(share * rate, 2)}


def published(problem: Problem, label: str) -> Config:
    """The settings of the authors' scripts; MNIST has none for ULDP-NAIVE."""
    chosen: Config = {
        "learning-rate": problem.full_learning_rate,
        "local-epochs": problem.full_epochs,
        "server-learning-rate": 1.0,
        "record-clipping-norm": problem.record_clipping_norm,
    }
    if label == "ULDP-SGD":
        chosen["server-learning-rate"] = 10.0
    if label.startswith("ULDP-AVG"):
        chosen |= {
            "local-epochs": problem.averaging_epochs,
            "server-learning-rate": problem.averaging_rate,
        }
    return chosen


def of_method(problem: Problem, label: str) -> Config:
    """The method, and for DP-SGD batches of 64 in expectation: rate and divisor by the group size.

    Silos are taken for equally large, and medians and maxima for leaving all records: these
    numbers are public guesses, not counts.
    """
    method = METHODS[label]
    if method["method"] != "uldp-group":
        return method
    size = str(method["group-size"])
    kept = min(int(size) * problem.users, problem.records) if size.isdigit() else problem.records
    rate = min(1.0, round(BATCH * problem.silos / kept, 4))
    expected = round(rate * kept / problem.silos, 1)
    return {**method, "record-sampling-rate": rate, "expected-batch-size": expected}


def choose(
    experiment: Experiment, scale: Scale, problem: Problem, labels: Sequence[str]
) -> dict[str, Config]:
    """Settings of each method: as published, or those with the lowest loss in the search."""
    needed = list(dict.fromkeys(SHARED.get(label, label) for label in labels))
    if scale.full:
        found = {label: published(problem, label) for label in needed}
        return {label: found[SHARED.get(label, label)] for label in labels}
    tried = [(label, one) for label in needed for one in candidates(problem, label)]
    seeds = range(SEARCH_SEED, SEARCH_SEED + problem.search_seeds)
    configs = [
        experiment.config(
            f"search/{problem.name}/{label}-{'-'.join(f'{value:g}' for value in _numbers(one))}"
            + ("" if seed == SEARCH_SEED else f"-{seed}"),
            of_problem(problem, problem.search_rounds),
            of_method(problem, label),
            one,
            {"seed": seed},
        )
        for label, one in tried
        for seed in seeds
    ]
    runs = iter(experiment.run(configs, f"searching, {problem.name}"))
    best: dict[str, tuple[float, Config]] = {}
    for label, one in tried:
        loss = sum(last(next(runs), "loss_pooled") for _ in seeds)
        if label not in best or loss < best[label][0]:
            best[label] = (math.inf if math.isnan(loss) else loss), one
    return {label: best[SHARED.get(label, label)][1] for label in labels}


def _numbers(config: Config) -> list[float]:
    return [float(value) for value in config.values()]


def last(run: RunDirectory, metric: str) -> float:
    """Of the last evaluation; not a number where training diverged."""
    values = run.series(metric)[1]
    return values[-1] if values else math.nan


def settings_text(config: Config) -> str:
    """Chosen settings in a table."""
    names = {
        "learning-rate": "η_l",
        "server-learning-rate": "η_g",
        "record-clipping-norm": "C of a record",
    }
    return ", ".join(f"{names[name]} {config[name]:g}" for name in names if name in config)


def search_text(scale: Scale, problem: Problem) -> str:
    """How settings were chosen."""
    if scale.full:
        return "Settings: those of the authors' scripts."
    seeds = problem.search_seeds
    return (
        f"Settings: of {2 * len(problem.learning_rates)} for each of DEFAULT, NAIVE, GROUP-8, SGD, "
        f"AVG and AVG-w the one with the lowest loss after {problem.search_rounds} rounds under "
        f"{'another seed' if seeds == 1 else f'{seeds} other seeds'}; the other groups take "
        "GROUP-8's."
    )
