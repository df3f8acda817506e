"""Build the parts of a run from its settings, and start the run, in the ServerApp of any app.

An app's class of settings inherits the shared ones (`flower_ext.runs.shared_settings`)::

    @dataclass(frozen=True, kw_only=True)
    class Settings(RunSettings, CohortSettings, ReleaseSettings, TrainingSettings):
        ...

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = configured.settings(Settings, context)
        plan = configured.release_plan(settings, configured.sampling(settings))
        method = DPFedAvg(local=configured.training(settings))
        configured.start(grid, context, settings, task, method, plan)

Each function raises `UnfitSetting` if settings contradict each other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flower_ext.federation.configured_plans import (
    naming_settings,
    non_private_plan,
    release_plan,
    sampling,
    unfit,
)
from flower_ext.federation.engines.virtual import clients_of
from flower_ext.federation.method import Method
from flower_ext.federation.recording import first_config, record, recorded_run
from flower_ext.federation.server_optimizers import (
    Adagrad,
    Adam,
    ExponentialAverage,
    ModelAverage,
    ServerOptimizer,
    Sgd,
    TailAverage,
    Yogi,
)
from flower_ext.federation.strategy import FederatedStrategy
from flower_ext.privacy import Budget, PrivacyPlan
from flower_ext.runs.callbacks import Callback
from flower_ext.runs.settings import UnfitSetting, absolute_path
from flower_ext.runs.shared_settings import (
    ClientSettings,
    PrivacySettings,
    ReleaseSettings,
    RunSettings,
    ServerSettings,
    TrainingSettings,
)
from flower_ext.training import LocalTraining, Task, check_shareable
from flower_ext.training.params import require_modules

__all__ = [
    "non_private_plan",
    "release_plan",
    "sampling",
    "server",
    "settings",
    "start",
    "training",
]

AppSettings = TypeVar("AppSettings", bound=RunSettings)

_TRAINING = {f.name for f in fields(TrainingSettings)} & {f.name for f in fields(LocalTraining)}
"""Fields of `LocalTraining` that have a setting of the same name."""
_ADAPTIVE: Mapping[str, Any] = {"adagrad": Adagrad, "adam": Adam, "yogi": Yogi}


def settings(kind: type[AppSettings], context: Context) -> AppSettings:
    """Return the settings of a run, as an object of the app's class ``kind``.

    In a resumed run, ``rounds`` is the number of rounds that was set when the run first began,
    because the noise was calibrated for this number.
    """
    return kind.of(first_config(context.run_config))


def training(settings: TrainingSettings, **changes: Any) -> LocalTraining:
    """Return the local training that the settings describe; ``changes`` override its fields."""
    options = {name: getattr(settings, name) for name in _TRAINING}
    with naming_settings(settings):
        return LocalTraining(**{"epochs": settings.local_epochs, **options, **changes})


def server(settings: ServerSettings, *, learning_rate: float | None = None) -> dict[str, Any]:
    """Return the arguments ``server`` (an optimizer) and ``average`` (of models) for a method.

    ``learning_rate`` overrides the setting ``server_learning_rate``.
    """
    rate = settings.server_learning_rate if learning_rate is None else learning_rate
    momentum, tau = settings.server_momentum, settings.server_tau
    if settings.average_decay and settings.average_last:
        raise unfit(settings, "average_decay", "one of them to be 0", beside="average_last")
    average: ModelAverage | None = None
    if settings.average_decay:
        average = ExponentialAverage(decay=settings.average_decay)
    elif settings.average_last:
        average = TailAverage(last=settings.average_last)
    optimizer: ServerOptimizer = Sgd(learning_rate=rate, momentum=momentum)
    if (adaptive := _ADAPTIVE.get(settings.server_optimizer)) is not None:
        optimizer = adaptive(learning_rate=rate, beta1=momentum, tau=tau)
    return {"server": optimizer, "average": average}


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

    A run with privacy may end early. It ends before its provable ε would exceed ``budget`` (0
    means no budget), or the ``epsilon`` for which its noise is provably calibrated. It also ends
    when all runs that share the account ``budget_ledger`` have spent the account's budget. If the
    plan is a `ReleasePlan`, the run's ledger records its releases.

    Parameters
    ----------
    wrapper : Callable[[FederatedStrategy], Strategy], optional
        Wraps the strategy, as `Upcycled` does; the result has the strategy as its ``base``.
    planned_rounds : int, optional
        Number of rounds that a planner chose in place of ``rounds``; the run directory records it.
    notes : Mapping, optional
        Further entries to record in addition to the settings.
    callbacks : Sequence[Callback]
        User code that the run calls when it begins, after each round, and when it ends.
    **options
        Options of `FederatedStrategy` that no setting names: ``sum``, ``stragglers``,
        ``disclosures``.

    Raises
    ------
    UnshareableModel
        A layer that clients would share keeps statistics of their data.
    InvalidValue
        The method does not fit the plan, or names a ``personal`` part that the model lacks; or
        `recorded_run` refuses the settings.
    """
    config = {**context.run_config, **(notes or {})}
    # ``settings`` has the rounds for which the noise was calibrated; a resumed run may have more.
    number: Any = context.run_config["rounds"]
    last = replace(settings, rounds=number).rounds  # refuses an invalid number
    rounds = last
    if planned_rounds is not None:
        rounds += planned_rounds - settings.rounds
        config["planned-rounds"] = planned_rounds
    base = _strategy(settings, task, method, plan, options)
    per_node = settings.clients_per_node if isinstance(settings, ClientSettings) else 1
    name = [str(config[part]) for part in ("method", "dataset") if part in config]
    with recorded_run(config, "-".join(name) or "run", callbacks) as directory:
        require_modules("personal", method.personal, task.shapes, task.factory.facts.tied)
        check_shareable(task.model(), method.personal)
        limit = _calibrated_budget(settings, plan)
        # Do not check a wrapped strategy, because a wrapper need not train in every round.
        if directory.resumed and wrapper is None and limit is not None:
            _check_rounds(last, settings.rounds, limit)
        base.record_in(directory, limit=limit)
        record(
            directory,
            base if wrapper is None else wrapper(base),
            clients_of(grid, per_node),
            ArrayRecord(task.initial_params(settings.seed)),
            num_rounds=rounds,
            timeout=settings.round_timeout,
        )


