"""Ways to find the gradient of every example of a batch, and the trials that choose among them.

The fastest way is one pass over a batch (`one_pass`). It gives the inputs and outputs of every
layer, from which this package computes the norm of each example's gradient, and the sum of the
clipped gradients. On a CPU, a batch is divided into several passes that fit into the caches. If a
model might mix examples, vmap or a loop computes each example's gradient.

Libraries choose their kernels by the number of rows, so an example's gradient would be rounded
differently if another example joined the pass. At the kink of a ReLU, such a difference in the last
bit changes the whole gradient. All passes therefore have the same, public number of examples. If a
trial finds that the bits of an example's gradient still depend on other examples, each example gets
a pass of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import lru_cache
from logging import getLogger

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.training.dp.one_pass import OnePass
from flower_ext.training.dp.per_example import GradientRows, Parts, is_known
from flower_ext.training.example_gradient import (
    ExampleLoss,
    gradient_alone,
    loss_alone,
    model_of_single_examples,
)
from flower_ext.training.params import Params, clone
from flower_ext.training.task import Task, TrainingKind, kind_of
from flower_ext.training.trials.examples_in_turn import why_not_one_by_one
from flower_ext.training.trials.examples_together import BatchInvarianceTrial

log = getLogger("flwr")

TOGETHER, _FEWEST = 64, 4
"""Most and fewest examples that pass together if each example's gradient is stored.

