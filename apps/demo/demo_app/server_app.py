"""Server side: make a plan and a strategy from the run configuration; write a run directory."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from demo_app.settings import Settings
from demo_app.task import SOURCES, task_of
from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import Method, configured
from flower_ext.privacy import NonPrivatePlan, ReleasePlan

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that ``context.run_config`` names and leave a run directory with a report."""
    settings = configured.settings(Settings, context)
    plan, task = plan_of(settings), task_of(context)
    task.data(0)  # a missing data set ends the run here, with its message
    notes = {"data-source": SOURCES[settings.dataset]}
    configured.start(grid, context, settings, task, method_of(settings), plan, notes=notes)


def plan_of(settings: Settings) -> ReleasePlan | NonPrivatePlan:
    """Return the plan that samples cohorts, clips and noises updates, and accounts for them."""
    cohorts = configured.sampling(settings)
    if settings.method == "dp-fedavg":
        return configured.release_plan(settings, cohorts)
    return configured.non_private_plan(settings, cohorts)


def method_of(settings: Settings) -> Method:
    """Return the method that the settings name."""
    if settings.method == "alone":
        # The shared model stays as it was initialised. Each client trains a copy of it before its
        # evaluation, and sends nothing that this training changes.
        return DPFedAvg(
            local=configured.training(settings, epochs=0),
            fine_tuning=configured.training(settings, epochs=settings.epochs_alone),
        )
    return DPFedAvg(local=configured.training(settings))
