"""The loss and metrics of a model on one client's examples."""

import math
from collections.abc import Callable, Mapping, Sequence
from logging import DEBUG, WARNING, getLogger
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flower_ext.data import Examples, trees
from flower_ext.errors import InvalidValue
from flower_ext.training.index_limits import on_device
from flower_ext.training.isolation import attempted, seeded
from flower_ext.training.models.calls import settable_model
from flower_ext.training.params import to_device
from flower_ext.training.task import Task

log = getLogger("flwr")

_ROWS = 1024
"""Number of examples in a mini-batch."""
_logged_scores: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Names of the failed scores that the log already shows, for each factory of models."""


@torch.no_grad()
def evaluate(task: Task, params: Mapping[str, Tensor], examples: Examples) -> dict[str, float]:
    """Return the mean loss and the task's metrics of a model on one client's ``examples``.

    The function joins the outputs of several mini-batches. Outputs may be tensors, or tuples,
    lists, mappings and dataclasses of tensors, whose parts may be None.

    A score that raises an error is NaN, and the other scores remain. If all scores raise errors,
    the function raises the first of these errors. No score depends on another client.

    Raises
    ------
    ValueError
        There are several mini-batches, and an output does not have one row per example. The message
        names the output.
    """
    device = task.torch_device()
    model = settable_model(task.factory, params, device, trains=False)
    model.set_params(to_device(params, device))
    # A model or a metric that draws numbers draws the same ones for every client.
    with seeded(0, device):
        examples = on_device(task, examples)
        parts = trees.split(examples.features, _ROWS)
        # Copy each mini-batch, because the model may write into it.
        outputs = _joined(
            [model(trees.mapped(Tensor.clone, part)) for part in parts], [*map(trees.length, parts)]
        )

        def value(metric: Callable[..., Any]) -> float:
            return float(metric(outputs, examples.targets))

        metrics: dict[str, Callable[..., Any]] = {"loss": task.loss, **task.metrics}
        values = {name: attempted(value, metric) for name, metric in metrics.items()}
    errors = {name: v for name, v in values.items() if isinstance(v, Exception)}
    if len(errors) == len(values):
        raise next(iter(errors.values()))
    for name, failure in errors.items():
        shown = _logged_scores.setdefault(task.factory, set())
        level = DEBUG if name in shown else WARNING  # once, and not for each client and round
        log.log(level, "the score %r failed, so it is left out", name, exc_info=failure)
        shown.add(name)
    return {name: math.nan if isinstance(v, Exception) else v for name, v in values.items()}


def _joined(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the outputs of several mini-batches; ``sizes`` are their numbers of examples."""
    if len(outputs) == 1:
        return outputs[0]
    if all(isinstance(output, Tensor) and output.dim() for output in outputs):
        return torch.cat([*outputs])
    for output, size in zip(outputs, sizes, strict=True):
        for name, leaf in trees.named("outputs", output):
            rows = leaf.shape[:1] if isinstance(leaf, Tensor) else None
            if leaf is not None and rows != (size,):
                form = type(leaf).__name__ if rows is None else f"shape {tuple(leaf.shape)}"
                raise InvalidValue(
                    f"{name} of {form} for a mini-batch of {size} examples: expected one row per "
                    f"example, because an evaluation joins {len(sizes)} mini-batches with "
                    f"{sum(sizes)} examples. Let the model return tensors such as logits, and "
                    "let the loss and the metrics read them"
                )
    return trees.mapped(
        lambda *leaves: leaves[0] if leaves[0] is None else torch.cat(leaves), *outputs
    )
