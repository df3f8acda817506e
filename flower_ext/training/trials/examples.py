"""Trials that find out whether examples change one another in a model or its loss, for DP-SGD.

`why_not_one_by_one` passes examples one at a time. While an example passes through the model, only
buffers may change, because they are reset for every example. The next example would see any other
change. Under DP-SGD, an example's gradient counts as zero if its loss raises an error, or if the
gradient is not finite. If every gradient counted as zero, DP-SGD would spend its budget on noise
alone. The trial therefore also finds out whether the model learns from one example.

`BatchInvarianceTrial` passes examples together: an example's gradient must not depend on the rest
of its batch. A model that mixes examples, as batch normalisation does, lets one record change the
gradients of others. Clipping each gradient does not bound such a change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.privacy.mechanisms.updates import is_finite
from flower_ext.training.isolation import attempted, deterministic_kernels, seeded
from flower_ext.training.models.calls import UnlikeTypes, call_model, call_with
from flower_ext.training.params import Params, clone, flat_rows, shaken
from flower_ext.training.per_example import Parts
from flower_ext.training.problem import (
    ExampleLoss,
    gradient_alone,
    has_rows,
    model_of_single_examples,
)
from flower_ext.training.task import Task, TrainingKind
from flower_ext.training.trials.made_up_examples import (
    ODD,
    TRIED,
    deterministic,
    integer_examples,
    random_examples,
    unlike_examples,
    with_odd_rows,
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
_ALIKE, _ROUNDED = 1e-3, 1e-6
"""Tolerated relative difference, and tolerated rounding error where the terms of a sum cancel."""

Follow = Callable[[Tree, Tree, ExampleLoss], Parts]
"""Returns every example's gradient from one pass over features and targets."""


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
            roots = {"model": model, "loss": task.loss}
            return Observed(roots, partial(_gradient, task, model, names))

        order = range(len(examples))
        # Some kernels of accelerators round differently each time.
        with deterministic_kernels(device, strict=False):
            place, gradients = find_carried_change(begin, examples, (order, order[::-1]), device)
        if place is not None:
            return _KEEPS.format(place=place)
        if device == training_kind.device:
            name, outputs_of = type(model).__name__, partial(_outputs_of, model)
            some = slice(len(usual))
            if reason := why_nothing_learned(name, outputs_of, examples[some], gradients[some]):
                return reason
    return None


def _gradient(task: Task, model: nn.Module, names: Sequence[str], x: Tree, y: Tree) -> Params:
    point = {n: p for n, p in model.state_dict().items() if n in task.shapes}
    return gradient_alone(model, point, names, task.loss, x, y)


def _outputs_of(model: nn.Module, x: Tree) -> Tree:
    """Return a model's outputs without changing its buffers."""
    buffers = clone(dict(model.named_buffers()))
    return call_with(model, {**dict(model.named_parameters()), **buffers}, x)


def usual_examples(features: Tree, targets: Tree) -> list[tuple[Tree, Tree]]:
    """Return examples from which a model should be able to learn.

    Most are random. One consists of zeros and one of ones, because a model of counts might accept
    no others.
    """
    x = random_examples(features, TRIED, torch.Generator().manual_seed(0))
    examples = [*trees.each((x, trees.zeros(targets, TRIED)))]
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
    examples have no batch dimension, and the first `TRIED` are random. ``gradients`` holds the
    gradient of each example, or the error that it raises.
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
        if of_labels and all(_takes(outputs_of, x) for x, _ in examples):
            return f"{reasons[0]}. loss, model={name}: {_OF_LABELS}"
        return f"{reasons[0]}. model={name}: {_REMEDY}"
    random = trees.mapped(lambda *rows: torch.stack(rows), *(x for x, _ in examples[:TRIED]))
    if _is_constant(outputs_of, random):
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


def _takes(outputs_of: Callable[[Tree], Tree], example: Tree) -> bool:
    alone = trees.mapped(lambda leaf: leaf[None], example)
    return not isinstance(attempted(_outputs, outputs_of, alone), Exception)


def _outputs(outputs_of: Callable[[Tree], Tree], examples: Tree) -> Iterator[Tensor]:
    """Call the model without dropout; yield its floating-point outputs with one row per example."""
    with torch.no_grad(), deterministic(), torch.random.fork_rng(devices=[]):
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


