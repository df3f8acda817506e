"""Ways to find the gradient of every example of a batch, and the trials that choose among them.

The fastest way is one pass over a batch. It gives the inputs and outputs of every layer, from which
`single_examples.layers` computes the norm of each example's gradient, and the sum of the clipped
gradients. On a CPU, a batch is divided into several passes that fit into the caches. If a model
might mix examples, vmap or a loop computes each example's gradient.

Libraries choose their kernels by the number of rows, so an example's gradient would be rounded
differently if another example joined the pass. At the kink of a ReLU, such a difference in the last
bit changes the whole gradient. All passes therefore have the same, public number of examples. If a
trial finds that the bits of an example's gradient still depend on other examples, each example gets
a pass of its own.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from functools import lru_cache, partial
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.training.dp.control_flow import DecidedTests, ReadsValues, watched
from flower_ext.training.isolation import attempted
from flower_ext.training.kind import TrainingKind, kind_of
from flower_ext.training.models.calls import call_model, call_with
from flower_ext.training.models.dropout import WithoutDropout
from flower_ext.training.params import Params
from flower_ext.training.single_examples.alone import (
    ExampleLoss,
    gradient_alone,
    has_rows,
    loss_alone,
    model_of_single_examples,
)
from flower_ext.training.single_examples.layers import GradientRows, Parts, gradients, is_known
from flower_ext.training.task import Task
from flower_ext.training.trials.examples_in_turn import why_not_one_by_one
from flower_ext.training.trials.examples_together import BatchInvarianceTrial
from flower_ext.training.trials.made_up_examples import random_examples

log = getLogger("flwr")

MOST_STORED, _FEWEST_STORED = 64, 4
"""Most and fewest examples that pass together if each example's gradient is stored.

