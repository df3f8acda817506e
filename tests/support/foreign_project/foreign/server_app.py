"""The drop-ins of the README: DP-FedAvg in place of Flower's strategy, or Upcycled around it."""

import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvgM

from flower_ext.algorithms import DPFedAvg, Upcycled
from flower_ext.federation import FederatedStrategy, recorded
from flower_ext.privacy import PoissonSampling, ReleasePlan

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    initial = ArrayRecord(torch.nn.Linear(3, 2).state_dict())
    if name := str(context.run_config["record"]):
        recorded(strategy_of(), name).start(
            grid, initial, num_rounds=int(context.run_config["rounds"])
        )
        return
    run = dp_fedavg if context.run_config["strategy"] == "dp-fedavg" else upcycled
    facts = run(grid, initial)
    Path(str(context.run_config["output"])).write_text(json.dumps(facts))


def strategy_of() -> FederatedStrategy:
    plan = ReleasePlan.for_target(
        epsilon=4.0,
        delta=0.05,
        sampling=PoissonSampling(population=6, rate=0.5),
        rounds=3,
        clipping_norm=2.0,
        noise_placement="server",
    )
    return FederatedStrategy(DPFedAvg(), plan)


def dp_fedavg(grid: Grid, initial: ArrayRecord) -> dict:
    strategy = strategy_of()
    result = strategy.start(grid, initial, num_rounds=3)
    return {
        "accuracy": result.evaluate_metrics_clientapp[3]["accuracy_mean"],
        "statements": [guarantee.statement() for guarantee in strategy.guarantees()],
        "refusals": strategy.refusals,
    }


def upcycled(grid: Grid, initial: ArrayRecord) -> dict:
    base = FedAvgM(server_momentum=0.5, min_train_nodes=3, min_available_nodes=3)
    strategy = Upcycled(base, coefficient=0.5)
    sizes, send = [], grid.send_and_receive

    def counted(messages, **options):
        sizes.append(len(messages := list(messages)))
        return send(messages, **options)

    grid.send_and_receive = counted
    result = strategy.start(grid, initial, num_rounds=4)
    return {
        "initial": {name: array.numpy().tolist() for name, array in initial.items()},
        "model": {name: array.numpy().tolist() for name, array in result.arrays.items()},
        "messages": sizes,
        "accuracy": {
            round_: metrics["accuracy"]
            for round_, metrics in result.evaluate_metrics_clientapp.items()
        },
    }
