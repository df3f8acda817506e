"""Small real learning problems that the tests share."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord
from torch import nn

from flower_ext.data import ClientData, Examples
from flower_ext.training import Task

CLASSES = 4
FEATURES = 6


class Net(nn.Module):
    """A two-layer network whose last layer is the personal head."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.extractor(x)))


def client_data(client: int) -> ClientData:
    """Return data of two classes per client; a label means a different class on each client."""
    generator = torch.Generator().manual_seed(client)
    targets = torch.randint(2, (40,), generator=generator)
    features = torch.randn(40, FEATURES, generator=generator)
    features[:, 0] += 3.0 * targets
    labels = (targets + client) % CLASSES
    return ClientData(
        train=Examples(features=features[:30], targets=labels[:30]),
        test=Examples(features=features[30:], targets=labels[30:]),
    )


def task() -> Task:
    """Return the problem as a task for every method."""
    return Task(model=Net, data=client_data, device="cpu")


def initial() -> ArrayRecord:
    """Return the model before the first round."""
    return ArrayRecord(task().initial_params(0))
