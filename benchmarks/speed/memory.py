"""Memory and time of a round by cohort and parameters, with invented updates.

    python -m benchmarks memory

Each point is a process: one round in which every client's update is clipped and added, and the
server noises the sum.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from benchmarks.speed.contest import Contender
from benchmarks.speed.workload import Workload, parse
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
from flower_ext.runs.page import table
from flower_ext.training import LocalTraining, Params, Task

MILLIONS, COHORTS = (0.11, 1.1, 11.0), (10, 100, 1_000)
OUTPUTS = 1_000


def made_up(work: ClientWork) -> LocalResult:
    """Return an update as large as the model."""
    return LocalResult(update={n: torch.full_like(p, 1e-3) for n, p in work.received.items()})


def received(work: ClientWork) -> Params:
    """Return the model that was sent."""
    return work.received


class MadeUp(DPFedAvg):
    """A method whose clients answer without training."""

    client = ClientMethod(
        name="made_up", local_update=made_up, local_model=received, memory=Memory.NONE
    )


def one_round(cohort: int, parameters: int) -> None:
    """Run one round, and print its time as a contender does."""
    width = parameters // OUTPUTS
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
        strategy = FederatedStrategy(MadeUp(local=LocalTraining()), plan, evaluate_every=0)
        strategy.start(grid, ArrayRecord(task.initial_params(0)), num_rounds=1)

    run_in_process(server, MadeUp.client_app(task), num_clients=cohort)
    print(json.dumps({"ms": 1e3 * (time.perf_counter() - started)}), flush=True)


def main() -> None:
    """Measure a round at each point, and print the table."""
    point = Contender("a round", (sys.executable, "-m", "benchmarks.speed.memory", "--one"))
    rows = []
    for millions in MILLIONS:
        for cohort in COHORTS:
            model = f"made-{int(millions * 1e6)}"
            workload = Workload(model=model, clients=cohort, cohort=cohort)
            if (measured := point.run(workload, timeout=900)) is not None:
                rows.append(
                    (
                        f"{millions:g}",
                        f"{cohort:,}",
                        f"{measured.megabytes:.0f}",
                        f"{measured.milliseconds / 1e3:.1f}",
                        f"{4 * millions * cohort:,.0f}",
                    )
                )
    header = ("parameters, millions", "clients a round", "peak MB", "seconds", "MB of all updates")
    print(table(header, rows))


if __name__ == "__main__":
    if "--one" in sys.argv:
        sys.argv.remove("--one")
        workload = parse()
        one_round(workload.cohort, int(workload.model.partition("-")[2]))
    else:
        main()
