"""One round of DPFedAvg with synthetic updates: clipped, added, and noised by the server."""

import json
import time

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from benchmarks.speed.workload import parse
from flower_ext.algorithms import DPFedAvg
from flower_ext.data import ClientData, Examples
from flower_ext.federation import (
    ClientMethod,
    ClientWork,
    FederatedStrategy,
    LocalResult,
    Memory,
    run_in_process,
)
from flower_ext.privacy import FixedSizeSampling, ReleasePlan
from flower_ext.training import LocalTraining, Params, Task

OUTPUTS = 1_000


def synthetic_update(work: ClientWork) -> LocalResult:
    """Return an update as large as the model."""
    return LocalResult(update={n: torch.full_like(p, 1e-3) for n, p in work.received.items()})


def received(work: ClientWork) -> Params:
    """Return the model that was sent."""
    return work.received


class SyntheticUpdates(DPFedAvg):
    """A method whose clients answer without training."""

    client = ClientMethod(
        name="synthetic_updates",
        local_update=synthetic_update,
        local_model=received,
        memory=Memory.NONE,
    )


def main() -> None:
    """Run one round of a workload; its model ``synthetic-1100000`` has 1,100,000 parameters."""
    workload = parse()
    cohort, width = workload.cohort, int(workload.model.partition("-")[2]) // OUTPUTS
    examples = Examples(torch.zeros(1, width), torch.zeros(1, dtype=torch.long))
    data = ClientData(train=examples, test=examples)
    task = Task(model=lambda: nn.Linear(width, OUTPUTS, bias=False), data=lambda client: data)
    plan = ReleasePlan(
        sampling=FixedSizeSampling(population=cohort, size=cohort),
        clipping_norm=1.0,
        noise_multiplier=1.0,
        rounds=1,
        delta=1e-5,
        noise_placement="server",
    )
    server, started = ServerApp(), time.perf_counter()

    @server.main()
    def _(grid: Grid, context: Context) -> None:
        method = SyntheticUpdates(local=LocalTraining())
        strategy = FederatedStrategy(method, plan, evaluate_every=0)
        strategy.start(grid, ArrayRecord(task.initial_params(0)), num_rounds=1)

    run_in_process(server, SyntheticUpdates.client_app(task), num_clients=cohort)
    print(json.dumps({"ms": 1e3 * (time.perf_counter() - started)}), flush=True)


if __name__ == "__main__":
    main()
