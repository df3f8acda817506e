"""Flower's FedAvg replaced by DP-FedAvg: the drop-in of the README."""

import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flower_ext.algorithms import DPFedAvg
from flower_ext.privacy import PoissonSampling, ReleasePlan

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    plan = ReleasePlan.for_target(
        epsilon=4.0,
        delta=0.05,
        sampling=PoissonSampling(population=6, rate=0.5),
        rounds=3,
        clipping_norm=2.0,
        noise_placement="server",
    )
    strategy = DPFedAvg(plan=plan)
    initial = ArrayRecord(torch.nn.Linear(3, 2).state_dict())
    result = strategy.start(grid, initial, num_rounds=3)
    facts = {
        "accuracy": result.evaluate_metrics_clientapp[3]["accuracy_mean"],
        "statements": [guarantee.statement() for guarantee in strategy.guarantees()],
        "refusals": strategy.refusals,
    }
    Path(str(context.run_config["output"])).write_text(json.dumps(facts))
