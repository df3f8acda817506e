"""Loss and metrics of models on examples: of one client, or of many that share a model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import DEBUG, WARNING, getLogger
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flower_ext.data import Examples, trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.training.batched.form import MEMORY_LIMIT
from flower_ext.training.isolation import attempted
from flower_ext.training.model_calls import call_with
from flower_ext.training.params import to_device
from flower_ext.training.task import Task
from flower_ext.training.trials.batch_invariance import evaluates_independently

log = getLogger("flwr")

_shown: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""By factory of models, the failing scores that the log has already."""


def evaluate(
    task: Task, params: Mapping[str, Tensor], examples: Examples, *, batch_size: int = 1024
) -> dict[str, float]:
    """Return the mean loss and the task's metrics of a model on ``examples``.

    Raises
    ------
    ValueError
        As `predict`.
    """
    outputs = predict(task, params, examples.features, batch_size=batch_size)
    targets = trees.to(examples.targets, task.torch_device())
    scores = {name: float(metric(outputs, targets)) for name, metric in task.metrics.items()}
    return {"loss": float(task.loss(outputs, targets)), **scores}


def _evaluate_alone(
    task: Task, params: Mapping[str, Tensor], examples: Examples
) -> dict[str, float]:
    """Return the scores of `score_each_alone` of a model on ``examples``."""
    outputs = predict(task, params, examples.features)
    return score_each_alone(task, outputs, trees.to(examples.targets, task.torch_device()))


@torch.no_grad()
def predict(
    task: Task, params: Mapping[str, Tensor], features: Tree, *, batch_size: int = 1024
) -> Any:
    """Return a model's outputs, on the task's device.

    Outputs of several mini-batches are joined. They may be tensors, or tuples, lists, mappings and
    dataclasses of tensors; parts may be None.

    Raises
    ------
    ValueError
        With several mini-batches, an output does not have one row per example; the message names
        it.
    """
    device = task.torch_device()
    model: nn.Module = task.model().to(device).eval()
    weights = to_device(params, device)
    parts = trees.split(features, batch_size)
    return _joined(
        [
            # A copy, because the model may write into its features.
            call_with(model, weights, trees.mapped(Tensor.clone, trees.to(x, device)))
            for x in parts
        ],
        [trees.length(x) for x in parts],
    )


def _joined(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the outputs of mini-batches of these sizes."""
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
                    f"example, because the outputs of {len(sizes)} mini-batches with {sum(sizes)} "
                    "examples are joined: let the model return tensors such as logits, and let "
                    "loss and metrics read these"
                )
    return trees.mapped(_cat, *outputs)


def _cat(*leaves: Any) -> Any:
    return None if leaves[0] is None else torch.cat(leaves)


def score_each_alone(task: Task, outputs: Any, targets: Tree) -> dict[str, float]:
    """Return the mean loss and the task's metrics, with NaN for each that raises an error.

    Raises
    ------
    Exception
        The first error, if all of them raise one.
    """

    def value(metric: Callable[..., Any]) -> float:
        return float(metric(outputs, targets))

    metrics: dict[str, Callable[..., Any]] = {"loss": task.loss, **task.metrics}
    values = {name: attempted(value, metric) for name, metric in metrics.items()}
    errors = {name: v for name, v in values.items() if isinstance(v, Exception)}
    if len(errors) == len(values):
        raise next(iter(errors.values()))
    for name, failure in errors.items():
        shown = _shown.setdefault(task.factory, set())
        level = DEBUG if name in shown else WARNING  # once, and not for each client and round
        log.log(level, "the score %r failed, so it is left out", name, exc_info=failure)
        shown.add(name)
    return {name: math.nan if isinstance(v, Exception) else v for name, v in values.items()}


def evaluate_each(
    task: Task,
    models: Sequence[Mapping[str, Tensor]],
    examples: Sequence[Examples],
    *,
    memory_limit: int = MEMORY_LIMIT,
) -> list[dict[str, float] | Exception]:
    """Return the scores of `evaluate` for each model on its own examples, or the error it raises.

    A loss or metric that raises an error for a client is NaN, and its other scores remain.

    Clients that share one model (the same object) pass through it together, as many as fit into
    ``memory_limit`` bytes, if their examples are tensors of one form and the model treats each
    example independently and returns a tensor. All others are evaluated one by one. A client's
    scores do not depend on another client's values or errors.
    """
    sharing = defaultdict(list)
    for index, (model, data) in enumerate(zip(models, examples, strict=True)):
        sharing[id(model), data.form].append(index)
    scores: dict[int, dict[str, float] | Exception] = {}
    for members in sharing.values():
        like = examples[members[0]].features
        together = isinstance(like, Tensor) and evaluates_independently(
            task.model, like.shape[1:], like.dtype
        )
        if not together:
            scores |= {i: attempted(_evaluate_alone, task, models[i], examples[i]) for i in members}
            continue
        sizes = [examples[index].features.nbytes for index in members]
        for portion in _portions(members, sizes, memory_limit):
            features = [examples[index].features for index in portion]
            outputs = _outputs(task, models[portion[0]], features)
            for index, output in zip(portion, outputs, strict=True):
                if isinstance(output, Exception):
                    scores[index] = output
                else:
                    targets = trees.to(examples[index].targets, output.device)
                    scores[index] = attempted(score_each_alone, task, output, targets)
    return [scores[index] for index in range(len(models))]


def _outputs(
    task: Task, model: Mapping[str, Tensor], features: Sequence[Tensor]
) -> Sequence[Tensor | Exception]:
    """Return the outputs for each client's features, which pass together, or their errors."""
    sizes = [*map(len, features)]
    together = attempted(predict, task, model, torch.cat([*features]))
    if not isinstance(together, Exception):
        return torch.split(together, sizes)
    alone = [attempted(predict, task, model, x) for x in features]
    # Zeros replace features that raise, so that all others round as they would beside values.
    sound = [
        torch.zeros_like(x) if isinstance(output, Exception) else x
        for x, output in zip(features, alone, strict=True)
    ]
    together = attempted(predict, task, model, torch.cat(sound))
    if isinstance(together, Exception):  # an error of the batch itself, such as too little memory
        return alone
    outputs = torch.split(together, sizes)
    return [
        error if isinstance(error, Exception) else output
        for error, output in zip(alone, outputs, strict=True)
    ]


def _portions(members: Sequence[int], sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Yield members in order, in lists whose sizes sum to at most ``limit`` (or single members)."""
    portion: list[int] = []
    total = 0
    for member, size in zip(members, sizes, strict=True):
        if portion and total + size > limit:
            yield portion
            portion, total = [], 0
        portion.append(member)
        total += size
    if portion:
        yield portion
