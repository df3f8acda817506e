"""Trials of batch invariance: an example's gradient must not depend on the rest of its batch.

A model that mixes examples, as batch normalisation does, lets one record change the gradients of
others, which no clipping of each gradient bounds. The trials compare what a pass over many examples
finds with each example's own gradient, and its bits with those of other batches. They use random
and odd examples, whose shapes and types alone come from real ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.training.model_calls import call_model
from flower_ext.training.params import Params, clone, flat_rows, shaken
from flower_ext.training.trials.deterministic import deterministic
from flower_ext.training.trials.single_examples import Loss, has_rows
from flower_ext.training.trials.trial_examples import (
    ODD,
    TRIED,
    integer_examples,
    random_examples,
    with_odd_rows,
    zeros,
)

_ALIKE, _ROUNDED = 1e-3, 1e-6
"""The tolerated relative rounding, and the rest of it where the terms of a sum cancel."""


class ExampleGradients(Protocol):
    """Gradients of one parameter, by example (see `training.dp.per_example`)."""

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """Tensors that determine the gradients, with one row per example."""
        ...

    def squares(self) -> Tensor:
        """Return the squared norm of every example's gradient."""
        ...

    def total(self, factors: Tensor) -> Tensor:
        """Return the sum of factor · gradient over all examples."""
        ...


Follow = Callable[[Tree, Tree, Loss], Mapping[str, ExampleGradients]]
"""Returns every example's gradient from one pass over features and targets."""


class Pass(Protocol):
    """A pass over many examples that keeps them apart, if the model does (see `OnePass`)."""

    model: nn.Module
    names: list[str]
    last: Tree | None

    def __call__(self, x: Tree, y: Tree, loss: Loss) -> Mapping[str, ExampleGradients]:
        """Return the gradients of all parameters that the loss depends on."""
        ...

    def reads_last(self, x: Tree) -> bool:
        """Return True if the model's operations depend on the extra example ``last``."""
        ...


