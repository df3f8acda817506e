from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_ext.algorithms import DP2FedSAM, DPFedAvg
from flower_ext.federation import FederatedStrategy, configured
from flower_ext.runs import RunDirectory
from texts.settings import Settings
from texts.task import task_of

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    configured.start(grid, context, Settings, task_of(context), strategy_of)


def strategy_of(settings: Settings, run: RunDirectory) -> FederatedStrategy:
    plan = configured.release_plan(settings, configured.sampling(settings))
    local = configured.training(settings)
    options = configured.options(settings, run, plan)
    if settings.personal_head:
        method = DP2FedSAM(head=local, extractor=local, personal=("*.classifier",))
        return FederatedStrategy(method, **options)
    return FederatedStrategy(DPFedAvg(local=local), **options)
