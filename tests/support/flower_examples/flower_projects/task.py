"""A small CNN, made-up images, and the usual two loops."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.fc = nn.Linear(2 * 2 * 2, 2)

    def forward(self, x):
        return self.fc(F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1))


def load_data(context: Context) -> DataLoader:
    partition = int(context.node_config["partition-id"])
    assert partition < int(context.node_config["num-partitions"])
    generator = torch.Generator().manual_seed(partition)
    x = torch.randn(24, 1, 4, 4, generator=generator)
    return DataLoader(TensorDataset(x, (x.mean((1, 2, 3)) > 0).long()), batch_size=8)


def received(message: Message) -> Net:
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return net


def train_fn(net, loader, lr: float) -> float:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    return one_epoch(net, optimizer, loader)


def one_epoch(net, optimizer, loader) -> float:
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def answer(message: Message, state: dict, **metrics) -> Message:
    content = {"arrays": ArrayRecord(state), "metrics": MetricRecord(metrics)}
    return Message(content=RecordDict(content), reply_to=message)


def evaluate(message: Message, context: Context) -> Message:
    loader = load_data(context)
    x, y = loader.dataset.tensors
    with torch.no_grad():
        accuracy = (received(message)(x).argmax(1) == y).float().mean().item()
    metrics = MetricRecord({"accuracy": accuracy, "num-examples": len(y)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)
