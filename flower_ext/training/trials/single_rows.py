"""A trial that finds whether a model refuses a mini-batch of a single row."""

import traceback
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from flower_ext.data import Examples, trees
from flower_ext.errors import InvalidValue
from flower_ext.training.isolation import attempted
from flower_ext.training.kind import TrainingKind, kind_of
from flower_ext.training.models.calls import call_model
from flower_ext.training.models.factory import in_training
from flower_ext.training.task import Task


def fewest_rows(task: Task, examples: Examples, batch_size: int) -> int:
    """Return the least number of rows that a mini-batch may have.

    The result is 1. It is 2 if the last mini-batch would have a single row and the model refuses a
    single row, as batch normalisation does in training. Such a model is refused if ``batch_size``
    is 1. No value of an example matters.
    """
    if batch_size > 1 and len(examples) % batch_size != 1:
        return 1
    layer = refusing_layer(kind_of(task, examples.features, examples.targets, {}))
    if layer is not None and batch_size == 1:
        raise InvalidValue.tellable(
            f"batch_size=1: expected at least 2, because {layer} refuses a single row"
        )
    return 1 if layer is None else 2


@lru_cache(maxsize=64)
def refusing_layer(training_kind: TrainingKind) -> str | None:
    """Return the name of the layer that refuses one row but not two; None if no layer does."""
    features = trees.to(training_kind.features, torch.device("cpu"))

    def error_of(count: int) -> Any:
        return attempted(call_model, model, trees.zeros(features, count))

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = in_training(training_kind.model().cpu())
        if isinstance(error_of(2), Exception) or not isinstance(error := error_of(1), Exception):
            return None
    names = {id(module): name for name, module in model.named_modules()}
    layer = model
    for frame, _ in traceback.walk_tb(error.__traceback__):  # the last module raised it
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            layer = module
    return f"layer {names[id(layer)]!r} ({type(layer).__name__})"
