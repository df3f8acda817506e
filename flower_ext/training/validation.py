"""Checks for layers that must not be shared, because their running statistics reveal data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flower_ext.errors import InvalidValue
from flower_ext.training.blueprint import is_frozen
from flower_ext.training.params import matches


class UnshareableModel(InvalidValue):
    """A layer of the shared part keeps statistics of the data."""


def opacus() -> Any:
    """Import Opacus with its validators on first use, because that takes over a second."""
    silent = logging.NullHandler()
    logging.getLogger().addHandler(silent)  # keeps Opacus from configuring the root logger
    try:
        import opacus.validators
    finally:
        logging.getLogger().removeHandler(silent)
    return opacus


def objections(layer: nn.Module) -> str:
    """Return Opacus' reasons against DP-SGD on a layer, with its advice; empty without any."""
    validate = opacus().validators.ModuleValidator.VALIDATORS.get(type(layer), lambda layer: ())
    return " ".join(map(str, validate(layer)))


def check_shareable(model: nn.Module, personal: Sequence[str] = ()) -> None:
    """Refuse a model whose shared part holds BatchNorm layers or other data-dependent buffers.

    Raises
    ------
    UnshareableModel
        The message names the layer and the remedy.
    """
    for name, module in model.named_modules():
        if matches(name, personal) or is_frozen(module):
            continue
        constant = module._non_persistent_buffers_set
        buffers = [name for name, _ in module.named_buffers(recurse=False) if name not in constant]
        if isinstance(module, _BatchNorm):
            raise UnshareableModel(
                f"layer {name!r} ({type(module).__name__}) keeps running statistics of the data, "
                "which neither clipping nor noise covers. Use GroupNorm in its place, call "
                "flower_ext.training.replace_batch_norm(model), or make the layer personal: "
                f"personal=(..., {name!r})."
            )
        if buffers:
            raise UnshareableModel(
                f"layer {name!r} ({type(module).__name__}) has buffers {buffers}, which would "
                "leave the client un-noised. Register them with persistent=False if they are "
                f"constants, or make the layer personal. {objections(module)}".rstrip()
            )


def replace_batch_norm(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` with GroupNorm in place of every BatchNorm, by Opacus' fixer.

    Opacus' whole-model fix would miss some of them, and replace recurrent layers too.
    """
    fix, copy = opacus().validators.ModuleValidator.FIXERS[nn.BatchNorm1d], deepcopy(model)
    for name, layer in [*copy.named_modules()]:
        if isinstance(layer, _BatchNorm):
            fixed = fix(layer).to(next(layer.buffers(), torch.empty(0)).device)
            if not name:
                return cast(nn.Module, fixed)
            parent, _, leaf = name.rpartition(".")
            setattr(copy.get_submodule(parent), leaf, fixed)
    return copy
