"""Hulls: models without their numbers, made once per process and copied for each training.

Building a small model takes as long as a training step or two, and all numbers that it draws are
replaced at once. A copy may stand in for a newly built model only if nothing that a training leaves
in a module can reach the next training. A `Hull` therefore consists of layers whose code is torch's
or this package's and keeps no data elsewhere, that hold plain values, and that have no hooks. Every
copy has its own containers and buffers. Only frozen weights are shared, as in every model of a
`Blueprint`. All other models are built anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flower_ext.training.blueprint import Blueprint, in_training, seeded
from flower_ext.training.calls import Replaced
from flower_ext.training.dropout import own_dropout

Travelling = Mapping[str, tuple[torch.Size, torch.dtype]]
_KNOWN = ("torch.nn.modules.", "flower_ext.training.models", "flower_ext.training.dropout")
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size)


class NotPlain(TypeError):
    """A module holds something that a copy might share with its original."""


class _Layer(NamedTuple):
    """One module: its plain values, and the places of its containers, tensors and children."""

    kind: type[nn.Module]
    values: dict[str, Any]
    containers: dict[str, Any]
    shared: dict[str, Tensor | None]
    buffers: dict[str, Tensor | None]
    children: dict[str, int | None]
    places: tuple[tuple[str, str, str], ...]


class Hull:
    """A model of known layers in training mode, without the numbers that travel.

    Parameters
    ----------
    model : nn.Module
        Is read, and stays unchanged.
    travelling : Mapping[str, (Size, dtype)]
        Parameters and buffers that each copy receives.

    Raises
    ------
    NotPlain
        A copy might share more than frozen weights with the model.
    """

    def __init__(self, model: nn.Module, travelling: Travelling) -> None:
        self.travelling = travelling
        modules = [*model.modules()]
        numbers = {id(module): number for number, module in enumerate(modules)}
        named = (*model.named_parameters(), *model.named_buffers())
        names = {id(tensor): name for name, tensor in named if name in travelling}
        self._layers = [_layer(module, numbers, names) for module in modules]
        self.learnable = frozenset(name for name, _ in model.named_parameters())
        self.convolves = any(isinstance(module, nn.Conv2d) for module in modules)

    def takes(self, params: Mapping[str, Tensor]) -> bool:
        """Return True if ``params`` has a tensor for every place of a copy."""
        return all(
            name in params and params[name].shape == shape
            for name, (shape, _) in self.travelling.items()
        )

    def copied(self) -> Replaced:
        """Return an independent model, whose travelling tensors the caller must still provide."""
        made = [object.__new__(layer.kind) for layer in self._layers]
        places = []
        for module, layer in zip(made, self._layers, strict=True):
            own = vars(module)
            own.update(layer.values)
            for key, container in layer.containers.items():
                own[key] = container.copy()
            own["_modules"] = {
                leaf: None if number is None else made[number]
                for leaf, number in layer.children.items()
            }
            own["_parameters"] = dict(layer.shared)
            own["_buffers"] = {
                leaf: None if buffer is None else buffer.clone()
                for leaf, buffer in layer.buffers.items()
            }
            places += [(own[kind], leaf, name) for kind, leaf, name in layer.places]
        return Replaced(made[0], places)


def _layer(module: nn.Module, numbers: Mapping[int, int], names: Mapping[int, str]) -> _Layer:
    kind = type(module)
    if not kind.__module__.startswith(_KNOWN):
        raise NotPlain(f"{kind.__name__} may keep data anywhere")
    values, containers = {}, {}
    for key, value in vars(module).items():
        if key in ("_modules", "_parameters", "_buffers"):
            continue
        if isinstance(value, dict | set | list):  # hooks are held in such too, and are not plain
            if not all(type(one) in _PLAIN for one in _contents(value)):
                raise NotPlain(f"{kind.__name__}.{key}")
            containers[key] = value.copy()
        elif type(value) in _PLAIN or _is_plain_tuple(value):
            values[key] = value
        else:
            raise NotPlain(f"{kind.__name__}.{key}")
    tensors: dict[str, dict[str, Tensor | None]] = {"_parameters": {}, "_buffers": {}}
    places = []
    for holder, own in tensors.items():
        usual = nn.Parameter if holder == "_parameters" else Tensor
        for leaf, tensor in getattr(module, holder).items():
            if tensor is not None and type(tensor) is not usual:
                raise NotPlain(f"{kind.__name__}.{leaf}")
            travels = id(tensor) in names
            own[leaf] = None if travels else tensor
            if travels:
                places.append((holder, leaf, names[id(tensor)]))
    return _Layer(
        kind=kind,
        values=values,
        containers=containers,
        shared=tensors["_parameters"],
        buffers=tensors["_buffers"],
        children={
            leaf: None if child is None else numbers[id(child)]
            for leaf, child in module._modules.items()
        },
        places=tuple(places),
    )


def _contents(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container, *container.values()]
    return [*container]


def _is_plain_tuple(value: object) -> bool:
    return type(value) is tuple and all(type(one) in _PLAIN for one in value)


@lru_cache(maxsize=64)
def hull_of(build: Blueprint, device: torch.device) -> Hull | None:
    """Return the hull of a blueprint's models; None if each training must build a model anew."""
    with seeded(0, devices=device.type != "cpu"):
        model = own_dropout(in_training(build().to(device)))
    try:
        return Hull(model, build.travelling)
    except NotPlain:
        return None
