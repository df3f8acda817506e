"""Server side: the run configuration becomes a plan and a strategy; the run leaves a directory."""

from functools import partial

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from demo_app.settings import Settings
from demo_app.task import SOURCES, task_of
from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import FederatedStrategy, configured
from flower_ext.privacy import NonPrivatePlan, ReleasePlan
from flower_ext.runs import RunDirectory

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that ``context.run_config`` names and leave a run directory with a report."""
    settings = configured.begun(Settings, context)
    plan, task = plan_of(settings), task_of(context)
    task.data(0)  # a missing data set ends the run here, with its message
    notes = {"data-source": SOURCES[settings.dataset]}
    configured.start(grid, context, Settings, task, partial(strategy_of, plan), notes=notes)


def plan_of(settings: Settings) -> ReleasePlan | NonPrivatePlan:
    """Return the plan that samples cohorts, clips and noises updates, and accounts for them."""
    cohorts = configured.sampling(settings)
    if settings.method == "dp-fedavg":
        return configured.release_plan(settings, cohorts)
    return configured.non_private_plan(settings, cohorts)


def strategy_of(
    plan: ReleasePlan | NonPrivatePlan, settings: Settings, run: RunDirectory
) -> FederatedStrategy:
    """Return the strategy of a method."""
    method = DPFedAvg(local=configured.training(settings))
    if settings.method == "alone":
        # The shared model stays as it was initialised. Each client trains a copy for itself
        # before it is evaluated, and sends nothing of that.
        method = DPFedAvg(
            local=configured.training(settings, epochs=0),
            fine_tuning=configured.training(settings, epochs=settings.epochs_alone),
        )
    return FederatedStrategy(method, **configured.options(settings, run, plan))
