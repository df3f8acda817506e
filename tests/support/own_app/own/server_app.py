"""An app written from scratch: settings, a task, a method, and the least wiring that works."""

from flwr.app import Context, UserConfig
from flwr.serverapp import Grid, ServerApp

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import FederatedStrategy, configured
from flower_ext.runs import RunDirectory
from own.task import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    configured.start(grid, context, task, strategy_of)


def strategy_of(config: UserConfig, run: RunDirectory) -> FederatedStrategy:
    plan, local = configured.release_plan(config), configured.training(config)
    return FederatedStrategy(DPFedAvg(local=local), **configured.options(config, run, plan))
