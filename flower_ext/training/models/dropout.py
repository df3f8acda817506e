"""Dropout whose masks are the same for a model in a batch as for the model alone, or no dropout.

PyTorch draws masks from one generator that all models of a process share, so a model in a batch
would get different masks than alone. PyTorch also takes 8 ns per number. In this module each
training has its own generator, which yields four 16-bit numbers at a time. The probability p is
therefore rounded to a multiple of 2⁻¹⁶, and kept values are divided by 1 minus the rounded p.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

LEVELS = 2**16
_LEAST = -(2**63)
AT_A_TIME = 4
"""Number of 16-bit numbers in one 64-bit draw, the smallest draw."""
_DROPPING = {
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout),
}


class Dropout(nn.Dropout):
    """`nn.Dropout` that draws 16-bit numbers on a CPU, as `Draws` does.

    The numbers come from torch's own generator.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``; in training mode, set a random part to 0, and scale the rest."""
        if not self.training or self.p == 0 or not x.is_cpu:
            return super().forward(x)
        bits = draw_bits(draws_needed(x.numel()), torch.default_generator)[: x.numel()]
        noise = _noise(bits.view(x.shape), self.p, x.dtype)
        return x.mul_(noise) if self.inplace else x * noise


def own_dropout(model: nn.Module) -> nn.Module:
    """Turn each `nn.Dropout` of ``model`` into a `Dropout`, and return ``model`` itself."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = Dropout
    return model


class WithoutDropout(TorchFunctionMode):
    """Switch off a model's random parts, such as dropout, so that repeated passes agree."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the function without its random part."""
        kwargs = kwargs or {}
        if func in _DROPPING:
            return args[0] if args else kwargs["input"]
        if func is functional.rrelu:
            return functional.leaky_relu(args[0], 0.2)
        if func is functional.scaled_dot_product_attention:
            kwargs = {name: value for name, value in kwargs.items() if name != "dropout_p"}
        return func(*args, **kwargs)


class Draws:
    """Random numbers for one step of K trainings. Each training draws from its own generator.

    Parameters
    ----------
    generators : sequence of torch.Generator or None
        None for a training that uses no draws.
    counts : sequence of int
        Number of examples in each mini-batch; all other rows are padding.
    """

    def __init__(self, generators: Sequence[torch.Generator | None], counts: Sequence[int]) -> None:
        self.generators, self.counts = generators, counts

    def noise(self, shape: Sequence[int], p: float, dtype: torch.dtype) -> Tensor:
        """Return factors of this shape, (K, batch, …): 0 with probability p, else 1 / (1 − p)."""
        each = math.prod(shape[2:])
        drawn = torch.zeros((shape[0], draws_needed(shape[1] * each)), dtype=torch.int64)
        for row, generator, count in zip(drawn.unbind(), self.generators, self.counts, strict=True):
            if generator is not None:
                drawn_row = row if count == shape[1] else row[: draws_needed(count * each)]
                drawn_row.random_(_LEAST, None, generator=generator)
        bits = drawn.view(torch.int16)[:, : shape[1] * each]
        return _noise(bits.reshape(tuple(shape)), p, dtype)


def draw_bits(count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` numbers of 64 bits; return their bits as 16-bit numbers."""
    drawn = torch.empty(count, dtype=torch.int64).random_(_LEAST, None, generator=generator)
    return drawn.view(torch.int16)


def draws_needed(count: int) -> int:
    """Return how many 64-bit draws yield at least ``count`` 16-bit numbers."""
    return -(-count // AT_A_TIME)


def levels_dropped(p: float) -> int:
    """Return how many of the `LEVELS` possible 16-bit numbers make dropout set a value to 0."""
    return round(p * LEVELS)


def _noise(bits: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    dropped = levels_dropped(p)
    if dropped == LEVELS:
        return torch.zeros(bits.shape, dtype=dtype)
    kept = bits >= dropped - LEVELS // 2
    return kept.to(dtype).mul_(LEVELS / (LEVELS - dropped))
