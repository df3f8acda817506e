"""Choose the number of rounds of a run by the planner that its settings name.

``planner = "none"`` takes the setting ``rounds``. ``"bound"`` and ``"pilot"`` take T* of Theorem 1,
at most ``rounds``. They read the constants of the losses from the settings (``"bound"``) or from a
pilot run on the clients' records (``"pilot"``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from flwr.app import UserConfig

from flower_ext.algorithms.ditto.pilot import pilot_run
from flower_ext.federation.configured import BASES
from flower_ext.planning import DittoProblem, PilotEstimates, best_rounds
from flower_ext.privacy import PrivacyPlan, RecordLevelPlan
from flower_ext.runs.settings import UnfitSetting, choice, integer, number
from flower_ext.training import Task
from flower_ext.training.models import parameter_count

PILOT = (
    "a pilot run without noise on the clients' training records, which chose the number of rounds "
    "and left its constants in pilot.json (planner=bound or none turns this off)"
)
"""Text for a run's report: the release by a pilot run, which no guarantee covers."""


def pilot_of(config: UserConfig, task: Task) -> PilotEstimates | None:
    """Return the estimates of a pilot run on the clients' records; None for other planners.

    Raises
    ------
    UnfitSetting
        The settings ask for a planner with a method that its theorem does not cover.
    """
    planner = choice(config, "planner", ("none", "bound", "pilot"))
    if planner != "none" and config["method"] != "dp-ditto":
        raise UnfitSetting(
            f"run-config planner={planner!r} with method={config['method']!r}: expected "
            "method='dp-ditto', the only method that Theorem 1 covers, or planner='none'"
        )
    if planner != "pilot":
        return None
    return pilot_run(
        task,
        task.initial_params(integer(config, "seed")),
        [task.data(client).train for client in range(integer(config, "clients"))],
        rounds=integer(config, "pilot-rounds"),
        learning_rate=number(config, "pilot-learning-rate"),
    )


def problem_of(config: UserConfig, task: Task, pilot: PilotEstimates | None) -> DittoProblem:
    """Return the constants of Theorem 1; those of the losses from the pilot run or the settings.

    A setting ``gradient-bound`` or ``model-spread`` of 0 stands for an unknown value.
    """
    constants = pilot or PilotEstimates(
        strong_convexity=number(config, "strong-convexity"),
        smoothness=number(config, "smoothness"),
        initial_gap=number(config, "initial-gap"),
        initial_distance=number(config, "initial-distance"),
        gradient_bound=number(config, "gradient-bound") or float("inf"),
        model_spread=number(config, "model-spread") or float("inf"),
    )
    return DittoProblem(
        **asdict(constants),
        dimension=parameter_count(task.model()),
        num_clients=integer(config, "clients"),
        learning_rate=number(config, "learning-rate"),
        personal_learning_rate=number(config, "personal-learning-rate"),
    )


def planned_rounds(
    config: UserConfig,
    task: Task,
    pilot: PilotEstimates | None,
    plan_of: Callable[[int], PrivacyPlan],
) -> int:
    """Return T: the setting ``rounds``, or T* of Theorem 1 up to it, for the settings' λ and ε.

    Parameters
    ----------
    config : UserConfig
        The run's settings.
    task : Task
    pilot : PilotEstimates, optional
        Estimates of a pilot run; None takes the constants of the settings.
    plan_of : Callable[[int], PrivacyPlan]
        Function that returns the plan of a run of a given number of rounds.

    Raises
    ------
    UnfitSetting
        ``rounds`` is below 1, or no number of rounds improves the bound.
    """
    most, basis = integer(config, "rounds", least=1), choice(config, "calibration", BASES)
    if config["planner"] == "none":
        return most
    plan = plan_of(1)
    assert isinstance(plan, RecordLevelPlan)  # the plan of dp-ditto, which `pilot_of` requires
    planned = best_rounds(
        problem_of(config, task, pilot),
        global_weight=number(config, "global-weight"),
        variance_per_round=plan.upload_stddev**2,
        max_rounds=most,
        basis=basis,
    )
    if planned.rounds == 0:
        raise UnfitSetting(
            f"run-config planner={config['planner']!r}: no number of rounds improves the bound on "
            "the start; take a larger epsilon or other constants"
        )
    return planned.rounds
