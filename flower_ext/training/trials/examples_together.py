"""The trial that passes examples together, for DP-SGD.

An example's gradient must not depend on the rest of its batch. A model that mixes examples, as
batch normalisation does, lets one record change the gradients of others. Clipping each gradient
does not bound such a change.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.training.kind import TrainingKind
from flower_ext.training.models.calls import call_with
from flower_ext.training.models.dropout import WithoutDropout
from flower_ext.training.params import Params, flat_rows, shaken
from flower_ext.training.single_examples.alone import ExampleLoss, gradient_alone, has_rows
from flower_ext.training.single_examples.layers import Parts
from flower_ext.training.trials.made_up_examples import (
    NUM_RANDOM_EXAMPLES,
    UNUSUAL_VALUES,
    integer_examples,
    random_examples,
    with_unusual_rows,
)

_ALIKE, _ROUNDED = 1e-3, 1e-6
"""Tolerated relative difference, and tolerated rounding error where the terms of a sum cancel."""

GradientPass = Callable[[Tree, Tree, ExampleLoss], Parts]
"""Returns every example's gradient from one pass over features and targets."""


class BatchInvarianceTrial:
    """Trials of one model on random examples of a kind; ``names`` are the trained parameters.

    The constructor gives ``model``, whose tensors are ``params``, random weights: under a head that
    begins at zero, the gradients of all other layers are zero. An argument ``gradient_pass`` is a
    function that computes the gradients of several examples in one pass; ``count`` is their number.
    """

    def __init__(
        self, training_kind: TrainingKind, model: nn.Module, params: Params, names: list[str]
    ) -> None:
        self.training_kind, self.names = training_kind, names
        self.model, self.params = model, params
        self._generator = torch.Generator().manual_seed(0)
        weights = {name: w for name, w in model.named_parameters() if name in params}
        for name, weight in shaken(weights, self._generator).items():
            weights[name].copy_(weight)

    def why_gradients_differ(self, gradient_pass: GradientPass, count: int) -> str | None:
        """Return why an example has a different gradient in a pass over several examples.

        The trial compares three of the examples, up to rounding. An error of the model or the loss
        reaches the caller.
        """
        targets = trees.zeros(self.training_kind.targets, count)
        generator = self._generator.clone_state()
        with WithoutDropout():
            x, directions = self._examples(count, generator)
            tried = torch.tensor([0, count // 2, count - 1], device=trees.first(x).device)
            for loss, y in ((_directional_loss, directions), (self.training_kind.loss, targets)):
                alone = [
                    gradient_alone(self.model, self.params, self.names, loss, row, target)
                    for row, target in trees.each(trees.rows((x, y), tried))
                ]
                expected = {n: torch.stack([one[n] for one in alone]) for n in self.names}
                gradients = _rows(_gradients_of_pass(gradient_pass, loss, x, y), tried, count)
                # A gradient of outputs along random directions never vanishes. A gradient of the
                # loss may vanish, because a loss may ignore a target.
                may_vanish = loss is not _directional_loss
                if not _equal_up_to_rounding(gradients, expected, may_vanish=may_vanish):
                    return (
                        "an example has a different gradient alone than in a pass over several "
                        "examples"
                    )
            x, directions = trees.mapped(lambda t: t[:NUM_RANDOM_EXAMPLES].clone(), (x, directions))
            return self._why_integers_mix(x, directions, gradient_pass, generator)

    def why_bits_differ(self, gradient_pass: GradientPass, count: int) -> str | None:
        """Return why a bit of an example's gradient depends on its place, or on other examples.

        A reason is certain. The result None is only evidence, for this processor and number of
        threads.
        """
        targets = trees.zeros(self.training_kind.targets, count)
        with WithoutDropout():
            x, directions = self._examples(count, self._generator.clone_state())
            places = torch.arange(count, device=trees.first(x).device)
            for loss, y in ((_directional_loss, directions), (self.training_kind.loss, targets)):
                gradients_of = partial(_gradients_of_pass, gradient_pass, loss)
                usual = _numbers(gradients_of(x, y))
                for order in (places.roll(1), places.flip(0), places.new_zeros(count)):
                    numbers = _numbers(gradients_of(*trees.rows((x, y), order)))
                    if not _equal_bits(numbers, [part[order] for part in usual]):
                        return "an example's place in a batch changes the bits of its gradient"
                for value in UNUSUAL_VALUES:
                    numbers = _numbers(
                        gradients_of(with_unusual_rows(x, slice(1, None, 2), value), y)
                    )
                    if not _equal_bits(numbers, usual, slice(0, None, 2)):
                        return f"an example of only {value} changes bits of other gradients"
        return None

    def _why_integers_mix(
        self, x: Tree, directions: Tree, gradient_pass: GradientPass, generator: torch.Generator
    ) -> str | None:
        """Return why examples with integers above 1 have different gradients together than alone.

        Examples for which the model raises an error do not count: the model may look up an integer
        in a table that is too short.
        """
        for examples, extremes in integer_examples(x, self.model, generator):
            # On an accelerator such a look-up would end the process, so check first whether the
            # model accepts the examples. On a CPU it is cheaper to check only after a failure.
            if not trees.first(x).is_cpu and not self._accepts_batch(examples):
                continue
            try:
                is_apart = _pass_apart(examples, extremes, directions, gradient_pass)
            except Exception:  # a model may raise anything
                if self._accepts_batch(examples):
                    raise
                continue
            if not is_apart and self._accepts_batch(examples):
                return "integers of one example change the gradients of other examples"
        return None

    def _accepts_batch(self, x: Tree) -> bool:
        """Return True if each example alone has finite outputs, and a batch raises no error."""
        model = self.model if trees.first(x).is_cpu else copy.deepcopy(self.model).cpu()
        x = trees.mapped(lambda leaf: leaf.cpu().clone(), x)
        try:
            outputs = [call_with(model, {}, example) for example in trees.split(x, 1)]
            call_with(model, {}, trees.mapped(Tensor.clone, x))
        except Exception:  # a model may raise anything
            return False
        leaves = [leaf for output in outputs for leaf in trees.leaves(output)]
        return all(bool(leaf.isfinite().all()) for leaf in leaves if isinstance(leaf, Tensor))

    def _examples(self, count: int, generator: torch.Generator) -> tuple[Tree, dict[str, Tensor]]:
        """Return random examples, and random directions along which to sum the model's outputs."""
        x = random_examples(self.training_kind.features, count, generator)
        pair = trees.mapped(lambda leaf: leaf[:2].clone(), x)
        with torch.no_grad():
            outputs = call_with(self.model, {}, pair)
        return x, {
            name: torch.randn(count, *leaf.shape[1:], generator=generator).to(leaf.device)
            for name, leaf in trees.named("", outputs)
            if has_rows(leaf, 2) and leaf.is_floating_point()
        }


def _pass_apart(
    examples: Tree, extremes: Sequence[Tree], directions: Tree, gradient_pass: GradientPass
) -> bool:
    """Return True if examples in a batch have the same gradients as alone, up to rounding.

    ``extremes`` are variants of the batch with a different first example. In each of them, all bits
    of the other examples' gradients must be the same as in the batch.
    """
    gradients_of = partial(_gradients_of_pass, gradient_pass, _directional_loss)
    together = gradients_of(examples, directions)
    rows = torch.arange(NUM_RANDOM_EXAMPLES, device=trees.first(examples).device)
    pairs = trees.split((examples, directions), 1)
    alone = [_rows(gradients_of(*pair), rows[:1], 1) for pair in pairs]
    expected = {name: torch.cat([one[name] for one in alone]) for name in alone[0]}
    actual = _rows(together, rows, NUM_RANDOM_EXAMPLES)
    if not _equal_up_to_rounding(actual, expected, may_vanish=True):
        return False
    usual, others = _numbers(together), slice(1, None)
    of_extremes = (_numbers(gradients_of(extreme, directions)) for extreme in extremes)
    return all(_equal_bits(numbers, usual, others) for numbers in of_extremes)


def _gradients_of_pass(gradient_pass: GradientPass, loss: ExampleLoss, x: Tree, y: Tree) -> Parts:
    return gradient_pass(
        trees.mapped(Tensor.clone, x), y, loss
    )  # the model may write into features


def _rows(gradients: Parts, rows: Tensor, count: int) -> Params:
    """Return the gradients of some of ``count`` examples; ``rows`` are the examples' numbers."""
    one_hot = torch.eye(count, device=rows.device)[rows]
    return {n: torch.stack([part.total(one) for one in one_hot]) for n, part in gradients.items()}


def _directional_loss(outputs: Any, directions: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of outputs · ``directions``, a loss that depends on every output."""
    leaves = dict(trees.named("", outputs))
    return torch.stack([(leaves[n] * along).sum() for n, along in directions.items()]).sum()


def _numbers(gradients: Parts) -> list[Tensor]:
    """Return all tensors that determine the gradients or norms; row k belongs to example k."""
    return [tensor for part in gradients.values() for tensor in (*part.factors, part.squares())]


def _equal_bits(ours: list[Tensor], theirs: list[Tensor], rows: slice = slice(None)) -> bool:
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(torch.equal(a[rows], b[rows]) for a, b in pairs)


def _equal_up_to_rounding(gradients: Params, expected: Params, *, may_vanish: bool) -> bool:
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
