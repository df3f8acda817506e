"""Server side: the run configuration becomes a plan and a strategy; the run leaves a directory."""

from functools import partial

from flwr.app import Context, UserConfig
from flwr.serverapp import Grid, ServerApp

from dp2_fedsam_app.task import task_of
from flower_ext.algorithms import Centaur, DP2FedSAM, DPFedAvg, DPFedAvgFT, DPFedSAM, DPFedSAMFT
from flower_ext.federation import FederatedStrategy, configured, first_config
from flower_ext.privacy import NonPrivatePlan, ReleasePlan
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import UnfitSetting, choice, flag, integer, number

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
    choice(config, "method", (*SHARED_MODEL, *PERSONAL_HEAD))
    plan, task = plan_of(config), task_of(context)
    task.data(0)  # a missing data set ends the run here, with its message
    configured.start(grid, context, task, partial(strategy_of, plan))


def plan_of(config: UserConfig) -> ReleasePlan | NonPrivatePlan:
    """Return the plan that samples cohorts, clips and noises updates, and accounts for them."""
    if config["method"] in WITHOUT_PRIVACY:
        return configured.non_private_plan(config)
    return configured.release_plan(config)


def strategy_of(
    plan: ReleasePlan | NonPrivatePlan, config: UserConfig, run: RunDirectory
) -> FederatedStrategy:
    """Return the strategy of a method; all methods share the settings that they have."""
    method, radius = str(config["method"]), number(config, "sam-radius")
    if "sam" in method and radius == 0:
        raise UnfitSetting(
            f"run-config sam-radius={radius!r} with method={method!r}: expected a number > 0 "
            "(centaur, dp-fedavg and fedavg do without it)"
        )
    sgd, sam = configured.training(config), configured.training(config, sam_radius=radius)
    options, rate = configured.options(config, run, plan), number(config, "server-learning-rate")
    if method in SHARED_MODEL:
        shared = SHARED_MODEL[method](
            local=sam if "sam" in method else sgd, server_learning_rate=rate
        )
        return FederatedStrategy(shared, **options)
    head = configured.training(
        config,
        epochs=integer(config, "head-epochs"),
        learning_rate=number(config, "head-learning-rate"),
    )
    partial_sharing = PERSONAL_HEAD[method](
        head=head,
        extractor=sam,
        adapt_before_evaluation=flag(config, "adapt-before-evaluation"),
        server_learning_rate=rate,
    )
    return FederatedStrategy(partial_sharing, **options)
