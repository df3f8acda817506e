"""Server side: make a plan and a strategy from the run configuration; write a run directory."""

from functools import partial

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedAvgM, FedProx, FedYogi

from flower_ext.algorithms import FedDyn, Hosted, PFedMe, Scaffold, Upcycled
from flower_ext.algorithms.upcycled import Coefficient, Decaying, proximal_ratio
from flower_ext.federation import Method, Sgd, Stragglers, configured
from flower_ext.privacy import NonPrivatePlan, PerturbationPlan
from flower_ext.runs.settings import UnfitSetting
from upcycled_fl_app.plans import local_training, plan_of
from upcycled_fl_app.settings import Settings
from upcycled_fl_app.task import data_facts, model_name, task_of

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that ``context.run_config`` names and leave a run directory with a report."""
    settings = configured.settings(Settings, context)
    check_method(settings)
    coefficient = coefficient_of(settings)
    plan, task = plan_of(settings), task_of(context)
    task.data(0)  # a missing data set ends the run here, with its message
    ratio = settings.straggler_ratio
    configured.start(
        grid,
        context,
        settings,
        task,
        method_of(plan, settings),
        plan,
        stragglers=Stragglers(ratio=ratio, exact=settings.exact_stragglers) if ratio else None,
        wrapper=partial(Upcycled, coefficient=coefficient) if settings.upcycled else None,
        notes={"data-source": data_facts(settings).source, "model": model_name(settings)},
    )


def coefficient_of(settings: Settings) -> float | Coefficient:
    """Return the coefficient of even rounds, from the settings ``schedule`` and ``coefficient``."""
    value, weight = settings.coefficient, local_training(settings).proximal_weight
    match settings.schedule:
        case "constant":
            return value
        case "decaying":
            return Decaying(value)
        case "half-lambda":
            return value / 2
        case "proximal-ratio":
            return proximal_ratio(proximal_weight=weight, penalty=value)


def check_method(settings: Settings) -> None:
    """Refuse settings that the method cannot have.

    Raises
    ------
    UnfitSetting
        The message names the setting and the value that the method expects.
    """
    method, local = settings.method, local_training(settings)
    if method in ("scaffold", "pfedme") and local.tolerance:
        raise UnfitSetting(
            f"run-config solver='newton' with method={method!r}: expected 'sgd', because the "
            "method is defined by its local steps"
        )
    if method == "pfedme" and local.proximal_weight:
        raise UnfitSetting(
            f"run-config proximal-weight={local.proximal_weight!r} with method='pfedme': expected "
            "0, because pFedMe has its own proximal term (setting attraction)"
        )
    rate = settings.server_learning_rate
    if rate and method in ("fedavg", "fedprox", "feddyn"):
        raise UnfitSetting(
            f"run-config server-learning-rate={rate!r} with method={method!r}: expected 0, "
            "because the server of this method takes the mean as it is"
        )


def method_of(plan: NonPrivatePlan | PerturbationPlan, settings: Settings) -> Method:
    """Return the method that the settings name.

    With ``server-learning-rate = 0``, the method uses its usual server learning rate.
    """
    local, rate = local_training(settings), settings.server_learning_rate
    size = round(plan.sampling.expected_cohort_size)
    nodes = {"min_train_nodes": size, "min_available_nodes": size}
    match settings.method:
        case "fedavg":
            return Hosted(FedAvg(**nodes), local=local)
        case "fedavgm":
            momentum = settings.server_momentum
            server = FedAvgM(server_learning_rate=rate or 1.0, server_momentum=momentum, **nodes)
            return Hosted(server, local=local)
        case "fedprox":
            return Hosted(FedProx(proximal_mu=local.proximal_weight, **nodes), local=local)
        case "fedyogi":
            tau = settings.adaptivity
            return Hosted(FedYogi(eta=rate or 0.01, tau=tau, **nodes), local=local)
        case "scaffold":
            return Scaffold(server=Sgd(learning_rate=rate or 1.0), local=local)
        case "feddyn":
            return FedDyn(regularization=settings.regularization, local=local)
        case _:
            personal = configured.training(
                settings,
                momentum=0.0,
                steps=settings.personal_steps,
                learning_rate=settings.personal_learning_rate,
            )
            return PFedMe(
                attraction=settings.attraction,
                personal_training=personal,
                server=Sgd(learning_rate=rate or 1.0),
                local=local,
            )
