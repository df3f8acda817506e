"""The ServerApp of a project on texts."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_ext.algorithms import DP2FedSAM, DPFedAvg
from flower_ext.federation import configured
from texts.settings import Settings
from texts.task import task_of

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings, task = configured.settings(Settings, context), task_of(context)
    plan = configured.release_plan(settings, configured.sampling(settings))
    local = configured.training(settings)
    method = DPFedAvg(local=local)
    if settings.personal_head:
        method = DP2FedSAM(head=local, extractor=local, personal=("*.classifier",))
    configured.start(grid, context, settings, task, method, plan)
