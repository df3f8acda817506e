"""Methods, settings, scales and the search that the figures of Uldp-FL share."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.runs import Config, Experiment, last_value, preset_settings
from flower_ext.algorithms.uldp import theory_learning_rate
from flower_ext.runs import RunDirectory

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
"""Methods that use the settings found for another method."""
NOISE_MULTIPLIER, DELTA = 5.0, 1e-5
BATCH = 64
FIGURE_OF = {"creditcard": 4, "mnist": 5, "heart-disease": 6, "tcga-brca": 7, "tcga-brca-scaled": 7}
"""The paper's figure of each data set."""
SETTINGS: Config = {
    "noise-multiplier": NOISE_MULTIPLIER,
    "delta": DELTA,
    "clipping-norm": 0.1,
    "batch-size": BATCH,
}
"""Settings that all presets share."""
TUNED = ("learning-rate", "local-epochs", "server-learning-rate", "record-clipping-norm")
"""Settings that the search chooses, and that the presets have for each method."""
SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Server rates to try, as shares of the theory's rate. ULDP-SGD takes the last ones."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A data set, its allocation to users, and the length of training.

    Parameters
    ----------
    metric : str
        Metric of the rounds to report besides the loss.
    records : int
        Approximate number of training records. A silo's part of it sets the rate of DP-SGD.
    learning_rates : tuple of float
        Rates to try, each with two values of another setting.
    search_seeds : int
        Number of runs whose mean loss decides between settings.
    rounds, search_rounds, epochs : int
        Values of the scaled-down setting.
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

    @property
    def name(self) -> str:
        """Name in titles and folders."""
        labels = f"-{self.labels_per_user}-labels" if self.labels_per_user else ""
        return f"{self.dataset}-{self.users}-{self.distribution}{labels}"

    def preset(self, label: str) -> Config:
        """Return the settings of the paper's figure for a method."""
        name = f"uldp-fig{FIGURE_OF[self.dataset]}-{self.users}-{self.distribution}"
        changes = {key.replace("-", "_"): value for key, value in METHODS[label].items()}
        return preset_settings(
            "uldp-fl", name + ("-noniid" if self.labels_per_user else ""), **changes
        )


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Part of the paper's experiments to run.

    Parameters
    ----------
    rounds : int
        Number of rounds; 0 for each problem's own number.
    all_panels : bool
        True to show a data set under each of the paper's numbers of users and distributions.
    methods : tuple of str
        Methods of Figures 4 to 7.
    datasets : tuple of str
        Data sets of Figures 7 and 10, which have two.
    """

    full: bool
    seeds: int
    rounds: int = 0
    all_panels: bool = False
    methods: tuple[str, ...] = tuple(METHODS)
    datasets: tuple[str, ...] = tuple(FIGURE_OF)

    def length(self, problem: Problem) -> int:
        """Return the number of rounds of a reported run."""
        return self.rounds or (
            int(problem.preset("ULDP-AVG")["rounds"]) if self.full else problem.rounds
        )


DEFAULT = Scale(full=False, seeds=3)
FULL = Scale(full=True, seeds=5, all_panels=True)


def problem_settings(problem: Problem, rounds: int) -> Config:
    """Return the settings of a run's data, and of its ``rounds`` with about ten evaluations."""
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
    """Return the settings that the search tries for a method; every method gets the same number.

    ULDP-NAIVE's noise grows with its clipping norm, so only the length of the server's step is left
    to choose. DP-SGD takes larger steps, because it averages clipped gradients.
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
    """Return a share of the server's learning rate in the paper's theory."""
    rate = theory_learning_rate(num_silos=problem.silos, num_users=problem.users, epochs=epochs)
    return {"server-learning-rate": round(share * rate, 2)}


def method_settings(problem: Problem, label: str) -> Config:
    """Return the method's settings.

    For DP-SGD, they include the sampling rate and the divisor for 64 expected records. The rate
    assumes silos of equal size, and that medians and maxima keep all records. These numbers are
    public guesses, not counts.
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
    """Return each method's settings: as published, or with the lowest loss in the search."""
    needed = dict.fromkeys(SHARED.get(label, label) for label in labels)
    if scale.full:
        presets = {label: problem.preset(label) for label in needed}
        chosen = {label: {name: presets[label][name] for name in TUNED} for label in needed}
    else:
        length = problem_settings(problem, problem.search_rounds)
        best = experiment.best(
            {f"{problem.name}/{label}": candidates(problem, label) for label in needed},
            lambda run: -last_value(run, "loss_pooled"),
            problem.name,
            fixed={
                f"{problem.name}/{label}": {**length, **method_settings(problem, label)}
                for label in needed
            },
            seeds=problem.search_seeds,
        )
        chosen = {label: best[f"{problem.name}/{label}"] for label in needed}
    return {label: chosen[SHARED.get(label, label)] for label in labels}


def run_methods(
    experiment: Experiment, scale: Scale, problem: Problem, chosen: dict[str, Config], name: str
) -> dict[str, list[RunDirectory]]:
    """Run all seeds of every method under its settings."""
    cases = {
        f"{name}/{problem.name}-{label}": {
            **problem_settings(problem, scale.length(problem)),
            **method_settings(problem, label),
            **chosen[label],
        }
        for label in chosen
    }
    groups = experiment.grouped(cases, range(1, scale.seeds + 1), f"{name}, {problem.name}")
    return dict(zip(chosen, groups.values(), strict=True))


def settings_text(config: Config) -> str:
    """Return chosen settings as text for a table."""
    names = {
        "learning-rate": "η_l",
        "server-learning-rate": "η_g",
        "record-clipping-norm": "C of a record",
    }
    return ", ".join(f"{names[name]} {config[name]:g}" for name in names if name in config)


def search_text(scale: Scale, problem: Problem) -> str:
    """Return text about the search for settings."""
    if scale.full:
        return "Settings: those of the authors' scripts."
    seeds = problem.search_seeds
    return (
        f"Settings: of {2 * len(problem.learning_rates)} for each of DEFAULT, NAIVE, GROUP-8, SGD, "
        f"AVG and AVG-w the one with the lowest loss after {problem.search_rounds} rounds under "
        f"{'another seed' if seeds == 1 else f'{seeds} other seeds'}; the other groups take "
        "GROUP-8's."
    )
