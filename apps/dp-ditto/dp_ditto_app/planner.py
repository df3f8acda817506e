"""Choose the number of rounds of a run by the planner that its settings name.

``planner = "none"`` takes the setting ``rounds``. ``"bound"`` and ``"pilot"`` take T*, the number
of rounds up to ``rounds`` at which the bound of DP-Ditto's Theorem 1 is smallest. ``"bound"`` reads
the constants of the losses from the settings. ``"pilot"`` estimates them by a pilot run on the
clients' records. Both ``"bound"`` and ``"pilot"`` need the plug-in flower-ext-planner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dp_ditto_app.loss_constants import LossConstants
from dp_ditto_app.pilot import pilot_run
from dp_ditto_app.settings import Settings
from flower_ext.privacy import PrivacyPlan, RecordLevelPlan
from flower_ext.runs import RunDirectory
from flower_ext.runs.callbacks import Callback
from flower_ext.runs.settings import UnfitSetting
from flower_ext.training import Task

if TYPE_CHECKING:
    from flower_ext_planner.convergence import DittoProblem

PILOT = (
    "the number of rounds and the constants in pilot.toml, which a pilot run without noise "
    "computed from the clients' training records (planner=bound or none turns this off)"
)
"""Text for a run's report: the release by a pilot run, which no guarantee covers."""


@dataclass
class PilotFile(Callback):
    """Write the estimates of a pilot run to ``pilot.toml`` in the run directory."""

    pilot: LossConstants
    dimension: int

    def begin(self, run: RunDirectory) -> None:
        """Write ``pilot.toml`` when the run begins."""
        lines = self.pilot.lines(dimension=self.dimension)
        (run.path / "pilot.toml").write_text(lines, encoding="utf-8")


def pilot_of(settings: Settings, task: Task) -> LossConstants | None:
    """Return the estimates of a pilot run on the clients' records, or None without a pilot run.

    There is a pilot run only if the setting ``planner`` is ``"pilot"``.

    Raises
    ------
    UnfitSetting
        The settings combine a planner with a method that Theorem 1 does not cover, or the plug-in
        flower-ext-planner is not installed.
    """
    planner = settings.planner
    if planner != "none" and settings.method != "dp-ditto":
        raise UnfitSetting(
            f"run-config planner={planner!r} with method={settings.method!r}: expected "
            "method='dp-ditto', the only method that Theorem 1 covers, or planner='none'"
        )
    if planner != "none" and find_spec("flower_ext_planner") is None:
        raise UnfitSetting(
            f"run-config planner={planner!r} needs a plug-in: pip install flower-ext-planner, or "
            "./plugins/planner in a checkout; or take planner='none'"
        )
    if planner != "pilot":
        return None
    return pilot_run(
        task,
        task.initial_params(settings.seed),
        [task.data(client).train for client in range(settings.clients)],
        rounds=settings.pilot_rounds,
        learning_rate=settings.pilot_learning_rate,
    )


def problem_of(settings: Settings, task: Task, pilot: LossConstants | None) -> DittoProblem:
    """Return the constants of Theorem 1.

    The constants of the losses are ``pilot``, or come from the settings if ``pilot`` is None. A
    setting ``gradient-bound`` or ``model-spread`` of 0 says that the value is not known.
    """
    from flower_ext_planner.convergence import DittoProblem

    constants = pilot or LossConstants(
        strong_convexity=settings.strong_convexity,
        smoothness=settings.smoothness,
        initial_gap=settings.initial_gap,
        initial_distance=settings.initial_distance,
        gradient_bound=settings.gradient_bound or float("inf"),
        model_spread=settings.model_spread or float("inf"),
    )
    return DittoProblem(
        **asdict(constants),
        dimension=parameter_count(task),
        num_clients=settings.clients,
        learning_rate=settings.learning_rate,
        personal_learning_rate=settings.personal_learning_rate,
    )


def parameter_count(task: Task) -> int:
    """Return the number of scalars in the parameters of the task's model, trained or frozen."""
    return sum(p.numel() for p in task.model().parameters())


def planned_rounds(
    settings: Settings,
    task: Task,
    pilot: LossConstants | None,
    plan_of: Callable[[int], PrivacyPlan],
) -> int:
    """Return the number of rounds of the run.

    With ``planner = "none"`` it is the setting ``rounds``. With another planner it is T* of
    Theorem 1, for the λ and ε of the settings; T* is at most ``rounds``.

    Parameters
    ----------
    settings : Settings
    task : Task
    pilot : LossConstants, optional
        Estimates of a pilot run. If None, the constants come from the settings.
    plan_of : Callable[[int], PrivacyPlan]
        Function that returns the plan of a run of a given number of rounds.

    Raises
    ------
    UnfitSetting
        The plan is no `RecordLevelPlan`, or no number of rounds improves the bound.
    """
    most, basis = settings.rounds, settings.calibration
    if settings.planner == "none":
        return most
    from flower_ext_planner.search import best_schedule

    plan = plan_of(1)
    if not isinstance(plan, RecordLevelPlan):
        raise UnfitSetting(
            f"run-config planner={settings.planner!r} with a {type(plan).__name__}: expected "
            "planner='none', or a RecordLevelPlan: the planner rests on Theorem 1 of the DP-Ditto "
            "paper, which covers no other noise"
        )
    planned = best_schedule(
        problem_of(settings, task, pilot),
        settings.global_weight,
        variance_per_round=plan.upload_stddev**2,
        max_rounds=most,
        basis=basis,
    )
    if planned.rounds == 0:
        constants = ""
        if pilot is not None:
            lines = pilot.lines(dimension=parameter_count(task))
            constants = f". The pilot run found\n{lines}"
        raise UnfitSetting(
            f"run-config planner={settings.planner!r}: no number of rounds makes the bound of "
            f"Theorem 1 smaller than before training; take a larger epsilon, or "
            f"planner='none'{constants}"
        )
    return planned.rounds
