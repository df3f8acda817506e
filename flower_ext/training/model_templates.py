"""Templates: models without their travelling tensors, made once per process, copied for trainings.

Building a small model takes as long as a training step or two, and all numbers that it draws are
replaced at once. A copy may stand in for a newly built model only if nothing that a training leaves
in a module can reach the next training. The modules of a `Template` therefore hold plain values
alone, and have no hooks. Every copy has its own containers and buffers. Only frozen weights are
shared, as in every model of a `ModelFactory`.

The caller's own classes may be among these modules if two builds show that building makes nothing
new: both have the same classes and equal values, and no container in common. What such a class
keeps elsewhere, as in a global variable, it also keeps between models that are built anew. All
other models are built anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from flower_ext.training.dropout import own_dropout
from flower_ext.training.model_calls import SettableModel
from flower_ext.training.model_factory import ModelFactory, channels_last_needs, in_training
from flower_ext.training.seeding import seeded

_KNOWN = ("torch.nn.modules.", "flower_ext.training.models", "flower_ext.training.dropout")
_CONTAINERS = (dict, set, list)
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size)


class Template:
    """A model of plain modules in training mode, without the tensors that travel.

    Parameters
    ----------
    model : nn.Module
        Its travelling tensors are removed.
    travelling : Mapping[str, (Size, dtype)]
        Parameters and buffers that each copy receives.
    """

    def __init__(
        self, model: nn.Module, travelling: Mapping[str, tuple[torch.Size, torch.dtype]]
    ) -> None:
        self.travelling = travelling
        modules = [*model.modules()]
        self.learnable = frozenset(name for name, _ in model.named_parameters())
        self.known = all(map(_is_known, modules))
        """True if no module is of the caller's own class, whose code may do anything."""
        self._convolves = any(isinstance(module, nn.Conv2d) for module in modules)
        self._must_train = channels_last_needs(model)
        named = (*model.named_parameters(), *model.named_buffers())
        names = {id(tensor): name for name, tensor in named if name in travelling}
        self._places = [
            (number, holder, leaf, names[id(tensor)])
            for number, module in enumerate(modules)
            for holder in ("_parameters", "_buffers")
            for leaf, tensor in getattr(module, holder).items()
            if id(tensor) in names
        ]
        for number, holder, leaf, _ in self._places:
            getattr(modules[number], holder)[leaf] = None
        self._model = model

    def faster_channels_last(self, trained: Collection[str]) -> bool:
        """Return True if images may have their channels last in memory, which is faster."""
        return self._convolves and (self._must_train is None or self._must_train in trained)

    def takes(self, params: Mapping[str, Tensor]) -> bool:
        """Return True if ``params`` has a tensor for every place of a copy."""
        return all(
            name in params and params[name].shape == shape
            for name, (shape, _) in self.travelling.items()
        )

    def copied(self) -> SettableModel:
        """Return an independent model, whose travelling tensors the caller must still provide."""
        copies: dict[int, nn.Module] = {}
        model = _copied(self._model, copies)
        modules = [*copies.values()]
        places = ((getattr(modules[n], holder), *names) for n, holder, *names in self._places)
        return SettableModel(model, [*places])


def _copied(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    """Return a copy that shares its weights alone; ``copies`` has all, in the modules' order."""
    if id(module) in copies:  # a module that stands in two places
        return copies[id(module)]
    # Without __init__, which would make and fill new weights.
    copy: nn.Module = object.__new__(type(module))
    copies[id(module)] = copy
    for key, value in vars(module).items():
        vars(copy)[key] = value.copy() if isinstance(value, _CONTAINERS) else value
    buffers, children = copy._buffers, copy._modules
    buffers.update({leaf: b.clone() for leaf, b in buffers.items() if b is not None})
    children.update({leaf: _copied(c, copies) for leaf, c in children.items() if c is not None})
    return copy


def _is_known(module: nn.Module) -> bool:
    return type(module).__module__.startswith(_KNOWN)


def _is_plain(module: nn.Module) -> bool:
    """Return True if a module holds nothing that a copy might share with it but its weights."""
    kind = type(module)
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        return False
    if not _is_known(module) and kind.__module__.startswith("torch."):
        return False  # a class of PyTorch's that may keep data elsewhere
    held = (*module._parameters.values(), *module._buffers.values())
    if not {*map(type, held)} <= {nn.Parameter, Tensor, type(None)}:
        return False
    return all(map(_is_plain_value, _attributes(module).values()))  # hooks are none


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, dict):
        value = (*value, *value.values())
    if type(value) is tuple or isinstance(value, _CONTAINERS):
        return all(type(part) in _PLAIN for part in value)
    return type(value) in _PLAIN


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return all attributes but tensors and children."""
    tensors_and_children = ("_modules", "_parameters", "_buffers")
    return {key: value for key, value in vars(module).items() if key not in tensors_and_children}


def _are_alike(one: nn.Module, other: nn.Module) -> bool:
    """Return True if two plain models have the same classes and values, and share no container."""
    ours, theirs = [*one.modules()], [*other.modules()]
    if [*map(type, ours)] != [*map(type, theirs)]:
        return False
    pairs = [(_attributes(a), _attributes(b)) for a, b in zip(ours, theirs, strict=True)]
    return all(
        a == b and not any(isinstance(v, _CONTAINERS) and v is b[key] for key, v in a.items())
        for a, b in pairs
    )


@lru_cache(maxsize=64)
def template_of(factory: ModelFactory, device: torch.device) -> Template | None:
    """Return the template of a factory's models; None if trainings must build them anew."""

    def build(seed: int) -> nn.Module:
        with seeded(seed, devices=device.type != "cpu"):
            return own_dropout(in_training(factory().to(device)))

    model = build(0)
    if not all(map(_is_plain, model.modules())):
        return None
    if not all(map(_is_known, model.modules())) and not _are_alike(model, build(1)):
        return None
    return Template(model, factory.travelling)
