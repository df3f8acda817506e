"""The loss and the gradient of one example alone."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.training.models.calls import call_with
from flower_ext.training.models.factory import in_training, suits_channels_last
from flower_ext.training.params import Params
from flower_ext.training.problem import gradient
from flower_ext.training.task import Task

ExampleLoss = Callable[[Any, Tree], Tensor]
"""A function from the outputs and targets of a batch to the mean loss of its examples."""


def model_of_single_examples(task: Task, trained: Sequence[str]) -> nn.Module:
    """Return a model of the task; refuse one whose layers are known to mix examples."""
    model = in_training(task.factory.on(task.torch_device())).requires_grad_(False)
    channels_last = suits_channels_last(model, trained)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise InvalidValue(
                f"layer {name!r} is batch normalisation, in which every example changes the "
                "gradients of all others: use GroupNorm (flower_ext.training.replace_batch_norm)"
            )
        if getattr(module, "inplace", False):  # an in-place layer overwrites another layer's output
            module.inplace = False
        if getattr(module, "max_norm", None) is not None:
            raise InvalidValue(
                f"layer {name!r} has max_norm={module.max_norm!r}: expected None with DP-SGD, "
                "because an example would otherwise rewrite rows that other examples look up"
            )
        if isinstance(module, nn.Conv2d) and channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def has_rows(leaf: Any, count: int) -> bool:
    """Return True if ``leaf`` is a tensor with ``count`` rows, one for each example of a batch."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == count


def loss_alone(model: nn.Module, params: Params, loss: ExampleLoss, x: Tree, y: Tree) -> Tensor:
    """Return the loss of one example. ``x`` and ``y`` have no batch dimension."""
    x, y = trees.mapped(lambda leaf: leaf.unsqueeze(0), (x, y))
    return loss(call_with(model, params, x), y)


def gradient_alone(
    model: nn.Module, params: Params, names: Sequence[str], loss: ExampleLoss, x: Tree, y: Tree
) -> Params:
    """Return one example's gradient. The example has no batch dimension; buffers stay unchanged."""
    return gradient(
        lambda leaves: loss_alone(model, {**params, **leaves}, loss, x, y),
        {name: params[name] for name in names},
    )
