"""Server side: the run configuration becomes a plan and a strategy; the run leaves a directory."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from flwr.app import ArrayRecord, Context, UserConfig
from flwr.serverapp import Grid, ServerApp

from dp_ditto_app.task import model_name, task_of
from flower_ext.algorithms import Apple, DPDitto, FedALA, FedAMP, PFedMe
from flower_ext.algorithms.ditto import pilot_run
from flower_ext.federation import (
    FederatedStrategy,
    clients_of,
    first_config,
    recorded_run,
    save_outcome,
    shared_budget,
)
from flower_ext.planning import DittoProblem, PilotEstimates, best_rounds
from flower_ext.privacy import (
    Budget,
    ClippedSteps,
    FullParticipation,
    NonPrivatePlan,
    RecordLevelPlan,
)
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import UnfitSetting, choice, flag, integer, number, text
from flower_ext.training import LocalTraining, Task, check_shareable
from flower_ext.training.models import build, parameter_count

WITHOUT_PRIVACY = ("ditto", "pfedme", "fedamp", "apple", "fedala")
PILOT = (
    "a pilot run without noise on the clients' training records, which chose the number of rounds "
    "and left its constants in pilot.json (planner=bound or none turns this off)"
)
METHODS = (*(f"dp-{method}" for method in WITHOUT_PRIVACY), *WITHOUT_PRIVACY)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that ``context.run_config`` names and leave a run directory with a report."""
    config = first_config(context.run_config)
    method = choice(config, "method", METHODS)
    last = integer(context.run_config, "rounds", least=1)
    task = task_of(context)
    for client in range(integer(config, "clients")):
        task.data(client)  # missing data, or a client with too few, end the run here
    pilot = pilot_of(config, task)
    rounds = rounds_of(config, pilot)
    plan = plan_of(config, rounds)

    with recorded_run({**config, "planned-rounds": rounds}, f"{method}-{config['dataset']}") as run:
        if pilot is not None:
            pilot.save(run.path / "pilot.json", dimension=dimension_of(config))
        strategy = strategy_of(config, plan, run)
        check_shareable(task.model(), strategy.personal)
        initial = ArrayRecord(task.initial_params(integer(config, "seed")))
        more = last - integer(config, "rounds")
        result = strategy.start(
            clients_of(grid, config),
            initial,
            num_rounds=rounds + more,
            timeout=number(config, "round-timeout", above=0),
        )
        save_outcome(run, strategy, result)


def planner_of(config: UserConfig) -> str:
    """What chooses the number of rounds.

    Raises
    ------
    UnfitSetting
        A planner for another method than the one that its theorem is about.
    """
    planner = choice(config, "planner", ("none", "bound", "pilot"))
    if planner != "none" and config["method"] != "dp-ditto":
        raise UnfitSetting(
            f"run-config planner={planner!r} with method={config['method']!r}: expected "
            "method='dp-ditto', which Theorem 1 is about, or planner='none'"
        )
    return planner


def pilot_of(config: UserConfig, task: Task) -> PilotEstimates | None:
    """Constants of the losses from a pilot run on the clients' records, where one is asked for."""
    if planner_of(config) != "pilot":
        return None
    return pilot_run(
        task,
        task.initial_params(integer(config, "seed")),
        [task.data(client).train for client in range(integer(config, "clients"))],
        rounds=integer(config, "pilot-rounds"),
        learning_rate=number(config, "pilot-learning-rate"),
    )


def dimension_of(config: UserConfig) -> int:
    """d of the configured model."""
    return parameter_count(build(model_name(config), num_classes=10))


def rounds_of(config: UserConfig, pilot: PilotEstimates | None) -> int:
    """T: as configured, or the T* of Theorem 1 below it for the configured λ and budget.

    Raises
    ------
    UnfitSetting
        Fewer than one, or no number of rounds improves the bound.
    """
    most = integer(config, "rounds", least=1)
    basis = choice(config, "calibration", ("published", "provable"))
    planner = planner_of(config)
    if planner == "none":
        return most
    plan = plan_of(config, 1)
    assert isinstance(plan, RecordLevelPlan)  # as dp-ditto has
    planned = best_rounds(
        problem_of(config, pilot),
        global_weight=number(config, "global-weight"),
        variance_per_round=plan.upload_stddev**2,
        max_rounds=most,
        basis=basis,
    )
    if planned.rounds == 0:
        raise UnfitSetting(
            f"run-config planner={planner!r}: no number of rounds improves the bound on the "
            "start: expected a larger epsilon or other constants"
        )
    return planned.rounds


