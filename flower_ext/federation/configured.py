"""Build the parts of a run from its settings, and start the run, in the ServerApp of any app.

All apps read the same settings by the same names (``docs/settings.md``)::

    def strategy_of(config: UserConfig, run: RunDirectory) -> DPFedAvg:
        plan, local = configured.release_plan(config), configured.training(config)
        return FederatedStrategy(DPFedAvg(local=local), **configured.options(config, run, plan))

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        configured.start(grid, context, task, strategy_of)

Each function raises `UnfitSetting` if a setting is missing or out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast, get_args

from flwr.app import ArrayRecord, Context, UserConfig
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flower_ext.errors import InvalidValue
from flower_ext.federation.engines.virtual import clients_of
from flower_ext.federation.recording import (
    base_of,
    first_config,
    record,
    recorded_run,
    shared_budget,
)
from flower_ext.federation.strategy import FederatedStrategy
from flower_ext.privacy import (
    Budget,
    ClippedSteps,
    FixedSizeSampling,
    FullParticipation,
    LocalObjective,
    NonPrivatePlan,
    ObjectivePerturbation,
    OutputPerturbation,
    PerturbationPlan,
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
from flower_ext.privacy.guarantee import Basis
from flower_ext.privacy.mechanisms.secure_scores import ACCURACY
from flower_ext.privacy.theorems.dp2_fedsam import dp2_fedsam_theorem2_noise_multiplier
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import UnfitSetting, choice, flag, integer, number, text
from flower_ext.training import DpSgdTraining, LocalTraining, Task, check_shareable
from flower_ext.training.params import require_modules

BASES: tuple[Basis, ...] = get_args(Basis)
"""Values of the setting ``calibration``: the bound by which noise is calibrated."""

_CHOICES = {
    "sampling": ("poisson", "fixed-size", "everyone"),
    "noise-placement": ("client", "server"),
    "dropout-policy": ("top-up", "discard"),
    "aggregation": ("plain", "secure"),
    "evaluation": ("plain", "secure"),
    "weighting": ("clients", "examples"),
    "calibration": BASES,
}
"""Words of the settings that all apps share; a word is checked even if the method ignores it."""

_SETTINGS = {
    "rate": "sampling-rate",
    "population": "clients",
    "colluding": "colluding-share",
    "dropouts": "dropout-share",
    "batch_size": "batch-size",
}
"""Settings by the names of fields that do not end like them, or end like several."""

P = ParamSpec("P")
R = TypeVar("R")


def _naming_settings(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function of a configuration name the setting in a refusal, in place of a field."""

    @wraps(function)
    def renamed(*args: P.args, **options: P.kwargs) -> R:
        try:
            return function(*args, **options)
        except InvalidValue as error:
            config = cast(UserConfig, args[0] if args else options["config"])
            field, separator, more = str(error).partition("=")
            setting = _setting_of(config, field, more.partition(":")[0]) if separator else None
            if setting is None:
                raise
            raise UnfitSetting(f"run-config {setting}={more}") from error

    return renamed


def _setting_of(config: UserConfig, field: str, value: str) -> str | None:
    """Return the setting from which a field got its value; None if no setting has that value."""
    end = field.replace("_", "-")
    names = [_SETTINGS.get(field, end), *(name for name in config if name.endswith(f"-{end}"))]
    fitting = (name for name in names if name in config and value in _written(config[name]))
    return next(fitting, None)


def _written(value: object) -> tuple[str, ...]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (repr(value), repr(float(value))) if number else (repr(value),)  # type: ignore[arg-type]


@_naming_settings
def sampling(config: UserConfig) -> Sampling:
    """Return the sampling of cohorts, from ``clients``, ``sampling`` and ``sampling-rate``."""
    clients, rate = integer(config, "clients"), number(config, "sampling-rate", above=0)
    match choice(config, "sampling", _CHOICES["sampling"]):
        case "poisson":
            return PoissonSampling(population=clients, rate=rate)
        case "fixed-size":
            return FixedSizeSampling(population=clients, size=size_for_rate(clients, rate))
        case _:
            return FullParticipation(population=clients)


