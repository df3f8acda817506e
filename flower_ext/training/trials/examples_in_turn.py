"""A trial of a model and its loss on one example at a time, before DP-SGD.

While an example passes through the model, nothing but buffers may change, because the next example
would see the change. Buffers are reset for every example.

An example whose loss raises an error, or whose gradient is not finite, counts as zero under DP-SGD.
If every example counted as zero, DP-SGD would spend its budget on noise alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue, tellable
from flower_ext.privacy.mechanisms.updates import is_finite
from flower_ext.training.example_gradient import gradient_alone, has_rows, model_of_single_examples
from flower_ext.training.isolation import attempted
from flower_ext.training.models.calls import UnlikeTypes, call_with
from flower_ext.training.params import Params, clone, shaken
from flower_ext.training.rounding import deterministic_kernels
from flower_ext.training.seeding import seeded
from flower_ext.training.task import Task
from flower_ext.training.trials.snapshots import Snapshot, changed_places, same_params, snapshot
from flower_ext.training.trials.made_up_examples import (
    TRIED,
    deterministic,
    random_examples,
    unlike_examples,
)

_KEEPS = (
    "{place} changes while an example passes the model or its loss: expected no change, because "
    "one record would move the gradients of those that follow, which no clipping bounds. Change it "
    "only when `not self.training`, or compute it anew in each forward pass; for a weight of "
    "torch.nn.utils.spectral_norm, use torch.nn.utils.parametrizations.spectral_norm"
)
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


def require_single_examples(
    task: Task, names: Sequence[str], features: Tree, targets: Tree
) -> None:
    """Refuse a model or a loss that remembers an example, or cannot learn from one example alone.

    Random and unusual examples pass one by one, in one order through a fresh model, and in reversed
    order through another. In one of the two orders, no earlier example hides what an example
    changes. The examples have only the shapes and types of real ones. On an accelerator, integer
    features are zeros and ones; on a CPU the trial uses other integers too (see `unlike_examples`).

    Parameters
    ----------
    names : sequence of str
        The trained parameters.

    Raises
    ------
    InvalidValue
        The message names the place that changes, or the unfit model or loss. It may reach the
        server.
    """
    usual = _usual_examples(features, targets)
    for device in dict.fromkeys((task.torch_device(), torch.device("cpu"))):
        on_device = replace(task, device=str(device))
        model = _random_model(on_device, names)
        unlike = unlike_examples(features, targets, model, integers=device.type == "cpu")
        examples = [*usual, *trees.each(unlike)]
        examples = [trees.to(example, device) for example in examples]
        order = range(len(examples))
        # Some kernels of accelerators round differently each time.
        with deterministic_kernels(device, strict=False):
            forwards = _passed(on_device, names, examples, order)
            backwards = _passed(on_device, names, examples, reversed(order))
        # A first pass may store something, such as a table of positions. It must not depend on the
        # example.
        for place in changed_places(forwards.untouched, forwards.prepared):
            if forwards.prepared.get(place) != backwards.prepared.get(place):
                raise _refusal(_KEEPS.format(place=place))
        for number in order:
            pair = forwards.gradients[number], backwards.gradients[number]
            if not same_params(*(None if isinstance(g, Exception) else g for g in pair)):
                raise _refusal(_KEEPS.format(place="something outside its attributes"))
        if device == task.torch_device():
            gradients = [forwards.gradients[number] for number in range(len(usual))]
            refuse_without_gradients(
                type(model).__name__,
                partial(_outputs_of, model),
                examples[: len(usual)],
                gradients,
            )


def _outputs_of(model: nn.Module, x: Tree) -> Tree:
    """Return a model's outputs without changing its buffers."""
    buffers = clone(dict(model.named_buffers()))
    return call_with(model, {**dict(model.named_parameters()), **buffers}, x)


def _usual_examples(features: Tree, targets: Tree) -> list[tuple[Tree, Tree]]:
    """Return random examples, and for models of counts an example of zeros and one of ones."""
    x = random_examples(features, TRIED, torch.Generator().manual_seed(0))
    examples = [*trees.each((x, trees.zeros(targets, TRIED)))]
    # The loss may ignore a class, so try every example with another target as well.
    examples += [(row, trees.mapped(torch.ones_like, target)) for row, target in examples]
    examples += [trees.mapped(fill, examples[0]) for fill in (torch.zeros_like, torch.ones_like)]
    return examples