def _strategy(
    settings: RunSettings, task: Task, method: Method, plan: PrivacyPlan, options: Mapping[str, Any]
) -> FederatedStrategy:
    key_file = settings.state_key_file if isinstance(settings, ReleaseSettings) else ""
    return FederatedStrategy(
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


def _check_rounds(last: int, planned: int, limit: Budget) -> None:
    """Refuse a resumed run with more rounds than those for which its noise was calibrated."""
    if last > planned:
        raise UnfitSetting(
            f"run-config rounds={last} of a resumed run: expected at most {planned}, the number of "
            f"rounds that spends epsilon={limit.epsilon:g} with this run's noise, which cannot "
            "change. To train longer under that epsilon, begin a new run: leave out --resume, and "
            f"give --set rounds={last}"
        )


def _budget(settings: RunSettings, plan: PrivacyPlan) -> Budget | None:
    """Return the budget in the settings: a shared account's budget, or one for this run alone."""
    if not isinstance(settings, PrivacySettings):
        return None
    if (path := absolute_path(settings.budget_ledger)) is None:
        if not settings.budget or plan.delta is None:
            return None
        return Budget(epsilon=settings.budget, delta=settings.delta or plan.delta)
    epsilon, delta = settings.population_epsilon, settings.population_delta
    for name, value in (("population-epsilon", epsilon), ("population-delta", delta)):
        if not value:
            raise UnfitSetting(
                f"run-config {name}={value!r} with a budget-ledger: expected a number > 0"
            )
    return Budget(epsilon=epsilon, delta=delta, ledger=path)


def _calibrated_budget(settings: RunSettings, plan: PrivacyPlan) -> Budget | None:
    """Return the ε and δ for which the noise was provably calibrated; None without such values."""
    if not isinstance(settings, PrivacySettings) or settings.calibration != "provable":
        return None
    if settings.target is None or plan.rounds is None:
        return None
    assert plan.delta is not None  # noise was chosen for it
    return Budget(epsilon=settings.target, delta=plan.delta)
