"""Call a model with given parameters, on features that may be tuples or mappings of tensors."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.training.isolation import seeded
from flower_ext.training.models.dropout import own_dropout
from flower_ext.training.models.factory import ModelFactory, in_training
from flower_ext.training.params import Params, clone


def call_model(model: Callable[..., Any], x: Tree) -> Any:
    """Return ``model(x)`` for a tensor, ``model(*x)`` for a tuple, ``model(**x)`` for a mapping."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def call_with(model: nn.Module, params: Params, x: Tree) -> Any:
    """Call a model with ``params`` in place of its own parameters; its buffers stay unchanged.

    The model gets copies of its buffers, because it may write into them. If the model fails because
    its features and parameters have different floating-point types, the error is `UnlikeTypes`.
    """
    tensors = {**params, **clone(dict(model.named_buffers()))}

    def replaced(*given: Tree, **named: Tree) -> Any:
        return functional_call(model, tensors, given, named)

    with _telling_types(model, params, x):
        return call_model(replaced if tensors else model, x)


class SettableModel:
    """A model that keeps the parameters and buffers of `set_params` for all later calls.

    `torch.func.functional_call` restores the former tensors after each call, which takes as long as
    a step of a small model. Tied parameters are replaced in all their places.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
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
        """Use these tensors in all later calls. Names that ``params`` lacks keep their tensors."""
        for tensors, leaf, name in self._places:
            if name in params:
                tensors[leaf] = params[name]

    def __call__(self, x: Tree) -> Any:
        """Call the model, with the tensors of the last `set_params`, on features ``x``."""
        with _telling_types(self.model, {}, x):
            return call_model(self.model, x)


def settable_model(
    factory: ModelFactory,
    params: Mapping[str, Tensor],
    device: torch.device,
    *,
    trains: bool,
    dtype: torch.dtype | None = None,
) -> SettableModel:
    """Return a model in training or evaluation mode, on which the caller sets ``params``.

    A thread gets the same model again, unless the model could keep a client's values. With a
    ``dtype``, the model is new, and its frozen tensors have this type.
    """
    # A shared model that kept a client's values would carry them to the next client.
    is_shared = dtype is None and factory.facts.serves_in_turn(params)
    return (_shared_model if is_shared else _new_model)(factory, device, trains, dtype, get_ident())


def _new_model(
    factory: ModelFactory,
    device: torch.device,
    trains: bool,
    dtype: torch.dtype | None,
    thread: int,
) -> SettableModel:
    # Seed torch, so that random numbers drawn to build the model do not change later draws.
    with seeded(0, device):
        model = factory.on(device)
        model = own_dropout(in_training(model)) if trains else model.eval()
    if dtype is not None and factory.facts.frozen:
        model = deepcopy(model).to(dtype)  # all models of a factory share the frozen tensors
    return SettableModel(model)


# Building a small model takes as long as one or two steps. Each thread shares a model of its own,
# because another thread would replace the model's tensors in the middle of a step.
_shared_model = lru_cache(maxsize=128)(_new_model)


class UnlikeTypes(InvalidValue):
    """The features and the model's parameters have different floating-point types."""


@contextmanager
def _telling_types(model: nn.Module, params: Params, x: Tree) -> Iterator[None]:
    """Turn an error about types into `UnlikeTypes` if ``x`` and the model have different types."""
    try:
        yield
    except RuntimeError as error:
        used = {**dict(model.named_parameters()), **dict(model.named_buffers()), **params}
        types = {tensor.dtype for tensor in used.values() if tensor.is_floating_point()}
        for name, leaf in trees.named("features", x) if types and "type" in str(error) else ():
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype not in types:
                kind = min(types, key=str)
                raise UnlikeTypes(
                    f"{name} of type {leaf.dtype}: expected {kind}, the type of the model's "
                    f"numbers; give Examples(features.to({kind}), …), or build the model with "
                    f"model.to({leaf.dtype})"
                ) from error
        raise