class BatchInvarianceTrial:
    """Trials of one model on random examples of a kind; ``names`` are the trained parameters.

    The trials set ``params`` to random numbers, and restore them at the end: under a head that
    begins at zero, the gradients of all other layers are zero. An argument ``follow`` computes the
    gradients from a pass over ``count`` examples.
    """

    def __init__(
        self, training_kind: TrainingKind, model: nn.Module, params: Params, names: list[str]
    ) -> None:
        self.training_kind, self.names = training_kind, names
        self.model, self.params = model, params

    def why_gradients_differ(self, follow: Follow, count: int) -> str | None:
        """Return why an example has a different gradient in a pass over several examples.

        The trial compares three of the examples, up to rounding. An error of the model or the loss
        reaches the caller.
        """
        targets = trees.zeros(self.training_kind.targets, count)
        with self._random_weights() as generator:
            x, directions = self._examples(count, generator)
            tried = torch.tensor([0, count // 2, count - 1], device=trees.first(x).device)
            for by, y in ((_along, directions), (self.training_kind.loss, targets)):
                alone = [
                    gradient_alone(self.model, self.params, self.names, by, row, target)
                    for row, target in trees.each(trees.rows((x, y), tried))
                ]
                expected = {n: torch.stack([one[n] for one in alone]) for n in self.names}
                gradients = _rows(_followed(follow, x, y, by), tried, count)
                # A gradient of outputs along random directions never vanishes. A gradient of the
                # loss may vanish, because a loss may ignore a target.
                if not _agree(gradients, expected, may_vanish=by is not _along):
                    return (
                        "an example has a different gradient alone than in a pass over several "
                        "examples"
                    )
            x, directions = trees.mapped(lambda leaf: leaf[:TRIED].clone(), (x, directions))
            return self._why_integers_mix(x, directions, follow, generator)

    def why_bits_differ(self, follow: Follow, count: int) -> str | None:
        """Return why a bit of an example's gradient depends on its place, or on other examples.

        A reason is certain. None is only evidence, for this processor and number of threads.
        """
        targets = trees.zeros(self.training_kind.targets, count)
        with self._random_weights() as generator:
            x, directions = self._examples(count, generator)
            places = torch.arange(count, device=trees.first(x).device)
            for by, y in ((_along, directions), (self.training_kind.loss, targets)):
                usual = _numbers(_followed(follow, x, y, by))
                for order in (places.roll(1), places.flip(0), places.new_zeros(count)):
                    moved, along = trees.rows((x, y), order)
                    numbers = _numbers(_followed(follow, moved, along, by))
                    if not _equal(numbers, [part[order] for part in usual]):
                        return "an example's place in a batch changes the bits of its gradient"
                for odd in ODD:
                    beside = with_odd_rows(x, slice(1, None, 2), odd)
                    numbers = _numbers(_followed(follow, beside, y, by))
                    if not _equal(numbers, usual, slice(0, None, 2)):
                        return f"an example of only {odd} changes bits of other gradients"
        return None

    def _why_integers_mix(
        self, x: Tree, directions: Tree, follow: Follow, generator: torch.Generator
    ) -> str | None:
        """Return why examples with integers above 1 have different gradients together than alone.

        Examples for which the model raises an error do not count: the model may look up an integer
        in a table that is too short.
        """
        for examples, extremes in integer_examples(x, self.model, generator):
            # On an accelerator such a look-up would end the process, so check first whether the
            # model accepts the examples. On a CPU it is cheaper to check only after a failure.
            if not trees.first(x).is_cpu and not self._takes(examples):
                continue
            try:
                is_apart = _pass_apart(examples, extremes, directions, follow)
            except Exception:  # a model may raise anything
                if self._takes(examples):
                    raise
                continue
            if not is_apart and self._takes(examples):
                return "integers of one example change the gradients of other examples"
        return None

    def _takes(self, x: Tree) -> bool:
        """Return True if each example alone has finite outputs, and a batch raises no error."""
        model = self.model if trees.first(x).is_cpu else copy.deepcopy(self.model).cpu()
        x = trees.mapped(lambda leaf: leaf.cpu().clone(), x)
        try:
            outputs = [call_model(model, example) for example in trees.split(x, 1)]
            call_model(model, trees.mapped(Tensor.clone, x))
        except Exception:  # a model may raise anything
            return False
        leaves = [leaf for output in outputs for leaf in trees.leaves(output)]
        return all(bool(leaf.isfinite().all()) for leaf in leaves if isinstance(leaf, Tensor))

    def _examples(self, count: int, generator: torch.Generator) -> tuple[Tree, dict[str, Tensor]]:
        """Return random examples, and random directions along which to sum the model's outputs."""
        x = random_examples(self.training_kind.features, count, generator)
        pair = trees.mapped(lambda leaf: leaf[:2].clone(), x)
        with torch.no_grad():
            outputs = call_model(self.model, pair)
        return x, {
            name: torch.randn(count, *leaf.shape[1:], generator=generator).to(leaf.device)
            for name, leaf in trees.named("", outputs)
            if has_rows(leaf, 2) and leaf.is_floating_point()
        }

    @contextmanager
    def _random_weights(self) -> Iterator[torch.Generator]:
        generator = torch.Generator().manual_seed(0)
        weights = {n: w for n, w in self.model.named_parameters() if n in self.params}
        touched = weights | dict(self.model.named_buffers())  # passes may write into buffers
        before = clone(touched)
        for name, weight in shaken(weights, generator).items():
            weights[name].copy_(weight)
        try:
            with deterministic():
                yield generator
        finally:
            for name, tensor in touched.items():
                tensor.copy_(before[name])


def _pass_apart(examples: Tree, extremes: Sequence[Tree], directions: Tree, follow: Follow) -> bool:
    """Return True if examples in a batch have the same gradients as alone, up to rounding.

    ``extremes`` are variants of the batch with a different first example. In each of them, all bits
    of the other examples' gradients must be the same as before.
    """
    together = _followed(follow, examples, directions, _along)
    rows = torch.arange(TRIED, device=trees.first(examples).device)
    alone = [
        _rows(_followed(follow, row, direction, _along), rows[:1], 1)
        for row, direction in trees.split((examples, directions), 1)
    ]
    expected = {name: torch.cat([one[name] for one in alone]) for name in alone[0]}
    if not _agree(_rows(together, rows, TRIED), expected, may_vanish=True):
        return False
    usual, others = _numbers(together), slice(1, None)
    return all(
        _equal(_numbers(_followed(follow, extreme, directions, _along)), usual, others)
        for extreme in extremes
    )


def _followed(follow: Follow, x: Tree, y: Tree, by: ExampleLoss) -> Parts:
    return follow(trees.mapped(Tensor.clone, x), y, by)  # the model may write into features


def _rows(gradients: Parts, rows: Tensor, count: int) -> Params:
    """Return the gradients of some of ``count`` examples; ``rows`` are the examples' numbers."""
    one_hot = torch.eye(count, device=rows.device)[rows]
    return {n: torch.stack([part.total(one) for one in one_hot]) for n, part in gradients.items()}


def _along(outputs: Any, directions: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of outputs · ``directions``, a loss that depends on every output."""
    leaves = dict(trees.named("", outputs))
    return torch.stack([(leaves[n] * along).sum() for n, along in directions.items()]).sum()


def _numbers(gradients: Parts) -> list[Tensor]:
    """Return all tensors that determine the gradients or norms; row k belongs to example k."""
    return [tensor for part in gradients.values() for tensor in (*part.factors, part.squares())]


def _equal(ours: Sequence[Tensor], theirs: Sequence[Tensor], rows: slice = slice(None)) -> bool:
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(torch.equal(a[rows], b[rows]) for a, b in pairs)


def _agree(gradients: Params, expected: Params, *, may_vanish: bool) -> bool:
    """Return True if the gradients equal the expected ones, up to rounding.

    Without ``may_vanish``, the result is False if all rows of a parameter are zero. The gradient
    of a bias may consist of rounding errors alone, as under softmax. It may therefore differ by
    rounding errors of the size that is usual for the weight of the same layer.
    """
    if any(part.any() for name, part in expected.items() if name not in gradients):
        return False
    for name, part in gradients.items():
        if not part.numel():
            continue
        actual = flat_rows(part).double()
        other = flat_rows(expected[name].to(part.device)).double()
        largest = other.abs().amax(dim=1)
        beside = f"{name.removesuffix('bias')}weight"
        room = _ALIKE * largest
        if name.endswith("bias") and beside in gradients:
            room = room + _ROUNDED * flat_rows(gradients[beside]).double().abs().amax(dim=1)
        if not (may_vanish or bool(largest.any())):
            return False
        if not bool(((actual - other).abs().amax(dim=1) <= room).all()):
            return False
    return bool(gradients)
