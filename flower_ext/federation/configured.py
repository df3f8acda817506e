"""Build the parts of a run from its settings, and start the run, in the ServerApp of any app.

An app's class of settings inherits the shared ones (`flower_ext.runs.shared_settings`)::

    @dataclass(frozen=True, kw_only=True)
    class Settings(RunSettings, CohortSettings, ReleaseSettings, TrainingSettings):
        ...

    def strategy_of(settings: Settings, run: RunDirectory) -> FederatedStrategy:
        plan = configured.release_plan(settings, configured.sampling(settings))
        local = configured.training(settings)
        return FederatedStrategy(DPFedAvg(local=local), **configured.options(settings, run, plan))

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        configured.start(grid, context, Settings, task, strategy_of)

Each function raises `UnfitSetting` if settings contradict each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flower_ext.errors import InvalidValue
from flower_ext.federation.engines.virtual import clients_of
from flower_ext.federation.recording import base_of, first_config, record, recorded_run
from flower_ext.privacy import (
    Budget,
    FixedSizeSampling,
    FullParticipation,
    NonPrivatePlan,
    PoissonSampling,
    PrivacyPlan,
    RecordLevelPlan,
    ReleasePlan,
    Sampling,
    SecureScores,
    SecureSum,
    calibrate_noise_multiplier,
    size_for_rate,
)
from flower_ext.privacy.accounting.calibration import default_relation
from flower_ext.privacy.mechanisms.secure_scores import ACCURACY
from flower_ext.privacy.theorems.dp2_fedsam_theorem import dp2_fedsam_theorem2_noise_multiplier
from flower_ext.runs import RunDirectory
from flower_ext.runs.callbacks import Callback
from flower_ext.runs.settings import Settings, UnfitSetting, absolute_path
from flower_ext.runs.shared_settings import (
    CohortSettings,
    PrivacySettings,
    ReleaseSettings,
    RunSettings,
    TrainingSettings,
)
from flower_ext.training import LocalTraining, Task, check_shareable
from flower_ext.training.params import require_modules

AppSettings = TypeVar("AppSettings", bound=RunSettings)


@contextmanager
def _naming_settings(settings: Settings) -> Iterator[None]:
    """Name the setting in the refusal of a field that has the setting's name."""
    try:
        yield
    except InvalidValue as error:
        field, separator, rest = str(error).partition("=")
        if not separator or not hasattr(settings, field):
            raise
        raise UnfitSetting(f"run-config {field.replace('_', '-')}={rest}") from error


def sampling(settings: CohortSettings) -> Sampling:
    """Return the sampling of cohorts, from ``clients``, ``sampling`` and ``sampling_rate``."""
    clients, rate = settings.clients, settings.sampling_rate
    match settings.sampling:
        case "poisson":
            return PoissonSampling(population=clients, rate=rate)
        case "fixed-size":
            return FixedSizeSampling(population=clients, size=size_for_rate(clients, rate))
        case "everyone":
            return FullParticipation(population=clients)


def training(settings: TrainingSettings, **changes: Any) -> LocalTraining:
    """Return the local training; ``changes`` are fields of `LocalTraining` that override them."""
    same = ("batch_size", "learning_rate", "learning_rate_decay", "momentum", "optimizer")
    options = {name: getattr(settings, name) for name in (*same, "weight_decay")}
    options["epochs"] = settings.local_epochs
    with _naming_settings(settings):
        return LocalTraining(**{**options, **changes})


def non_private_plan(settings: TrainingSettings, sampling: Sampling) -> NonPrivatePlan:
    """Return the plan of a mean over sampled clients, without privacy.

    Raises
    ------
    UnfitSetting
        The settings ask for secure sums, which need clipped and noised updates.
    """
    for name in ("aggregation", "evaluation"):
        if getattr(settings, name, "plain") != "plain":
            raise UnfitSetting(
                f"run-config {name}='secure'{_with_method(settings)}: expected 'plain', because "
                "secure sums are of clipped and noised values, and this method noises nothing"
            )
    return NonPrivatePlan(sampling=sampling, weighting=settings.weighting)


