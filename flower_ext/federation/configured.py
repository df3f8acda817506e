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

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flower_ext.errors import InvalidValue
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
from flower_ext.privacy import (
    AdaptiveClipping,
    Budget,
    CorrelatedNoise,
    FixedSizeSampling,
    FullParticipation,
    NonPrivatePlan,
    PoissonSampling,
    PrivacyPlan,
    ReleasePlan,
    Sampling,
    SecureScores,
    SecureSum,
    SpacedSampling,
    calibrate_noise_multiplier,
    size_for_rate,
)
from flower_ext.privacy.queries.secure_scores import ACCURACY, Bounds
from flower_ext.privacy.theorems.dp2_fedsam_theorem import dp2_fedsam_theorem2_noise_multiplier
from flower_ext.runs.callbacks import Callback
from flower_ext.runs.settings import Settings, UnfitSetting, absolute_path
from flower_ext.runs.shared_settings import (
    ClientSettings,
    CohortSettings,
    PrivacySettings,
    ReleaseSettings,
    RunSettings,
    ServerSettings,
    TrainingSettings,
)
from flower_ext.training import LocalTraining, Task, check_shareable
from flower_ext.training.params import require_modules

AppSettings = TypeVar("AppSettings", bound=RunSettings)

_TRAINING = {f.name for f in fields(TrainingSettings)} & {f.name for f in fields(LocalTraining)}
"""Fields of `LocalTraining` that have a setting of the same name."""
_ADAPTIVE: Mapping[str, Any] = {"adagrad": Adagrad, "adam": Adam, "yogi": Yogi}


def settings(kind: type[AppSettings], context: Context) -> AppSettings:
    """Return the settings of a run, as an object of the app's class ``kind``.

    In a resumed run, ``rounds`` is the number with which the run began, because the noise was
    calibrated for this number.
    """
    return kind.of(first_config(context.run_config))


def sampling(settings: CohortSettings) -> Sampling:
    """Return the cohort sampling that the settings ``sampling…`` and ``clients`` describe."""
    clients, rate = settings.clients, settings.sampling_rate
    match settings.sampling:
        case "poisson":
            return PoissonSampling(population=clients, rate=rate)
        case "fixed-size":
            return FixedSizeSampling(population=clients, size=size_for_rate(clients, rate))
        case "everyone":
            return FullParticipation(population=clients)


def non_private_plan(settings: TrainingSettings, sampling: Sampling) -> NonPrivatePlan:
    """Return the plan under which the server averages sampled clients' updates without privacy.

    Raises
    ------
    UnfitSetting
        The settings ask for secure sums, which need clipped and noised updates.
    """
    if isinstance(settings, ReleaseSettings):
        for name in ("aggregation", "evaluation"):
            if getattr(settings, name) != "plain":
                raise _unfit(
                    settings,
                    name,
                    "'plain', because a secure sum adds up clipped and noised values, and this "
                    "method adds no noise",
                )
    return NonPrivatePlan(sampling=sampling, weighting=settings.weighting)


