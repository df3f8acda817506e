"""Hulls: models without their numbers, made once per process and copied for each training.

Building a small model takes as long as a training step or two, and all numbers that it draws are
replaced at once. A copy may stand in for a newly built model only if nothing that a training leaves
in a module can reach the next training. A `Template` therefore consists of modules that hold plain
values and have no hooks. Every copy has its own containers and buffers. Only frozen weights are
shared, as in every model of a `ModelFactory`.

The caller's own classes may be among these modules if two builds show that building makes nothing
new: both have the same classes and equal values, and no container in common. What such a class
keeps elsewhere, as in a global variable, it also keeps between models that are built anew. All
other models are built anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flower_ext.training.dropout import own_dropout
from flower_ext.training.model_calls import SettableModel
from flower_ext.training.model_factory import ModelFactory, channels_last_needs, in_training, seeded

Travelling = Mapping[str, tuple[torch.Size, torch.dtype]]
_KNOWN = ("torch.nn.modules.", "flower_ext.training.models", "flower_ext.training.dropout")
_CONTAINERS = (dict, set, list)
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


class Template:
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
        self.known = all(map(_is_known, modules))
        """True if no module is of the caller's own class, whose code may do anything."""
        self.convolves = any(isinstance(module, nn.Conv2d) for module in modules)
        self._must_train = channels_last_needs(model)

    def faster_channels_last(self, trained: Collection[str]) -> bool:
        """Return True if images may have their channels last in memory, which is faster."""
        return self.convolves and (self._must_train is None or self._must_train in trained)

    def takes(self, params: Mapping[str, Tensor]) -> bool:
        """Return True if ``params`` has a tensor for every place of a copy."""
        return all(
            name in params and params[name].shape == shape
            for name, (shape, _) in self.travelling.items()
        )

    def copied(self) -> SettableModel:
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
        return SettableModel(made[0], places)


def _layer(module: nn.Module, numbers: Mapping[int, int], names: Mapping[int, str]) -> _Layer:
    kind = type(module)
    foreign = not _is_known(module) and kind.__module__.startswith("torch.")
    if foreign or any(vars(base).get("__slots__") for base in kind.__mro__):
        raise NotPlain(f"{kind.__name__} may keep data elsewhere")
    values, containers = {}, {}
    for key, value in _held(module).items():
        if isinstance(value, _CONTAINERS):  # hooks are held in such too, and are not plain
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


def _is_known(module: nn.Module) -> bool:
    return type(module).__module__.startswith(_KNOWN)


def _held(module: nn.Module) -> dict[str, Any]:
    """Return all attributes but tensors and children."""
    kinds = ("_modules", "_parameters", "_buffers")
    return {key: value for key, value in vars(module).items() if key not in kinds}


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Return True if two plain models have the same classes and values, and share no container."""
    ours, theirs = [*one.modules()], [*other.modules()]
    if [*map(type, ours)] != [*map(type, theirs)]:
        return False
    pairs = [(_held(a), _held(b)) for a, b in zip(ours, theirs, strict=True)]
    return all(
        a == b and not any(isinstance(v, _CONTAINERS) and v is b[key] for key, v in a.items())
        for a, b in pairs
    )


def leaves_attributes_unchanged(model: nn.Module, features: Tensor) -> bool:
    """Return True if a pass over ``features`` changes no attribute of a module.

    Parameters and buffers are not compared. What a class keeps in a global variable goes unnoticed.
    """
    before = [deepcopy(_held(module)) for module in model.modules()]
    model(features)
    return before == [_held(module) for module in model.modules()]


def _contents(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container, *container.values()]
    return [*container]


def _is_plain_tuple(value: object) -> bool:
    return type(value) is tuple and all(type(one) in _PLAIN for one in value)


@lru_cache(maxsize=64)
def template_of(build: ModelFactory, device: torch.device) -> Template | None:
    """Return the template of a factory's models; None if trainings must build them anew."""

    def built(seed: int) -> nn.Module:
        with seeded(seed, devices=device.type != "cpu"):
            return own_dropout(in_training(build().to(device)))

    try:
        template = Template(model := built(0), build.travelling)
    except NotPlain:
        return None
    return template if template.known or _alike(model, built(1)) else None
