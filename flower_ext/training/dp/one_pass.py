"""One pass of many examples, which gives each example's loss and every layer's input and output.

Features and outputs may be trees. The loss sees only those output tensors that have one row per
example, because other tensors might mix examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.training.dp.per_example import Parts, gradients
from flower_ext.training.example_gradient import ExampleLoss, has_rows
from flower_ext.training.models.calls import call_model, call_with
from flower_ext.training.params import clone
from flower_ext.training.trials.control_flow import watched
from flower_ext.training.trials.made_up_examples import deterministic, random_examples


class OnePass:
    """Computes the gradient of every single example, from one pass over all of them.

    Parameters
    ----------
    model : nn.Module
        None of its parameters requires a gradient.
    names : list of str
        The trained parameters.
    layers : Mapping[str, nn.Module]
        The layers that hold these parameters; `per_example.is_known` is true for each.
    """

    def __init__(self, model: nn.Module, names: list[str], layers: Mapping[str, nn.Module]) -> None:
        self.model, self.names, self.layers = model, names, layers
        self.last: Tree | None = None
        """An extra last example that is the same in every pass; None if passes do not need it.

        Its gradient is never returned.
        """

    def __call__(self, x: Tree, y: Tree, loss: ExampleLoss) -> Parts:
        """Return the gradients of all parameters that the loss depends on."""
        count = trees.length(x)
        inputs_of, outputs_of = dict[str, Tensor](), dict[str, Tensor]()

        def widen(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            rows = count + (self.last is not None)
            if inputs[0].dim() and len(inputs[0]) == 1 < rows:  # shared by all, such as positions
                return inputs[0].expand(rows, *inputs[0].shape[1:]), *inputs[1:]
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
            outputs = self._outputs(x, count)
        finally:
            for hook in hooks:
                hook.remove()
        slopes = torch.autograd.grad(
            summed(loss, outputs, y, count), [*outputs_of.values()], allow_unused=True
        )
        parts: dict[str, Any] = {}
        for name, slope in zip(outputs_of, slopes, strict=True):
            if slope is not None:  # the loss depends on the layer
                of_layer = gradients(self.layers[name], inputs_of[name][:count], slope[:count])
                for leaf, part in of_layer.items():
                    parts[f"{name}.{leaf}".removeprefix(".")] = part
        return {name: parts[name] for name in self.names if name in parts}

    def prepare(self, features: Tree, count: int) -> None:
        """Set `last` if passes over ``count`` examples need an extra last example.

        Some models choose their operations by a test of feature values, such as "does any mask hide
        a word?". Such a test could mix examples. An extra example, the same in every pass, decides
        the test in advance.

        Raises
        ------
        ReadsValues
            Values of the ``count`` examples still decide which operations the model runs.
        """
        generator = torch.Generator().manual_seed(0)
        pair = random_examples(features, 2, generator)
        self.last = trees.mapped(lambda leaf: leaf[1:], pair)
        with deterministic():
            if not self.reads_last(random_examples(features, count, generator)):
                self.last = None

    def reads_last(self, x: Tree) -> bool:
        """Return True if values of the last example decide which operations the model runs.

        Raises
        ------
        ReadsValues
            Values of other examples decide which operations the model runs.
        """
        features = self._with_last(x)
        with watched([leaf for _, leaf in trees.named("", features)], self.model) as watch:
            call_model(self.model, features)
        return watch.needs_last

    def _with_last(self, x: Tree) -> Tree:
        if self.last is None:
            return x
        return trees.mapped(lambda *both: torch.cat(both), x, self.last)

    def _outputs(self, x: Tree, count: int) -> Any:
        """Return the model's outputs for ``x``, without the output of the extra last example."""
        # Restore the buffers, which could count passes, because the number of passes is private.
        buffers = clone(dict(self.model.named_buffers()))
        features = self._with_last(x)
        outputs = (
            call_with(self.model, buffers, features)
            if buffers
            else call_model(self.model, features)
        )
        if self.last is None:
            return outputs
        rows = count + 1
        return trees.mapped(lambda leaf: leaf[:-1] if has_rows(leaf, rows) else leaf, outputs)


def summed(loss: ExampleLoss, outputs: Any, y: Tree, count: int) -> Tensor:
    """Return the sum of the examples' losses, each computed from that example alone."""
    if loss is functional.cross_entropy and isinstance(outputs, Tensor) and outputs.dim() == 2:
        return functional.cross_entropy(outputs, y, reduction="sum")
    rows = {name: leaf for name, leaf in trees.named("", outputs) if has_rows(leaf, count)}

    def alone(rows: Mapping[str, Tensor], target: Tree) -> Tensor:
        left = iter(rows.values())

        def with_one_row(leaf: Any) -> Any:
            if has_rows(leaf, count):
                return next(left).unsqueeze(0)
            return None if isinstance(leaf, Tensor) else leaf

        return loss(
            trees.mapped(with_one_row, outputs), trees.mapped(lambda t: t.unsqueeze(0), target)
        )

    return vmap(alone)(rows, y).sum()
