"""One architecture with many sets of parameters: K models on K mini-batches in one pass.

The model is traced and each of its layers replaced by one that computes for K models. Weights of
linear and convolutional layers never have a gradient of their own: the backward pass adds its
product right to where it is wanted (a velocity, a gradient, or the weights themselves), which
saves the largest tensors of the whole computation from being written and read once more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from flower_ext.training.batched.unfused import unfuse
from flower_ext.training.params import Params

Loss = Callable[[Tensor], Tensor]
"""A number from the outputs of K models, of shape (K, batch, …)."""


def hooked(model: nn.Module) -> bool:
    """Whether a module has hooks, which a traced forward pass does not show."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(
        "forward" in vars(module)
        or type(module).__call__ is not nn.Module.__call__
        or any(getattr(module, kind) for kind in kinds)
        for module in model.modules()
    )


class NotStackable(ValueError):
    """A model holds something that has no form for many models; the message says what."""


@dataclass(frozen=True)
class Target:
    """Where the gradient of one parameter goes: ``tensor ← keep · tensor + factor · gradient``."""

    tensor: Tensor
    keep: float = 0.0
    factor: float = 1.0

    def add(self, gradient: Tensor) -> None:
        """Take a gradient."""
        if self.keep == 0:
            torch.mul(gradient, self.factor, out=self.tensor)
            return
        if self.keep != 1:
            self.tensor.mul_(self.keep)
        self.tensor.add_(gradient, alpha=self.factor)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Take the gradient a @ b, which is not written anywhere else."""
        self.tensor.baddbmm_(a, b, beta=self.keep, alpha=self.factor)


class StackedModel:
    """K models of one architecture.

    From the first layer that works on channels, images travel as (batch, K·channels, height,
    width), channels last in memory: what treats channels alike knows no models. Everything else
    is (K, batch, …).

    Parameters
    ----------
    model : nn.Module
        Any instance; its own parameters are not used.
    example : Tensor
        Features of one example. The stacked form is held against the model on it, once.

    Raises
    ------
    NotStackable
        The model has a layer or an operation that is not in `LAYERS` or `OPERATIONS`, or uses one
        in a way that this form does not foresee.
    """

    fewest = 1
    """Models below which one after the other is faster."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self.parameters = [name for name, _ in model.named_parameters()]
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        if names != self.parameters:
            raise NotStackable("two layers share a parameter")
        if hooked(model):
            raise NotStackable("a module has hooks")
        whole = nn.Sequential(model) if type(model) in LAYERS else model  # a single layer
        try:
            graph = fx.Tracer().trace(whole)
        except Exception as error:  # whatever a forward method makes of a symbol
            raise NotStackable(f"its forward pass cannot be traced ({error})") from error
        self._nodes = _pooled_first(graph, model)
        layers = [_name(node, model) for node in self._nodes if node.op == "call_module"]
        if {name.rpartition(".")[0] for name in names} - set(layers):
            raise NotStackable("a layer is not used, or holds parameters of its own")
        if len(set(layers)) < len(layers):
            raise NotStackable("a layer is used twice")
        steps = [node for node in self._nodes if node.op not in ("placeholder", "output")]
        self._run = {node: _form(node, model) for node in steps}
        self.steady = _UNSTEADY.isdisjoint(
            type(_layer(node, model)) if node.op == "call_module" else node.target for node in steps
        )
        """Whether no model depends on which others there are, not even by its rounding."""
        self._check(model, example)

    def __call__(self, parameters: Pass, x: Tensor) -> Tensor:
        """Outputs (K, batch, …) for mini-batches ``x`` (K, batch, …)."""
        values: dict[fx.Node, Any] = {}
        outputs: Any = None
        for node in self._nodes:
            if node.op == "placeholder":
                values[node] = x
            elif node.op == "output":
                outputs = fx.node.map_arg(node.args[0], values.__getitem__)
            else:
                arguments = fx.node.map_arg(node.args, values.__getitem__)
                values[node] = self._run[node](parameters, *arguments)
        return _by_model(outputs, parameters.count)

    @staticmethod
    def stack(many: Sequence[Tensor]) -> Tensor:
        """One parameter of many models; convolutional weights with their input channels last."""
        if many[0].dim() != 4:
            return _stacked(many)
        # Models that share a tensor must share its permuted form too.
        moved = {id(one): one.permute(0, 2, 3, 1) for one in many}
        return _stacked([moved[id(one)] for one in many]).permute(0, 1, 4, 2, 3)

    def gradient(
        self, params: Mapping[str, Tensor], x: Tensor, loss: Loss, targets: Mapping[str, Target]
    ) -> None:
        """Send the gradient of ``loss`` to ``targets``, by parameter name.

        Parameters
        ----------
        params : Mapping[str, Tensor]
            Of K models, each with a first dimension of K. Those without a target are frozen.
        x : Tensor
            Mini-batches (K, batch, …).
        loss : Callable[[Tensor], Tensor]
        targets : Mapping[str, Target]
        """
        parameters = Pass(params, targets)
        value = loss(self(parameters, x))
        inputs = [parameters.begin, *parameters.leaves.values()]
        _, *slopes = torch.autograd.grad(value, inputs, allow_unused=True)
        for name, slope in zip(parameters.leaves, slopes, strict=True):
            targets[name].add(slope)

    def _check(self, model: nn.Module, example: Tensor) -> None:
        x = example.expand(2, 3, *example.shape) * 1
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        other = {n: 0.9 * p if p.is_floating_point() else p for n, p in own.items()}
        models = [own, other]
        try:
            stacked = {name: self.stack([one[name] for one in models]) for name in own}
            with torch.no_grad():
                found = self(Pass(stacked, {}), x)
                expected = torch.stack([functional_call(model, one, (x[0],)) for one in models])
        except Exception as error:  # shapes that the form of a layer does not foresee
            raise NotStackable(f"its forward pass has no such form ({error})") from error
        if found.shape != expected.shape or not torch.allclose(found, expected, 1e-3, 1e-4):
            raise NotStackable("its forward pass mixes dimensions in an unforeseen way")


