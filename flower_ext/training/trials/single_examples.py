"""One example by itself: a model that keeps examples apart, the example's loss and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue
from flower_ext.training.model_calls import call_with
from flower_ext.training.model_factory import channels_last_needs, in_training
from flower_ext.training.params import Params, clone
from flower_ext.training.task import Task

Loss = Callable[[Any, Tree], Tensor]


def built(task: Task, trained: Sequence[str]) -> nn.Module:
    """Return a model of the task in which examples stay apart, or refuse one in which they mix."""
    model = in_training(task.model().to(task.torch_device())).requires_grad_(False)
    must_train = channels_last_needs(model)
    channels_last = must_train is None or must_train in trained  # faster on a CPU
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise InvalidValue(
                f"{name!r} is batch normalisation, through which every example moves every "
                "gradient: use GroupNorm (flower_ext.training.replace_batch_norm)"
            )
        if getattr(module, "inplace", False):  # it would overwrite another layer's output
            module.inplace = False
        if getattr(module, "max_norm", None) is not None:
            raise InvalidValue(
                f"{name!r} has max_norm={module.max_norm!r}: expected None with DP-SGD, because an "
                "example would rewrite rows that others look up"
            )
        if isinstance(module, nn.Conv2d) and channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def has_rows(leaf: Any, count: int) -> bool:
    """Return True if an output may have one row for each of ``count`` examples."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == count


def loss_alone(model: nn.Module, params: Params, loss: Loss, x: Tree, y: Tree) -> Tensor:
    """Return the loss of one example, which comes without the dimension of examples."""
    x, y = trees.mapped(lambda leaf: leaf.unsqueeze(0), (x, y))
    return loss(call_with(model, params, x), y)


def slopes_alone(
    model: nn.Module, params: Params, names: Sequence[str], loss: Loss, x: Tree, y: Tree
) -> Params:
    """Return the gradient of one example; the next one finds the model's buffers as they were."""
    leaves = {name: params[name].detach().requires_grad_() for name in names}
    point = {**params, **clone(dict(model.named_buffers())), **leaves}
    slopes = torch.autograd.grad(
        loss_alone(model, point, loss, x, y),
        list(leaves.values()),
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, slopes, strict=True))
