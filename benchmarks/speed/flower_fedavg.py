"""Flower's own FedAvg (with its own central DP wrapper) on Ray, around a plain PyTorch client."""

from collections.abc import Iterable
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, Strategy
from flwr.simulation import run_simulation

from benchmarks.speed.workload import (
    CLIPPING_NORM,
    EXAMPLES,
    NOISE_MULTIPLIER,
    Clock,
    examples,
    parse,
    train_in_place,
)


def main() -> None:
    """Run the workload."""
    workload = parse()
    clock, client, server = Clock(), ClientApp(), ServerApp()

    @client.train()
    def _(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        model = workload.build()
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        train_in_place(model, *examples(workload, int(context.node_config["partition-id"])))
        content = RecordDict(
            {
                "arrays": ArrayRecord(model.state_dict()),
                "metrics": MetricRecord({"num-examples": EXAMPLES}),
            }
        )
        return Message(content, reply_to=message)

    class Timed(FedAvg):
        def aggregate_train(
            self, server_round: int, replies: Iterable[Message]
        ) -> tuple[ArrayRecord | None, MetricRecord | None]:
            done = super().aggregate_train(server_round, replies)
            clock.tick()
            return done

    @server.main()
    def _(grid: Grid, context: Context) -> None:
        strategy: Strategy = Timed(
            fraction_train=workload.cohort / workload.clients,
            fraction_evaluate=0.0,
            min_available_nodes=workload.clients,
            min_train_nodes=workload.cohort,
        )
        if workload.private:
            strategy = DifferentialPrivacyServerSideFixedClipping(
                strategy,
                noise_multiplier=NOISE_MULTIPLIER,
                clipping_norm=CLIPPING_NORM,
                num_sampled_clients=workload.cohort,
            )
        initial = ArrayRecord(workload.build().state_dict())
        strategy.start(grid, initial, num_rounds=workload.rounds)

    resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, workload.clients, backend_config=resources)
    clock.report()


if __name__ == "__main__":
    main()
