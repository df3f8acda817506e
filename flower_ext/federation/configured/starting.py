"""Start a run in the ServerApp of an app, with the budgets that its settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flower_ext.federation.engines.virtual import clients_of
from flower_ext.federation.method import Method
from flower_ext.federation.recording import record, recorded_run
from flower_ext.federation.strategy import FederatedStrategy
from flower_ext.privacy import Budget, PrivacyPlan
from flower_ext.runs.callbacks import Callback
from flower_ext.runs.settings import UnfitSetting, absolute_path
from flower_ext.runs.shared_settings import (
    ClientSettings,
    PrivacySettings,
    ReleaseSettings,
    RunSettings,
)
from flower_ext.training import Task, check_shareable
from flower_ext.training.params import require_modules


def start(
    grid: Grid,
    context: Context,
    settings: RunSettings,
    task: Task,
    method: Method,
    plan: PrivacyPlan,
    *,
    wrapper: Callable[[FederatedStrategy], Strategy] | None = None,
    planned_rounds: int | None = None,
    notes: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> None:
    """Run a method under a plan for ``rounds`` rounds in a run directory, and write its report.

    A run with privacy may end early. It ends when its provable ε reaches ``budget`` (0 means no
    budget), or the ``epsilon`` for which its noise is provably calibrated. It also ends when all
    runs that share the account ``budget_ledger`` have spent the account's budget. If the plan is a
    `ReleasePlan`, the run's ledger records its releases.

    Parameters
    ----------
    grid, context
        The arguments of the ServerApp.
    settings : RunSettings
        The run's settings.
    task : Task
    method : Method
    plan : PrivacyPlan
    wrapper : Callable[[FederatedStrategy], Strategy], optional
        Wraps the strategy, as `Upcycled` does; the result has the strategy as its ``base``.
    planned_rounds : int, optional
        Number of rounds that a planner chose in place of ``rounds``; the run directory records it.
    notes : Mapping, optional
        Further entries to record in addition to the settings.
    callbacks : Sequence[Callback]
        User code that the run calls when it begins, after each round, and when it ends.
    **options
        Options of `FederatedStrategy` that no setting names: ``sum``, ``stragglers``, ``exposed``.

    Raises
    ------
    UnshareableModel
        A layer that clients would share keeps statistics of their data.
    InvalidValue
        The method does not fit the plan, or names a ``personal`` part that the model lacks; or
        `recorded_run` refuses the settings.
    """
    config = {**context.run_config, **(notes or {})}
    # The settings are those that the noise was calibrated for; a resumed run may be longer.
    number: Any = context.run_config["rounds"]
    last = replace(settings, rounds=number).rounds  # checks the number of a resumed run, too
    rounds = last
    if planned_rounds is not None:
        rounds += planned_rounds - settings.rounds
        config["planned-rounds"] = planned_rounds
    key_file = settings.state_key_file if isinstance(settings, ReleaseSettings) else ""
    per_node = settings.clients_per_node if isinstance(settings, ClientSettings) else 1
    base = FederatedStrategy(
        method,
        plan,
        seed=settings.seed or None,
        seeded_noise=settings.seeded_noise,
        evaluate_every=settings.evaluate_every,
        training_loss=settings.training_loss,
        diagnostics=settings.diagnostics,
        timeout=settings.connect_timeout,
        budget=_budget(settings, plan),
        # Nodes whose frozen part differs are refused before the first round.
        frozen=task.fingerprint,
        state_key_file=absolute_path(key_file),
        **options,
    )
    name = [str(config[part]) for part in ("method", "dataset") if part in config]
    with recorded_run(config, "-".join(name) or "run", callbacks) as run:
        require_modules("personal", method.personal, task.shapes, task.factory.facts.tied)
        check_shareable(task.model(), method.personal)
        limit = _calibrated_budget(settings, plan)
        # Do not check a wrapped strategy, because a wrapper need not train in every round.
        if run.resumed and wrapper is None and limit is not None and last > settings.rounds:
            raise UnfitSetting(
                f"run-config rounds={last} of a resumed run: expected at most {settings.rounds}, "
                f"because so many rounds spend epsilon={limit.epsilon:g} with the noise of this "
                "run, which cannot change. To train longer under that epsilon, begin a new run: "
                f"leave out --resume, and give --set rounds={last}"
            )
        base.record_in(run, limit=limit)
        record(
            run,
            base if wrapper is None else wrapper(base),
            clients_of(grid, per_node),
            ArrayRecord(task.initial_params(settings.seed)),
            num_rounds=rounds,
            timeout=settings.round_timeout,
        )


def _budget(settings: RunSettings, plan: PrivacyPlan) -> Budget | None:
    """Return the budget in the settings: that of a shared account, or of this run alone.

    The budget is None if the settings limit neither.

    Raises
    ------
    UnfitSetting
        The settings name an account, but lack the account's ε or δ.
    """
    if not isinstance(settings, PrivacySettings):
        return None
    if (path := absolute_path(settings.budget_ledger)) is None:
        is_limited = settings.budget and plan.delta is not None
        return Budget(epsilon=settings.budget, delta=settings.delta) if is_limited else None
    epsilon, delta = settings.population_epsilon, settings.population_delta
    for name, value in (("population-epsilon", epsilon), ("population-delta", delta)):
        if not value:
            raise UnfitSetting(
                f"run-config {name}={value!r} with a budget-ledger: expected a number > 0"
            )
    return Budget(epsilon=epsilon, delta=delta, ledger=path)


def _calibrated_budget(settings: RunSettings, plan: PrivacyPlan) -> Budget | None:
    """Return the ε and δ that the run's noise was chosen to keep provably, as a budget.

    Return None if the settings do not choose the noise in this way.
    """
    if not isinstance(settings, PrivacySettings) or settings.calibration != "provable":
        return None
    if settings.target is None or plan.rounds is None:
        return None
    assert plan.delta is not None  # noise was chosen for it
    return Budget(epsilon=settings.target, delta=plan.delta)