def release_plan(
    settings: ReleaseSettings, sampling: Sampling, *, of_users: bool = False, **changes: Any
) -> ReleasePlan:
    """Return the plan under which the server releases noised sums of sampled clients' updates.

    Without a ``noise_multiplier`` above 0, the function chooses the least noise that keeps
    ``epsilon``. The setting ``calibration`` says by which bound: the provable one, or the published
    one. A ``delta`` of 0 stands for one over the number of clients, but not for a plan of users.

    Parameters
    ----------
    settings : ReleaseSettings
    sampling : Sampling
    of_users : bool
        True if the units are users with records in several silos.
    **changes
        Fields of `ReleasePlan` that override the settings; ``noise_multiplier`` cannot be among
        them.
    """
    if (weighting := getattr(settings, "weighting", "clients")) != "clients":
        raise UnfitSetting(
            f"run-config weighting={weighting!r}{_with_method(settings)}: expected 'clients', "
            "because a private mean weights all clients equally"
        )
    secure = SecureSum(colluding=settings.colluding_share, dropouts=settings.dropout_share)
    options: dict[str, Any] = {
        "sampling": sampling,
        "clipping_norm": settings.clipping_norm,
        "rounds": settings.rounds,
        "delta": settings.delta if of_users else _delta(settings, sampling),
        "noise_placement": settings.noise_placement if settings.aggregation == "plain" else secure,
        **changes,
    }
    epsilon = settings.target
    with _naming_settings(settings):
        if settings.evaluation == "secure":
            options["queries"] = (_secure_scores(settings, options),)
        if epsilon is None:
            return ReleasePlan(noise_multiplier=settings.noise_multiplier, **options)
        if settings.calibration == "provable":
            return ReleasePlan.for_target(epsilon=epsilon, **options)
        multiplier = dp2_fedsam_theorem2_noise_multiplier(
            epsilon=epsilon,
            delta=options["delta"],
            rounds=options["rounds"],
            sampling_rate=sampling.sampling_rate,
        )
        return ReleasePlan(noise_multiplier=multiplier, **options)


def _delta(settings: PrivacySettings, sampling: Sampling) -> float:
    if settings.delta:
        return settings.delta
    if sampling.population == 1:
        raise UnfitSetting(
            f"run-config clients=1 with delta={settings.delta!r}: expected a delta in (0, 1), or "
            "more clients, because delta=0 stands for 1 / clients"
        )
    return 1 / sampling.population


