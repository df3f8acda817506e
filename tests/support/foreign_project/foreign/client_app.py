"""A ClientApp as in Flower's tutorials: plain PyTorch, without flower_ext."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


def data(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    x = torch.randn(60, 3, generator=generator)
    return x, (x[:, 0] > 0).long()


@app.train()
def train(message: Message, context: Context) -> Message:
    model = torch.nn.Linear(3, 2)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = data(context)
    for _ in range(10):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(x)}),
    }
    return Message(RecordDict(content), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model = torch.nn.Linear(3, 2)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = data(context)
    accuracy = float((model(x).argmax(1) == y).float().mean())
    metrics = MetricRecord({"accuracy": accuracy, "num-examples": len(x)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
