"""Server side: the run configuration becomes a plan and a strategy; the run leaves a directory."""

from flwr.app import Context, UserConfig
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedAvgM, FedProx, FedYogi

from flower_ext.algorithms import FedDyn, Hosted, PFedMe, Scaffold, Upcycled
from flower_ext.algorithms.upcycled import coefficient_of
from flower_ext.federation import FederatedStrategy, Method, Stragglers, configured, first_config
from flower_ext.privacy import NonPrivatePlan, PerturbationPlan
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import UnfitSetting, choice, flag, integer, number
from flower_ext.training import LocalTraining
from upcycled_fl_app.task import data_facts, loss_of, model_name, task_of

METHODS = ("fedavg", "fedavgm", "fedprox", "fedyogi", "scaffold", "feddyn", "pfedme")
NEWTON_TOLERANCE = 1e-10

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that ``context.run_config`` names and leave a run directory with a report."""
    config = first_config(context.run_config)
    choice(config, "method", METHODS)
    weight = local_training(config).proximal_weight
    coefficient = coefficient_of(config, proximal_weight=weight)
    plan, task = plan_of(config), task_of(context)
    task.data(0)  # a missing data set ends the run here, with its message

    def strategy(config: UserConfig, run: RunDirectory) -> FederatedStrategy | Upcycled:
        base = strategy_of(plan, config, run)
        return Upcycled(base, coefficient) if flag(config, "upcycled") else base

    facts = {"data-source": data_facts(config).source, "model": model_name(config)}
    configured.start(grid, context, task, strategy, facts=facts)


def plan_of(config: UserConfig) -> NonPrivatePlan | PerturbationPlan:
    """Return the plan that samples devices and perturbs their local models."""
    return configured.perturbation_plan({"sampling": "fixed-size", **config}, loss_of(config))


def local_training(config: UserConfig) -> LocalTraining:
    """Return the training of every client, whatever the method."""
    weight, method = number(config, "proximal-weight"), config["method"]
    exact = choice(config, "solver", ("sgd", "newton")) == "newton"
    return configured.training(
        config,
        proximal_weight=weight or (0.1 if method == "fedprox" else 0.0),
        tolerance=NEWTON_TOLERANCE if exact else 0.0,
        **({"momentum": 0.0} if method == "pfedme" else {}),
    )


def strategy_of(
    plan: NonPrivatePlan | PerturbationPlan, config: UserConfig, run: RunDirectory
) -> FederatedStrategy:
    """Return the strategy of a method; all methods share the settings that they have."""
    method, local = str(config["method"]), local_training(config)
    if method in ("scaffold", "pfedme") and local.tolerance:
        raise UnfitSetting(
            f"run-config solver='newton' with method={method!r}: expected 'sgd', because the "
            "method is defined by its local steps"
        )
    if method == "pfedme" and local.proximal_weight:
        raise UnfitSetting(
            f"run-config proximal-weight={local.proximal_weight!r} with method='pfedme': expected "
            "0, because its attraction is such a weight"
        )
    rate = number(config, "server-learning-rate")
    if rate and method in ("fedavg", "fedprox", "feddyn"):
        raise UnfitSetting(
            f"run-config server-learning-rate={rate!r} with method={method!r}: expected 0, because "
            "its server takes no step of its own"
        )
    ratio = number(config, "straggler-ratio")
    return FederatedStrategy(
        method_of(plan, config, local, rate),
        stragglers=Stragglers(ratio=ratio) if ratio else None,
        **configured.options(config, run, plan),
    )


def method_of(
    plan: NonPrivatePlan | PerturbationPlan,
    config: UserConfig,
    local: LocalTraining,
    rate: float,
) -> Method:
    """Return the method; a server learning rate of 0 stands for the method's usual one."""
    size = round(plan.sampling.expected_cohort_size)
    nodes = {"min_train_nodes": size, "min_available_nodes": size}
    match config["method"]:
        case "fedavg":
            return Hosted(FedAvg(**nodes), local=local)
        case "fedavgm":
            momentum = number(config, "server-momentum")
            server = FedAvgM(server_learning_rate=rate or 1.0, server_momentum=momentum, **nodes)
            return Hosted(server, local=local)
        case "fedprox":
            return Hosted(FedProx(proximal_mu=local.proximal_weight, **nodes), local=local)
        case "fedyogi":
            tau = number(config, "adaptivity")
            return Hosted(FedYogi(eta=rate or 0.01, tau=tau, **nodes), local=local)
        case "scaffold":
            return Scaffold(server_learning_rate=rate or 1.0, local=local)
        case "feddyn":
            return FedDyn(regularization=number(config, "regularization"), local=local)
        case _:
            personal = configured.training(
                config,
                momentum=0.0,
                steps=integer(config, "personal-steps"),
                learning_rate=number(config, "personal-learning-rate"),
            )
            return PFedMe(
                attraction=number(config, "attraction"),
                personal_training=personal,
                server_learning_rate=rate or 1.0,
                local=local,
            )
