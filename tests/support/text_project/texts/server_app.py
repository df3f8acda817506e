from flwr.app import Context, UserConfig
from flwr.serverapp import Grid, ServerApp

from flower_ext.algorithms import DP2FedSAM, DPFedAvg
from flower_ext.federation import FederatedStrategy, configured
from flower_ext.runs import RunDirectory
from texts.task import task_of

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    configured.start(grid, context, task_of(context), strategy_of)


def strategy_of(config: UserConfig, run: RunDirectory) -> FederatedStrategy:
    plan, local = configured.release_plan(config), configured.training(config)
    options = configured.options(config, run, plan)
    if config["personal-head"]:
        method = DP2FedSAM(head=local, extractor=local, personal=("*.classifier",))
        return FederatedStrategy(method, **options)
    return FederatedStrategy(DPFedAvg(local=local), **options)
