"""Build a run's sampling and privacy plan from its settings; apps import them from `configured`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flower_ext.errors import InvalidValue
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
    ReleaseSettings,
    ServerSettings,
    TrainingSettings,
)


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
        The settings ask for secure sums, but these need clipped and noised updates.
    """
    if isinstance(settings, ReleaseSettings):
        for name in ("aggregation", "evaluation"):
            if getattr(settings, name) != "plain":
                raise unfit(
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
    ``delta`` has no such default.

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
        raise unfit(settings, "weighting", f"'clients', {why}")
    options = {**_common_fields(settings, sampling, of_users=of_users), **changes}
    if settings.noise == "correlated":
        options |= _correlated(settings, sampling, of_users=of_users)
    with naming_settings(settings):
        if settings.evaluation == "secure":
            queries = options.get("queries", ())
            options["queries"] = (*queries, _secure_scores(settings, options, scores))
        if settings.target is None:
            return ReleasePlan(noise_multiplier=settings.noise_multiplier, **options)
        if settings.calibration == "provable":
            return ReleasePlan.for_target(epsilon=settings.target, **options)
        multiplier = _published_noise_multiplier(settings, sampling, options)
        return ReleasePlan(noise_multiplier=multiplier, **options)


def _common_fields(
    settings: ReleaseSettings, sampling: Sampling, *, of_users: bool
) -> dict[str, Any]:
    """Return the fields that a plan has with every kind of noise."""
    secure = SecureSum(
        colluding=settings.colluding_share,
        dropouts=settings.dropout_share,
        signed=settings.signed_sums,
    )
    clipping_norm: float | AdaptiveClipping = settings.clipping_norm
    if settings.clipping == "adaptive":
        clipping_norm = AdaptiveClipping(
            initial_norm=settings.clipping_norm,
            quantile=settings.clipping_quantile,
            learning_rate=settings.clipping_learning_rate,
        )
    if not (settings.delta or of_users) and sampling.population == 1:
        raise UnfitSetting(
            f"run-config clients=1 with delta={settings.delta!r}: expected a delta in (0, 1), or "
            "more clients, because delta=0 stands for 1 / clients, which is 1 here"
        )
    return {
        "sampling": sampling,
        "clipping_norm": clipping_norm,
        "rounds": settings.rounds,
        "delta": settings.delta if settings.delta or of_users else 1 / sampling.population,
        "noise_placement": settings.noise_placement if settings.aggregation == "plain" else secure,
    }


def _published_noise_multiplier(
    settings: ReleaseSettings, sampling: Sampling, options: Mapping[str, Any]
) -> float:
    """Return the least noise multiplier that keeps ``epsilon`` by the published bound."""
    for name, value in (("noise", "independent"), ("clipping", "fixed")):
        if getattr(settings, name) != value:
            why = f"because the published bound needs {name}={value!r}"
            raise unfit(settings, "calibration", f"'provable', {why}", beside=name)
    assert settings.target is not None  # otherwise no noise is chosen
    return dp2_fedsam_theorem2_noise_multiplier(
        epsilon=settings.target,
        delta=options["delta"],
        rounds=options["rounds"],
        sampling_rate=sampling.sampling_rate,
    )


def _correlated(settings: ReleaseSettings, sampling: Sampling, *, of_users: bool) -> dict[str, Any]:
    """Return the fields of a plan whose noise is correlated over rounds."""
    if of_users:
        raise unfit(
            settings,
            "noise",
            "'independent', because correlated noise needs the number of a user's participations, "
            "which no server counts over silos",
        )
    if settings.aggregation != "plain":
        why = "because the noise of a client that drops out would be missing"
        raise unfit(settings, "aggregation", f"'plain', {why}", beside="noise")
    clients = sampling.population
    size = size_for_rate(clients, sampling.sampling_rate)
    apart = settings.rounds_apart or clients // size
    most = settings.participations or -(-settings.rounds // apart)
    momentum = settings.server_momentum if isinstance(settings, ServerSettings) else 0.0
    with naming_settings(settings):
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
    """Return the query by which evaluations release scores in secure sums.

    ``options`` has the plan's other arguments.
    """
    every, multiplier = settings.evaluate_every, settings.evaluation_noise_multiplier
    if not isinstance(options["noise_placement"], SecureSum):
        why = "because clients send scores in the same kind of secure sum as updates"
        expected = f"aggregation='secure', {why}"
        raise unfit(settings, "evaluation", expected, beside="aggregation")
    if every < 1:
        raise unfit(settings, "evaluation", "evaluate-every >= 1", beside="evaluate_every")
    evaluations = -(-settings.rounds // every)
    if not multiplier:
        if (epsilon := settings.target) is None:
            raise UnfitSetting(
                f"run-config evaluation-noise-multiplier={multiplier!r} with noise-multiplier="
                f"{settings.noise_multiplier!r}: expected a number > 0; or set noise-multiplier=0 "
                "and an epsilon, of which evaluations then spend the fraction evaluation-share"
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


def unfit(settings: Settings, name: str, expected: str, *, beside: str = "method") -> UnfitSetting:
    """Return an error that says that the setting ``name`` does not fit the setting ``beside``.

    The error leaves out a setting that the app does not have.
    """
    named = [each for each in (name, beside) if hasattr(settings, each)]
    values = (f"{each.replace('_', '-')}={getattr(settings, each)!r}" for each in named)
    return UnfitSetting(f"run-config {' with '.join(values)}: expected {expected}")


@contextmanager
def naming_settings(settings: Settings) -> Iterator[None]:
    """Replace an error about a field by an error about the setting of the same name."""
    try:
        yield
    except InvalidValue as error:
        text = str(error).replace("noise_placement=SecureSum(…)", "aggregation='secure'")
        name, equals, value = text.partition("=")
        if not equals or not hasattr(settings, name):
            raise
        raise UnfitSetting(f"run-config {name.replace('_', '-')}={value}") from error
