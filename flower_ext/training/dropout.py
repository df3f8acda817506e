"""Dropout whose masks a batch of models draws as each of them does by itself.

PyTorch draws a mask from a generator that all models of a process share, so that a model in a batch
would have other masks than alone; and it takes 8 ns a number. Here each training has a generator of
its own, of which four numbers of 16 bits come at a time: p is rounded to a multiple of 2⁻¹⁶, and
what is kept grows by the inverse of the share that this keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

LEVELS = 2**16
_LEAST = -(2**63)
AT_A_TIME = 4
"""Numbers of 16 bits in one of 64: so many are drawn at least."""


class Dropout(nn.Dropout):
    """As `nn.Dropout`; on a CPU it draws as `Draws` does, from torch's own generator."""

    def forward(self, x: Tensor) -> Tensor:
        """Keep a random part of ``x`` and scale it, in training."""
        if not self.training or self.p == 0 or not x.is_cpu:
            return super().forward(x)
        bits = draw(words(x.numel()), torch.default_generator)[: x.numel()]
        noise = _noise(bits.view(x.shape), self.p, x.dtype)
        return x.mul_(noise) if self.inplace else x * noise


def own_dropout(model: nn.Module) -> nn.Module:
    """Return ``model`` itself, each `nn.Dropout` of it a `Dropout` from now on."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = Dropout
    return model


class Draws:
    """What K trainings draw in one step, each from a generator of its own.

    Parameters
    ----------
    generators : sequence of torch.Generator or None
        None where what is drawn does not count.
    counts : sequence of int
        Examples in the mini-batch of each; all others are padding.
    """

    def __init__(self, generators: Sequence[torch.Generator | None], counts: Sequence[int]) -> None:
        self.generators, self.counts = generators, counts

    def noise(self, shape: Sequence[int], p: float, dtype: torch.dtype) -> Tensor:
        """Return factors of this shape, (K, batch, …): 0 with probability p, else 1 / (1 − p)."""
        each = math.prod(shape[2:])
        drawn = torch.zeros((shape[0], words(shape[1] * each)), dtype=torch.int64)
        for row, generator, count in zip(drawn.unbind(), self.generators, self.counts, strict=True):
            if generator is not None:
                own = row if count == shape[1] else row[: words(count * each)]
                own.random_(_LEAST, None, generator=generator)
        bits = drawn.view(torch.int16)[:, : shape[1] * each]
        return _noise(bits.reshape(tuple(shape)), p, dtype)


def draw(count: int, generator: torch.Generator) -> Tensor:
    """Return 16 random bits `AT_A_TIME` times ``count``."""
    drawn = torch.empty(count, dtype=torch.int64).random_(_LEAST, None, generator=generator)
    return drawn.view(torch.int16)


def words(count: int) -> int:
    """Return how many times `AT_A_TIME` there are at least ``count``."""
    return -(-count // AT_A_TIME)


def levels_dropped(p: float) -> int:
    """Return of how many of all `LEVELS` dropout of ``p`` keeps nothing."""
    return round(p * LEVELS)


def _noise(bits: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """Return the factors that random ``bits`` stand for."""
    dropped = levels_dropped(p)
    if dropped == LEVELS:
        return torch.zeros(bits.shape, dtype=dtype)
    kept = bits >= dropped - LEVELS // 2
    return kept.to(dtype).mul_(LEVELS / (LEVELS - dropped))
