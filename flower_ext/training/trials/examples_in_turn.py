"""The trial that passes examples one at a time, for DP-SGD.

While an example passes through the model, only buffers may change, because they are reset for every
example. The next example would see any other change. Under DP-SGD, an example's gradient counts as
zero if its loss raises an error, or if the gradient is not finite. If every gradient counted as
zero, DP-SGD would spend its budget on noise alone. The trial therefore also finds out whether the
model learns from one example.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.privacy.mechanisms.updates import is_finite
from flower_ext.training.isolation import attempted, deterministic_kernels, seeded
from flower_ext.training.kind import TrainingKind
from flower_ext.training.models.calls import UnlikeTypes, call_with
from flower_ext.training.models.dropout import WithoutDropout
from flower_ext.training.params import Params, shaken
from flower_ext.training.single_examples.alone import (
    gradient_alone,
    has_rows,
    model_of_single_examples,
)
from flower_ext.training.task import Task
from flower_ext.training.trials.made_up_examples import (
    NUM_RANDOM_EXAMPLES,
    random_examples,
    unlike_examples,
)
from flower_ext.training.trials.snapshots import Observed, find_carried_change

_KEEPS = (
    "{place} changes while an example passes the model or its loss: expected no change, because "
    "one record would change the gradients of later records, and clipping does not bound that. "
    "Change it only when `not self.training`, or compute it anew in each forward pass; for a "
    "weight of torch.nn.utils.spectral_norm, use torch.nn.utils.parametrizations.spectral_norm"
)

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


def why_not_one_by_one(training_kind: TrainingKind, names: Sequence[str]) -> str | None:
    """Return why a model or a loss cannot learn from one example at a time; None if it can.

    There are two possible reasons. First, the model or the loss remembers an example; the text then
    names the variable that changes. Second, the model cannot learn from any single example (see
    `why_nothing_learned`). The text may reach the server. ``names`` are the trained parameters.

    Random and unusual examples pass one by one through a fresh model, and in reversed order through
    another fresh model. In a single order, an example's change would stay hidden if an earlier
    example had already made the same change. On an accelerator, integer features are zeros and
    ones; on a CPU the trial uses other integers too (see `unlike_examples`).
    """
    features, targets = training_kind.features, training_kind.targets
    usual = usual_examples(features, targets)
    for device in dict.fromkeys((training_kind.device, torch.device("cpu"))):
        on_device = replace(training_kind, device=device).task
        model = _random_model(on_device, names)
        on_cpu = device.type == "cpu"
        unlike = unlike_examples(features, targets, model, integers=on_cpu)
        examples = [trees.to(example, device) for example in (*usual, *trees.each(unlike))]

        def begin(task: Task = on_device) -> Observed:
            model = _random_model(task, names)
            point = {n: p for n, p in model.state_dict().items() if n in task.shapes}
            step = partial(gradient_alone, model, point, names, task.loss)
            return Observed({"model": model, "loss": task.loss}, step)

        order = range(len(examples))
        # Some kernels of accelerators round differently each time.
        with deterministic_kernels(device, strict=False):
            place, gradients = find_carried_change(begin, examples, (order, order[::-1]), device)
        if place is not None:
            return _KEEPS.format(place=place)
        if device == training_kind.device:
            name, outputs_of = type(model).__name__, partial(call_with, model, {})
            some = slice(len(usual))
            if reason := why_nothing_learned(name, outputs_of, examples[some], gradients[some]):
                return reason
    return None


def usual_examples(features: Tree, targets: Tree) -> list[tuple[Tree, Tree]]:
    """Return examples from which a model should be able to learn.

    Most are random. One consists of zeros and one of ones, because a model of counts might accept
    no others.
    """
    x = random_examples(features, NUM_RANDOM_EXAMPLES, torch.Generator().manual_seed(0))
    examples = [*trees.each((x, trees.zeros(targets, NUM_RANDOM_EXAMPLES)))]
    # The loss may ignore a class, so try every example with another target as well.
    examples += [(row, trees.mapped(torch.ones_like, target)) for row, target in examples]
    examples += [trees.mapped(fill, examples[0]) for fill in (torch.zeros_like, torch.ones_like)]
    return examples


def _random_model(task: Task, names: Sequence[str]) -> nn.Module:
    """Return a model with random trained weights: a head of zeros would make outputs equal."""
    with seeded(0, task.torch_device()):
        model = model_of_single_examples(task, names)
    weights = {name: w for name, w in model.named_parameters() if name in names}
    for name, weight in shaken(weights, torch.Generator().manual_seed(0)).items():
        weights[name].copy_(weight)
    return model


def why_nothing_learned(
    name: str,
    outputs_of: Callable[[Tree], Tree],
    examples: Sequence[tuple[Tree, Tree]],
    gradients: Sequence[Params | Exception],
) -> str | None:
    """Return why a model cannot learn from any single example; None if it can.

    There are four possible reasons. The features have another floating-point type than the model.
    The loss raises an error for every example, as for labels that do not begin at 0. No example has
    a finite gradient other than zero. Or the outputs for all examples are equal, if each passes
    alone.

    ``name`` names the model in messages, and ``outputs_of`` computes its outputs for a batch. The
    examples have no batch dimension, and the first `NUM_RANDOM_EXAMPLES` are random. ``gradients``
    holds the gradient of each example, or the error that it raises.
    """
    for gradient in gradients:
        if isinstance(gradient, UnlikeTypes):
            return str(gradient)
    reasons = [*map(_why_no_gradient, gradients)]
    if "" in reasons and None not in reasons:  # some examples have a gradient, of zero
        return (
            f"each random example by itself has a gradient of zero. loss, model={name}: expected a "
            "loss that one example alone can lower, not a loss over pairs of examples"
        )
    if None not in reasons:
        of_labels = isinstance(gradients[0], Exception) and not any(
            leaf.is_floating_point() for leaf in trees.leaves(examples[0][1])
        )
        if of_labels and all(_has_outputs(outputs_of, x) for x, _ in examples):
            return f"{reasons[0]}. loss, model={name}: {_OF_LABELS}"
        return f"{reasons[0]}. model={name}: {_REMEDY}"
    random = [x for x, _ in examples[:NUM_RANDOM_EXAMPLES]]
    if _is_constant(outputs_of, trees.mapped(lambda *rows: torch.stack(rows), *random)):
        return f"all random examples by themselves have equal outputs. model={name}: {_REMEDY}"
    return None


def _why_no_gradient(gradient: Params | Exception) -> str | None:
    """Return why an example has no finite gradient; "" if it is zero; None for any other."""
    if isinstance(gradient, Exception):
        text = str(gradient).partition("\n")[0].rstrip(". ")
        return f"a random example raises {type(gradient).__name__}: {text}"
    if not all(map(is_finite, gradient.values())):
        return "a random example has a gradient that is not finite"
    return None if any(part.any() for part in gradient.values()) else ""


def _has_outputs(outputs_of: Callable[[Tree], Tree], example: Tree) -> bool:
    alone = trees.mapped(lambda leaf: leaf[None], example)
    return not isinstance(attempted(_outputs, outputs_of, alone), Exception)


def _outputs(outputs_of: Callable[[Tree], Tree], examples: Tree) -> Iterator[Tensor]:
    """Call the model without dropout; yield its floating-point outputs with one row per example."""
    with torch.no_grad(), WithoutDropout(), torch.random.fork_rng(devices=[]):
        outputs = outputs_of(trees.mapped(Tensor.clone, examples))
    rows = (leaf for leaf in trees.leaves(outputs) if has_rows(leaf, trees.length(examples)))
    return filter(Tensor.is_floating_point, rows)


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
    is_real = all(leaf.is_floating_point() for leaf in trees.leaves(x))
    if is_real and any(rows.any() for rows in alone):
        return True
    return any(not torch.allclose(rows, others) for rows, others in pairs)
