"""Find the fewest rows that a mini-batch may have: two, if a layer of the model refuses one row."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.training.isolation import attempted
from flower_ext.training.models.calls import call_model
from flower_ext.training.models.factory import in_training


def fewest_rows(build: Callable[[], nn.Module], features: Tree, batch_size: int) -> int:
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
    layer = refusing_layer(build, features)
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