@_naming_settings
def training(config: UserConfig, **changes: Any) -> LocalTraining:
    """Return the local training, from ``local-epochs``, ``batch-size`` and ``learning-rate``.

    Also reads ``learning-rate-decay``, ``momentum``, ``optimizer`` and ``weight-decay`` if the app
    has them. ``changes`` are fields of `LocalTraining` that override all settings.
    """
    facts = {
        "epochs": integer(config, "local-epochs", least=1),
        "batch_size": integer(config, "batch-size"),
        "learning_rate": number(config, "learning-rate"),
        **_those_there(config, number, "learning-rate-decay", "momentum", "weight-decay"),
        **_those_there(config, text, "optimizer"),
    }
    return LocalTraining(**{**facts, **changes})


@_naming_settings
def dp_sgd(config: UserConfig) -> DpSgdTraining:
    """Return DP-SGD that passes over the records ``local-epochs`` times on average.

    Also reads ``record-sampling-rate``, ``expected-batch-size``, ``learning-rate``,
    ``record-clipping-norm`` and ``noise-multiplier``.
    """
    rate, epochs = number(config, "record-sampling-rate"), integer(config, "local-epochs", least=1)
    return DpSgdTraining(
        steps=max(1, round(epochs / rate)) if rate > 0 else 0,
        sampling_rate=rate,
        batch_size=number(config, "expected-batch-size"),
        learning_rate=number(config, "learning-rate"),
        clipping_norm=number(config, "record-clipping-norm"),
        noise_multiplier=number(config, "noise-multiplier"),
    )


@_naming_settings
def non_private_plan(config: UserConfig, **changes: Any) -> NonPrivatePlan:
    """Return the plan of a mean over sampled clients, without privacy.

    Reads the settings of `sampling`, and ``weighting`` if the app has it. ``changes`` are fields of
    `NonPrivatePlan` that override all settings.
    """
    if _secure_sum(config) is not None:
        raise UnfitSetting(
            f"run-config aggregation='secure' with method={config.get('method')!r}: expected "
            "'plain', because a secure sum needs clipped and noised updates"
        )
    if config.get("evaluation", "plain") != "plain":
        raise UnfitSetting(
            f"run-config evaluation={config['evaluation']!r} with method={config.get('method')!r}: "
            "expected 'plain', because this method noises nothing, and secure scores are noised"
        )
    told = _words(config, "weighting")
    drawn = changes.get("sampling") or sampling(config)
    return NonPrivatePlan(**{"sampling": drawn, **told, **changes})


@_naming_settings
def release_plan(config: UserConfig, **changes: Any) -> ReleasePlan:
    """Return the plan under which the server releases noised sums of sampled clients' updates.

    The function reads these settings:

    * the settings of `sampling`, ``clipping-norm``, ``rounds`` and ``noise-multiplier``;
    * ``delta``, where 0 stands for one over ``clients``;
    * if the app has them, ``noise-placement`` and ``dropout-policy``;
    * if the app has it, ``aggregation``; for ``secure``, also ``colluding-share`` and
      ``dropout-share``;
    * if the app has it, ``evaluation``; for ``secure``, also ``evaluation-share``,
      ``evaluation-noise-multiplier`` and ``evaluation-loss-bound``.

    If the app has ``epsilon`` and no ``noise-multiplier`` above 0, the function chooses the least
    noise that keeps ``epsilon``. The setting ``calibration`` says by which bound: the provable
    one, or the published one.

    ``changes`` are fields of `ReleasePlan` that override the settings; ``noise_multiplier`` cannot
    be among them.
    """
    _refuse_weights(config)
    facts: dict[str, Any] = {
        "sampling": changes.get("sampling") or sampling(config),
        "clipping_norm": number(config, "clipping-norm"),
        "rounds": integer(config, "rounds", least=1),
        "delta": _delta(config),
        **_words(config, "noise-placement", "dropout-policy"),
        "secure_aggregation": _secure_sum(config),
        **changes,
    }
    epsilon = _target(config)
    if (scores := _secure_scores(config, facts, epsilon)) is not None:
        facts["scores"] = scores
    if epsilon is None:
        return ReleasePlan(noise_multiplier=number(config, "noise-multiplier"), **facts)
    if _basis(config) == "provable":
        return ReleasePlan.for_target(epsilon=epsilon, **facts)
    multiplier = dp2_fedsam_theorem2_noise_multiplier(
        epsilon=epsilon,
        delta=facts["delta"],
        rounds=facts["rounds"],
        sampling_rate=facts["sampling"].sampling_rate,
    )
    return ReleasePlan(noise_multiplier=multiplier, **facts)