class BatchInvarianceTrial:
    """Trials of one model, with random weights, on random examples.

    Weights must be random because below a head that begins at zero all gradients are zero.

    Parameters
    ----------
    one_pass : Pass
    params : Mapping[str, Tensor]
        Parameters by name; they are random for the duration of a trial.
    gradient_alone : Callable[[Loss, Tree, Tree], Params | None]
        Returns the gradient of one example by itself; None if it raises.
    """

    def __init__(
        self,
        one_pass: Pass,
        params: Mapping[str, Tensor],
        gradient_alone: Callable[[Loss, Tree, Tree], Params | None],
    ) -> None:
        self.one_pass, self.params, self.gradient_alone = one_pass, params, gradient_alone

    def finds_own_gradients(self, features: Tree, targets: Tree, loss: Loss, count: int) -> bool:
        """Return True if one pass over ``count`` examples finds the own gradients of some of them.

        Sets the last example of the pass, if the model needs one.

        Raises
        ------
        ReadsValues
            The model's operations depend on values.
        """
        one_pass = self.one_pass
        with self._random_weights() as generator:
            x, directions = self._examples(features, count, generator)
            one_pass.last = trees.mapped(
                lambda leaf: leaf[1:], random_examples(features, 2, generator)
            )
            if not one_pass.reads_last(x):
                one_pass.last = None
            tried = torch.tensor([0, count // 2, count - 1], device=trees.first(x).device)
            for by, y in ((_along, directions), (loss, zeros(targets, count))):
                alone = [
                    self.gradient_alone(by, *pair) or {}
                    for pair in trees.each(trees.rows((x, y), tried))
                ]
                expected = {n: torch.stack([one[n] for one in alone]) for n in one_pass.names}
                found = self._gradients(x, y, by, tried)
                # Along random directions every gradient is something; a loss may ignore a target.
                if not _agree(found, expected, may_vanish=by is not _along):
                    return False
            few = trees.mapped(lambda leaf: leaf[:TRIED].clone(), x)
            return self._keeps_integers_apart(few, generator)

    def is_batch_invariant(
        self, features: Tree, targets: Tree, loss: Loss, follow: Follow, count: int
    ) -> bool:
        """Return True if no bit of a row of ``count`` depends on its place or on the other rows.

        False is certain. True is evidence for this processor and this number of its threads.
        """
        with self._random_weights() as generator:
            x, directions = self._examples(features, count, generator)
            places = torch.arange(count, device=trees.first(x).device)
            for by, y in ((_along, directions), (loss, zeros(targets, count))):
                usual = _numbers(follow(trees.mapped(Tensor.clone, x), y, by))
                for order in (places.roll(1), places.flip(0), places.new_zeros(count)):
                    found = _numbers(follow(*trees.rows((x, y), order), by))
                    if not _equal(found, [part[order] for part in usual]):
                        return False
                odd = (with_odd_rows(x, slice(1, None, 2), value) for value in ODD)
                if not _leaves_unmoved(slice(0, None, 2), usual, odd, y, by, follow):
                    return False
        return True

    def _gradients(self, x: Tree, y: Tree, by: Loss, rows: Tensor) -> Params:
        """Return the gradients of some examples, from one pass over all of them."""
        parts = self.one_pass(trees.mapped(Tensor.clone, x), y, by)
        one_hot = torch.eye(trees.length(x), device=rows.device)[rows]
        return {n: torch.stack([part.total(one) for one in one_hot]) for n, part in parts.items()}

    def _keeps_integers_apart(self, x: Tree, generator: torch.Generator) -> bool:
        """Return True if examples pass alike together and alone with any other integers.

        Those for which the model raises do not count, because it may look them up in a table
        without such a row.
        """
        every = torch.arange(TRIED, device=trees.first(x).device)
        for examples, extremes in integer_examples(x, self.one_pass.model, generator):
            directions = self._directions(examples, generator)
            if directions is None:
                continue
            alone = [
                self._gradients(*pair, _along, every[:1])
                for pair in trees.split((examples, directions), 1)
            ]
            expected = {n: torch.cat([one[n] for one in alone]) for n in alone[0]}
            found = self._gradients(examples, directions, _along, every)
            if not _agree(found, expected, may_vanish=True):
                return False
            usual = _numbers(
                self.one_pass(trees.mapped(Tensor.clone, examples), directions, _along)
            )
            others = slice(1, None)
            if not _leaves_unmoved(others, usual, extremes, directions, _along, self.one_pass):
                return False
        return True

    def _directions(self, x: Tree, generator: torch.Generator) -> dict[str, Tensor] | None:
        """Return random directions for the outputs; None if the model raises, or is not finite."""
        model = self.one_pass.model
        try:
            if not trees.first(x).is_cpu:  # there an error would be the end of the process
                on_cpu = trees.mapped(lambda leaf: leaf.cpu().clone(), x)
                call_model(copy.deepcopy(model).cpu(), on_cpu)
            for example in trees.split(x, 1):
                outputs = call_model(model, trees.mapped(Tensor.clone, example))
                if not all(_is_finite(leaf) for _, leaf in trees.named("", outputs)):
                    return None
            outputs = call_model(model, trees.mapped(Tensor.clone, x))
        except Exception:  # a model may raise anything
            return None
        return _random_directions(outputs, TRIED, TRIED, generator)

    def _examples(
        self, features: Tree, count: int, generator: torch.Generator
    ) -> tuple[Tree, dict[str, Tensor]]:
        """Return random examples, and random directions along which to sum the model's outputs."""
        x = random_examples(features, count, generator)
        pair = trees.mapped(lambda leaf: leaf[:2].clone(), x)
        with torch.no_grad():
            outputs = call_model(self.one_pass.model, pair)
        return x, _random_directions(outputs, 2, count, generator)

    @contextmanager
    def _random_weights(self) -> Iterator[torch.Generator]:
        generator = torch.Generator().manual_seed(0)
        model = self.one_pass.model
        weights = {n: weight for n, weight in model.named_parameters() if n in self.params}
        touched = weights | dict(model.named_buffers())  # a trial's passes may write into buffers
        before = clone(touched)
        for name, weight in shaken(weights, generator).items():
            weights[name].copy_(weight)
        try:
            with deterministic():
                yield generator
        finally:
            for name, tensor in touched.items():
                tensor.copy_(before[name])


@lru_cache(maxsize=64)
def evaluates_independently(
    build: Callable[[], nn.Module], shape: torch.Size, dtype: torch.dtype
) -> bool:
    """Return True if the model in evaluation returns one independent row per example."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(2, (TRIED, *shape), generator=generator).to(dtype)
    if dtype.is_floating_point:
        x.normal_(generator=generator)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            model = build().eval()
            model.load_state_dict(shaken(dict(model.named_parameters()), generator), strict=False)
            together, alone = model(x.clone()), [model(row.clone()) for row in x.split(1)]
            if not isinstance(together, Tensor):
                return False
            return len(together) == TRIED and torch.allclose(torch.cat(alone), together, 1e-3, 1e-4)
        except Exception:  # a model may raise anything for random examples
            return False


def _leaves_unmoved(
    rows: slice,
    usual: Sequence[Tensor],
    others: Iterator[Tree] | Sequence[Tree],
    y: Tree,
    by: Loss,
    follow: Follow,
) -> bool:
    """Return True if no bit of these rows changes where ``others`` take the place of the rest."""
    return all(
        _equal(
            [part[rows] for part in _numbers(follow(trees.mapped(Tensor.clone, x), y, by))],
            [part[rows] for part in usual],
        )
        for x in others
    )


def _random_directions(
    outputs: Any, rows: int, count: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return ``count`` random directions for each of the outputs that has ``rows`` rows."""
    return {
        name: torch.randn(count, *leaf.shape[1:], generator=generator).to(leaf.device)
        for name, leaf in trees.named("", outputs)
        if has_rows(leaf, rows) and leaf.is_floating_point()
    }


def _along(outputs: Any, directions: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of outputs along directions: a loss that no output is indifferent to."""
    leaves = dict(trees.named("", outputs))
    return torch.stack([(leaves[n] * along).sum() for n, along in directions.items()]).sum()


def _is_finite(output: Any) -> bool:
    return not isinstance(output, Tensor) or bool(output.isfinite().all())


def _numbers(gradients: Mapping[str, ExampleGradients]) -> list[Tensor]:
    """Return everything of which each example has one row."""
    return [tensor for part in gradients.values() for tensor in (*part.factors, part.squares())]


def _equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def _agree(found: Params, expected: Params, *, may_vanish: bool) -> bool:
    """Return True if all rows agree, and each name has a row that is not zero.

    With ``may_vanish`` rows may all be zero. A bias's gradient may be nothing but rounding, as
    under softmax. It then counts as equal if the weight beside it agrees, which tests the same
    layer.
    """
    if any(part.any() for name, part in expected.items() if name not in found):
        return False
    for name, part in found.items():
        if not part.numel():
            continue
        own = flat_rows(part).double()
        other = flat_rows(expected[name].to(part.device)).double()
        largest = other.abs().amax(dim=1)
        beside = f"{name.removesuffix('bias')}weight"
        room = _ALIKE * largest
        if name.endswith("bias") and beside in found:
            room = room + _ROUNDED * flat_rows(found[beside]).double().abs().amax(dim=1)
        if not (may_vanish or bool(largest.any())):
            return False
        if not bool(((own - other).abs().amax(dim=1) <= room).all()):
            return False
    return bool(found)
