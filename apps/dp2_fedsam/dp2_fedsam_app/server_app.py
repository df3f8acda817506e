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
    choice,
    clients_of,
    first_config,
    recorded_run,
    save_outcome,
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
    dp2_fedsam_theorem2_noise_multiplier,
)
from flower_ext.reporting import RunDirectory
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
    plan = plan_of(config)
    task = task_of(context)
    task.data(0)  # a missing data set ends the run here, with its message

    with recorded_run(config, f"{method}-{config['dataset']}") as run:
        strategy = strategy_of(config, plan, run)
        check_shareable(task.model(), strategy.personal)
        initial = task.initial_params(int(config["seed"]))
        result = strategy.start(
            clients_of(grid, config),
            ArrayRecord(initial),
            num_rounds=int(context.run_config["rounds"]),
            timeout=float(config["round-timeout"]),
        )
        save_outcome(run, strategy, result)


def plan_of(config: UserConfig) -> ReleasePlan | NonPrivatePlan:
    """What is sampled, clipped, noised and accounted."""
    sampling = sampling_of(config)
    if config["method"] in WITHOUT_PRIVACY:
        return NonPrivatePlan(sampling=sampling)
    rounds, delta = int(config["rounds"]), float(config["delta"]) or 1 / sampling.population
    multiplier = float(config["noise-multiplier"])
    if multiplier == 0:
        target = {"epsilon": float(config["epsilon"]), "delta": delta, "rounds": rounds}
        if choice(config, "calibration", ("provable", "published")) == "published":
            multiplier = dp2_fedsam_theorem2_noise_multiplier(
                **target, sampling_rate=sampling.sampling_rate
            )
        else:
            multiplier = calibrate_noise_multiplier(**target, sampling=sampling)
    return ReleasePlan(
        sampling=sampling,
        clipping_norm=float(config["clipping-norm"]),
        noise_multiplier=multiplier,
        noise_placement=choice(config, "noise-placement", ("client", "server")),
        dropout_policy=choice(config, "dropout-policy", ("top-up", "discard")),
        rounds=rounds,
        delta=delta,
    )


def sampling_of(config: UserConfig) -> Sampling:
    """How a round's cohort is drawn."""
    clients, rate = int(config["clients"]), float(config["sampling-rate"])
    match choice(config, "sampling", ("poisson", "fixed-size", "everyone")):
        case "poisson":
            return PoissonSampling(population=clients, rate=rate)
        case "fixed-size":
            return FixedSizeSampling(population=clients, size=max(1, round(rate * clients)))
        case _:
            return FullParticipation(population=clients)


def strategy_of(
    config: UserConfig, plan: ReleasePlan | NonPrivatePlan, run: RunDirectory
) -> FederatedStrategy:
    """The strategy of a method; every method gets the same settings where it has them."""
    method = str(config["method"])
    sgd = LocalTraining(
        epochs=int(config["local-epochs"]),
        batch_size=int(config["batch-size"]),
        learning_rate=float(config["learning-rate"]),
        learning_rate_decay=float(config["learning-rate-decay"]),
        momentum=float(config["momentum"]),
    )
    sam = replace(sgd, sam_radius=float(config["sam-radius"]))
    head = replace(
        sgd,
        epochs=int(config["head-epochs"]),
        learning_rate=float(config["head-learning-rate"]),
    )
    options = {
        "plan": plan,
        "server_learning_rate": float(config["server-learning-rate"]),
        "seed": int(config["seed"]) or None,
        "seeded_noise": bool(config["seeded-noise"]),
        "evaluate_every": int(config["evaluate-every"]),
        "diagnostics": bool(config["diagnostics"]),
        "timeout": float(config["connect-timeout"]),
        "run": run,
        "ledger": ledger_of(config, plan, run),
    }
    if method in PERSONAL_HEAD:
        return PERSONAL_HEAD[method](
            head=head,
            extractor=sam,
            adapt_before_evaluation=bool(config["adapt-before-evaluation"]),
            **options,
        )
    return SHARED_MODEL[method](local=sam if "sam" in method else sgd, **options)


def ledger_of(
    config: UserConfig, plan: ReleasePlan | NonPrivatePlan, run: RunDirectory
) -> Ledger | None:
    """The run's ledger; it stops the run at a provable epsilon, where one was asked for."""
    if isinstance(plan, NonPrivatePlan):
        return None
    asked = config["calibration"] == "provable" and float(config["noise-multiplier"]) == 0
    budget = Budget(epsilon=float(config["epsilon"]), delta=plan.delta) if asked else None
    return run.open_ledger(budget=budget)
