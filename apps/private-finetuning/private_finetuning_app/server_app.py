"""Server side: the run configuration becomes a plan and a strategy; the run leaves a directory."""

from functools import partial

from flwr.app import Context, UserConfig
from flwr.serverapp import Grid, ServerApp

from flower_ext.algorithms import (
    Centaur,
    DP2FedSAM,
    DPFedAvg,
    DPFedAvgFT,
    DPFedSAM,
    DPFedSAMFT,
    UldpAvg,
    Upcycled,
)
from flower_ext.federation import FederatedStrategy, Method, configured, first_config
from flower_ext.privacy import NonPrivatePlan, PoissonSampling, PrivacyUnit, ReleasePlan
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import UnfitSetting, choice, flag, integer, number
from private_finetuning_app.task import TUNES, USERS, client_data, shares_of, source_of, task_of

SHARED_MODEL = {
    "dp-fedavg": DPFedAvg,
    "dp-fedavg-ft": DPFedAvgFT,
    "dp-fedsam": DPFedSAM,
    "dp-fedsam-ft": DPFedSAMFT,
    "fedavg": DPFedAvg,
}
OWN_HEAD = "own-head"
PERSONAL_HEAD = {
    "centaur": Centaur,
    "dp2-fedsam": DP2FedSAM,
    "p-fedsam": DP2FedSAM,
    OWN_HEAD: DP2FedSAM,
}
WITHOUT_PRIVACY = ("fedavg", "p-fedsam", OWN_HEAD)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that ``context.run_config`` names and leave a run directory with a report."""
    config = first_config(context.run_config)
    method = choice(config, "method", (*SHARED_MODEL, *PERSONAL_HEAD, USERS))
    if method in PERSONAL_HEAD and choice(config, "tune", TUNES) == "head":
        raise UnfitSetting(
            f"run-config tune='head' with method={method!r}: its head is personal, and nothing "
            "would be left to share; expected tune='adapter' or 'all', or a method with one model "
            f"for all: {', '.join(SHARED_MODEL)}"
        )
    plan = plan_of(config)
    client_data(source_of(config), shares_of(config), 0)  # missing data end the run here
    configured.start(grid, context, task_of(context), partial(strategy_of, plan))


def plan_of(config: UserConfig) -> ReleasePlan | NonPrivatePlan:
    """Return the plan that samples cohorts, clips and noises updates, and accounts for them."""
    if config["method"] in WITHOUT_PRIVACY:
        return configured.non_private_plan(config)
    rounds = integer(config, "rounds", least=1)
    changes = {"rounds": -(-rounds // 2)} if flag(config, "upcycled") else {}
    if config["method"] == USERS:
        users = PoissonSampling(
            population=integer(config, "num-users", least=1),
            rate=number(config, "sampling-rate", above=0),
        )
        changes |= {"sampling": users, "unit": PrivacyUnit.USER}
    return configured.release_plan(config, **changes)


def strategy_of(
    plan: ReleasePlan | NonPrivatePlan, config: UserConfig, run: RunDirectory
) -> FederatedStrategy | Upcycled:
    """Return the strategy of a method, upcycled if the settings ask for it."""
    strategy = FederatedStrategy(method_of(config), **configured.options(config, run, plan))
    if not flag(config, "upcycled"):
        return strategy
    return Upcycled(strategy, number(config, "upcycling-coefficient"))


def method_of(config: UserConfig) -> Method:
    """Return the method; all methods share the settings that they have."""
    method, radius = str(config["method"]), number(config, "sam-radius")
    if "sam" in method and radius == 0:
        raise UnfitSetting(
            f"run-config sam-radius={radius!r} with method={method!r}: expected a number > 0 "
            "(centaur, dp-fedavg and fedavg do without it)"
        )
    sgd, sam = configured.training(config), configured.training(config, sam_radius=radius)
    rate = {"server_learning_rate": number(config, "server-learning-rate")}
    if method == USERS:
        silos = integer(config, "clients")
        return UldpAvg(weighting="by-records", num_silos=silos, local=sgd, **rate)
    if method in SHARED_MODEL:
        return SHARED_MODEL[method](local=sam if "sam" in method else sgd, **rate)
    head = configured.training(
        config,
        epochs=integer(config, "head-epochs"),
        learning_rate=number(config, "head-learning-rate"),
    )
    if method == OWN_HEAD:
        sam = configured.training(config, epochs=0)
    adapt = flag(config, "adapt-before-evaluation")
    return PERSONAL_HEAD[method](head=head, extractor=sam, adapt_before_evaluation=adapt, **rate)