Fewer than four would change the rounding, because libraries use different kernels for so few rows.
"""
_MOST_NOT_STORED, _MULTIPLE = 1024, 8
"""If no gradient is stored, at most 1,024 examples pass together, always a multiple of eight."""
_UNKNOWN = "flower_ext has no formula for the gradients of layer {!r}"


class Way(StrEnum):
    """Ways to find the gradients of single examples, the fastest first."""

    IN_ONE_PASS = "in one pass"
    BY_VMAP = "by vmap"
    ONE_BY_ONE = "one by one"


class Passes:
    """Forward and backward passes of examples through one model, in each `Way` to find gradients.

    ``names`` are the trained parameters, and ``batch_size`` is the usual size of a batch. The
    constructor refuses a model with a layer that mixes examples.
    """

    def __init__(self, task: Task, names: list[str], batch_size: float) -> None:
        self.task, self.names, self.batch_size = task, names, batch_size
        self.model = model_of_single_examples(task, names)
        self.params = {n: p for n, p in self.model.state_dict().items() if n in task.shapes}
        layers = {name.rpartition(".")[0] for name in names}
        self.layers = {name: self.model.get_submodule(name) for name in layers}
        holders = [m for m in self.model.modules() if [*m.parameters(recurse=False)]]
        self._is_dense = all(type(layer) is nn.Linear for layer in holders)
        self.decides_tests = False
        """True if passes need `DecidedTests` (see `prepare`)."""

    def gradients(self, way: Way, x: Tree, y: Tree) -> Parts:
        """Run one pass over `width` examples; return the gradient of each."""
        if way == Way.IN_ONE_PASS:
            return self.in_one_pass(x, y, self.task.loss)
        if way == Way.BY_VMAP:
            return self.by_vmap(x, y, self.task.loss)
        (pair,) = trees.each((x, y))
        alone = gradient_alone(self.model, self.params, self.names, self.task.loss, *pair)
        return {name: GradientRows(part.unsqueeze(0)) for name, part in alone.items()}

    def width(self, way: Way) -> int:
        """Return the number of examples of each pass, the same for every batch."""
        if way == Way.ONE_BY_ONE:
            return 1
        on_cpu = self.task.torch_device().type == "cpu"
        if way == Way.BY_VMAP or (on_cpu and not self._is_dense):
            # Each gradient is stored. Padding costs time, so two or three small passes are better
            # than a large one.
            half = math.ceil(min(self.batch_size, 2 * MOST_STORED) / 2)
            return max(_FEWEST_STORED, 1 << (half - 1).bit_length())  # round up to a power of two
        # Three standard deviations above the mean: a Poisson sample rarely exceeds this size.
        usual = self.batch_size + 3 * math.sqrt(self.batch_size)
        passes = math.ceil(usual / _MOST_NOT_STORED)
        return _MULTIPLE * math.ceil(usual / passes / _MULTIPLE)

    def in_one_pass(self, x: Tree, y: Tree, loss: ExampleLoss) -> Parts:
        """Return each example's gradients for the parameters on which the loss depends."""
        count = trees.length(x)
        inputs_of, outputs_of = dict[str, Tensor](), dict[str, Tensor]()

        def widen(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            if inputs[0].dim() and len(inputs[0]) == 1 < count:  # one for all, such as positions
                return inputs[0].expand(count, *inputs[0].shape[1:]), *inputs[1:]
            return inputs

        def keep(name: str, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            if name in inputs_of:
                raise RuntimeError(f"layer {name!r} is used twice")
            inputs_of[name] = inputs[0].detach()
            # No parameter requires a gradient, so the lowest layer's output must require one.
            outputs_of[name] = output if output.requires_grad else output.requires_grad_()
            return output

        hooks = [layer.register_forward_pre_hook(widen) for layer in self.layers.values()]
        for name, layer in self.layers.items():
            hooks.append(layer.register_forward_hook(partial(keep, name)))
        try:
            outputs = self._outputs(x)
        finally:
            for hook in hooks:
                hook.remove()
        slopes = torch.autograd.grad(
            _sum_of_losses(loss, outputs, y, count), [*outputs_of.values()], allow_unused=True
        )
        parts: dict[str, Any] = {}
        for name, slope in zip(outputs_of, slopes, strict=True):
            if slope is not None:  # the loss depends on the layer
                of_layer = gradients(self.layers[name], inputs_of[name], slope)
                for leaf, part in of_layer.items():
                    parts[f"{name}.{leaf}".removeprefix(".")] = part
        # In the order of `names`, as the other ways do: the order decides how norms are rounded.
        return {name: parts[name] for name in self.names if name in parts}

    def prepare(self, features: Tree, count: int) -> None:
        """Find out whether passes over ``count`` examples need `DecidedTests`.

        Some models choose their operations by a test of feature values, such as "does any mask hide
        a word?". Such a test could mix examples, so every pass gets the same answer. If other
        values still decide which operations the model runs, the error is `ReadsValues`.
        """
        x = random_examples(features, count, torch.Generator().manual_seed(0))
        with WithoutDropout():
            try:
                self._watch(x)
            except ReadsValues:
                self.decides_tests = True
                self._watch(x)

    def _watch(self, x: Tree) -> None:
        with self._decided_tests(), watched([*trees.leaves(x)], self.model):
            call_model(self.model, x)

    def _decided_tests(self) -> AbstractContextManager[object]:
        return DecidedTests() if self.decides_tests else nullcontext()

    def _outputs(self, x: Tree) -> Any:
        # Buffers must stay unchanged: they could count the passes, whose number is private.
        with self._decided_tests():
            return call_with(self.model, {}, x)

    def by_vmap(self, x: Tree, y: Tree, loss: ExampleLoss) -> Parts:
        """Return the gradient of each example, for any model that vmap supports."""
        chosen = {name: self.params[name] for name in self.names}

        def alone(chosen: Params, x: Tree, y: Tree) -> Tensor:
            return loss_alone(self.model, {**self.params, **chosen}, loss, x, y)

        rows = vmap(grad(alone), in_dims=(None, 0, 0), randomness="different")(chosen, x, y)
        return {name: GradientRows(part) for name, part in rows.items()}

    def fastest_way(self, features: Tree, targets: Tree) -> Way:
        """Return the fastest way that trials allow. The process remembers the trials' results.

        Refuse the model if `why_not_one_by_one` returns a reason.
        """
        training_kind = kind_of(self.task, features, targets, self.params)
        size, threads = self.batch_size, torch.get_num_threads()
        way, self.decides_tests = _fastest_way(training_kind, tuple(self.names), size, threads)
        return way


@lru_cache(maxsize=64)
def _fastest_way(
    training_kind: TrainingKind, names: tuple[str, ...], batch_size: float, threads: int
) -> tuple[Way, bool]:
    """Return the fastest way that trials allow, and `Passes.decides_tests`.

    The way "in one pass" is excluded in five cases. A layer has no formula in
    `single_examples.layers`. A layer gets a row for each patch or time, not for each example. The
    model uses a layer twice. The model mixes examples. Or feature values decide which operations
    the model runs (`watched`). Trials also exclude one pass, and then vmap, if bits of an example's
    gradient depend on the example's place or on other examples.
    """
    if reason := why_not_one_by_one(training_kind, names):
        raise InvalidValue.tellable(reason)
    passes = Passes(training_kind.task, [*names], batch_size)
    trial = BatchInvarianceTrial(training_kind, passes.model, passes.params, passes.names)
    way, width = Way.IN_ONE_PASS, passes.width(Way.IN_ONE_PASS)
    if reason := (
        next((_UNKNOWN.format(n) for n, m in passes.layers.items() if not is_known(m)), None)
        or _reason_or_error(passes.prepare, training_kind.features, width)
        or _reason_or_error(trial.why_gradients_differ, passes.in_one_pass, width)
        or _reason_or_error(trial.why_bits_differ, passes.in_one_pass, width)
    ):
        log.info("DP-SGD does not compute single examples' gradients %s: %s", way, reason)
        way, width = Way.BY_VMAP, passes.width(Way.BY_VMAP)
        if reason := _reason_or_error(trial.why_bits_differ, passes.by_vmap, width):
            log.info("DP-SGD does not compute single examples' gradients %s: %s", way, reason)
            way = Way.ONE_BY_ONE
    log.info("DP-SGD computes the gradients of single examples %s", way)
    return way, passes.decides_tests


def _reason_or_error(trial: Callable[..., str | None], *arguments: object) -> str | None:
    """Return the reason that a trial returns, or the error that it raises."""
    result = attempted(trial, *arguments)  # a model may raise anything for random examples
    return repr(result) if isinstance(result, Exception) else result


def _sum_of_losses(loss: ExampleLoss, outputs: Any, y: Tree, count: int) -> Tensor:
    """Return the sum of the examples' losses, each computed from that example alone."""
    if loss is functional.cross_entropy and isinstance(outputs, Tensor) and outputs.dim() == 2:
        return functional.cross_entropy(outputs, y, reduction="sum")
    rows = {name: leaf for name, leaf in trees.named("", outputs) if has_rows(leaf, count)}

    def alone(rows: Mapping[str, Tensor], target: Tree) -> Tensor:
        # vmap gives this function one row of each tensor. Put the rows back into the outputs, whose
        # tensors have the same order.
        left = iter(rows.values())

        def with_one_row(leaf: Any) -> Any:
            if has_rows(leaf, count):
                return next(left).unsqueeze(0)
            # A tensor of the whole batch could mix examples, so a loss that uses it must fail.
            return None if isinstance(leaf, Tensor) else leaf

        target = trees.mapped(lambda leaf: leaf.unsqueeze(0), target)
        return loss(trees.mapped(with_one_row, outputs), target)

    return vmap(alone)(rows, y).sum()
