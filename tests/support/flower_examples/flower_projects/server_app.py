"""The ServerApp of the projects, with another strategy in the place of Flower's FedAvg."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import FederatedStrategy
from flower_ext.privacy import FullParticipation, ReleasePlan
from flower_projects.task import Net

CLIENTS = 4

app = ServerApp()


def plan(**changes) -> ReleasePlan:
    facts = {"epsilon": 8.0, "delta": 1e-3, "rounds": 2, "clipping_norm": 1.0}
    sampling = FullParticipation(CLIENTS)
    return ReleasePlan.for_target(**{**facts, "sampling": sampling, **changes})


def start(grid: Grid, strategy: Strategy, rounds: int = 2) -> Result:
    torch.manual_seed(0)
    return strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": 0.1}),
        num_rounds=rounds,
    )


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FederatedStrategy(DPFedAvg(), plan())
    start(grid, strategy, int(context.run_config["num-server-rounds"]))
    assert strategy.refusals == []
    print(*(guarantee.statement() for guarantee in strategy.guarantees()), sep="\n")
