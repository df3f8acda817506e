"""Build the parts of a run from its settings: sampling, plan, local training, and server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, runtime_checkable

from flwr.app import Context

from flower_ext.errors import InvalidValue
from flower_ext.federation.recording import first_config
from flower_ext.federation.server_optimizers import (
    Adagrad,
    Adam,
    ExponentialAverage,
    ModelAverage,
    Sgd,
    TailAverage,
    Yogi,
)
from flower_ext.privacy import (
    AdaptiveClipping,
    CorrelatedNoise,
    FixedSizeSampling,
    FullParticipation,
    NonPrivatePlan,
    PoissonSampling,
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
from flower_ext.runs.settings import Settings, UnfitSetting
from flower_ext.runs.shared_settings import (
    CohortSettings,
    PrivacySettings,
    ReleaseSettings,
    RunSettings,
    ServerSettings,
    TrainingSettings,
)
from flower_ext.training import LocalTraining

AppSettings = TypeVar("AppSettings", bound=RunSettings)

_ADAPTIVE: Mapping[str, Any] = {"adagrad": Adagrad, "adam": Adam, "yogi": Yogi}


def settings(kind: type[AppSettings], context: Context) -> AppSettings:
    """Return the settings of a run.

    In a resumed run, ``rounds`` is the number with which the run began: its noise fits this number.

    Parameters
    ----------
    kind : type[AppSettings]
        The app's class of settings.
    context : Context
        The argument of the ServerApp.
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
        sums = {"aggregation": settings.aggregation, "evaluation": settings.evaluation}
        for name, value in sums.items():
            if value != "plain":
                raise UnfitSetting(
                    f"run-config {name}={value!r}{_with_method(settings)}: expected 'plain', "
                    "because a secure sum adds up clipped and noised values, and this method adds "
                    "no noise"
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

    Without a ``noise_multiplier`` above 0, the function chooses the least noise that keeps
    ``epsilon``. The setting ``calibration`` says which bound on ε counts: the provable one or the
    published one. A ``delta`` of 0 means 1 / ``clients``; with ``of_users``, the plan gets
    ``delta`` unchanged.

    Parameters
    ----------
    settings : ReleaseSettings
    sampling : Sampling
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
        raise UnfitSetting(
            f"run-config weighting={settings.weighting!r}{_with_method(settings)}: expected "
            "'clients', because a private mean weights all clients equally"
        )
    secure = SecureSum(
        colluding=settings.colluding_share,
        dropouts=settings.dropout_share,
        signed=settings.signed_sums,
    )
    options: dict[str, Any] = {
        "sampling": sampling,
        "clipping_norm": _clipping_norm(settings),
        "rounds": settings.rounds,
        "delta": settings.delta if of_users else _delta(settings, sampling),
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
        for name, chosen, value in (
            ("noise", settings.noise, "independent"),
            ("clipping", settings.clipping, "fixed"),
        ):
            if chosen != value:
                raise UnfitSetting(
                    f"run-config calibration='published' with {name}={chosen!r}: expected "
                    f"'provable', because the published bound needs {name}={value!r}"
                )
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
        raise UnfitSetting(
            f"run-config noise='correlated'{_with_method(settings)}: expected 'independent', "
            "because correlated noise needs the number of a user's participations, which no server "
            "counts over silos"
        )
    if settings.aggregation != "plain":
        raise UnfitSetting(
            f"run-config aggregation={settings.aggregation!r} with noise='correlated': expected "
            "'plain', because the noise of a client that drops out would be missing"
        )
    clients = sampling.population
    size = size_for_rate(clients, sampling.sampling_rate)
    apart = settings.rounds_apart or clients // size
    most = settings.participations or -(-settings.rounds // apart)
    momentum = settings.server_momentum if isinstance(settings, ServerSettings) else 0.0
    with _naming_settings(settings):
        return {
            "sampling": SpacedSampling(
                population=clients, size=size, rounds_apart=apart, participations=most
            ),
            "correlation": CorrelatedNoise(
                buffers=settings.noise_buffers,
                bands=settings.noise_bands,
                momentum=momentum,
            ),
        }


def _clipping_norm(settings: ReleaseSettings) -> float | AdaptiveClipping:
    if settings.clipping == "fixed":
        return settings.clipping_norm
    return AdaptiveClipping(
        initial=settings.clipping_norm,
        quantile=settings.clipping_quantile,
        learning_rate=settings.clipping_learning_rate,
    )


def _delta(settings: PrivacySettings, sampling: Sampling) -> float:
    if settings.delta:
        return settings.delta
    if sampling.population == 1:
        raise UnfitSetting(
            f"run-config clients=1 with delta={settings.delta!r}: expected a delta in (0, 1), or "
            "more clients, because delta=0 stands for 1 / clients, which is 1 here"
        )
    return 1 / sampling.population


def _secure_scores(
    settings: ReleaseSettings, options: Mapping[str, Any], scores: Bounds
) -> SecureScores:
    """Return the query by which evaluations release scores.

    The settings whose names begin with ``evaluation_`` determine it.
    """
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
    options: dict[str, Any] = {
        "epochs": settings.local_epochs,
        "batch_size": settings.batch_size,
        "learning_rate": settings.learning_rate,
        "learning_rate_decay": settings.learning_rate_decay,
        "momentum": settings.momentum,
        "optimizer": settings.optimizer,
        "weight_decay": settings.weight_decay,
    }
    with _naming_settings(settings):
        return LocalTraining(**{**options, **changes})


def server(settings: ServerSettings, *, learning_rate: float | None = None) -> dict[str, Any]:
    """Return a method's options ``server`` (its optimiser) and ``average`` (of its models).

    ``learning_rate`` overrides the setting ``server_learning_rate``.

    Raises
    ------
    UnfitSetting
        Both ``average_decay`` and ``average_last`` are set, but a method has only one average.
    """
    rate = settings.server_learning_rate if learning_rate is None else learning_rate
    momentum, tau = settings.server_momentum, settings.server_tau
    if settings.average_decay and settings.average_last:
        raise UnfitSetting(
            f"run-config average-decay={settings.average_decay!r} with "
            f"average-last={settings.average_last!r}: expected one of them to be 0"
        )
    average: ModelAverage | None = None
    if settings.average_decay:
        average = ExponentialAverage(decay=settings.average_decay)
    elif settings.average_last:
        average = TailAverage(last=settings.average_last)
    if (kind := _ADAPTIVE.get(settings.server_optimizer)) is not None:
        return {"server": kind(learning_rate=rate, beta1=momentum, tau=tau), "average": average}
    return {"server": Sgd(learning_rate=rate, momentum=momentum), "average": average}


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


@runtime_checkable
class _SeveralMethods(Protocol):
    """Settings of an app that has several methods; the setting ``method`` names the one to run."""

    method: str


def _with_method(settings: Settings) -> str:
    """Return words for a message that name the method; empty if the app has only one method."""
    return f" with method={settings.method!r}" if isinstance(settings, _SeveralMethods) else ""
