"""Layers on top of a pretrained image model, and layers that replace its BatchNorm."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class Adapter(nn.Module):
    """A residual bottleneck on features, which begins as the identity."""

    def __init__(self, width: int, bottleneck: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, bottleneck)
        self.up = nn.Linear(bottleneck, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return adapted features (n, width)."""
        return x + self.up(torch.relu(self.down(x)))


class ChannelAffine(nn.Module):
    """A BatchNorm in evaluation mode, with a trainable factor and shift per channel."""

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        factor = norm.weight.detach() / torch.sqrt(norm.running_var + norm.eps)
        self.weight = nn.Parameter(factor)
        self.bias = nn.Parameter(norm.bias.detach() - norm.running_mean * factor)

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift the channels of (n, channels, …)."""
        shape = (-1, *(1,) * (x.dim() - 2))
        return x * self.weight.view(shape) + self.bias.view(shape)


def without_statistics(model: nn.Module) -> nn.Module:
    """Replace each BatchNorm by a `ChannelAffine`, because its statistics would depend on data."""
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, _BatchNorm):
            model.set_submodule(name, ChannelAffine(layer))
    return model
