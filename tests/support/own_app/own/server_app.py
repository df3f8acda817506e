"""An app written from scratch: settings, a task, a method, and the least wiring that works."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import FederatedStrategy, configured
from flower_ext.runs import RunDirectory
from own.settings import Settings
from own.task import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    configured.start(grid, context, Settings, task, strategy_of)


def strategy_of(settings: Settings, run: RunDirectory) -> FederatedStrategy:
    plan = configured.release_plan(settings, configured.sampling(settings))
    local = configured.training(settings)
    return FederatedStrategy(DPFedAvg(local=local), **configured.options(settings, run, plan))