Fewer than four would change the rounding, because libraries have other kernels for so few rows.
"""
_MOST_DENSE, _OF_EIGHT = 1024, 8
"""If no gradient is stored, at most 1,024 examples pass together, in a multiple of eight."""


class GradientMethod(StrEnum):
    """Ways to find the gradients of single examples, the fastest first."""

    IN_ONE_PASS = "in one pass"
    BY_VMAP = "by vmap"
    ONE_BY_ONE = "one by one"


class Passes:
    """Passes of examples through one model of a task, in any `GradientMethod`.

    Parameters
    ----------
    names : list of str
        The trained parameters.
    batch_size : float
        The usual number of examples of a batch.

    Raises
    ------
    InvalidValue
        A layer of the model mixes examples.
    """

    def __init__(self, task: Task, names: list[str], batch_size: float) -> None:
        self.task, self.names, self.batch_size = task, names, batch_size
        self.model = model_of_single_examples(task, names)
        self.params = {n: p for n, p in self.model.state_dict().items() if n in task.shapes}
        layers = {name.rpartition(".")[0] for name in names}
        self.layers = {name: self.model.get_submodule(name) for name in layers}
        self.one_pass = OnePass(self.model, names, self.layers)
        holders = [m for m in self.model.modules() if [*m.parameters(recurse=False)]]
        self._is_dense = all(type(layer) is nn.Linear for layer in holders)

    def gradients(self, way: GradientMethod, x: Tree, y: Tree) -> Parts:
        """Run one pass over `width` examples; return the gradient of each."""
        if way == GradientMethod.IN_ONE_PASS:
            return self.one_pass(x, y, self.task.loss)
        follow = self.by_vmap if way == GradientMethod.BY_VMAP else self._alone
        return follow(x, y, self.task.loss)

    def width(self, way: GradientMethod) -> int:
        """Return the number of examples of each pass, the same for every batch."""
        if way == GradientMethod.ONE_BY_ONE:
            return 1
        by_vmap, on_cpu = way == GradientMethod.BY_VMAP, self.task.torch_device().type == "cpu"
        written = by_vmap or (on_cpu and not self._is_dense)
        return _width(self.batch_size, written=written)

    def by_vmap(self, x: Tree, y: Tree, loss: ExampleLoss) -> Parts:
        """Return the gradient of each example, for any model that vmap supports."""
        chosen = {name: self.params[name] for name in self.names}
        buffers = {n: self.params.get(n, b) for n, b in self.model.named_buffers()}
        point = {**self.params, **clone(buffers)}

        def alone(chosen: Params, x: Tree, y: Tree) -> Tensor:
            return loss_alone(self.model, {**point, **chosen}, loss, x, y)

        gradients = vmap(grad(alone), in_dims=(None, 0, 0), randomness="different")(chosen, x, y)
        return {name: GradientRows(gradient) for name, gradient in gradients.items()}

    def _alone(self, x: Tree, y: Tree, loss: ExampleLoss) -> Parts:
        """Return the gradient of a single example, for any model."""
        (pair,) = trees.each((x, y))
        gradient = gradient_alone(self.model, self.params, self.names, loss, *pair)
        return {name: GradientRows(part.unsqueeze(0)) for name, part in gradient.items()}

    def fastest_way(self, features: Tree, targets: Tree) -> GradientMethod:
        """Return the fastest way that trials allow. The process remembers the trials' results.

        Raises
        ------
        InvalidValue
            The model remembers an example, or it cannot learn from one example alone (see
            `why_not_one_by_one`).
        """
        kind = kind_of(self.task, features, targets, self.params)
        threads = torch.get_num_threads()
        way, self.one_pass.last = _tried(kind, tuple(self.names), self.batch_size, threads)
        return way


@lru_cache(maxsize=64)
def _tried(
    kind: TrainingKind, names: tuple[str, ...], batch_size: float, threads: int
) -> tuple[GradientMethod, Tree | None]:
    """Return the fastest way that trials allow, and the extra last example (see `OnePass.last`).

    Trials exclude the way "in one pass" in four cases. A layer gets rows that are not examples, but
    patches or times. The model uses a layer twice. The model mixes examples. Or feature values
    decide which operations the model runs (`watched`). They also exclude one pass, and then vmap,
    if bits of an example's gradient depend on the example's place or on other examples.
    """
    if reason := why_not_one_by_one(kind.task, names, kind.features, kind.targets):
        raise InvalidValue.tellable(reason)
    passes = Passes(kind.task, [*names], batch_size)
    trial = BatchInvarianceTrial(passes.model, passes.params, passes.names)
    example = kind.features, kind.targets, kind.loss
    way, width = GradientMethod.IN_ONE_PASS, passes.width(GradientMethod.IN_ONE_PASS)
    if reason := (
        _why_unknown(passes.layers)
        or _why_not(passes.one_pass.prepare, kind.features, width)
        or _why_not(trial.why_gradients_differ, *example, passes.one_pass, width)
        or _why_not(trial.why_bits_differ, *example, passes.one_pass, width)
    ):
        log.info("DP-SGD does not compute single examples' gradients %s: %s", way, reason)
        way, width = GradientMethod.BY_VMAP, passes.width(GradientMethod.BY_VMAP)
        if reason := _why_not(trial.why_bits_differ, *example, passes.by_vmap, width):
            log.info("DP-SGD does not compute single examples' gradients %s: %s", way, reason)
            way = GradientMethod.ONE_BY_ONE
    log.info("DP-SGD computes the gradients of single examples %s", way)
    return way, passes.one_pass.last


def _why_unknown(layers: Mapping[str, nn.Module]) -> str | None:
    unknown = [name for name, layer in layers.items() if not is_known(layer)]
    return (
        f"flower_ext has no formula for the gradients of layer {unknown[0]!r}" if unknown else None
    )


def _why_not(trial: Callable[..., str | None], *arguments: object) -> str | None:
    """Return the reason that a trial returns, or None if it returns none.

    If the trial raises an error, return this error as a text.
    """
    try:
        return trial(*arguments)
    except Exception as error:  # a model may raise anything for random examples
        return repr(error)


def _width(batch_size: float, *, written: bool) -> int:
    """Return the number of examples of a pass; ``batch_size`` is the usual size of a batch.

    ``written`` is true if the gradient of each example is stored. Passes are then smaller.
    """
    if written:  # padding costs time, so two or three small passes are better than a large one
        half = math.ceil(min(batch_size, 2 * TOGETHER) / 2)
        return max(_FEWEST, 1 << (half - 1).bit_length())
    usual = batch_size + 3 * math.sqrt(batch_size)  # a Poisson batch is rarely larger
    passes = math.ceil(usual / _MOST_DENSE)
    return _OF_EIGHT * math.ceil(usual / passes / _OF_EIGHT)
