"""Trials of batch invariance: an example's gradient must not depend on the rest of its batch.

A model that mixes examples, as batch normalisation does, lets one record change the gradients of
others. Clipping each gradient does not bound such a change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.training.models.calls import call_model
from flower_ext.training.params import Params, clone, flat_rows, shaken
from flower_ext.training.per_example import Parts
from flower_ext.training.problem import ExampleLoss, gradient_alone, has_rows
from flower_ext.training.task import TrainingKind
from flower_ext.training.trials.made_up_examples import (
    ODD,
    TRIED,
    deterministic,
    integer_examples,
    random_examples,
    with_odd_rows,
)

_ALIKE, _ROUNDED = 1e-3, 1e-6
"""Tolerated relative difference, and tolerated rounding error where the terms of a sum cancel."""


Follow = Callable[[Tree, Tree, ExampleLoss], Parts]
"""Returns every example's gradient from one pass over features and targets."""


class BatchInvarianceTrial:
    """Trials of one model on random examples of a kind; ``names`` are the trained parameters.

    The trials set ``params`` to random numbers, and restore them at the end: under a head that
    begins at zero, the gradients of all other layers are zero. An argument ``follow`` computes the
    gradients from a pass over ``count`` examples.
    """

    def __init__(
        self, kind: TrainingKind, model: nn.Module, params: Params, names: list[str]
    ) -> None:
        self.kind, self.model, self.params, self.names = kind, model, params, names

    def why_gradients_differ(self, follow: Follow, count: int) -> str | None:
        """Return why an example has another gradient in a pass over several examples than alone.

        The trial compares three of the examples, up to rounding. An error of the model or the loss
        is raised again.
        """
        targets = trees.zeros(self.kind.targets, count)
        with self._random_weights() as generator:
            x, directions = self._examples(count, generator)
            tried = [0, count // 2, count - 1]
            # No gradient along random directions vanishes. A gradient of the loss may vanish,
            # because a loss may ignore a target.
            if not (
                self._agrees(follow, x, directions, _along, tried, may_vanish=False)
                and self._agrees(follow, x, targets, self.kind.loss, tried)
            ):
                return "an example has another gradient in a pass over several examples than alone"
            x, directions = trees.mapped(lambda leaf: leaf[:TRIED].clone(), (x, directions))
            return self._why_integers_mix(x, directions, follow, generator)

    def why_bits_differ(self, follow: Follow, count: int) -> str | None:
        """Return why a bit of an example's gradient depends on its place, or on other examples.

        A reason is certain. None is only evidence, for this processor and number of threads.
        """
        targets = trees.zeros(self.kind.targets, count)
        with self._random_weights() as generator:
            x, directions = self._examples(count, generator)
            places = torch.arange(count, device=trees.first(x).device)
            for by, y in ((_along, directions), (self.kind.loss, targets)):
                usual = _numbers(follow, x, y, by)
                for order in (places.roll(1), places.flip(0), places.new_zeros(count)):
                    moved, along = trees.rows((x, y), order)
                    numbers = _numbers(follow, moved, along, by)
                    if not _equal(numbers, [part[order] for part in usual]):
                        return "an example's place in a batch changes the bits of its gradient"
                for odd in ODD:
                    beside = with_odd_rows(x, slice(1, None, 2), odd)
                    if not _equal(_numbers(follow, beside, y, by), usual, slice(0, None, 2)):
                        return f"an example of only {odd} changes bits of other gradients"
        return None

    def _why_integers_mix(
        self, x: Tree, directions: Tree, follow: Follow, generator: torch.Generator
    ) -> str | None:
        """Return why examples with integers above 1 have other gradients together than alone.

        Examples for which the model raises an error do not count: the model may look up an integer
        in a table that is too short.
        """
        for examples, extremes in integer_examples(x, self.model, generator):
            # On an accelerator such a look-up would end the process, so check first whether the
            # model accepts the examples. On a CPU it is cheaper to check only after a failure.
            if not trees.first(x).is_cpu and not self._takes(examples):
                continue
            try:
                # In variants of the batch with another first example, all bits of the other
                # examples' gradients must be the same.
                usual, others = _numbers(follow, examples, directions, _along), slice(1, None)
                is_apart = self._agrees(follow, examples, directions, _along, range(TRIED)) and all(
                    _equal(_numbers(follow, extreme, directions, _along), usual, others)
                    for extreme in extremes
                )
            except Exception:  # a model may raise anything
                if self._takes(examples):
                    raise
                continue
            if not is_apart and self._takes(examples):
                return "integers of one example change the gradients of other examples"
        return None

    def _agrees(
        self,
        follow: Follow,
        x: Tree,
        y: Tree,
        by: ExampleLoss,
        tried: Sequence[int],
        *,
        may_vanish: bool = True,
    ) -> bool:
        """Return True if examples ``tried`` have the same gradients as alone, up to rounding."""
        rows = torch.tensor(tried, device=trees.first(x).device)
        alone = [
            gradient_alone(self.model, self.params, self.names, by, *pair)
            for pair in trees.each(trees.rows((x, y), rows))
        ]
        expected = {n: torch.stack([one[n] for one in alone]) for n in self.names}
        one_hot = torch.eye(trees.length(x), device=rows.device)[rows]
        gradients = {
            name: torch.stack([part.total(one) for one in one_hot])
            for name, part in _followed(follow, x, y, by).items()
        }
        return _agree(gradients, expected, may_vanish=may_vanish)

    def _takes(self, x: Tree) -> bool:
        """Return True if examples alone have finite outputs, and all together raise no error."""
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
        x = random_examples(self.kind.features, count, generator)
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


def _followed(follow: Follow, x: Tree, y: Tree, by: ExampleLoss) -> Parts:
    return follow(trees.mapped(Tensor.clone, x), y, by)  # the model may write into features


def _along(outputs: Any, directions: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of outputs · ``directions``, a loss that depends on every output."""
    leaves = dict(trees.named("", outputs))
    return torch.stack([(leaves[n] * along).sum() for n, along in directions.items()]).sum()


def _numbers(follow: Follow, x: Tree, y: Tree, by: ExampleLoss) -> list[Tensor]:
    """Return all tensors that determine the gradients, and the squared norms, row by row."""
    parts = _followed(follow, x, y, by).values()
    return [tensor for part in parts for tensor in (*part.factors, part.squares())]


def _equal(ours: Sequence[Tensor], theirs: Sequence[Tensor], rows: slice = slice(None)) -> bool:
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(torch.equal(a[rows], b[rows]) for a, b in pairs)


def _agree(gradients: Params, expected: Params, *, may_vanish: bool) -> bool:
    """Return True if the gradients equal the expected ones, up to rounding.

    Without ``may_vanish``, all-zero rows of a parameter are refused. The gradient of a bias may
    consist of rounding errors alone, as under softmax. It may therefore differ by rounding errors
    of the size that is usual for the weight of the same layer.
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
