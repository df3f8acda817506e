"""A linear model whose records pull it by fixed amounts, so that every update is known."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from flower_ext.data import ClientData, Examples, SiloData
from flower_ext.federation import client_level_dp_mod
from flower_ext.training import LocalTraining

SIZE = 100
"""Number of weights of the model, beside its bias."""
ONE_STEP = LocalTraining(steps=1, batch_size=64, learning_rate=1.0)


def model(width=1):
    return nn.Linear(SIZE, width)


def pull(outputs, targets):
    """Return a loss whose steepest descent moves the model by the pulls of its records."""
    return -(outputs.squeeze(-1) * targets).mean()


def initial():
    """Return the model before the first round, of zeros."""
    return ArrayRecord({"weight": torch.zeros(1, SIZE), "bias": torch.zeros(1)})


def client_data(*forces):
    """Return a client's data: a record for each force with which to pull a weight and the bias."""
    records = Examples(torch.eye(1, SIZE).repeat(len(forces), 1), torch.tensor(forces))
    return ClientData(train=records, test=records)


def silo_data(owners, forces):
    """Return a silo's data: a record for each force, with its owner."""
    records = client_data(*forces).train
    return SiloData(train=records, test=records, owners=torch.tensor(owners))


def plain_app(task):
    """Return a ClientApp that takes one step by hand, under this package's Flower mod."""
    app = ClientApp(mods=[client_level_dp_mod()])

    @app.train()
    def _(message, context):
        records = task.data(context.node_config["partition-id"]).train
        received = message.content["arrays"].to_torch_state_dict()
        moved = {
            "weight": received["weight"] + records.targets @ records.features / len(records),
            "bias": received["bias"] + records.targets.mean(),
        }
        content = RecordDict({"arrays": ArrayRecord(moved)})
        content["metrics"] = MetricRecord({"num-examples": len(records)})
        return Message(content, reply_to=message)

    return app