class MappedModel:
    """K models of any architecture that `torch.vmap` knows, at its overhead."""

    fewest = 5
    steady = False
    """Nobody knows how what vmap makes of a model rounds."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [name for name, _ in model.named_parameters()]
        self._model = unfuse(model)

    @staticmethod
    def stack(many: Sequence[Tensor]) -> Tensor:
        """One parameter of many models."""
        return _stacked(many)

    def gradient(
        self, params: Mapping[str, Tensor], x: Tensor, loss: Loss, targets: Mapping[str, Target]
    ) -> None:
        """As `StackedModel.gradient`."""
        leaves = {n: p.detach().requires_grad_() for n, p in params.items() if n in targets}
        outputs = vmap(lambda own, rows: functional_call(self._model, own, (rows,)))(
            {**params, **leaves}, x
        )
        slopes = torch.autograd.grad(loss(outputs), list(leaves.values()))
        for name, slope in zip(leaves, slopes, strict=True):
            targets[name].add(slope)


def _stacked(many: Sequence[Tensor]) -> Tensor:
    """As `torch.stack`, but faster where all are the same object: models that start alike."""
    one = many[0]
    if any(other is not one for other in many):
        return torch.stack(list(many))
    return one.unsqueeze(0).repeat(len(many), *(1 for _ in one.shape))


class Pass:
    """What the layers of one pass over K models read, and where their gradients go."""

    def __init__(self, params: Mapping[str, Tensor], targets: Mapping[str, Target]) -> None:
        self.params, self.targets = params, targets
        first = next(iter(params.values()))
        self.count = len(first)
        self.begin = torch.zeros((), device=first.device, requires_grad=True)
        self.leaves: Params = {}

    def leaf(self, name: str) -> Tensor:
        """A parameter whose gradient, if it is wanted, autograd finds."""
        name = name.lstrip(".")  # of a model of a single layer
        value = self.params[name].detach()
        if name in self.targets:
            value = self.leaves[name] = value.requires_grad_()
        return value

    def product(self, x: Tensor, layer: str) -> Tensor:
        """x Wᵀ + b of shape (K, rows, outputs), for the weight and bias of ``layer``."""
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

    ``begin`` does nothing but require a gradient, so that there is a backward pass at all.
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
        # The product with W comes first: a target may be W itself.
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
    if len(kernel) == 1:  # PyTorch's backward pass wants a single filter in its usual order
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

    The gradients of the biases are summed model by model. With several threads a convolution sums
    them in an order that depends on how many channels there are.
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
        return slope, torch.stack([own.sum(dim=0) for own in by_model.unbind(dim=1)])


def _group_norm(parameters: Pass, x: Tensor, *, layer: nn.GroupNorm, name: str) -> Tensor:
    weight = bias = None
    groups, x = layer.num_groups * parameters.count, _by_channel(x)
    if layer.affine:
        weight, bias = (parameters.leaf(f"{name}.{leaf}").flatten() for leaf in ("weight", "bias"))
        if weight.requires_grad or bias.requires_grad:
            x = _Wanting.apply(parameters.begin, x)  # type: ignore[no-untyped-call]
    return functional.group_norm(x, groups, weight, bias, layer.eps)


class _Wanting(torch.autograd.Function):
    """x, whose gradient is always wanted: PyTorch's group_norm crashes without, channels last."""

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
    return _by_model(x, parameters.count).flatten(2)


