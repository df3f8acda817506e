"""Server side: the run configuration becomes a plan and a strategy; the run leaves a directory."""

from dataclasses import replace

from flwr.app import ArrayRecord, Context, UserConfig
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedAvgM, FedProx, FedYogi

from flower_ext.algorithms import FedDyn, Hosted, PFedMe, Scaffold, Upcycled
from flower_ext.algorithms.upcycled import (
    Coefficient,
    Constant,
    Decaying,
    HalfLambda,
    ProximalRatio,
)
from flower_ext.federation import (
    FederatedStrategy,
    Stragglers,
    clients_of,
    first_config,
    recorded_run,
    save_outcome,
    shared_budget,
)
from flower_ext.privacy import (
    Budget,
    FixedSizeSampling,
    LocalObjective,
    NonPrivatePlan,
    ObjectivePerturbation,
    OutputPerturbation,
    PerturbationPlan,
    size_for_rate,
)
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import UnfitSetting, choice, flag, integer, number, text
from flower_ext.training import LocalTraining, check_shareable
from upcycled_fl_app.task import data_facts, model_name, task_of

METHODS = ("fedavg", "fedavgm", "fedprox", "fedyogi", "scaffold", "feddyn", "pfedme")

# What is known of a model's cross-entropy when no record has a norm above 1. The gradient of
# softmax regression is (p − e_y) ⊗ (x, 1): at most √2 · √2.
LOSSES = {
    "synthetic-logistic": LocalObjective(convex=True, gradient_bound=2.0),
    "binary-logistic": LocalObjective(
        convex=True,
        generalised_linear=True,
        gradient_bound=1.0,
        curvature_bound=0.25,
        feature_norm_bound=1.0,
    ),
}
NEWTON_TOLERANCE = 1e-10

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that ``context.run_config`` names and leave a run directory with a report."""
    config = first_config(context.run_config)
    method = choice(config, "method", METHODS)
    rounds = integer(context.run_config, "rounds", least=1)
    coefficient, plan = schedule_of(config), plan_of(config)
    task = task_of(context)
    task.data(0)  # a missing data set ends the run here, with its message
    facts = {"data-source": data_facts(config).source, "model": model_name(config)}

    with recorded_run({**config, **facts}, f"{method}-{config['dataset']}") as run:
        base = strategy_of(config, plan, run)
        strategy = Upcycled(base, coefficient) if flag(config, "upcycled") else base
        check_shareable(task.model(), base.personal)
        initial = ArrayRecord(task.initial_params(integer(config, "seed")))
        result = strategy.start(
            clients_of(grid, config),
            initial,
            num_rounds=rounds,
            timeout=number(config, "round-timeout", above=0),
        )
        save_outcome(run, base, result)


def schedule_of(config: UserConfig) -> Coefficient:
    """The coefficient of the even rounds."""
    value = number(config, "coefficient")
    names = ("constant", "decaying", "half-lambda", "proximal-ratio")
    match choice(config, "schedule", names):
        case "constant":
            return Constant(value)
        case "decaying":
            return Decaying(value)
        case "half-lambda":
            return HalfLambda(penalty=value)
        case _:
            return ProximalRatio(
                proximal_weight=local_training(config).proximal_weight, penalty=value
            )


def plan_of(config: UserConfig) -> NonPrivatePlan | PerturbationPlan:
    """Who takes part, and how local models are perturbed.

    Raises
    ------
    PreconditionFailed
        Objective perturbation of a problem that Theorem 6.3 does not cover.
    """
    clients = integer(config, "clients")
    size = size_for_rate(clients, number(config, "sampling-rate", above=0))
    sampling = FixedSizeSampling(population=clients, size=size)
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
    loss = LOSSES.get(model_name(config), LocalObjective())
    if not flag(config, "unit-features"):
        loss = LocalObjective(convex=loss.convex, generalised_linear=loss.generalised_linear)
    return PerturbationPlan(
        sampling=sampling,
        perturbation=perturbation,
        objective=loss,
        delta=number(config, "delta"),
    )


def budget_of(config: UserConfig) -> Budget | None:
    """The provable epsilon at which the run ends, where one is set."""
    if config["perturbation"] == "none" or not (epsilon := number(config, "budget")):
        return None
    return Budget(epsilon=epsilon, delta=number(config, "delta"))


def local_training(config: UserConfig) -> LocalTraining:
    """What every client does, whatever the method."""
    method, exact = config["method"], choice(config, "solver", ("sgd", "newton")) == "newton"
    weight = number(config, "proximal-weight")
    return LocalTraining(
        epochs=integer(config, "local-epochs", least=1),
        batch_size=integer(config, "batch-size"),
        learning_rate=number(config, "learning-rate"),
        learning_rate_decay=number(config, "learning-rate-decay"),
        momentum=0.0 if method == "pfedme" else number(config, "momentum"),
        proximal_weight=weight or (0.1 if method == "fedprox" else 0.0),
        tolerance=NEWTON_TOLERANCE if exact else 0.0,
    )


def strategy_of(
    config: UserConfig, plan: NonPrivatePlan | PerturbationPlan, run: RunDirectory
) -> FederatedStrategy:
    """The strategy of a method; every method gets the same settings where it has them."""
    method, local = text(config, "method"), local_training(config)
    rate = number(config, "server-learning-rate")
    if rate and method in ("fedavg", "fedprox", "feddyn"):
        raise UnfitSetting(
            f"run-config server-learning-rate={rate!r} with method={method!r}: expected 0, as its "
            "server takes no step of its own"
        )
    ratio = number(config, "straggler-ratio")
    options = {
        "plan": plan,
        "local": local,
        "stragglers": Stragglers(ratio=ratio) if ratio else None,
        "seed": integer(config, "seed") or None,
        "seeded_noise": flag(config, "seeded-noise"),
        "evaluate_every": integer(config, "evaluate-every"),
        "timeout": number(config, "connect-timeout", above=0),
        "budget": shared_budget(config, budget_of(config)),
        "run": run,
    }
    size = round(plan.sampling.expected_cohort_size)
    nodes = {"min_train_nodes": size, "min_available_nodes": size}
    match method:
        case "fedavg":
            return Hosted(FedAvg(**nodes), **options)
        case "fedavgm":
            server = FedAvgM(
                server_learning_rate=rate or 1.0,
                server_momentum=number(config, "server-momentum"),
                **nodes,
            )
            return Hosted(server, **options)
        case "fedprox":
            return Hosted(FedProx(proximal_mu=local.proximal_weight, **nodes), **options)
        case "fedyogi":
            return Hosted(
                FedYogi(eta=rate or 0.01, tau=number(config, "adaptivity"), **nodes), **options
            )
        case "scaffold":
            return Scaffold(server_learning_rate=rate or 1.0, **options)
        case "feddyn":
            return FedDyn(regularization=number(config, "regularization"), **options)
        case _:
            personal = replace(
                local,
                steps=integer(config, "personal-steps"),
                learning_rate=number(config, "personal-learning-rate"),
            )
            return PFedMe(
                attraction=number(config, "attraction"),
                personal_training=personal,
                server_learning_rate=rate or 1.0,
                **options,
            )
