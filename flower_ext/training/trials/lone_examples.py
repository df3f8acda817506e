"""A trial that finds whether a model learns from one example alone, before DP-SGD spends a budget.

Under DP-SGD, an example's gradient counts as zero if its loss raises an error, or if the gradient
is not finite. If every gradient counted as zero, DP-SGD would spend its budget on noise alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.privacy.mechanisms.updates import is_finite
from flower_ext.training.example_gradient import has_rows
from flower_ext.training.isolation import attempted
from flower_ext.training.models.calls import UnlikeTypes
from flower_ext.training.params import Params
from flower_ext.training.trials.made_up_examples import TRIED, deterministic

_REMEDY = (
    "expected a model that trains on one example at a time, because DP-SGD clips the gradient of "
    "each example: "
    "normalise within an example (nn.LayerNorm, nn.GroupNorm with several channels in a group, or "
    "flower_ext.training.replace_batch_norm) instead of over the batch, and leave out activation "
    "checkpointing"
)
_OF_LABELS = (
    "the model accepts such an example, but the loss fails for the labels 0 and 1: expected a loss "
    "for labels that begin at 0. If your labels begin at another number, as in cross_entropy("
    "outputs, targets - 1990), subtract it in the data set, not in the loss"
)
_OVER_PAIRS = "expected a loss that one example alone can lower, not a loss over pairs of examples"


def why_nothing_learned(
    name: str,
    outputs_of: Callable[[Tree], Tree],
    examples: Sequence[tuple[Tree, Tree]],
    gradients: Sequence[Params | Exception],
) -> str | None:
    """Return why a model cannot learn from any single example; None if it can.

    There are three possible reasons. The loss raises an error for every example, as for labels that
    do not begin at 0. No example has a finite gradient other than zero. Or the outputs for all
    examples are equal, if each passes alone.

    Parameters
    ----------
    name : str
        Name of the model in messages.
    outputs_of : Callable[[Tree], Tree]
        Returns the model's outputs for a batch of features.
    examples, gradients : sequence
        Examples without a batch dimension, of which the first `TRIED` are random. For each example
        there is its gradient, or the error that it raises.
    """
    for gradient in gradients:
        if isinstance(gradient, UnlikeTypes):
            return str(gradient)
    reasons = [*map(_why_no_gradient, gradients)]
    if "" in reasons and None not in reasons:  # some examples have a gradient, of zero
        reason = "each random example by itself has a gradient of zero"
        return f"{reason}. loss, model={name}: {_OVER_PAIRS}"
    if None not in reasons:
        is_of_labels = isinstance(gradients[0], Exception) and not _has_floats(examples[0][1])
        if is_of_labels and all(_takes(outputs_of, x) for x, _ in examples):
            return f"{reasons[0]}. loss, model={name}: {_OF_LABELS}"
        return f"{reasons[0]}. model={name}: {_REMEDY}"
    random = [x for x, _ in examples[:TRIED]]
    if _is_constant(outputs_of, trees.mapped(lambda *rows: torch.stack(rows), *random)):
        reason = "all random examples by themselves have equal outputs"
        return f"{reason}. model={name}: {_REMEDY}"
    return None


def _why_no_gradient(gradient: Params | Exception) -> str | None:
    """Return why an example has no finite gradient; "" if the gradient is zero.

    The result is None for any other gradient.
    """
    if isinstance(gradient, Exception):
        text = str(gradient).partition("\n")[0].rstrip(". ")
        return f"a random example raises {type(gradient).__name__}: {text}"
    if not all(map(is_finite, gradient.values())):
        return "a random example has a gradient that is not finite"
    return None if any(part.any() for part in gradient.values()) else ""


def _has_floats(tree: Tree) -> bool:
    return any(leaf.is_floating_point() for _, leaf in trees.named("", tree))


def _takes(outputs_of: Callable[[Tree], Tree], example: Tree) -> bool:
    alone = trees.mapped(lambda leaf: leaf[None], example)
    return not isinstance(attempted(_outputs, outputs_of, alone), Exception)


def _outputs(outputs_of: Callable[[Tree], Tree], examples: Tree) -> Iterator[Tensor]:
    """Call the model without dropout; yield its floating-point outputs with one row per example."""
    with torch.no_grad(), deterministic(), torch.random.fork_rng(devices=[]):
        outputs = outputs_of(trees.mapped(Tensor.clone, examples))
    leaves = (leaf for _, leaf in trees.named("", outputs))
    count = trees.length(examples)
    return (leaf for leaf in leaves if has_rows(leaf, count) and leaf.is_floating_point())


def _is_constant(outputs_of: Callable[[Tree], Tree], x: Tree) -> bool:
    """Return True if a model has the same outputs for each example alone, whatever the example."""
    try:
        together = [*_outputs(outputs_of, x)]
        each = [_outputs(outputs_of, row) for row in trees.split(x, 1)]
        alone = [torch.cat(rows) for rows in zip(*each, strict=True)]
    except Exception:  # the model may refuse a batch of this size
        return False
    pairs = [*zip(together, alone, strict=False)]
    if not all(torch.allclose(rows, rows[:1].expand_as(rows)) for _, rows in pairs):
        return False
    # Equal outputs may be chance: random integers may be equal where the model looks, and an
    # activation may set all outputs to zero.
    is_real = all(leaf.is_floating_point() for _, leaf in trees.named("", x))
    if is_real and any(rows.any() for rows in alone):
        return True
    return any(not torch.allclose(rows, others) for rows, others in pairs)