def _secure_sum(config: UserConfig) -> SecureSum | None:
    if _words(config, "aggregation").get("aggregation", "plain") == "plain":
        return None
    return SecureSum(
        colluding=number(config, "colluding-share"), dropouts=number(config, "dropout-share")
    )


def _secure_scores(
    config: UserConfig, facts: Mapping[str, Any], epsilon: float | None
) -> SecureScores | None:
    """Return how evaluations release scores, by ``evaluation`` and the settings beside it."""
    if _words(config, "evaluation").get("evaluation", "plain") == "plain":
        return None
    rounds, every = integer(config, "rounds", least=1), integer(config, "evaluate-every")
    if facts["secure_aggregation"] is None:
        raise UnfitSetting(
            "run-config evaluation='secure' with aggregation='plain': expected "
            "aggregation='secure', because clients send scores in the same kind of secure sum as "
            "updates"
        )
    if every < 1:
        raise UnfitSetting(
            f"run-config evaluation='secure' with evaluate-every={every!r}: expected 1 or more"
        )
    evaluations = -(-rounds // every)
    multiplier = number(config, "evaluation-noise-multiplier")
    if not multiplier:
        if epsilon is None:
            raise UnfitSetting(
                f"run-config evaluation-noise-multiplier={multiplier!r} without an epsilon that "
                "evaluations could have a share of: expected above 0"
            )
        share, drawn = number(config, "evaluation-share", above=0), facts["sampling"]
        if not share < 1:
            raise UnfitSetting(f"run-config evaluation-share={share!r}: expected below 1")
        multiplier = calibrate_noise_multiplier(
            epsilon=share * epsilon,
            delta=facts["delta"],
            sampling=FullParticipation(drawn.population),
            rounds=evaluations,
            relation=default_relation(drawn),
        )
    bound = number(config, "evaluation-loss-bound")
    bounds = (*ACCURACY, ("loss", 0.0, bound)) if bound else ACCURACY
    return SecureScores(noise_multiplier=multiplier, evaluations=evaluations, bounds=bounds)


def _refuse_weights(config: UserConfig) -> None:
    if config.get("weighting", "clients") != "clients":
        raise UnfitSetting(
            f"run-config weighting={config['weighting']!r} with method={config.get('method')!r}: "
            "expected 'clients', because a private mean weights all clients equally"
        )


def _target(config: UserConfig) -> float | None:
    """Return the ε to calibrate noise for; None if the settings fix the noise itself."""
    noise = number({"noise-multiplier": 0, **config}, "noise-multiplier")
    return None if noise or "epsilon" not in config else number(config, "epsilon")


def _basis(config: UserConfig) -> Basis:
    return choice({"calibration": "provable", **config}, "calibration", BASES)


def _delta(config: UserConfig) -> float:
    delta = number(config, "delta")
    if delta or "clients" not in config:
        return delta
    clients = integer(config, "clients")
    if clients == 1:
        raise UnfitSetting(
            f"run-config clients={clients} with delta={config['delta']!r}: expected a delta in "
            "(0, 1), or more clients, because delta=0 stands for 1 / clients"
        )
    return 1 / clients


@_naming_settings
def perturbation_plan(
    config: UserConfig, objective: LocalObjective
) -> NonPrivatePlan | PerturbationPlan:
    """Return the plan of local models that the mechanism ``perturbation`` perturbs.

    Reads the settings of `sampling`, ``delta``, and the numbers of the mechanism:
    ``clipping-norm`` and ``noise-stddev``, or ``noise-rate``.

    Raises
    ------
    PreconditionFailed
        The settings ask for objective perturbation of a problem that Theorem 6.3 of Upcycled-FL
        does not cover.
    """
    perturbation: OutputPerturbation | ObjectivePerturbation
    match choice(config, "perturbation", ("none", "output", "objective")):
        case "none":
            return non_private_plan(config)
        case "output":
            perturbation = OutputPerturbation(
                clipping_norm=number(config, "clipping-norm"),
                noise_stddev=number(config, "noise-stddev"),
            )
        case _:
            perturbation = ObjectivePerturbation(rate=number(config, "noise-rate"))
    return PerturbationPlan(
        sampling=sampling(config),
        perturbation=perturbation,
        objective=objective,
        delta=number(config, "delta"),
    )


@_naming_settings
def record_level_plan(config: UserConfig, local: LocalTraining, *, rounds: int) -> RecordLevelPlan:
    """Return a record-level plan for all ``clients``: noise on uploads, or in ``local``'s steps.

    Reads ``noise``, ``examples-per-client``, ``clipping-norm``, ``calibration``, ``epsilon``,
    ``delta``, and for noise in steps ``gradient-clipping-norm``.
    """
    _refuse_weights(config)
    size, steps = integer(config, "examples-per-client"), None
    if choice(config, "noise", ("upload", "steps")) == "steps":
        steps = ClippedSteps(
            learning_rate=local.learning_rate,
            gradient_clipping_norm=number(config, "gradient-clipping-norm"),
            num_examples=size,
            local_steps=local.num_steps(size),
            batch_size=min(local.batch_size, size),
        )
    return RecordLevelPlan.for_target(
        epsilon=number(config, "epsilon"),
        delta=number(config, "delta"),
        sampling=FullParticipation(integer(config, "clients")),
        num_examples=size,
        rounds=rounds,
        clipping_norm=number(config, "clipping-norm"),
        basis=_basis(config),
        steps=steps,
    )


def options(
    config: UserConfig, run: RunDirectory, plan: PrivacyPlan | None = None
) -> dict[str, Any]:
    """Return the options that every strategy takes, from those settings that the app has.

    Reads ``seed`` (0: none), ``seeded-noise``, ``evaluate-every``, ``diagnostics``,
    ``training-loss`` and ``connect-timeout``. A run with privacy ends at the provable ε ``budget``
    (0: none), at the ``epsilon`` for which its noise is provably calibrated, or at the budget of
    `shared_budget`. The run's ledger records the releases of a `ReleasePlan`.

    Parameters
    ----------
    config : UserConfig
        The run's settings.
    run : RunDirectory
    plan : PrivacyPlan, optional
        The strategy's plan; None if the strategy makes its own.
    """
    told = _those_there(config, flag, "seeded-noise", "diagnostics", "training-loss")
    told |= _those_there(config, integer, "evaluate-every")
    if "connect-timeout" in config:
        told["timeout"] = number(config, "connect-timeout", above=0)
    if "seed" in config:
        told["seed"] = integer(config, "seed") or None
    if plan is not None:
        told["plan"] = plan
    budget = aim = None
    if not isinstance(plan, NonPrivatePlan) and (end := number({"budget": 0, **config}, "budget")):
        budget = Budget(epsilon=end, delta=number(config, "delta"))
    if isinstance(plan, ReleasePlan | RecordLevelPlan) and _basis(config) == "provable":
        epsilon = _target(config)
        aim = None if epsilon is None else Budget(epsilon=epsilon, delta=plan.delta)
    if isinstance(plan, ReleasePlan):
        told["ledger"] = run.open_ledger(budget=aim)
        aim = None  # the ledger ends the run at this ε
    return {**told, "budget": shared_budget(config, budget or aim), "run": run}


def start(
    grid: Grid,
    context: Context,
    task: Task,
    strategy_of: Callable[[UserConfig, RunDirectory], Strategy],
    *,
    planned_rounds: int | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Run a strategy for ``rounds`` rounds in a run directory, and write its report there.

    Parameters
    ----------
    grid, context
        The arguments of the ServerApp.
    task : Task
    strategy_of : Callable[[UserConfig, RunDirectory], Strategy]
        Function that takes the settings with which the run began, and its directory. It returns a
        strategy of this package, or a wrapper whose ``base`` is such a strategy.
    planned_rounds : int, optional
        Number of rounds that a planner chose in place of ``rounds``; the run directory records it.
    facts : Mapping, optional
        Further facts to record beside the settings.

    Raises
    ------
    UnshareableModel
        A layer that clients would share keeps statistics of their data.
    InvalidValue
        The strategy is not of this package, a name in its ``personal`` matches no part of the
        model, or `recorded_run` refuses the settings.
    """
    config = first_config(context.run_config)
    _words(config, *_CHOICES)
    rounds = integer(context.run_config, "rounds", least=1)
    recorded = {**config, **(facts or {})}
    if planned_rounds is not None:
        rounds += planned_rounds - integer(config, "rounds")
        recorded["planned-rounds"] = planned_rounds
    name = [str(config[part]) for part in ("method", "dataset") if part in config]
    with recorded_run(recorded, "-".join(name) or "run") as run:
        strategy = strategy_of(config, run)
        base = base_of(strategy)
        require_modules("personal", base.method.personal, task.shapes, task.blueprint.tied)
        check_shareable(task.model(), base.method.personal)
        base.run.frozen = base.run.frozen or task.fingerprint
        if run.resumed and strategy is base:  # a wrapper need not train in every round
            _refuse_more_rounds(config, integer(context.run_config, "rounds"), base)
        record(
            run,
            strategy,
            clients_of(grid, config),
            ArrayRecord(task.initial_params(integer({"seed": 0, **config}, "seed"))),
            num_rounds=rounds,
            timeout=number({"round-timeout": 3600, **config}, "round-timeout", above=0),
        )


def _refuse_more_rounds(config: UserConfig, rounds: int, strategy: FederatedStrategy) -> None:
    """Refuse to extend a run whose budget is the ε for which its noise was calibrated."""
    first, epsilon, plan = integer(config, "rounds"), _target(config), strategy.run.plan
    calibrated = isinstance(plan, ReleasePlan | RecordLevelPlan) and _basis(config) == "provable"
    if not calibrated or epsilon is None or rounds <= first:
        return
    raise UnfitSetting(
        f"run-config rounds={rounds} of a resumed run: expected at most {first}, because its "
        f"noise stays as it is and spends epsilon={epsilon:g} in these rounds. To train longer "
        f"under that epsilon, begin a new run: leave out --resume, and give --set rounds={rounds}"
    )


def _words(config: UserConfig, *names: str) -> dict[str, str]:
    """Return those of these settings that the app has, by the names of fields."""
    return {
        name.replace("-", "_"): choice(config, name, _CHOICES[name])
        for name in names
        if name in config
    }


def _those_there(
    config: UserConfig, read: Callable[[UserConfig, str], Any], *names: str
) -> dict[str, Any]:
    return {name.replace("-", "_"): read(config, name) for name in names if name in config}
