"""The parts of a ServerApp that settings of a run configuration ask for.

An app of one's own reads the same settings by the same names: ``docs/settings.md`` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ArrayRecord, Context, UserConfig
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flower_ext.federation.engines.virtual import clients_of
from flower_ext.federation.recording import (
    first_config,
    recorded_run,
    save_outcome,
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
    PrivacyUnit,
    RecordLevelPlan,
    ReleasePlan,
    Sampling,
    size_for_rate,
)
from flower_ext.privacy.guarantee import Basis
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import UnfitSetting, choice, flag, integer, number
from flower_ext.training import DpSgdTraining, LocalTraining, Task, check_shareable


def sampling_of(config: UserConfig) -> Sampling:
    """How a round's cohort of ``clients`` is drawn: ``sampling`` and ``sampling-rate``."""
    clients, rate = integer(config, "clients"), number(config, "sampling-rate", above=0)
    match choice(config, "sampling", ("poisson", "fixed-size", "everyone")):
        case "poisson":
            return PoissonSampling(population=clients, rate=rate)
        case "fixed-size":
            return FixedSizeSampling(population=clients, size=size_for_rate(clients, rate))
        case _:
            return FullParticipation(population=clients)


def training_of(config: UserConfig, **changes: Any) -> LocalTraining:
    """Local training, with ``changes`` that a method makes to it.

    Reads ``local-epochs``, ``batch-size``, ``learning-rate``; and ``learning-rate-decay`` and
    ``momentum`` where the app has them.
    """
    facts: dict[str, Any] = {
        "epochs": integer(config, "local-epochs", least=1),
        "batch_size": integer(config, "batch-size"),
        "learning_rate": number(config, "learning-rate"),
    }
    for name in ("learning-rate-decay", "momentum"):
        if name in config:
            facts[name.replace("-", "_")] = number(config, name)
    return LocalTraining(**{**facts, **changes})