def _secure_scores(settings: ReleaseSettings, options: Mapping[str, Any]) -> SecureScores:
    """Return how evaluations release scores, by the settings beside ``evaluation``."""
    every, multiplier = settings.evaluate_every, settings.evaluation_noise_multiplier
    if not isinstance(options["noise_placement"], SecureSum):
        raise UnfitSetting(
            "run-config evaluation='secure' with aggregation='plain': expected "
            "aggregation='secure', because clients send scores in the same kind of secure sum as "
            "updates"
        )
    if every < 1:
        raise UnfitSetting(
            f"run-config evaluation='secure' with evaluate-every={every!r}: expected 1 or more"
        )
    evaluations = -(-settings.rounds // every)
    if not multiplier:
        if (epsilon := settings.target) is None:
            raise UnfitSetting(
                f"run-config evaluation-noise-multiplier={multiplier!r} without epsilon: expected "
                "a number > 0, because evaluations have no share of an epsilon"
            )
        multiplier = calibrate_noise_multiplier(
            epsilon=settings.evaluation_share * epsilon,
            delta=options["delta"],
            sampling=FullParticipation(options["sampling"].population),
            rounds=evaluations,
            relation=default_relation(options["sampling"]),
        )
    bound = settings.evaluation_loss_bound
    bounds = (*ACCURACY, ("loss", 0.0, bound)) if bound else ACCURACY
    return SecureScores(noise_multiplier=multiplier, times=evaluations, bounds=bounds)


def _with_method(settings: Settings) -> str:
    """Name the method in a message, if the app has several."""
    method = getattr(settings, "method", None)
    return "" if method is None else f" with method={method!r}"


def options(
    settings: RunSettings, run: RunDirectory, plan: PrivacyPlan | None = None
) -> dict[str, Any]:
    """Return the options that every strategy takes.

    A run with privacy ends at the provable ε ``budget`` (0: none), at the ``epsilon`` for which its
    noise is provably calibrated, or at the budget of all runs that share the account
    ``budget_ledger``. The run's ledger records the releases of a `ReleasePlan`.

    Parameters
    ----------
    settings : RunSettings
    run : RunDirectory
    plan : PrivacyPlan, optional
        The strategy's plan; None if the strategy makes its own.
    """
    same = ("seeded_noise", "evaluate_every", "training_loss", "diagnostics")
    options: dict[str, Any] = {name: getattr(settings, name) for name in same}
    options |= {
        "seed": settings.seed or None,
        "timeout": settings.connect_timeout,
        "budget": None,
        "run": run,
    }
    if plan is not None:
        options["plan"] = plan
    if not isinstance(settings, PrivacySettings):
        return options
    budget = target = None
    if settings.budget and not isinstance(plan, NonPrivatePlan):
        budget = Budget(epsilon=settings.budget, delta=settings.delta)
    if _is_calibrated(settings, plan) and settings.target is not None:
        assert isinstance(plan, ReleasePlan | RecordLevelPlan)
        target = Budget(epsilon=settings.target, delta=plan.delta)
    if isinstance(plan, ReleasePlan):
        # The ledger ends the run at this ε, so the strategy needs no budget for it.
        options["ledger"], target = run.open_ledger(budget=target), None
    return {**options, "budget": _shared_budget(settings) or budget or target}


def _is_calibrated(settings: PrivacySettings, plan: PrivacyPlan | None) -> bool:
    return isinstance(plan, ReleasePlan | RecordLevelPlan) and settings.calibration == "provable"


def _shared_budget(settings: PrivacySettings) -> Budget | None:
    """Return the budget of all runs that share an account; None if the settings name none."""
    if (path := absolute_path(settings.budget_ledger)) is None:
        return None
    for name in ("population_epsilon", "population_delta"):
        if not getattr(settings, name):
            raise UnfitSetting(
                f"run-config {name.replace('_', '-')}={getattr(settings, name)!r} with a "
                "budget-ledger: expected a number > 0"
            )
    return Budget(epsilon=settings.population_epsilon, delta=settings.population_delta, ledger=path)


def begun(kind: type[AppSettings], context: Context) -> AppSettings:
    """Return the settings from which to build a resumed run's plan: its first number of rounds."""
    return kind.of(first_config(context.run_config))


def start(
    grid: Grid,
    context: Context,
    kind: type[AppSettings],
    task: Task,
    strategy_of: Callable[[AppSettings, RunDirectory], Strategy],
    *,
    planned_rounds: int | None = None,
    notes: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Run a strategy for ``rounds`` rounds in a run directory, and write its report there.

    Parameters
    ----------
    grid, context
        The arguments of the ServerApp.
    kind : type[AppSettings]
        The app's class of settings.
    task : Task
    strategy_of : Callable[[AppSettings, RunDirectory], Strategy]
        Function that takes the settings with which the run began, and its directory. It returns a
        strategy of this package, or a wrapper whose ``base`` is such a strategy.
    planned_rounds : int, optional
        Number of rounds that a planner chose in place of ``rounds``; the run directory records it.
    notes : Mapping, optional
        Further entries to record beside the settings.
    callbacks : Sequence[Callback]
        Callbacks that follow the run.

    Raises
    ------
    UnshareableModel
        A layer that clients would share keeps statistics of their data.
    InvalidValue
        The strategy is not of this package, a name in its ``personal`` matches no part of the
        model, or `recorded_run` refuses the settings.
    """
    config = first_config(context.run_config)
    settings = kind.of(config)
    # The settings are those that the noise was calibrated for; a resumed run may be longer.
    number: Any = context.run_config["rounds"]
    last = replace(settings, rounds=number).rounds  # checks the number of a resumed run, too
    rounds, recorded = last, {**config, **(notes or {})}
    if planned_rounds is not None:
        rounds += planned_rounds - settings.rounds
        recorded["planned-rounds"] = planned_rounds
    name = [str(config[part]) for part in ("method", "dataset") if part in config]
    with recorded_run(recorded, "-".join(name) or "run", callbacks) as run:
        strategy = strategy_of(settings, run)
        base = base_of(strategy)
        require_modules("personal", base.method.personal, task.shapes, task.factory.facts.tied)
        check_shareable(task.model(), base.method.personal)
        # Nodes whose frozen part differs are refused before the first round.
        base.run.frozen = base.run.frozen or task.fingerprint
        if run.resumed and strategy is base:  # a wrapper need not train in every round
            _refuse_more_rounds(settings, last, base.run.plan)
        record(
            run,
            strategy,
            clients_of(grid, getattr(settings, "clients_per_node", 1)),
            ArrayRecord(task.initial_params(settings.seed)),
            num_rounds=rounds,
            timeout=settings.round_timeout,
        )


def _refuse_more_rounds(settings: RunSettings, rounds: int, plan: PrivacyPlan) -> None:
    """Refuse to extend a run whose budget is the ε for which its noise was calibrated."""
    if not isinstance(settings, PrivacySettings) or not _is_calibrated(settings, plan):
        return
    first, epsilon = settings.rounds, settings.target
    if epsilon is None or rounds <= first:
        return
    raise UnfitSetting(
        f"run-config rounds={rounds} of a resumed run: expected at most {first}, because its "
        f"noise stays as it is and spends epsilon={epsilon:g} in these rounds. To train longer "
        f"under that epsilon, begin a new run: leave out --resume, and give --set rounds={rounds}"
    )
