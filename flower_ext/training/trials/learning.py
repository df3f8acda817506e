"""A trial of random examples, each by itself, before DP-SGD trains on any record.

An example whose loss raises, or whose gradient is not finite, counts as zero. If the model does so
for every example, DP-SGD would spend its budget on noise alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue, tellable
from flower_ext.training.model_calls import UnlikeTypes
from flower_ext.training.params import Params, is_finite
from flower_ext.training.trials.batch_invariance import TRIED, random_examples, zeros
from flower_ext.training.trials.control_flow import deterministic
from flower_ext.training.trials.single_examples import has_rows

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


def check_single_examples(
    name: str,
    outputs_of: Callable[[Tree], Tree],
    slopes_of: Callable[[Tree, Tree], Params],
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
    slopes_of : Callable[[Tree, Tree], Params]
        Returns the gradient of one example, whose tensors lack the dimension of examples.

    Raises
    ------
    InvalidValue
        Each example's loss raises, as for labels that do not begin at 0; or no example has a finite
        gradient other than zero, or all examples by themselves have equal outputs. The message may
        travel.
    """
    x, y = random_examples(features, TRIED, torch.Generator().manual_seed(0)), zeros(targets, TRIED)
    pairs = [*trees.each((x, y))]
    # Classes may be ignored, or weigh nothing, so another target is tried as well.
    pairs += [(own, trees.mapped(torch.ones_like, target)) for own, target in pairs]
    pairs += [trees.mapped(fill, pairs[0]) for fill in (torch.zeros_like, torch.ones_like)]
    reasons, are_zero = [], False
    for pair in pairs:
        try:
            with torch.random.fork_rng(devices=[]):  # a trial leaves the draws of training alone
                slopes = slopes_of(*pair)
        except UnlikeTypes as error:
            raise tellable(error) from None
        except Exception as error:  # a model or a loss may raise anything
            text = str(error).partition("\n")[0].rstrip(". ")
            reasons.append(f"{_RAISES} {type(error).__name__}: {text}")
            continue
        if not all(map(is_finite, slopes.values())):
            reasons.append("a random example has a gradient that is not finite")
        elif any(slope.any() for slope in slopes.values()):
            break
        else:
            are_zero = True
    else:
        if not are_zero:
            raises = reasons[0].startswith(_RAISES) and _is_whole(targets)
            if raises and all(_takes(outputs_of, example) for example, _ in pairs):
                raise tellable(InvalidValue(f"{reasons[0]}. loss, model={name}: {_OF_LABELS}"))
            raise tellable(InvalidValue(f"{reasons[0]}. model={name}: {_REMEDY}"))
        raise tellable(
            InvalidValue(
                "each random example by itself has a gradient of zero. "
                f"loss, model={name}: expected a loss that a single example can lower, and not one "
                "over pairs of examples"
            )
        )
    if _is_constant(outputs_of, x):
        reason = "all random examples by themselves have equal outputs"
        raise tellable(InvalidValue(f"{reason}. model={name}: {_REMEDY}"))


def _is_whole(targets: Tree) -> bool:
    """Return True if all targets are whole numbers, as labels are."""
    return not any(leaf.is_floating_point() for _, leaf in trees.named("", targets))


def _takes(outputs_of: Callable[[Tree], Tree], example: Tree) -> bool:
    """Return True if the model takes one example by itself."""
    try:
        with torch.no_grad(), deterministic(), torch.random.fork_rng(devices=[]):
            outputs_of(trees.mapped(lambda leaf: leaf.clone()[None], example))
    except Exception:  # a model may raise anything
        return False
    return True


def _is_constant(outputs_of: Callable[[Tree], Tree], x: Tree) -> bool:
    """Return True if outputs say nothing of an example by itself."""

    def outputs(examples: Tree) -> list[Tensor]:
        with torch.no_grad(), deterministic(), torch.random.fork_rng(devices=[]):
            leaves = dict(trees.named("", outputs_of(trees.mapped(Tensor.clone, examples))))
        count = trees.length(examples)
        return [one for one in leaves.values() if has_rows(one, count) and one.is_floating_point()]

    try:
        together = outputs(x)
        singles = [torch.cat(own) for own in zip(*map(outputs, trees.split(x, 1)), strict=True)]
    except Exception:  # the model may refuse a batch of this size
        return False
    pairs = [*zip(together, singles, strict=False)]
    if not all(torch.allclose(one, one[:1].expand_as(one)) for _, one in pairs):
        return False
    # Random integers may be equal where the model looks, and an activation may end it with zeros.
    numbers = all(leaf.is_floating_point() for _, leaf in trees.named("", x))
    constant = numbers and any(one.any() for one in singles)
    return constant or any(not torch.allclose(one, other) for one, other in pairs)