def _number_by_number(parameters: Pass, x: Tensor, *, layer: nn.Module, name: str) -> Tensor:
    y: Tensor = layer(x)
    return y


def _by_channel(x: Tensor) -> Tensor:
    """(K, batch, C, height, width) → (batch, K·C, height, width), channels last in memory."""
    if x.dim() == 4:
        return x
    return x.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)


def _by_model(x: Tensor, count: int) -> Tensor:
    """The way back from `_by_channel`; what has been there all along as it is."""
    return x.reshape(len(x), count, -1, *x.shape[2:]).transpose(0, 1) if x.dim() == 4 else x


LAYERS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.GroupNorm: _group_norm,
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
            nn.Dropout,
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
"""Functions, and methods of tensors, that treat every number alike."""

_UNSTEADY: frozenset[Any] = frozenset(
    {
        *(nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Softplus, torch.sigmoid, "sigmoid"),
        nn.AdaptiveAvgPool2d,
    }
)
"""Of these PyTorch rounds the last numbers of an array, which fill no vector register, otherwise
than those before them (measured on CPUs): which model comes last depends on the others."""


def _pooled_first(graph: fx.Graph, model: nn.Module) -> list[fx.Node]:
    """The steps of a model, with max pooling before ReLU where it came right after it.

    Values and gradients are the same, and ReLU has a fraction of the numbers to look at.
    """
    for relu in graph.nodes:
        if not _is_relu(relu, model) or len(relu.users) != 1:
            continue
        (pool,), (before,) = relu.users, relu.all_input_nodes
        if pool.op != "call_module" or type(_layer(pool, model)) is not nn.MaxPool2d:
            continue
        pool.replace_all_uses_with(relu)
        pool.replace_input_with(relu, before)
        relu.replace_input_with(before, pool)
        relu.prepend(pool)
    return list(graph.nodes)


def _is_relu(node: fx.Node, model: nn.Module) -> bool:
    if node.op == "call_module":
        return type(_layer(node, model)) is nn.ReLU
    calls = node.op in ("call_function", "call_method")
    return calls and node.target in (torch.relu, functional.relu, "relu")


def _form(node: fx.Node, model: nn.Module) -> Callable[..., Any]:
    """What a step of the traced model is for many models."""
    if node.op == "call_module":
        name, layer = _name(node, model), _layer(node, model)
        form = LAYERS.get(type(layer))
        if form is None or node.kwargs or not _usual(layer):
            raise NotStackable(f"{node.target!r} is a {type(layer).__name__}, or an unusual one")
        return partial(form, layer=layer, name=name)
    if node.op == "get_attr" or node.kwargs or node.target not in OPERATIONS:
        raise NotStackable(f"its forward pass uses {node.target!r}")
    if node.op == "call_method":
        return lambda parameters, x, *more: getattr(x, str(node.target))(*more)
    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    return lambda parameters, *arguments: function(*arguments)


def _name(node: fx.Node, model: nn.Module) -> str:
    """Of the layer that ``node`` calls; that of a model of a single layer is empty."""
    return "" if type(model) in LAYERS else str(node.target)


def _layer(node: fx.Node, model: nn.Module) -> nn.Module:
    return model.get_submodule(_name(node, model))


def _usual(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        return layer.padding_mode == "zeros"
    if isinstance(layer, nn.Flatten):
        return (layer.start_dim, layer.end_dim) == (1, -1)
    return not isinstance(layer, nn.Dropout) or layer.p == 0