def dp_sgd_of(config: UserConfig) -> DpSgdTraining:
    """DP-SGD of one round: as many steps as pass over the records in expectation.

    Reads ``record-sampling-rate``, ``local-epochs``, ``expected-batch-size``, ``learning-rate``,
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


def delta_of(config: UserConfig) -> float:
    """δ; where it is 0, one over the number of ``clients``.

    Raises
    ------
    UnfitSetting
        That would be 1.
    """
    clients = integer(config, "clients")
    delta = number(config, "delta") or 1 / clients
    if delta == 1:
        raise UnfitSetting(
            f"run-config clients={clients} with delta={config['delta']!r}: expected a delta in "
            "(0, 1), or more clients where delta=0 stands for 1 / clients"
        )
    return delta


def release_plan_of(config: UserConfig, sampling: Sampling, **changes: Any) -> ReleasePlan:
    """The plan of a noised sum; ``changes`` name fields that other settings decide.

    Reads ``clipping-norm``, ``noise-multiplier``, ``dropout-policy``, ``rounds``, ``delta``, and
    ``noise-placement`` where the app has it.
    """
    facts: dict[str, Any] = {
        "sampling": sampling,
        "clipping_norm": number(config, "clipping-norm"),
        "noise_multiplier": number(config, "noise-multiplier"),
        "dropout_policy": choice(config, "dropout-policy", ("top-up", "discard")),
        "rounds": integer(config, "rounds", least=1),
        "delta": number(config, "delta"),
        "unit": PrivacyUnit.CLIENT,
    }
    if "noise-placement" in config:
        facts["noise_placement"] = choice(config, "noise-placement", ("client", "server"))
    return ReleasePlan(**{**facts, **changes})


def perturbation_plan_of(
    config: UserConfig, sampling: Sampling, objective: LocalObjective
) -> NonPrivatePlan | PerturbationPlan:
    """How local models are perturbed: ``perturbation``, with the numbers of that mechanism.

    Raises
    ------
    PreconditionFailed
        Objective perturbation of a problem that Theorem 6.3 does not cover.
    """
    perturbation: OutputPerturbation | ObjectivePerturbation
    match choice(config, "perturbation", ("none", "output", "objective")):
        case "none":
            return NonPrivatePlan(sampling=sampling)
        case "output":
            perturbation = OutputPerturbation(
                clipping_norm=number(config, "clipping-norm"),
                noise_stddev=number(config, "noise-stddev"),
            )
        case _:
            perturbation = ObjectivePerturbation(rate=number(config, "noise-rate"))
    return PerturbationPlan(
        sampling=sampling,
        perturbation=perturbation,
        objective=objective,
        delta=number(config, "delta"),
    )


def basis_of(config: UserConfig) -> Basis:
    """Whose bound noise is calibrated by: ``calibration``."""
    basis = choice(config, "calibration", ("published", "provable"))
    return "published" if basis == "published" else "provable"


def record_level_plan_of(
    config: UserConfig, sampling: Sampling, local: LocalTraining, *, rounds: int
) -> RecordLevelPlan:
    """The plan of records: noise on uploads, or in the ``local`` steps behind them.

    Reads ``noise``, ``examples-per-client``, ``clipping-norm``, ``calibration``, ``epsilon`` and
    ``delta``; ``gradient-clipping-norm`` for noise in steps.
    """
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
        sampling=sampling,
        num_examples=size,
        rounds=rounds,
        clipping_norm=number(config, "clipping-norm"),
        basis=basis_of(config),
        steps=steps,
    )


def budget_of(config: UserConfig) -> Budget | None:
    """The provable epsilon at which a run ends: ``budget``, where it is above 0."""
    epsilon = number(config, "budget")
    return Budget(epsilon=epsilon, delta=number(config, "delta")) if epsilon else None


def options_of(
    config: UserConfig, run: RunDirectory, *, budget: Budget | None = None
) -> dict[str, Any]:
    """Options that every strategy takes.

    Reads ``seed``, ``seeded-noise``, ``evaluate-every``, ``connect-timeout`` and ``budget-ledger``
    (see `shared_budget`); and ``diagnostics`` and ``training-loss`` where the app has them.
    """
    told = {
        name.replace("-", "_"): flag(config, name)
        for name in ("diagnostics", "training-loss")
        if name in config
    }
    return {
        "seed": integer(config, "seed") or None,
        "seeded_noise": flag(config, "seeded-noise"),
        "evaluate_every": integer(config, "evaluate-every"),
        "timeout": number(config, "connect-timeout", above=0),
        "budget": shared_budget(config, budget),
        "run": run,
        **told,
    }


def run_recorded(
    grid: Grid,
    context: Context,
    task: Task,
    make: Callable[[RunDirectory], Strategy],
    *,
    name: str,
    facts: Mapping[str, Any] | None = None,
    rounds: int | None = None,
) -> None:
    """Run a strategy in a run directory of its own, and leave its report there.

    Parameters
    ----------
    make : Callable[[RunDirectory], Strategy]
        The strategy of the run in that directory: one of this package, or a wrapper with such a
        ``base``.
    name : str
        Part of the directory's name.
    facts : Mapping, optional
        What the run's record holds besides the settings.
    rounds : int, optional
        By default the setting of that name.

    Raises
    ------
    UnshareableModel
        A layer that clients would share keeps statistics of their data.
    UnfitSetting
        As `recorded_run`.
    """
    config = first_config(context.run_config)
    with recorded_run({**config, **(facts or {})}, name) as run:
        strategy = make(run)
        base = getattr(strategy, "base", strategy)
        assert isinstance(base, FederatedStrategy)
        check_shareable(task.model(), base.personal)
        result = strategy.start(
            clients_of(grid, config),
            ArrayRecord(task.initial_params(integer(config, "seed"))),
            num_rounds=rounds or integer(context.run_config, "rounds", least=1),
            timeout=number(config, "round-timeout", above=0),
        )
        save_outcome(run, base, result)
