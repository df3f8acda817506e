"""Shared parts of DP-Ditto's figures: worlds, scales and the paper's settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from benchmarks.runs import Config, Experiment, app_module, preset_settings
from flower_ext.privacy.guarantee import Basis
from flower_ext_planner.convergence import DittoProblem
from flower_ext_planner.search import best_schedule

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
    "digits": {
        "dataset": "digits",
        "model": "digits-mlp",
        "examples-per-client": 75,
        "batch-size": 16,
        "delta": 1e-4,
    },
}
"""The paper's worlds; ``fashion-mnist-dnn``, ``cifar10-lenet`` and ``digits`` are additions.

``digits`` needs no data folder.
"""
BEST_WEIGHT = {10.0: 0.005, 100.0: 0.01}
"""λ* that the paper found, for each ε of Figures 3 and 4."""
SETTINGS = preset_settings("dp-ditto", "ditto-fig3-mnist-dnn") | {
    "partition": "pathological",
    "classes-per-client": 2,
    "batch-size": 32,
}
"""The paper's settings, and those that it does not print: division of the data and batches."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The part of the paper's experiments to run.

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
    seeds: Sequence[int] = (1, 2, 3)


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
    training_worlds=tuple(world for world in WORLDS if world != "digits"),
    examples=2500,
    rounds=(5, 10, 20, 30, 50, 80),
    planned_rounds=(10, 20, 40, 60, 80, 100),
)


def pilot(experiment: Experiment, changes: Config, seed: int) -> tuple[DittoProblem, float]:
    """Return the constants of Theorem 1 from a pilot run, and the app's noise of one round.

    The noise is the variance of an upload if the run has one round.
    """
    server, planner = (app_module("dp-ditto", name) for name in ("server_app", "planner"))
    config = experiment.config("pilot", changes, {"planner": "pilot", "seed": seed})
    settings = server.Settings.of(config)
    task = server.task_of(SimpleNamespace(run_config=config, node_config={}))
    problem = planner.problem_of(settings, task, planner.pilot_of(settings, task))
    return problem, server.plan_of(settings, 1).upload_stddev ** 2


def planned_rounds(
    experiment: Experiment, changes: Config, basis: Basis, most: int, seeds: Sequence[int]
) -> list[int]:
    """Return T* of the bound for each seed, under the app's noise; only a pilot run trains.

    0 means that no number of rounds improves on the start.
    """
    rounds = []
    for seed in seeds:
        problem, variance = pilot(experiment, changes, seed)
        schedule = best_schedule(
            problem,
            float(str(changes["global-weight"])),
            variance_per_round=variance,
            max_rounds=most,
            basis=basis,
        )
        rounds.append(schedule.rounds)
    return rounds


def length_settings(rounds: int) -> Config:
    """Return the settings of a run with so many rounds and one evaluation at its end."""
    return {"rounds": rounds, "evaluate-every": rounds}


def rate_settings(rate: float) -> Config:
    """Return the settings of one learning rate for the shared and the personal model."""
    return {"learning-rate": rate, "personal-learning-rate": rate}