def _random_model(task: Task, names: Sequence[str]) -> nn.Module:
    """Return a model with random weights; below a head of zeros all outputs would be equal."""
    with seeded(0, devices=task.torch_device().type != "cpu"):
        model = model_of_single_examples(task, names)
    weights = {name: w for name, w in model.named_parameters() if name in names}
    for name, weight in shaken(weights, torch.Generator().manual_seed(0)).items():
        weights[name].copy_(weight)
    return model


@dataclass
class _Passed:
    """A model's state before and after the first example, and each example's gradient or error."""

    untouched: Snapshot
    prepared: Snapshot
    gradients: dict[int, Params | Exception] = field(default_factory=dict)


def _passed(
    task: Task, names: Sequence[str], examples: Sequence[tuple[Tree, Tree]], order: Iterable[int]
) -> _Passed:
    """Pass examples through a fresh model; refuse one that changes after the first of them."""
    model = _random_model(task, names)
    before = snapshot(model=model, loss=task.loss)
    passed, is_prepared = _Passed(before, before), False
    for number in order:
        point = {n: p for n, p in model.state_dict().items() if n in task.shapes}
        # Model and loss may write into the example.
        x, y = trees.mapped(Tensor.clone, examples[number])
        with seeded(0, devices=task.torch_device().type != "cpu"):
            gradient = attempted(gradient_alone, model, point, names, task.loss, x, y)
        passed.gradients[number] = gradient
        after = snapshot(model=model, loss=task.loss)
        if not is_prepared:  # an example may raise before the model stores anything
            passed.prepared, is_prepared = after, not isinstance(gradient, Exception)
        elif places := changed_places(passed.prepared, after):
            raise _refusal(_KEEPS.format(place=places[0]))
    return passed


def refuse_without_gradients(
    name: str,
    outputs_of: Callable[[Tree], Tree],
    examples: Sequence[tuple[Tree, Tree]],
    gradients: Sequence[Params | Exception],
) -> None:
    """Refuse a model that cannot learn from any example alone.

    Parameters
    ----------
    name : str
        Name of the model in messages.
    outputs_of : Callable[[Tree], Tree]
        Returns the model's outputs for a batch of features.
    examples, gradients : sequence
        Examples without the dimension of examples, of which the first `TRIED` are random; and each
        example's gradient, or the error that it raises.

    Raises
    ------
    InvalidValue
        The loss raises an error for every example, as for labels that do not begin at 0; or no
        example has a finite gradient other than zero; or all examples, each passed alone, have
        equal outputs. The message may reach the server.
    """
    reasons = [*map(_why_no_gradient, gradients)]
    if "" in reasons and None not in reasons:  # some examples have a gradient, of zero
        reason = "each random example by itself has a gradient of zero"
        raise _refusal(f"{reason}. loss, model={name}: {_OVER_PAIRS}")
    if None not in reasons:
        is_of_labels = isinstance(gradients[0], Exception) and not _has_floats(examples[0][1])
        if is_of_labels and all(_takes(outputs_of, x) for x, _ in examples):
            raise _refusal(f"{reasons[0]}. loss, model={name}: {_OF_LABELS}")
        raise _refusal(f"{reasons[0]}. model={name}: {_REMEDY}")
    random = [x for x, _ in examples[:TRIED]]
    if _is_constant(outputs_of, trees.mapped(lambda *rows: torch.stack(rows), *random)):
        reason = "all random examples by themselves have equal outputs"
        raise _refusal(f"{reason}. model={name}: {_REMEDY}")


def _refusal(text: str) -> InvalidValue:
    return InvalidValue.tellable(text)


def _why_no_gradient(gradient: Params | Exception) -> str | None:
    """Return why an example has no gradient; empty for a gradient of zero, None for any other."""
    if isinstance(gradient, UnlikeTypes):
        raise tellable(gradient)
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
    """Yield the outputs in floating point that have one row per example, without dropout."""
    with torch.no_grad(), deterministic(), torch.random.fork_rng(devices=[]):
        outputs = outputs_of(trees.mapped(Tensor.clone, examples))
    leaves = (leaf for _, leaf in trees.named("", outputs))
    count = trees.length(examples)
    return (leaf for leaf in leaves if has_rows(leaf, count) and leaf.is_floating_point())


def _is_constant(outputs_of: Callable[[Tree], Tree], x: Tree) -> bool:
    """Return True if the outputs of single examples do not depend on the example."""
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