def release_plan(
    settings: ReleaseSettings,
    sampling: Sampling,
    *,
    of_users: bool = False,
    scores: Bounds = ACCURACY,
    **changes: Any,
) -> ReleasePlan:
    """Return the plan under which the server releases noised sums of sampled clients' updates.

    Without a ``noise_multiplier`` above 0, the function chooses the least noise with which the run
    spends at most ``epsilon``. The setting ``calibration`` says which bound on ε counts: the
    provable one or the published one. A ``delta`` of 0 means 1 / ``clients``; with ``of_users``,
    the plan gets ``delta`` unchanged.

    Parameters
    ----------
    of_users : bool
        True if the units are users with records in several silos.
    scores : tuple of (str, float, float)
        Metrics that a secure evaluation releases: the name, the least and the largest value of
        each. If ``evaluation_loss_bound`` is above 0, the evaluation releases the loss, too.
    **changes
        Fields of `ReleasePlan` that override the settings; ``noise_multiplier`` cannot be among
        them.
    """
    if isinstance(settings, TrainingSettings) and settings.weighting != "clients":
        why = "because a private mean weights all clients equally"
        raise _unfit(settings, "weighting", f"'clients', {why}")
    secure = SecureSum(
        colluding=settings.colluding_share,
        dropouts=settings.dropout_share,
        signed=settings.signed_sums,
    )
    clipping_norm: float | AdaptiveClipping = settings.clipping_norm
    if settings.clipping == "adaptive":
        clipping_norm = AdaptiveClipping(
            initial=settings.clipping_norm,
            quantile=settings.clipping_quantile,
            learning_rate=settings.clipping_learning_rate,
        )
    if not (settings.delta or of_users) and sampling.population == 1:
        raise UnfitSetting(
            f"run-config clients=1 with delta={settings.delta!r}: expected a delta in (0, 1), or "
            "more clients, because delta=0 stands for 1 / clients, which is 1 here"
        )
    options: dict[str, Any] = {
        "sampling": sampling,
        "clipping_norm": clipping_norm,
        "rounds": settings.rounds,
        "delta": settings.delta if settings.delta or of_users else 1 / sampling.population,
        "noise_placement": settings.noise_placement if settings.aggregation == "plain" else secure,
        **changes,
    }
    epsilon = settings.target
    if settings.noise == "correlated":
        options |= _correlated(settings, sampling, of_users=of_users)
    with _naming_settings(settings):
        if settings.evaluation == "secure":
            options["queries"] = (_secure_scores(settings, options, scores),)
        if epsilon is None:
            return ReleasePlan(noise_multiplier=settings.noise_multiplier, **options)
        if settings.calibration == "provable":
            return ReleasePlan.for_target(epsilon=epsilon, **options)
        for name, value in (("noise", "independent"), ("clipping", "fixed")):
            if getattr(settings, name) != value:
                why = f"because the published bound needs {name}={value!r}"
                raise _unfit(settings, "calibration", f"'provable', {why}", beside=name)
        multiplier = dp2_fedsam_theorem2_noise_multiplier(
            epsilon=epsilon,
            delta=options["delta"],
            rounds=options["rounds"],
            sampling_rate=sampling.sampling_rate,
        )
        return ReleasePlan(noise_multiplier=multiplier, **options)


