"""Server side: the run configuration becomes a plan and a strategy; the run leaves a directory."""

from dataclasses import replace

from flwr.app import ArrayRecord, Context, UserConfig
from flwr.serverapp import Grid, ServerApp

from dp2_fedsam_app.task import task_of
from flower_ext.algorithms import (
    Centaur,
    DP2FedSAM,
    DPFedAvg,
    DPFedAvgFT,
    DPFedSAM,
    DPFedSAMFT,
)
from flower_ext.federation import (
    FederatedStrategy,
    clients_of,
    first_config,
    recorded_run,
    save_outcome,
    shared_budget,
)
from flower_ext.privacy import (
    Budget,
    FixedSizeSampling,
    FullParticipation,
    Ledger,
    NonPrivatePlan,
    PoissonSampling,
    ReleasePlan,
    Sampling,
    calibrate_noise_multiplier,
    size_for_rate,
)
from flower_ext.privacy.theorems.dp2_fedsam import dp2_fedsam_theorem2_noise_multiplier
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import UnfitSetting, choice, flag, integer, number, text
from flower_ext.training import LocalTraining, check_shareable

SHARED_MODEL = {
    "dp-fedavg": DPFedAvg,
    "dp-fedavg-ft": DPFedAvgFT,
    "dp-fedsam": DPFedSAM,
    "dp-fedsam-ft": DPFedSAMFT,
    "fedavg": DPFedAvg,
}
PERSONAL_HEAD = {"centaur": Centaur, "dp2-fedsam": DP2FedSAM, "p-fedsam": DP2FedSAM}
WITHOUT_PRIVACY = ("fedavg", "p-fedsam")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that ``context.run_config`` names and leave a run directory with a report."""
    config = first_config(context.run_config)
    method = choice(config, "method", (*SHARED_MODEL, *PERSONAL_HEAD))
    rounds = integer(context.run_config, "rounds", least=1)
    plan = plan_of(config)
    task = task_of(context)
    task.data(0)  # a missing data set ends the run here, with its message

    with recorded_run(config, f"{method}-{config['dataset']}") as run:
        strategy = strategy_of(config, plan, run)
        check_shareable(task.model(), strategy.personal)
        initial = task.initial_params(integer(config, "seed"))
        result = strategy.start(
            clients_of(grid, config),
            ArrayRecord(initial),
            num_rounds=rounds,
            timeout=number(config, "round-timeout", above=0),
        )
        save_outcome(run, strategy, result)


def plan_of(config: UserConfig) -> ReleasePlan | NonPrivatePlan:
    """What is sampled, clipped, noised and accounted."""
    sampling = sampling_of(config)
    if config["method"] in WITHOUT_PRIVACY:
        return NonPrivatePlan(sampling=sampling)
    rounds = integer(config, "rounds")
    delta = delta_of(config)
    multiplier = number(config, "noise-multiplier")
    if multiplier == 0:
        target = {"epsilon": number(config, "epsilon"), "delta": delta, "rounds": rounds}
        if choice(config, "calibration", ("provable", "published")) == "published":
            multiplier = dp2_fedsam_theorem2_noise_multiplier(
                **target, sampling_rate=sampling.sampling_rate
            )
        else:
            multiplier = calibrate_noise_multiplier(**target, sampling=sampling)
    return ReleasePlan(
        sampling=sampling,
        clipping_norm=number(config, "clipping-norm"),
        noise_multiplier=multiplier,
        noise_placement=choice(config, "noise-placement", ("client", "server")),
        dropout_policy=choice(config, "dropout-policy", ("top-up", "discard")),
        rounds=rounds,
        delta=delta,
    )


def delta_of(config: UserConfig) -> float:
    """δ, by default 1 / clients.

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


def sampling_of(config: UserConfig) -> Sampling:
    """How a round's cohort is drawn."""
    clients, rate = integer(config, "clients"), number(config, "sampling-rate", above=0)
    match choice(config, "sampling", ("poisson", "fixed-size", "everyone")):
        case "poisson":
            return PoissonSampling(population=clients, rate=rate)
        case "fixed-size":
            return FixedSizeSampling(population=clients, size=size_for_rate(clients, rate))
        case _:
            return FullParticipation(population=clients)


def strategy_of(
    config: UserConfig, plan: ReleasePlan | NonPrivatePlan, run: RunDirectory
) -> FederatedStrategy:
    """The strategy of a method; every method gets the same settings where it has them."""
    method = text(config, "method")
    sgd = LocalTraining(
        epochs=integer(config, "local-epochs", least=1),
        batch_size=integer(config, "batch-size"),
        learning_rate=number(config, "learning-rate"),
        learning_rate_decay=number(config, "learning-rate-decay"),
        momentum=number(config, "momentum"),
    )
    sam = replace(sgd, sam_radius=sam_radius_of(config))
    head = replace(
        sgd,
        epochs=integer(config, "head-epochs"),
        learning_rate=number(config, "head-learning-rate"),
    )
    options = {
        "plan": plan,
        "server_learning_rate": number(config, "server-learning-rate"),
        "seed": integer(config, "seed") or None,
        "seeded_noise": flag(config, "seeded-noise"),
        "evaluate_every": integer(config, "evaluate-every"),
        "diagnostics": flag(config, "diagnostics"),
        "timeout": number(config, "connect-timeout", above=0),
        "run": run,
        "ledger": ledger_of(config, plan, run),
        "budget": shared_budget(config, None),
    }
    if method in PERSONAL_HEAD:
        return PERSONAL_HEAD[method](
            head=head,
            extractor=sam,
            adapt_before_evaluation=flag(config, "adapt-before-evaluation"),
            **options,
        )
    return SHARED_MODEL[method](local=sam if "sam" in method else sgd, **options)


def sam_radius_of(config: UserConfig) -> float:
    """The radius q of SAM, where the method has one.

    Raises
    ------
    UnfitSetting
        It is 0 and the method's name says SAM.
    """
    radius = number(config, "sam-radius")
    if "sam" in text(config, "method") and radius == 0:
        raise UnfitSetting(
            f"run-config sam-radius={radius!r} with method={config['method']!r}: expected a number "
            "> 0 (centaur, dp-fedavg and fedavg are without)"
        )
    return radius


def ledger_of(
    config: UserConfig, plan: ReleasePlan | NonPrivatePlan, run: RunDirectory
) -> Ledger | None:
    """The run's ledger; it stops the run at a provable epsilon, where one was asked for."""
    if isinstance(plan, NonPrivatePlan):
        return None
    asked = config["calibration"] == "provable" and number(config, "noise-multiplier") == 0
    budget = Budget(epsilon=number(config, "epsilon"), delta=plan.delta) if asked else None
    return run.open_ledger(budget=budget)
