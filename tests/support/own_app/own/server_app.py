"""An app written from scratch: settings, a task, a method, and the least wiring that works."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import configured
from own.settings import Settings
from own.task import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = configured.settings(Settings, context)
    plan = configured.release_plan(settings, configured.sampling(settings))
    method = DPFedAvg(local=configured.training(settings))
    configured.start(grid, context, settings, task, method, plan)