def problem_of(config: UserConfig, pilot: PilotEstimates | None) -> DittoProblem:
    """What Theorem 1 has to know: from the pilot run, or as configured."""
    return DittoProblem(
        **asdict(pilot or configured_constants(config)),
        dimension=dimension_of(config),
        num_clients=integer(config, "clients"),
        learning_rate=number(config, "learning-rate"),
        personal_learning_rate=number(config, "personal-learning-rate"),
    )


def configured_constants(config: UserConfig) -> PilotEstimates:
    """μ, L, G₀, M, Ψ₁ and Ψ₂ as the run configuration has them; 0 for G₀ or M is unknown."""
    return PilotEstimates(
        strong_convexity=number(config, "strong-convexity"),
        smoothness=number(config, "smoothness"),
        initial_gap=number(config, "initial-gap"),
        initial_distance=number(config, "initial-distance"),
        gradient_bound=number(config, "gradient-bound") or float("inf"),
        model_spread=number(config, "model-spread") or float("inf"),
    )


def plan_of(config: UserConfig, rounds: int) -> RecordLevelPlan | NonPrivatePlan:
    """Who takes part, and what is clipped and noised: uploads, or the local steps behind them."""
    sampling = FullParticipation(integer(config, "clients"))
    if config["method"] in WITHOUT_PRIVACY:
        return NonPrivatePlan(sampling=sampling)
    size, local = integer(config, "examples-per-client"), local_training(config)
    steps = None
    if choice(config, "noise", ("upload", "steps")) == "steps":
        steps = ClippedSteps(
            learning_rate=local.learning_rate,
            gradient_clipping_norm=number(config, "gradient-clipping-norm"),
            num_examples=size,
            local_steps=local.num_steps(size),
            batch_size=min(local.batch_size, size),
        )
    basis = choice(config, "calibration", ("published", "provable"))
    return RecordLevelPlan.for_target(
        epsilon=number(config, "epsilon"),
        delta=number(config, "delta"),
        sampling=sampling,
        num_examples=size,
        rounds=rounds,
        clipping_norm=number(config, "clipping-norm"),
        basis="published" if basis == "published" else "provable",
        steps=steps,
    )


def budget_of(config: UserConfig) -> Budget | None:
    """The provable epsilon that noise was calibrated for: more rounds than planned end at it."""
    if config["method"] in WITHOUT_PRIVACY or config["calibration"] != "provable":
        return None
    return Budget(epsilon=number(config, "epsilon"), delta=number(config, "delta"))


def local_training(config: UserConfig) -> LocalTraining:
    """Of the model that is uploaded, whatever the method."""
    return LocalTraining(
        epochs=integer(config, "local-epochs", least=1),
        batch_size=integer(config, "batch-size") or integer(config, "examples-per-client"),
        learning_rate=number(config, "learning-rate"),
    )


def strategy_of(
    config: UserConfig, plan: RecordLevelPlan | NonPrivatePlan, run: RunDirectory
) -> FederatedStrategy:
    """The strategy of a method; every method gets the same settings where it has them."""
    local = local_training(config)
    options: Mapping[str, Any] = {
        "plan": plan,
        "local": local,
        "seed": integer(config, "seed") or None,
        "seeded_noise": flag(config, "seeded-noise"),
        "evaluate_every": integer(config, "evaluate-every"),
        "training_loss": flag(config, "training-loss"),
        "timeout": number(config, "connect-timeout", above=0),
        "budget": shared_budget(config, budget_of(config)),
        "run": run,
        "exposed": [PILOT] if config["planner"] == "pilot" else [],
    }
    rate = number(config, "personal-learning-rate")
    match text(config, "method").removeprefix("dp-"):
        case "ditto":
            personal = LocalTraining(
                epochs=integer(config, "personal-epochs"),
                batch_size=local.batch_size,
                learning_rate=rate,
            )
            return DPDitto(
                global_weight=number(config, "global-weight"), personal_training=personal, **options
            )
        case "pfedme":
            return PFedMe(
                attraction=number(config, "attraction"),
                personal_training=LocalTraining(
                    steps=integer(config, "personal-steps"), learning_rate=rate
                ),
                **options,
            )
        case "fedamp":
            return FedAMP(
                attention_width=number(config, "attention-width"),
                attraction=number(config, "cloud-attraction"),
                **options,
            )
        case "apple":
            return Apple(
                relation_learning_rate=number(config, "relation-learning-rate"),
                penalty=number(config, "penalty"),
                penalty_rounds=integer(config, "rounds"),
                **options,
            )
        case _:
            return FedALA(
                weight_learning_rate=number(config, "weight-learning-rate"),
                sample_share=number(config, "sample-share"),
                **options,
            )
