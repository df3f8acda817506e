"""A ClientApp from elsewhere behind this package's mod, audited like the package's methods."""

from __future__ import annotations

import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_ext.federation import client_level_dp_mod
from flower_ext.training import Task


def plain_app(task: Task) -> ClientApp:
    """Return a ClientApp whose clients take one step of plain torch on a linear model."""
    app = ClientApp(mods=[client_level_dp_mod()])

    @app.train()
    def _(message: Message, context: Context) -> Message:
        records = task.data(int(context.node_config["partition-id"])).train
        assert isinstance(records.features, torch.Tensor)
        received = message.content.array_records["arrays"]["weight"].numpy()
        weight = torch.from_numpy(received).requires_grad_()
        loss = task.loss(records.features @ weight.T, records.targets)
        (gradient,) = torch.autograd.grad(loss, [weight])
        content = RecordDict({"metrics": MetricRecord({"num-examples": len(records)})})
        content["arrays"] = ArrayRecord({"weight": Array(received - gradient.numpy())})
        return Message(content, reply_to=message)

    return app
