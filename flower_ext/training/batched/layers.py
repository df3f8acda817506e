"""Layers and operations for K models at once, which send gradients to their targets.

From the first layer that works on channels on, images have the shape (batch, K·channels, height,
width), channels last in memory; operations that treat channels alike then need not know about
models. Everything else has the shape (K, batch, …).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_ext.training.batched.form import Target
from flower_ext.training.dropout import Draws
from flower_ext.training.params import Params


class Pass:
    """Parameters, random numbers and gradient targets of one pass over K models."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        targets: Mapping[str, Target],
        draws: Draws | None = None,
    ) -> None:
        self.params, self.targets, self.draws = params, targets, draws
        first = next(iter(params.values()))
        self.count = len(first)
        self.begin = torch.zeros((), device=first.device, requires_grad=True)
        self.leaves: Params = {}

    def leaf(self, name: str) -> Tensor:
        """Return a parameter; autograd computes its gradient if there is a target for it."""
        name = name.lstrip(".")  # a model of a single layer has an empty layer name
        value = self.params[name].detach()
        if name in self.targets:
            value = self.leaves[name] = value.requires_grad_()
        return value

    def product(self, x: Tensor, layer: str) -> Tensor:
        """Return x Wᵀ + b of shape (K, rows, outputs), for the weight and bias of ``layer``."""
        names = [f"{layer}.{leaf}".lstrip(".") for leaf in ("weight", "bias")]
        weight, bias = (self.params.get(name) for name in names)
        assert weight is not None
        targets = tuple(self.targets.get(name) for name in names)
        if targets == (None, None):
            return _product(x, weight, bias)
        y: Tensor = _Product.apply(self.begin, x, weight, bias, *targets)  # type: ignore[no-untyped-call]
        return y


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


class _Product(torch.autograd.Function):
    """x Wᵀ + b, whose backward pass sends the gradients of W and b to their targets.

    ``begin`` only requires a gradient, so that autograd runs a backward pass at all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        begin: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_target: Target | None,
        bias_target: Target | None,
    ) -> Tensor:
        ctx.x, ctx.weight, ctx.targets = x, weight, (weight_target, bias_target)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        # The product with W comes first, because a target may be W itself.
        down = torch.bmm(slope, ctx.weight) if ctx.needs_input_grad[1] else None
        weight, bias = ctx.targets
        if weight is not None:
            weight.add_product(slope.mT, ctx.x)
        if bias is not None:
            bias.add(slope.sum(dim=1))
        return None, down, None, None, None, None


def _linear(parameters: Pass, x: Tensor, *, layer: nn.Linear, name: str) -> Tensor:
    return parameters.product(x, name)


def _convolution(parameters: Pass, x: Tensor, *, layer: nn.Conv2d, name: str) -> Tensor:
    weight = parameters.leaf(f"{name}.weight")
    groups = len(weight) * layer.groups
    x, kernel = _by_channel(x), weight.flatten(0, 1)
    if len(kernel) == 1:  # PyTorch's backward pass needs a single filter in the default order
        kernel = kernel.contiguous()
    bias = None if layer.bias is None else parameters.leaf(f"{name}.bias")
    added = bias.flatten() if bias is not None and torch.get_num_threads() == 1 else None
    x = functional.conv2d(x, kernel, added, layer.stride, layer.padding, layer.dilation, groups)
    if bias is None or added is not None:
        return x
    y: Tensor = _Biased.apply(x, bias)  # type: ignore[no-untyped-call]
    return y


class _Biased(torch.autograd.Function):
    """x (batch, K·channels, height, width) plus the biases (K, channels), in place.

    Gradients of the biases are summed model by model, because with several threads a convolution
    sums them in an order that depends on the number of channels.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.count = len(bias)
        ctx.mark_dirty(x)
        return x.add_(bias.flatten().view(-1, 1, 1))

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor | None]:
        if not ctx.needs_input_grad[1]:
            return slope, None
        numbers = slope.permute(0, 2, 3, 1).flatten(0, 2)
        by_model = numbers.view(len(numbers), ctx.count, -1)
        return slope, torch.stack([model.sum(dim=0) for model in by_model.unbind(dim=1)])


