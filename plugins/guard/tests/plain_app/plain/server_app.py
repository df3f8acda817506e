"""A ServerApp that averages vectors, and notes everything that it can read in the replies."""

import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class Noting(FedAvg):
    """FedAvg that notes everything that the server can read in the replies."""

    def __init__(self, output, **settings):
        super().__init__(**settings)
        self.replies, self.output = [], Path(output)

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        for reply in replies:
            content = reply.content if reply.has_content() else {}
            self.replies.append(
                {
                    "round": server_round,
                    "node": reply.metadata.src_node_id,
                    "error": reply.error.reason if reply.has_error() else None,
                    "records": sorted(content),
                    "metrics": {k: dict(v) for k, v in content.items() if k == "metrics"},
                    "vector": [float(value) for value in content["arrays"]["vector"].numpy()]
                    if "arrays" in content
                    else None,
                }
            )
        self.write(None)  # the strategy may refuse the replies
        return super().aggregate_train(server_round, replies)

    def write(self, model):
        self.output.write_text(json.dumps({"replies": self.replies, "model": model}))


def in_secure_sums(grid, config):
    """Average by secure sums of this package, of which the clients need not know."""
    from flower_ext.algorithms import DPFedAvg
    from flower_ext.federation import FederatedStrategy
    from flower_ext.privacy import FullParticipation, ReleasePlan, SecureSum

    rounds = int(config["num-server-rounds"])
    plan = ReleasePlan(
        sampling=FullParticipation(3),
        clipping_norm=1.0,
        noise_multiplier=1.0,
        rounds=rounds,
        delta=1e-6,
        noise_placement=SecureSum(colluding=0.0, dropouts=0.0, signed=True),
    )
    strategy = FederatedStrategy(DPFedAvg(), plan, evaluate_every=0)
    start = ArrayRecord({"vector": Array(np.zeros(4, np.float32))})
    way = ConfigRecord({"way": str(config["way"])})
    result = strategy.start(grid, start, num_rounds=rounds, train_config=way)
    model = [float(value) for value in result.arrays["vector"].numpy()]
    outcome = {"model": model, "refusals": strategy.refusals}
    Path(str(config["output"])).write_text(json.dumps(outcome))


@app.main()
def main(grid, context):
    config = context.run_config
    if config["secure-sums"]:
        return in_secure_sums(grid, config)
    strategy = Noting(
        str(config["output"]), fraction_evaluate=1.0, min_train_nodes=3, min_available_nodes=3
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({"vector": Array(np.zeros(4, np.float32))}),
        train_config=ConfigRecord({"way": str(config["way"])}),
        num_rounds=int(config["num-server-rounds"]),
        timeout=120,
    )
    model = [float(value) for value in result.arrays["vector"].numpy()]
    return strategy.write(model)
