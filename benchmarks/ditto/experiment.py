"""Shared parts of DP-Ditto's figures: worlds, scales, and runs named by what varies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

from benchmarks.runs import Config, over_seeds, run_all, settings
from flower_ext.federation.engines.run_app import load_app
from flower_ext.planning import best_schedule
from flower_ext.privacy.guarantee import Basis
from flower_ext.runs import RunDirectory
from flower_ext.runs.figures import Line

APP = Path(__file__).parents[2] / "apps" / "dp-ditto"
METHODS = {
    "dp-ditto": "DP-Ditto",
    "dp-pfedme": "DP-pFedMe",
    "dp-fedamp": "DP-FedAMP",
    "dp-apple": "DP-APPLE",
    "dp-fedala": "DP-FedALA",
}
WORLDS: dict[str, Config] = {
    "mnist-mlr": {"dataset": "mnist", "model": "mnist-logistic"},
    "mnist-dnn": {"dataset": "mnist", "model": "mnist-dnn"},
    "fashion-mnist-dnn": {"dataset": "fashion-mnist", "model": "mnist-dnn"},
    "fashion-mnist-cnn": {"dataset": "fashion-mnist", "model": "mnist-cnn-32-64"},
    "cifar10-lenet": {"dataset": "cifar10", "model": "cifar10-lenet", "examples-per-client": 500},
    "cifar10-cnn": {"dataset": "cifar10", "model": "cifar10-cnn-32-64"},
}
"""The paper's worlds; ``fashion-mnist-dnn`` and ``cifar10-lenet`` are smaller additions."""
SEARCH_SEED = 1001
"""Seed of the search: tried learning rates see other clients, models and noise than reports."""
LONGEST_NAME = 255
"""Longest file name in bytes, on the usual file systems; longer run names end in a digest."""
BEST_WEIGHT = {10.0: 0.005, 100.0: 0.01}
"""λ* that the paper found, for each ε of Figures 3 and 4."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Part of the paper's experiments that is run.

    Parameters
    ----------
    worlds, training_worlds : tuple[str, ...]
        Worlds of Figures 3, 4 and 6, and of Figure 5.
    examples : int
        Training records of a client. Fewer mean more noise at the same ε, by their ratio.
    rounds : tuple[int, ...]
        Every T of Figures 3, 4 and 5; each is a run with noise for that many rounds.
    planned_rounds : tuple[int, ...]
        Every T of Figure 7.
    learning_rates : tuple[float, ...]
        Rates tried for every method of Figures 3 and 4; if empty, all use the paper's.
    """

    worlds: tuple[str, ...]
    training_worlds: tuple[str, ...]
    examples: int
    rounds: tuple[int, ...]
    planned_rounds: tuple[int, ...]
    learning_rates: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (1, 2, 3)


DEFAULT = Scale(
    worlds=("mnist-dnn", "fashion-mnist-dnn"),
    training_worlds=("mnist-dnn", "mnist-mlr"),
    examples=1000,
    rounds=(10, 30),
    planned_rounds=(5, 10, 20, 30),
    learning_rates=(0.005, 0.02, 0.08),
)
FULL = Scale(
    worlds=("mnist-dnn", "fashion-mnist-cnn", "cifar10-cnn"),
    training_worlds=tuple(WORLDS),
    examples=2500,
    rounds=(5, 10, 20, 30, 50, 80),
    planned_rounds=(10, 20, 40, 60, 80, 100),
)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Runs of the app in one folder, each named by what it varies."""

    folder: Path
    data_folder: str
    scale: Scale
    workers: int
    overrides: Config = field(default_factory=dict)

    def run(self, changes: Sequence[Config], title: str) -> list[RunDirectory]:
        """Run each change under each seed, in this order; finished runs are kept."""
        configs = [self._config({**change, "seed": seed}) for change, seed in self._each(changes)]
        return run_all(APP, configs, workers=self.workers, title=title)

    def best_learning_rates(self, changes: Mapping[str, Config], title: str) -> dict[str, float]:
        """Return for each name the rate with the best mean accuracy under `SEARCH_SEED`."""
        tried = [(name, rate) for name in changes for rate in self.scale.learning_rates]
        configs = [
            self._config({**changes[name], **learning_rate(rate), "seed": SEARCH_SEED})
            for name, rate in tried
        ]
        runs = run_all(APP, configs, workers=self.workers, title=f"searching, {title}")
        best: dict[str, tuple[float, float]] = {}
        for (name, rate), run in zip(tried, runs, strict=True):
            # A run that diverged has no accuracy.
            accuracy = run.metrics()[-1].get("accuracy_mean", 0.0)
            best[name] = max(best.get(name, (-1.0, rate)), (accuracy, rate))
        return {name: rate for name, (_, rate) in best.items()}

    def grouped(self, changes: Mapping[str, Config], title: str) -> dict[str, list[RunDirectory]]:
        """Run each change under all seeds; return the runs by name."""
        runs = iter(self.run(list(changes.values()), title))
        return {name: [next(runs) for _ in self.scale.seeds] for name in changes}

    def planned_rounds(self, change: Config, basis: Basis, most: int) -> list[int]:
        """Return T* of the bound for each seed, under the app's noise; only a pilot run trains.

        0 means that no number of rounds improves on the start.
        """
        load_app(APP)
        server = import_module("dp_ditto_app.server_app")
        planner = import_module("dp_ditto_app.planner")
        found = []
        for seed in self.scale.seeds:
            config = self._config({**change, "planner": "pilot", "seed": seed})
            settings = server.Settings.of(config)
            task = server.task_of(SimpleNamespace(run_config=config, node_config={}))
            plan = best_schedule(
                planner.problem_of(settings, task, planner.pilot_of(settings, task)),
                float(config["global-weight"]),
                variance_per_round=server.plan_of(settings, 1).upload_stddev ** 2,
                max_rounds=most,
                basis=basis,
            )
            found.append(plan.rounds)
        return found

    def _each(self, changes: Iterable[Config]) -> Iterable[tuple[Config, int]]:
        return ((change, seed) for change in changes for seed in self.scale.seeds)

    def _config(self, change: Config) -> Config:
        base: Config = {
            "clients": 20,
            "partition": "pathological",
            "classes-per-client": 2,
            "examples-per-client": self.scale.examples,
            "delta": 0.01,
            "clipping-norm": 20.0,
            "calibration": "published",
            "noise": "upload",
            "batch-size": 32,
            "learning-rate": 0.005,
            "personal-learning-rate": 0.005,
            "data-folder": self.data_folder,
            **self.overrides,
        }
        merged = {**settings(APP), **base, **change}
        assert set(merged) == set(settings(APP)), set(merged) - set(settings(APP))
        words = [f"{name}={value}" for name, value in sorted(change.items())]
        name = "-".join(word.replace("/", "_") for word in words)
        if len(name) > LONGEST_NAME:
            name = f"{name[: LONGEST_NAME - 17]}-{sha256(name.encode()).hexdigest()[:16]}"
        return {**merged, "run-directory": str(self.folder / "runs" / name)}


def learning_rate(rate: float) -> Config:
    """Return the setting of one rate for the shared and the personal model."""
    return {"learning-rate": rate, "personal-learning-rate": rate}


def at_the_end(runs: Mapping[int, Sequence[RunDirectory]], metric: str) -> list[Line]:
    """Return the last value of ``metric`` against T, one line per seed; ``runs`` is by T."""
    values = [over_seeds(of_seeds, metric) for of_seeds in runs.values()]
    return [(list(runs), list(of_seed)) for of_seed in zip(*values, strict=True)]
