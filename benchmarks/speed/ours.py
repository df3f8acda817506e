"""DPFedAvg of this package: in one process, or on Ray.

    python -m benchmarks.speed.ours --engine {vectorised,loop,ray,ray-nodes} [workload options]

In one process, clients train together (vectorised) or one after the other (loop). On Ray, every
client is a node, or four nodes hold all clients (ray-nodes).
"""

import argparse
from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result

from benchmarks.speed.workload import (
    ACCELERATOR_MEMORY,
    BATCH,
    CLIPPING_NORM,
    LEARNING_RATE,
    NOISE_MULTIPLIER,
    Clock,
    Workload,
    examples,
    parse,
)
from flower_ext.algorithms import DPFedAvg
from flower_ext.data import ClientData, Examples
from flower_ext.federation import FederatedStrategy, VirtualGrid, run_in_process
from flower_ext.federation.client.app import CohortApp
from flower_ext.privacy import FixedSizeSampling, NonPrivatePlan, PrivacyPlan, ReleasePlan
from flower_ext.training import LocalTraining, Task
from flower_ext.training.batched.form import MEMORY_LIMIT

ENGINES = ("vectorised", "loop", "ray", "ray-nodes")
NODES = 4


def task_of(workload: Workload) -> Task:
    """Return the task: fifty images a client."""

    def data(client: int) -> ClientData:
        features, targets = examples(workload, client)
        images = Examples(features=features, targets=targets)
        return ClientData(train=images, test=images)

    return Task(model=workload.build, data=data, device=workload.device)


def plan_of(workload: Workload) -> PrivacyPlan:
    """Return a plan of central DP, or of no privacy."""
    sampling = FixedSizeSampling(population=workload.clients, size=workload.cohort)
    if not workload.private:
        return NonPrivatePlan(sampling=sampling)
    return ReleasePlan(
        sampling=sampling,
        clipping_norm=CLIPPING_NORM,
        noise_multiplier=NOISE_MULTIPLIER,
        rounds=workload.rounds,
        delta=1e-5,
        noise_placement="server",
    )


def main() -> None:
    """Run the workload on one engine."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    options, workload_options = parser.parse_known_args()
    engine, workload = options.engine, parse(workload_options)
    task, server = task_of(workload), ServerApp()
    clock = Clock()

    def after_round(server_round: int, result: Result) -> bool:
        clock.tick()
        return False

    @server.main()
    def _(grid: Grid, context: Context) -> None:
        strategy = FederatedStrategy(
            DPFedAvg(local=LocalTraining(epochs=1, batch_size=BATCH, learning_rate=LEARNING_RATE)),
            plan_of(workload),
            evaluate_every=0,
            timeout=3600,
        )
        nodes = VirtualGrid(grid, workload.clients // NODES) if engine == "ray-nodes" else grid
        model = ArrayRecord(task.initial_params(0))
        strategy.start(nodes, model, num_rounds=workload.rounds, should_stop=after_round)

    app = DPFedAvg.client_app(task)
    if engine == "loop":
        assert isinstance(app, CohortApp)
        app.cohort_answers.clear()  # without them it answers one client at a time
    if engine.startswith("ray"):
        from flwr.simulation import run_simulation  # Ray: 55 MB

        resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        count = NODES if engine == "ray-nodes" else workload.clients
        run_simulation(server, app, count, backend_config=resources)
    else:
        limit = MEMORY_LIMIT if workload.device == "cpu" else ACCELERATOR_MEMORY
        run_in_process(
            server,
            app,
            num_clients=workload.clients,
            workers=workload.workers,
            memory_limit=limit,
        )
    clock.report()


if __name__ == "__main__":
    main()
