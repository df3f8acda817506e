"""One architecture with many sets of parameters: K models on K mini-batches in one pass.

The model is traced, and a form for K models replaces each of its layers. Weights of linear and
convolutional layers never get a gradient tensor of their own: the backward pass adds the product
directly to its target (a velocity, a gradient, or the weights themselves). That saves writing and
reading the largest tensors of the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn import functional

from flower_ext.errors import InvalidValue
from flower_ext.training.batched.form import Loss, Target, stacked
from flower_ext.training.batched.layers import (
    LAYERS,
    OPERATIONS,
    POSITION_DEPENDENT,
    Pass,
    by_model,
    usual,
)
from flower_ext.training.dropout import Draws, own_dropout
from flower_ext.training.seeding import seeded


def hooked(model: nn.Module) -> bool:
    """Return True if a module has hooks, which a traced forward pass does not show."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(
        "forward" in vars(module)
        or type(module).__call__ is not nn.Module.__call__
        or any(getattr(module, kind) for kind in kinds)
        for module in model.modules()
    )


class NotStackable(InvalidValue):
    """A model holds something that has no form for many models; the message names it."""


class StackedModel:
    """K models of one architecture.

    The module `layers` describes the shapes of tensors.

    Parameters
    ----------
    model : nn.Module
        Any instance; its own parameters are not used.
    example : Tensor
        Features of one example, on which the stacked form is compared with the model, once.

    Raises
    ------
    NotStackable
        The model has a layer or an operation that is not in `LAYERS` or `OPERATIONS`, or uses one
        in a way that this form does not support.
    """

    fewest = 1
    """Smallest number of models for which a batch is faster than one by one."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self.parameters = [name for name, _ in model.named_parameters()]
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        if names != self.parameters:
            raise NotStackable("two layers share a parameter")
        if not all(parameter.requires_grad for parameter in model.parameters()):
            raise NotStackable("some of its parameters are frozen")
        if hooked(model):
            raise NotStackable("a module has hooks")
        whole = nn.Sequential(model) if type(model) in LAYERS else model  # a single layer
        try:
            graph = fx.Tracer().trace(whole)
        except Exception as error:  # a forward method may raise anything for a symbol
            raise NotStackable(f"its forward pass cannot be traced ({error})") from error
        self._nodes = _pooled_first(graph, model)
        layers = [_name(node, model) for node in self._nodes if node.op == "call_module"]
        if {name.rpartition(".")[0] for name in names} - set(layers):
            raise NotStackable("a layer is not used, or holds parameters of its own")
        if len(set(layers)) < len(layers):
            raise NotStackable("a layer is used twice")
        steps = [node for node in self._nodes if node.op not in ("placeholder", "output")]
        self._run = {node: _form(node, model) for node in steps}
        self.batch_invariant = POSITION_DEPENDENT.isdisjoint(
            type(_layer(node, model)) if node.op == "call_module" else node.target for node in steps
        )
        """True if no model depends on the others, not even by its rounding."""
        self.draws = any(
            isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()
        )
        """True if a model draws random numbers."""
        self._check(own_dropout(model), example)

    def __call__(self, parameters: Pass, x: Tensor) -> Tensor:
        """Return outputs (K, batch, …) for mini-batches ``x`` (K, batch, …)."""
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
        return by_model(outputs, parameters.count)

    @staticmethod
    def stack(many: Sequence[Tensor]) -> Tensor:
        """Stack one parameter of many models; convolutional weights get input channels last."""
        if many[0].dim() != 4:
            return stacked(many)
        # Models that share a tensor must also share its permuted form.
        moved = {id(one): one.permute(0, 2, 3, 1) for one in many}
        return stacked([moved[id(one)] for one in many]).permute(0, 1, 4, 2, 3)

    def gradient(
        self,
        params: Mapping[str, Tensor],
        x: Tensor,
        loss: Loss,
        targets: Mapping[str, Target],
        draws: Draws | None = None,
    ) -> None:
        """Send the gradient to ``targets``, as `ManyModels.gradient` does."""
        parameters = Pass(params, targets, draws)
        value = loss(self(parameters, x))
        inputs = [parameters.begin, *parameters.leaves.values()]
        _, *slopes = torch.autograd.grad(value, inputs, allow_unused=True)
        for name, slope in zip(parameters.leaves, slopes, strict=True):
            targets[name].add(slope)

    def _check(self, model: nn.Module, example: Tensor) -> None:
        x = example.expand(2, 3, *example.shape) * 1
        values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        other = {n: 0.9 * p if p.is_floating_point() else p for n, p in values.items()}
        models = [values, other]
        try:
            stacked = {name: self.stack([one[name] for one in models]) for name in values}
            with torch.no_grad():
                draws = Draws([torch.Generator().manual_seed(0) for _ in models], [3, 3])
                outputs = self(Pass(stacked, {}, draws), x)
                expected = torch.stack([_drawn(model, one, x[0]) for one in models])
        except Exception as error:  # shapes that the form of a layer does not support
            raise NotStackable(f"its forward pass has no such form ({error})") from error
        if outputs.shape != expected.shape or not torch.allclose(outputs, expected, 1e-3, 1e-4):
            raise NotStackable("its forward pass mixes dimensions in an unforeseen way")


def _drawn(model: nn.Module, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return a model's outputs if its draws begin with seed 0."""
    with seeded(0, devices=False):
        outputs: Tensor = functional_call(model, dict(params), (x,))
        return outputs


def _pooled_first(graph: fx.Graph, model: nn.Module) -> list[fx.Node]:
    """Return the steps of a model, with max pooling moved before a ReLU that it follows.

    Values and gradients stay the same, and ReLU handles a fraction of the numbers.
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
    """Return the form of a traced step for many models."""
    if node.op == "call_module":
        name, layer = _name(node, model), _layer(node, model)
        form = LAYERS.get(type(layer))
        if form is None or node.kwargs or not usual(layer):
            raise NotStackable(f"{node.target!r} is a {type(layer).__name__}, or an unusual one")
        return partial(form, layer=layer, name=name)
    if node.op == "get_attr" or node.kwargs or node.target not in OPERATIONS:
        raise NotStackable(f"its forward pass uses {node.target!r}")
    if node.op == "call_method":
        return lambda parameters, x, *more: getattr(x, str(node.target))(*more)
    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    return lambda parameters, *arguments: function(*arguments)


def _name(node: fx.Node, model: nn.Module) -> str:
    """Return the name of the layer that ``node`` calls; empty for a model of a single layer."""
    return "" if type(model) in LAYERS else str(node.target)


def _layer(node: fx.Node, model: nn.Module) -> nn.Module:
    return model.get_submodule(_name(node, model))