def _group_norm(parameters: Pass, x: Tensor, *, layer: nn.GroupNorm, name: str) -> Tensor:
    if x.dim() == 3:
        normed = functional.layer_norm(
            x.view(*x.shape[:2], layer.num_groups, -1),
            (layer.num_channels // layer.num_groups,),
            eps=layer.eps,
        )
        return _affine(parameters, normed.flatten(2), name) if layer.affine else normed.flatten(2)
    weight = bias = None
    groups, x = layer.num_groups * parameters.count, _by_channel(x)
    if layer.affine:
        weight, bias = (parameters.leaf(f"{name}.{leaf}").flatten() for leaf in ("weight", "bias"))
        if weight.requires_grad or bias.requires_grad:
            x = _Wanting.apply(parameters.begin, x)  # type: ignore[no-untyped-call]
    return functional.group_norm(x, groups, weight, bias, layer.eps)


def _layer_norm(parameters: Pass, x: Tensor, *, layer: nn.LayerNorm, name: str) -> Tensor:
    x = functional.layer_norm(
        by_model(x, parameters.count), tuple(layer.normalized_shape), eps=layer.eps
    )
    return _affine(parameters, x, name) if layer.elementwise_affine else x


def _affine(parameters: Pass, x: Tensor, name: str) -> Tensor:
    """Return each model's weight times x (K, batch, …), plus its bias if it has one."""

    def leaf(part: str) -> Tensor:
        value = parameters.leaf(f"{name}.{part}")
        return value.view(len(value), *(1 for _ in range(x.dim() - value.dim())), *value.shape[1:])

    weight = leaf("weight")
    if f"{name}.bias".lstrip(".") not in parameters.params:
        return x * weight
    return torch.addcmul(leaf("bias"), x, weight)


class _Wanting(torch.autograd.Function):
    """x with a gradient that is always computed: without it group_norm crashes, channels last."""

    @staticmethod
    def forward(ctx: Any, begin: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[None, Tensor]:
        return None, slope


def _pooled(parameters: Pass, x: Tensor, *, layer: nn.Module, name: str) -> Tensor:
    y: Tensor = layer(_by_channel(x))
    return y


def _flattened(parameters: Pass, x: Tensor, *, layer: nn.Flatten, name: str) -> Tensor:
    return by_model(x, parameters.count).flatten(2)


def _number_by_number(parameters: Pass, x: Tensor, *, layer: nn.Module, name: str) -> Tensor:
    y: Tensor = layer(x)
    return y


def _dropout(parameters: Pass, x: Tensor, *, layer: nn.Dropout, name: str) -> Tensor:
    if layer.p == 0 or not layer.training:
        return x
    models = x if x.dim() != 4 else by_model(x, parameters.count)
    assert parameters.draws is not None
    noise = parameters.draws.noise(models.shape, layer.p, x.dtype)
    noise = noise if x.dim() != 4 else _by_channel(noise)
    return x.mul_(noise) if layer.inplace else x * noise


def _by_channel(x: Tensor) -> Tensor:
    """Convert (K, batch, C, h, w) to (batch, K·C, h, w), channels last in memory."""
    if x.dim() == 4:
        return x
    return x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)


def by_model(x: Tensor, count: int) -> Tensor:
    """Undo `_by_channel`; return tensors that never went through it unchanged."""
    return x.reshape(len(x), count, -1, *x.shape[2:]).transpose(0, 1) if x.dim() == 4 else x


LAYERS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Dropout: _dropout,
    nn.Flatten: _flattened,
    **dict.fromkeys(
        (
            nn.Identity,
            nn.ReLU,
            nn.LeakyReLU,
            nn.ELU,
            nn.GELU,
            nn.SiLU,
            nn.Tanh,
            nn.Sigmoid,
            nn.Softplus,
        ),
        _number_by_number,
    ),
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d), _pooled),
}
"""Layers with a form for many models."""

OPERATIONS: frozenset[Any] = frozenset(
    {
        *(torch.relu, torch.tanh, torch.sigmoid, functional.relu, functional.tanh),
        *(operator.add, operator.sub, operator.mul, torch.add, torch.mul),
        *("relu", "tanh", "sigmoid", "add", "mul"),
    }
)
"""Functions, and methods of tensors, that treat all numbers alike."""

POSITION_DEPENDENT: frozenset[Any] = frozenset(
    {
        *(nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Softplus, torch.sigmoid, "sigmoid"),
        nn.AdaptiveAvgPool2d,
    }
)
"""Layers and operations whose rounding depends on position. PyTorch rounds the last numbers of an
array, which do not fill a vector register, unlike those before them (measured on CPUs). The model
that comes last therefore depends on the others."""


def usual(layer: nn.Module) -> bool:
    """Return False for a layer with settings that its form does not support."""
    if isinstance(layer, nn.Conv2d):
        return layer.padding_mode == "zeros"
    if isinstance(layer, nn.Flatten):
        return (layer.start_dim, layer.end_dim) == (1, -1)
    return True
