"""Call a model with given parameters, on features that may be tuples or mappings of tensors."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.training.isolation import attempted
from flower_ext.training.model_factory import in_training
from flower_ext.training.params import Params
from flower_ext.training.task import Task


def call_model(model: Callable[..., Any], x: Tree) -> Any:
    """Return ``model(x)`` for a tensor, ``model(*x)`` for a tuple, ``model(**x)`` for a mapping."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def call_with(model: nn.Module, params: Params, x: Tree) -> Any:
    """Call a model with ``params`` in place of its own tensors of the same names.

    Raises
    ------
    UnlikeTypes
        The model raises an error, and the features have another type than the model's numbers.
    """

    def replaced(*given: Tree, **named: Tree) -> Any:
        return functional_call(model, params, given, named)

    try:
        return call_model(replaced, x)
    except RuntimeError as error:
        _tell_types(error, params, x)
        raise


class SettableModel:
    """A model that keeps the parameters and buffers of `set_params` for all later calls.

    `torch.func.functional_call` restores the former tensors after each call, which takes as long as
    a step of a small model. Tied parameters are replaced in all their places.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._params: Params = {}
        names = {id(p): name for name, p in (*model.named_parameters(), *model.named_buffers())}
        # A module's dictionary, the key in it, and the tensor's name in the model.
        self._places: list[tuple[dict[str, Any], str, str]] = [
            (tensors, leaf, names[id(tensor)])
            for module in model.modules()
            for tensors in (module._parameters, module._buffers)
            for leaf, tensor in tensors.items()
            if tensor is not None
        ]

    def set_params(self, params: Params) -> None:
        """Put parameters in their places; names that ``params`` lacks keep their tensors."""
        self._params = params
        for tensors, leaf, name in self._places:
            if name in params:
                tensors[leaf] = params[name]

    def __call__(self, x: Tree) -> Any:
        """Call the model with the last parameters, as `call_model` does."""
        try:
            return call_model(self.model, x)
        except RuntimeError as error:
            _tell_types(error, self._params, x)
            raise


class UnlikeTypes(InvalidValue):
    """Features have another type than the model's numbers."""


def _tell_types(error: RuntimeError, params: Params, x: Tree) -> None:
    """Raise `UnlikeTypes` if features differ in type from the parameters, a likely cause."""
    types = {p.dtype for p in params.values() if p.is_floating_point()}
    for name, leaf in trees.named("features", x) if "type" in str(error) else ():
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype not in types:
            kind = min(types, key=str)
            raise UnlikeTypes(
                f"{name} of type {leaf.dtype}: expected {kind}, the type of the model's numbers; "
                f"give Examples(features.to({kind}), …), or build the model with "
                f"model.to({leaf.dtype})"
            ) from error


def fewest_rows(task: Task, features: Tree, batch_size: int) -> int:
    """Return the fewest rows that a mini-batch may have.

    The result is 1, or 2 if the last mini-batch would have a single row and the model refuses a
    single row, as batch normalisation does in training. It depends on the shapes and the number of
    examples only.

    Raises
    ------
    InvalidValue
        ``batch_size`` is 1, and the model refuses a single row. The message may reach the server.
    """
    if batch_size > 1 and trees.length(features) % batch_size != 1:
        return 1
    layer = refusing_layer(task.model, features)
    if layer is not None and batch_size == 1:
        raise InvalidValue.tellable(
            f"batch_size=1: expected at least 2, because {layer} refuses a single row"
        )
    return 1 if layer is None else 2


def refusing_layer(build: Callable[[], nn.Module], features: Tree) -> str | None:
    """Return the name of the layer that refuses one row but not two; None if no layer does."""
    none = trees.to(trees.zeros(features, 0), torch.device("cpu"))
    return _refusing_layer(_Probe(build, trees.row_type(features), none))


@dataclass(frozen=True)
class _Probe:
    build: Callable[[], nn.Module]
    row_type: Hashable
    features: Tree = field(compare=False)


@lru_cache(maxsize=64)
def _refusing_layer(probe: _Probe) -> str | None:
    def error_of(count: int) -> Any:
        return attempted(call_model, model, trees.zeros(probe.features, count))

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = in_training(probe.build().cpu())
        if isinstance(error_of(2), Exception) or not isinstance(error := error_of(1), Exception):
            return None
    names = {id(module): name for name, module in model.named_modules()}
    layer = model
    for frame, _ in traceback.walk_tb(error.__traceback__):  # the innermost module raised it
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            layer = module
    return f"layer {names[id(layer)]!r} ({type(layer).__name__})"
