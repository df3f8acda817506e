"""A frozen front part that reveals which examples pass through it together; clients with images."""

import torch
from torch import nn

from flower_ext.data import ClientData, Examples
from flower_ext_pretrained.features import Features

WIDTH = 6


class Front(nn.Module):
    """A frozen part with statistics, dropout and random draws, which counts its forward passes."""

    passes = 0

    def __init__(self, *, moved: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.lift = nn.Conv2d(1, WIDTH, 3)
        self.lift.weight.data = torch.randn(self.lift.weight.shape, generator=generator)
        self.lift.weight.data[0, 0, 0, 0] += moved
        self.norm = nn.BatchNorm2d(WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).passes += 1
        assert len(x) == 1
        noise = 0.01 * torch.randn(int(x.abs().sum().nan_to_num().item()) % 7 + WIDTH)[:WIDTH]
        return self.dropout(self.norm(self.lift(x))).mean(dim=(2, 3)) + noise


def images(client: int) -> ClientData:
    generator = torch.Generator().manual_seed(client)
    x = torch.randn(12, 1, 5, 5, generator=generator)
    y = torch.arange(12) % 2
    return ClientData(train=Examples(x[:8], y[:8]), test=Examples(x[8:], y[8:]))


def count_of(features: Features, client: int = 0) -> int:
    Front.passes = 0
    features(client)
    return Front.passes
