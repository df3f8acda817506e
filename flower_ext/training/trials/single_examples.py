"""One example by itself: its model, its loss, its gradient, and a trial that it has one.

An example whose loss raises, or whose gradient is not finite, counts as zero under DP-SGD. If a
model does so for every example, DP-SGD would spend its budget on noise alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue, tellable
from flower_ext.training.model_calls import UnlikeTypes, call_with
from flower_ext.training.model_factory import channels_last_needs, in_training
from flower_ext.training.params import Params, clone, is_finite
from flower_ext.training.task import Task
from flower_ext.training.trials.deterministic import deterministic
from flower_ext.training.trials.trial_examples import TRIED, random_examples, zeros

Loss = Callable[[Any, Tree], Tensor]

_RAISES = "a random example raises"
_REMEDY = (
    "expected a model that trains on one example at a time, as DP-SGD clips the gradient of each: "
    "normalise within an example (nn.LayerNorm, nn.GroupNorm with several channels in a group, or "
    "flower_ext.training.replace_batch_norm) instead of over the batch, and leave out activation "
    "checkpointing"
)
_OF_LABELS = (
    "the model takes such an example and the loss does not, for labels of 0 or of 1: expected a "
    "loss that takes labels from 0 on. If yours begin at another number, as in cross_entropy("
    "outputs, targets - 1990), subtract it in the data set, not in the loss"
)
_OVER_PAIRS = "expected a loss that a single example can lower, and not one over pairs of examples"


def model_of_single_examples(task: Task, trained: Sequence[str]) -> nn.Module:
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


def gradient_alone(
    model: nn.Module, params: Params, names: Sequence[str], loss: Loss, x: Tree, y: Tree
) -> Params:
    """Return the gradient of one example; the next one finds the model's buffers as they were."""
    leaves = {name: params[name].detach().requires_grad_() for name in names}
    point = {**params, **clone(dict(model.named_buffers())), **leaves}
    gradient = torch.autograd.grad(
        loss_alone(model, point, loss, x, y),
        list(leaves.values()),
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, gradient, strict=True))


def refuse_without_gradients(
    name: str,
    outputs_of: Callable[[Tree], Tree],
    gradient_of: Callable[[Tree, Tree], Params],
    features: Tree,
    targets: Tree,
) -> None:
    """Refuse a model that learns from no example by itself.

    Only the shapes and types of the examples matter, which count as public. Random examples take
    their place, and an example of zeros and one of ones, because some models need numbers that are
    not negative.

    Parameters
    ----------
    name : str
        Name of the model in messages.
    outputs_of : Callable[[Tree], Tree]
        Returns the model's outputs for a batch of features.
    gradient_of : Callable[[Tree, Tree], Params]
        Returns the gradient of one example, whose tensors lack the dimension of examples.

    Raises
    ------
    InvalidValue
        Each example's loss raises, as for labels that do not begin at 0; or no example has a finite
        gradient other than zero, or all examples by themselves have equal outputs. The message may
        travel.
    """
    x, y = random_examples(features, TRIED, torch.Generator().manual_seed(0)), zeros(targets, TRIED)
    examples = [*trees.each((x, y))]
    # Classes may be ignored, or weigh nothing, so another target is tried as well.
    examples += [(row, trees.mapped(torch.ones_like, target)) for row, target in examples]
    examples += [trees.mapped(fill, examples[0]) for fill in (torch.zeros_like, torch.ones_like)]
    reasons = []
    for example in examples:
        if (reason := _why_no_gradient(gradient_of, *example)) is None:
            break
        reasons.append(reason)
    else:
        if "" in reasons:  # some examples have a gradient, of zero
            reason = "each random example by itself has a gradient of zero"
            raise _refusal(f"{reason}. loss, model={name}: {_OVER_PAIRS}")
        is_of_labels = reasons[0].startswith(_RAISES) and not _has_floats(targets)
        if is_of_labels and all(_takes(outputs_of, row) for row, _ in examples):
            raise _refusal(f"{reasons[0]}. loss, model={name}: {_OF_LABELS}")
        raise _refusal(f"{reasons[0]}. model={name}: {_REMEDY}")
    if _is_constant(outputs_of, x):
        reason = "all random examples by themselves have equal outputs"
        raise _refusal(f"{reason}. model={name}: {_REMEDY}")


def _refusal(text: str) -> InvalidValue:
    return tellable(InvalidValue(text))


def _why_no_gradient(gradient_of: Callable[[Tree, Tree], Params], x: Tree, y: Tree) -> str | None:
    """Return why an example has no gradient, empty if it is zero; None if it has one."""
    try:
        with torch.random.fork_rng(devices=[]):  # a trial leaves the draws of training alone
            gradient = gradient_of(x, y)
    except UnlikeTypes as error:
        raise tellable(error) from None
    except Exception as error:  # a model or a loss may raise anything
        text = str(error).partition("\n")[0].rstrip(". ")
        return f"{_RAISES} {type(error).__name__}: {text}"
    if not all(map(is_finite, gradient.values())):
        return "a random example has a gradient that is not finite"
    return None if any(part.any() for part in gradient.values()) else ""


def _has_floats(tree: Tree) -> bool:
    return any(leaf.is_floating_point() for _, leaf in trees.named("", tree))


def _takes(outputs_of: Callable[[Tree], Tree], example: Tree) -> bool:
    """Return True if the model takes one example by itself."""
    try:
        _outputs(outputs_of, trees.mapped(lambda leaf: leaf[None], example))
    except Exception:  # a model may raise anything
        return False
    return True


def _outputs(outputs_of: Callable[[Tree], Tree], examples: Tree) -> Iterator[Tensor]:
    """Yield the outputs in floating point that have one row per example, without dropout."""
    with torch.no_grad(), deterministic(), torch.random.fork_rng(devices=[]):
        outputs = outputs_of(trees.mapped(Tensor.clone, examples))
    leaves = (leaf for _, leaf in trees.named("", outputs))
    count = trees.length(examples)
    return (leaf for leaf in leaves if has_rows(leaf, count) and leaf.is_floating_point())


def _is_constant(outputs_of: Callable[[Tree], Tree], x: Tree) -> bool:
    """Return True if outputs say nothing of an example by itself."""
    try:
        together = [*_outputs(outputs_of, x)]
        each = [_outputs(outputs_of, row) for row in trees.split(x, 1)]
        alone = [torch.cat(rows) for rows in zip(*each, strict=True)]
    except Exception:  # the model may refuse a batch of this size
        return False
    pairs = [*zip(together, alone, strict=False)]
    if not all(torch.allclose(rows, rows[:1].expand_as(rows)) for _, rows in pairs):
        return False
    # Random integers may be equal where the model looks, and an activation may end it with zeros.
    is_real = all(leaf.is_floating_point() for _, leaf in trees.named("", x))
    if is_real and any(rows.any() for rows in alone):
        return True
    return any(not torch.allclose(rows, others) for rows, others in pairs)
