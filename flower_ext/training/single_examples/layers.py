"""The gradient of every example of a batch, layer by layer, from one pass over all of them.

A layer's gradient for one example is a product of two factors: the layer's input, and the *slope*,
which is the gradient of the loss with respect to the layer's output. Where it is cheaper not to
store this product, the module computes the gradient's norm, and weighted sums over examples, from
the two factors (book-keeping and ghost norms, Li et al. 2022; Bu et al. 2023).

Norms and sums accumulate in float64, so that rounding lets no example count for more than the
clipping norm, however many examples or parameters there are. Opacus' ghost clipping takes a second
backward pass and computes norms in single precision. For layers where this module is not faster, it
uses Opacus' functions for single examples' gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from flower_ext.training.models.validation import objections, opacus
from flower_ext.training.params import flat_rows

_CANCELLATION_MARGIN = 2e-6
"""Margin for terms s_t a_tᵀ that cancel (`Products`): a norm grows by at least this share of
Σ_t ‖s_t a_tᵀ‖.

After clipping to C, an example's Σ_t ‖s_t a_tᵀ‖ is therefore at most C/share, and rounding in
float64 changes Σ_t s_t a_tᵀ by far less than C.
"""
_INFINITE_SQUARE = 1e200
"""A square above this counts as infinite. Otherwise it might be multiplied by a square that
underflowed, and the product would be too small."""
_LEAST_RELIABLE_SQUARE = 1e-20
"""A sum of squares in single precision is reliable if it is above this number: squares that
underflow are then tiny beside the sum."""
_FEW_CHANNELS = 32
"""With fewer channels, a grouped convolution is at least as fast as Opacus on a CPU."""
_PATCHES = 2**22
"""Largest number of elements in the patches that Opacus stores at a time."""
_CONVERTED_AT_A_TIME = 2**20
"""Most numbers that are converted to float64 at a time, so that they stay in the caches."""
_SUMMED_IN_SINGLE = 256
"""Most numbers whose squares are added up in single precision. In any order of additions, the
relative error is at most 1.6e-5 for the sum, and 0.8e-5 for the norm."""


class GradientRows:
    """Gradients of a parameter, one row per example."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = flat_rows(rows)
        self.factors = (self.rows,)

    def only(self, sound: Tensor) -> GradientRows:
        """Return the same gradients, with 0 for every example whose ``sound`` is False."""
        return GradientRows(self.rows.where(sound.unsqueeze(1), 0.0))

    def squares(self) -> Tensor:
        """Return ‖gradient‖² of every example."""
        return _squares(self.rows)

    def total(self, factors: Tensor) -> Tensor:
        """Return the sum over examples of factor · gradient, in float64."""
        summed = self.rows.new_zeros(self.rows.shape[1], dtype=torch.float64)
        piece = max(1, _CONVERTED_AT_A_TIME // max(1, len(summed)))
        pieces = zip(
            torch.split(factors.double(), piece), torch.split(self.rows, piece), strict=True
        )
        for scales, rows in pieces:
            summed.addmv_(rows.double().T, scales)
        return summed


class Products:
    """Gradients Σ_t s_t a_tᵀ of a weight, kept as two factors.

    The sum is over the places t of an example, such as its words or pixels.

    The squared norms Σ_t Σ_u ⟨s_t, s_u⟩ ⟨a_t, a_u⟩ (ghost norms, Li et al. 2022) are computed in
    float64, because terms of opposite sign may cancel and small terms underflow. A margin covers
    the rounding errors of terms that cancel.

    ``slopes`` is s, of shape (examples, places, outputs). ``inputs`` is a, of shape (examples,
    places, inputs).
    """

    def __init__(self, slopes: Tensor, inputs: Tensor) -> None:
        self.slopes, self.inputs = slopes, inputs
        self.factors = slopes, inputs

    def only(self, sound: Tensor) -> Products:
        """Return the same gradients, with 0 for every example whose ``sound`` is False."""
        rows = sound.view(-1, 1, 1)
        return Products(self.slopes.where(rows, 0.0), self.inputs.where(rows, 0.0))

    def squares(self) -> Tensor:
        """Return ‖gradient‖² of every example."""
        if self.slopes.shape[1] == 1:
            slopes, inputs = (_bounded(_squares(part.flatten(1))) for part in self.factors)
            return slopes * inputs
        slopes, inputs = (_bounded(torch.bmm(p, p.mT)) for p in map(Tensor.double, self.factors))
        return _squares_of_sums(slopes * inputs, self.slopes.shape[2] + self.inputs.shape[2])

    def total(self, factors: Tensor) -> Tensor:
        """Return the sum over examples of factor · gradient, in float64."""
        scaled = self.slopes.double() * factors.view(-1, 1, 1)
        return scaled.flatten(0, 1).T @ self.inputs.flatten(0, 1).double()


class Lookups:
    """Gradients of an embedding table, kept as factors. Each place t of an example looks up a row.

    The squared norms are Σ ⟨s_t, s_u⟩ over the places t and u that look up the same row. They equal
    those of `Products` with one-hot inputs: 1 for the row that a place looks up, and 0 otherwise.

    ``slopes`` is s, of shape (examples, places, width). ``places`` holds the row numbers, of shape
    (examples, places). The table has ``rows`` rows.
    """

    def __init__(self, slopes: Tensor, places: Tensor, rows: int) -> None:
        self.slopes, self.places, self.rows = slopes, places, rows
        self.factors = slopes, places

    def only(self, sound: Tensor) -> Lookups:
        """Return the same gradients, with 0 for every example whose ``sound`` is False."""
        return Lookups(self.slopes.where(sound.view(-1, 1, 1), 0.0), self.places, self.rows)

    def squares(self) -> Tensor:
        """Return ‖gradient‖² of every example."""
        piece = max(1, _PATCHES // self.places.shape[1] ** 2)
        squares = []
        pairs = zip(torch.split(self.slopes, piece), torch.split(self.places, piece), strict=True)
        for slopes, places in pairs:
            same = places.unsqueeze(2) == places.unsqueeze(1)
            doubled = slopes.double()
            products = _bounded(torch.bmm(doubled, doubled.mT)).where(same, 0.0)
            squares.append(_squares_of_sums(products, slopes.shape[2]))
        return torch.cat(squares)

    def total(self, factors: Tensor) -> Tensor:
        """Return the sum over examples of factor · gradient, in float64."""
        scaled = self.slopes.double() * factors.view(-1, 1, 1)
        summed = scaled.new_zeros(self.rows, scaled.shape[2])
        return summed.index_add_(0, self.places.flatten(), scaled.flatten(0, 1))


def _squares_of_sums(products: Tensor, terms: int) -> Tensor:
    """Return ‖Σ_t g_t‖² of every example, rounded up.

    ``products`` are ⟨g_t, g_u⟩ in float64 (examples, places, places). Each of them is the
    result of ``terms`` operations that round.
    """
    squares = products.sum(dim=2).sum(dim=1).clamp_min(0.0)
    sizes = products.diagonal(dim1=1, dim2=2).sqrt().sum(dim=1)
    # In any order of additions, rounding moves the square by at most this share of sizes².
    share = (terms + 2 * products.shape[1] + 4) * torch.finfo(torch.float64).eps
    return (squares.sqrt() + max(_CANCELLATION_MARGIN, math.sqrt(share)) * sizes).square()


def _bounded(squares: Tensor) -> Tensor:
    return squares.where(squares.abs() < _INFINITE_SQUARE, math.inf)


def _squares(rows: Tensor) -> Tensor:
    """Return ‖row‖² in float64, because a long sum in float32 would lose terms or overflow."""
    whole = rows.shape[1] // _SUMMED_IN_SINGLE * _SUMMED_IN_SINGLE
    norms = [
        vector_norm(rows[:, :whole].view(len(rows), -1, _SUMMED_IN_SINGLE), dim=2),
        vector_norm(rows[:, whole:], dim=1, keepdim=True),
    ]
    squares = torch.cat(norms, dim=1).double().square().sum(dim=1)
    if rows.dtype != torch.float64:
        unsure = (squares < _LEAST_RELIABLE_SQUARE) | squares.isinf()
        if bool(unsure.any()):
            squares[unsure] = _squares(rows[unsure].double())
    return squares


Parts = Mapping[str, "GradientRows | Products | Lookups"]


def _linear(layer: nn.Linear, x: Tensor, slope: Tensor) -> Parts:
    x, slope = (part.reshape(len(part), -1, part.shape[-1]) for part in (x, slope))
    bias = GradientRows(slope.sum(dim=1))  # one row per example is small, whatever the layer
    if _is_better_unwritten(layer.weight, x.shape[1]):
        return {"weight": Products(slope, x), "bias": bias}
    return {"weight": GradientRows(torch.bmm(slope.mT, x)), "bias": bias}


def _convolution(layer: nn.Conv2d, x: Tensor, slope: Tensor) -> Parts:
    slopes = slope.flatten(2)  # (examples, channels, places)
    if isinstance(layer.padding, tuple):
        bias = GradientRows(slopes.sum(dim=2))
        if layer.groups > 1 or layer.out_channels < _FEW_CHANNELS:
            return {"weight": GradientRows(_grouped(layer, x, slope)), "bias": bias}
        if _is_better_unwritten(layer.weight, slopes.shape[2]):
            return {"weight": Products(slopes.mT, _patches(layer, x)), "bias": bias}
    piece = max(1, _PATCHES // (layer.weight[0].numel() * slopes.shape[2]))
    pairs = zip(torch.split(x, piece), torch.split(slope, piece), strict=True)
    samples = [_sampled(layer, *pair) for pair in pairs]
    return {n: GradientRows(torch.cat([rows[n].rows for rows in samples])) for n in samples[0]}


def _is_better_unwritten(weight: Tensor, places: int) -> bool:
    """Return True if it is faster to keep gradients as `Products` than to store them."""
    return places == 1 or weight.numel() > 4 * places * (len(weight) + weight[0].numel())


def _patches(layer: nn.Conv2d, images: Tensor) -> Tensor:
    """Return the inputs of each pixel of the output: (examples, places, numbers in a patch)."""
    assert isinstance(layer.padding, tuple)
    placed = layer.kernel_size, layer.dilation, layer.padding, layer.stride
    return functional.unfold(images, *placed).mT


def _grouped(layer: nn.Conv2d, x: Tensor, slope: Tensor) -> Tensor:
    """Return each example's gradient, by one convolution with a group of channels per example."""
    assert isinstance(layer.padding, tuple)
    count, kernels = len(x), layer.weight.shape[1:]
    x, slope = (
        part.reshape(1, -1, *part.shape[2:]).contiguous(memory_format=torch.channels_last)
        for part in (x, slope)
    )
    placed = layer.stride, layer.padding, layer.dilation, count * layer.groups
    gradients = conv2d_weight(x, (slope.shape[1], *kernels), slope, *placed)  # type: ignore[no-untyped-call]
    return cast(Tensor, gradients).reshape(count, -1)


def _embedding(layer: nn.Embedding, x: Tensor, slope: Tensor) -> Parts:
    words, slopes = x.reshape(len(x), -1), slope.reshape(len(x), -1, slope.shape[-1])
    if layer.padding_idx is not None:
        slopes = slopes.where((words != layer.padding_idx).unsqueeze(2), 0.0)
    # `Lookups` compares pairs of words, which costs less than a table of zeros per example.
    if words.shape[1] < layer.num_embeddings:
        return {"weight": Lookups(slopes, words.long(), layer.num_embeddings)}
    return _sampled(layer, x, slopes.view_as(slope))


_FORMS: dict[type[nn.Module], Callable[..., Parts]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.Embedding: _embedding,
}
"""Layers for which one of the functions above was measured to be faster than Opacus."""
_SAMPLED = {
    *(nn.Conv1d, nn.Conv3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
}
"""Layers whose gradients Opacus computes. `EmbeddingBag` is left out, because Opacus counts a
word only once if an example repeats it."""


def gradients(layer: nn.Module, x: Tensor, slope: Tensor) -> Parts:
    """Return each example's gradients of a layer's parameters, by the parameters' names.

    ``x`` is the layer's input, and ``slope`` the gradient of the loss with respect to its output.
    """
    return _FORMS.get(type(layer), _sampled)(layer, x, slope)


def is_known(layer: nn.Module) -> bool:
    """Return True if `gradients` supports the layer."""
    # These two settings change gradients, and a trial on a few random examples might miss that.
    usual = getattr(layer, "padding_mode", "zeros") == "zeros"
    if not usual or getattr(layer, "scale_grad_by_freq", False):
        return False
    return type(layer) in _FORMS or (type(layer) in _SAMPLED and not objections(layer))


def _sampled(layer: nn.Module, x: Tensor, slope: Tensor) -> dict[str, GradientRows]:
    """Return what `gradients` returns, computed by Opacus."""
    sampler = opacus().GradSampleModule.GRAD_SAMPLERS[type(layer)]
    layer.requires_grad_(True)  # as Opacus expects
    try:
        rows = sampler(layer, [x.contiguous()], slope.contiguous())
    finally:
        layer.requires_grad_(False)
    return {name: GradientRows(rows[p]) for name, p in layer.named_parameters() if p in rows}
