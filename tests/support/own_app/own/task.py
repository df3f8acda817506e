"""Eight clients with 40 points of five numbers; the sign of the first is the class."""

import torch

from flower_ext.data import ClientData, Examples
from flower_ext.training import Task


def data(client: int) -> ClientData:
    generator = torch.Generator().manual_seed(client)
    x = torch.randn(40, 5, generator=generator)
    y = (x[:, 0] > 0).long()
    return ClientData(train=Examples(x[:30], y[:30]), test=Examples(x[30:], y[30:]))


task = Task(model=lambda: torch.nn.Linear(5, 2), data=data)