def _correlated(settings: ReleaseSettings, sampling: Sampling, *, of_users: bool) -> dict[str, Any]:
    """Return the fields of a plan whose noise is correlated over rounds."""
    if of_users:
        raise _unfit(
            settings,
            "noise",
            "'independent', because correlated noise needs the number of a user's participations, "
            "which no server counts over silos",
        )
    if settings.aggregation != "plain":
        why = "because the noise of a client that drops out would be missing"
        raise _unfit(settings, "aggregation", f"'plain', {why}", beside="noise")
    clients = sampling.population
    size = size_for_rate(clients, sampling.sampling_rate)
    apart = settings.rounds_apart or clients // size
    most = settings.participations or -(-settings.rounds // apart)
    momentum = settings.server_momentum if isinstance(settings, ServerSettings) else 0.0
    with _naming_settings(settings):
        spaced = SpacedSampling(
            population=clients, size=size, rounds_apart=apart, participations=most
        )
        correlation = CorrelatedNoise(
            buffers=settings.noise_buffers, bands=settings.noise_bands, momentum=momentum
        )
    return {"sampling": spaced, "correlation": correlation}


def _secure_scores(
    settings: ReleaseSettings, options: Mapping[str, Any], scores: Bounds
) -> SecureScores:
    """Return the query by which evaluations release scores."""
    every, multiplier = settings.evaluate_every, settings.evaluation_noise_multiplier
    if not isinstance(options["noise_placement"], SecureSum):
        why = "because clients send scores in the same kind of secure sum as updates"
        expected = f"aggregation='secure', {why}"
        raise _unfit(settings, "evaluation", expected, beside="aggregation")
    if every < 1:
        raise _unfit(settings, "evaluation", "1 or more", beside="evaluate_every")
    evaluations = -(-settings.rounds // every)
    if not multiplier:
        if (epsilon := settings.target) is None:
            raise UnfitSetting(
                f"run-config evaluation-noise-multiplier={multiplier!r} without epsilon: expected "
                "a number > 0, or an epsilon as well, because 0 means the noise that spends "
                "evaluation-share * epsilon"
            )
        multiplier = calibrate_noise_multiplier(
            epsilon=settings.evaluation_share * epsilon,
            delta=options["delta"],
            sampling=FullParticipation(options["sampling"].population),
            rounds=evaluations,
            relation=options["sampling"].default_relation,
        )
    bound = settings.evaluation_loss_bound
    bounds = (*scores, ("loss", 0.0, bound)) if bound else scores
    return SecureScores(noise_multiplier=multiplier, times=evaluations, bounds=bounds)


def training(settings: TrainingSettings, **changes: Any) -> LocalTraining:
    """Return the local training that the settings describe; ``changes`` override its fields."""
    options = {name: getattr(settings, name) for name in _TRAINING}
    with _naming_settings(settings):
        return LocalTraining(**{"epochs": settings.local_epochs, **options, **changes})


def server(settings: ServerSettings, *, learning_rate: float | None = None) -> dict[str, Any]:
    """Return the arguments ``server`` (an optimiser) and ``average`` (of models) for a method.

    ``learning_rate`` overrides the setting ``server_learning_rate``.
    """
    rate = settings.server_learning_rate if learning_rate is None else learning_rate
    momentum, tau = settings.server_momentum, settings.server_tau
    if settings.average_decay and settings.average_last:
        raise _unfit(settings, "average_decay", "one of them to be 0", beside="average_last")
    average: ModelAverage | None = None
    if settings.average_decay:
        average = ExponentialAverage(decay=settings.average_decay)
    elif settings.average_last:
        average = TailAverage(last=settings.average_last)
    optimizer: ServerOptimizer = Sgd(learning_rate=rate, momentum=momentum)
    if (adaptive := _ADAPTIVE.get(settings.server_optimizer)) is not None:
        optimizer = adaptive(learning_rate=rate, beta1=momentum, tau=tau)
    return {"server": optimizer, "average": average}


def _unfit(settings: Settings, name: str, expected: str, *, beside: str = "method") -> UnfitSetting:
    """Return an error that says that the setting ``name`` does not fit the setting ``beside``.

    The error leaves out a setting that the app does not have.
    """
    named = [each for each in (name, beside) if hasattr(settings, each)]
    values = (f"{each.replace('_', '-')}={getattr(settings, each)!r}" for each in named)
    return UnfitSetting(f"run-config {' with '.join(values)}: expected {expected}")


@contextmanager
def _naming_settings(settings: Settings) -> Iterator[None]:
    """Replace an error about a field by an error about the setting of the same name."""
    try:
        yield
    except InvalidValue as error:
        field, separator, rest = str(error).partition("=")
        if not separator or not hasattr(settings, field):
            raise
        raise UnfitSetting(f"run-config {field.replace('_', '-')}={rest}") from error


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
    with recorded_run(config, "-".join(name) or "run", callbacks) as directory:
        require_modules("personal", method.personal, task.shapes, task.factory.facts.tied)
        check_shareable(task.model(), method.personal)
        limit = _calibrated_budget(settings, plan)
        # Do not check a wrapped strategy, because a wrapper need not train in every round.
        if directory.resumed and wrapper is None and limit is not None and last > settings.rounds:
            raise UnfitSetting(
                f"run-config rounds={last} of a resumed run: expected at most {settings.rounds}, "
                f"the number of rounds that spends epsilon={limit.epsilon:g} with this run's "
                "noise, which cannot change. To train longer under that epsilon, begin a new run: "
                f"leave out --resume, and give --set rounds={last}"
            )
        base.record_in(directory, limit=limit)
        record(
            directory,
            base if wrapper is None else wrapper(base),
            clients_of(grid, per_node),
            ArrayRecord(task.initial_params(settings.seed)),
            num_rounds=rounds,
            timeout=settings.round_timeout,
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
