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


@app.main()
def main(grid, context):
    config = context.run_config
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
    strategy.write(model)
