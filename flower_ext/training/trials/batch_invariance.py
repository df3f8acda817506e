"""Trials on random examples that compare one pass with every example's own gradient.

A trial depends on the shapes and types of the examples, never on anybody's values.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.training.model_calls import call_model
from flower_ext.training.params import Params, clone, flat_rows, shaken
from flower_ext.training.trials.control_flow import deterministic
from flower_ext.training.trials.single_examples import Loss, has_rows

TRIED = 3
"""Number of random examples on which one pass is compared with each one's own gradient."""
ODD = (math.nan, math.inf, -math.inf, 300.0, -300.0, 0.0)
"""Values of an example by which a model may change what it does to all others."""
_HIGHEST = (2, 3, 255, 10_000)
"""Largest integers of random features beside zeros and ones: a few, as for marks of padding; those
of images; and large ones, as for counts."""
_ODD_CLASSES = (-100, -1, 2, _HIGHEST[-1])
"""Integers of targets by which a loss may keep something; negative ones mark what is missing."""
_PIECE, _ALIKE, _ROUNDED = 16, 1e-3, 1e-6
"""Examples in a piece with which larger passes are compared; the tolerated relative rounding; and
the rest that rounding leaves where the terms of a sum cancel."""


class GradientRows(Protocol):
    """Gradients of one parameter, one row per example (see `training.dp.per_example`)."""

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """Tensors with one row per example, which determine the gradients."""
        ...

    def squares(self) -> Tensor:
        """Return the squared norm of every example's gradient."""
        ...

    def total(self, factors: Tensor) -> Tensor:
        """Return the sum of factor · gradient over all examples."""
        ...


Follow = Callable[[Tree, Tree, Loss], Mapping[str, GradientRows]]


class Trial:
    """A comparison of one pass, with random weights, on random examples.

    Weights must be random because below a head that begins at zero all slopes are zero.

    Parameters
    ----------
    one_pass : OnePass
    params : Mapping[str, Tensor]
        Parameters by name; they are random for the duration of a trial.
    own : Callable[[Loss, Tree, Tree], Params | None]
        Returns the gradient of one example by itself; None if it raises.
    """

    def __init__(
        self,
        one_pass: Any,
        params: Mapping[str, Tensor],
        own: Callable[[Loss, Tree, Tree], Params | None],
    ) -> None:
        self.one_pass, self.params, self.own = one_pass, params, own

    def tells_apart(self, features: Tree, targets: Tree, loss: Loss) -> bool:
        """Return True if one pass over a few random examples finds every one's own gradient.

        Sets the last example of ``one_pass``, if the model needs one.

        Raises
        ------
        ReadsValues
            The model's operations depend on values.
        """
        one_pass = self.one_pass
        with self._shaken() as generator:
            x, directions = self._examples(features, TRIED, generator)
            one_pass.last = trees.mapped(
                lambda leaf: leaf[1:], random_examples(features, 2, generator)
            )
            if not one_pass.reads_last(x):
                one_pass.last = None
            for by, y in ((_along, directions), (loss, zeros(targets, TRIED))):
                own = [self.own(by, *pair) or {} for pair in trees.each((x, y))]
                expected = {n: torch.stack([one[n] for one in own]) for n in one_pass.names}
                if not self._agrees(x, y, by, expected, zero_too=by is not _along):
                    return False
            odd = [trees.mapped(partial(_beside, value, 0), x) for value in ODD]
            if not self._keeps_apart(x, directions, odd):
                return False
            if not self._tells_integers_apart(x, generator):
                return False
        return self.is_like(features, _PIECE, TRIED)

    def _agrees(self, x: Tree, y: Tree, by: Loss, expected: Params, *, zero_too: bool) -> bool:
        """Return True if one pass finds the expected gradient of each example."""
        rows = self._rows(x, y, by)
        unused = [part for name, part in expected.items() if name not in rows]
        return not any(part.any() for part in unused) and _alike(rows, expected, zero_too)

    def _rows(self, x: Tree, y: Tree, by: Loss) -> Params:
        """Return the gradient of every example, from one pass over them."""
        found = self.one_pass(trees.mapped(Tensor.clone, x), y, by)
        each = torch.eye(trees.length(x)).to(trees.first(x).device)
        return {n: torch.stack([part.total(one) for one in each]) for n, part in found.items()}

    def _tells_integers_apart(self, x: Tree, generator: torch.Generator) -> bool:
        """Return True if examples also pass alike together and singly with any other integers.

        Such integers stand in one of the features at a time. Those for which the model raises do
        not count, because it may look them up in a table without such a row.
        """
        for _, leaf in trees.named("", x):
            every = (
                _integers(leaf, *pair, generator)
                for pair in _ranges(leaf.dtype, self.one_pass.model)
            )
            for low, high, drawn in chain.from_iterable(every):
                examples = _replaced(x, leaf, drawn)
                directions = self._directions(examples, generator)
                if directions is None:
                    continue
                odd = []
                for value in (low, high):
                    beside = drawn.clone()
                    beside[0] = value
                    odd.append(_replaced(x, leaf, beside))
                pairs = zip(trees.split(examples, 1), trees.split(directions, 1), strict=True)
                singles = [self._rows(*pair, _along) for pair in pairs]
                expected = {n: torch.cat([one[n] for one in singles]) for n in singles[0]}
                if not (
                    self._agrees(examples, directions, _along, expected, zero_too=True)
                    and self._keeps_apart(examples, directions, odd)
                ):
                    return False
        return True

    def _directions(self, x: Tree, generator: torch.Generator) -> dict[str, Tensor] | None:
        """Return random directions for the outputs; None if the model raises, or is not finite."""
        try:
            if not trees.first(x).is_cpu:  # there an error would be the end of the process
                model = copy.deepcopy(self.one_pass.model).cpu()
                call_model(model, trees.mapped(lambda leaf: leaf.cpu().clone(), x))
            for example in trees.split(x, 1):
                outputs = call_model(self.one_pass.model, trees.mapped(Tensor.clone, example))
                if not all(map(_is_usable, dict(trees.named("", outputs)).values())):
                    return None
            outputs = call_model(self.one_pass.model, trees.mapped(Tensor.clone, x))
        except Exception:  # a model may raise anything
            return None
        return _random_directions(outputs, TRIED, TRIED, generator)

    def _keeps_apart(self, x: Tree, directions: Tree, odd: Sequence[Tree]) -> bool:
        """Return True if all others' gradients stay the same if ``odd`` replaces ``x``.

        Only the first example differs. False is certain; True is evidence only.
        """
        factors = torch.eye(TRIED).to(trees.first(x).device)[1:]

        def of_others(examples: Tree) -> dict[str, list[Tensor]]:
            parts = self.one_pass(examples, directions, _along)
            sound = factors.any(dim=0)
            return {n: [p.only(sound).total(one) for one in factors] for n, p in parts.items()}

        usual = of_others(trees.mapped(Tensor.clone, x))
        for examples in odd:
            found = of_others(trees.mapped(Tensor.clone, examples))
            if usual.keys() != found.keys():
                return False
            for name, rows in usual.items():
                if not all(map(torch.equal, rows, found[name])):
                    return False
        return True

    def is_steady(
        self, features: Tree, targets: Tree, loss: Loss, follow: Follow, count: int
    ) -> bool:
        """Return True if no bit of a row of ``count`` depends on its place or on the other rows.

        False is certain. True is evidence for this processor and this number of its threads.

        Parameters
        ----------
        follow : Callable[[Tree, Tree, Loss], Parts]
            Returns every example's gradient from one pass.
        """
        with self._shaken() as generator:
            x, directions = self._examples(features, count, generator)
            places = torch.arange(count, device=trees.first(x).device)
            for by, y in ((_along, directions), (loss, zeros(targets, count))):
                usual = _numbers(follow(trees.mapped(Tensor.clone, x), y, by))
                for order in (places.roll(1), places.flip(0), places.new_zeros(count)):
                    moved, along = trees.rows((x, y), order)
                    found = _numbers(follow(moved, along, by))
                    if not _equal(found, [part[order] for part in usual]):
                        return False
                for odd in ODD:
                    beside = trees.mapped(partial(_beside, odd, slice(1, None, 2)), x)
                    found = _numbers(follow(beside, y, by))
                    if not _equal([part[::2] for part in found], [part[::2] for part in usual]):
                        return False
        return True

    def is_like(self, features: Tree, count: int, piece: int = _PIECE) -> bool:
        """Return True if one pass over ``count`` random examples agrees with passes over pieces."""
        one_pass = self.one_pass
        with self._shaken() as generator:
            tried = self._examples(features, -(-count // piece) * piece, generator)
            x, directions = trees.mapped(lambda leaf: leaf[:count].clone(), tried)
            if one_pass.reads_last(trees.mapped(Tensor.clone, x)) and one_pass.last is None:
                return False
            parts = one_pass(x, directions, _along)
            pieces = [
                one_pass(trees.mapped(Tensor.clone, x), y, _along)
                for x, y in trees.split(tried, piece)
            ]
        factors = torch.randn(len(pieces) * piece, generator=generator)
        factors[count:] = 0.0
        factors = factors.to(trees.first(features).device)
        if any(one.keys() != parts.keys() for one in pieces):
            return False
        norms, norms_of_pieces, totals, totals_of_pieces = (dict[str, Tensor]() for _ in range(4))
        for name, part in parts.items():
            own = [one[name] for one in pieces]
            norms[name] = part.squares().sqrt()[None]
            norms_of_pieces[name] = torch.cat([one.squares() for one in own])[:count].sqrt()[None]
            totals[name] = part.total(factors[:count])[None]
            scaled = zip(own, torch.split(factors, piece), strict=True)
            totals_of_pieces[name] = torch.stack([one.total(f) for one, f in scaled]).sum(0)[None]
        return _alike(norms, norms_of_pieces) and _alike(totals, totals_of_pieces)

    @contextmanager
    def _shaken(self) -> Iterator[torch.Generator]:
        generator = torch.Generator().manual_seed(0)
        every = self.one_pass.model.named_parameters()
        weights = {name: weight for name, weight in every if name in self.params}
        buffers = dict(self.one_pass.model.named_buffers())  # a trial's passes may write into them
        kept = clone(weights | buffers)
        for name, weight in shaken(weights, generator).items():
            weights[name].copy_(weight)
        try:
            with deterministic():
                yield generator
        finally:
            for name, tensor in (weights | buffers).items():
                tensor.copy_(kept[name])

    def _examples(
        self, features: Tree, count: int, generator: torch.Generator
    ) -> tuple[Tree, dict[str, Tensor]]:
        """Return random examples, and random directions along which to sum the model's outputs."""
        x = random_examples(features, count, generator)
        with torch.no_grad():
            outputs = call_model(
                self.one_pass.model, trees.mapped(lambda leaf: leaf[:2].clone(), x)
            )
        return x, _random_directions(outputs, 2, count, generator)


def unlike_examples(
    features: Tree, targets: Tree, model: nn.Module, *, integers: bool
) -> tuple[Tree, Tree]:
    """Return examples that differ in as many ways as models and losses may keep something of them.

    They have the shapes and types of ``features`` and ``targets``. The first is random, with a
    target of zero, and the last is odd.

    Parameters
    ----------
    model : nn.Module
        Its tables name the largest integers that they have rows for.
    integers : bool
        Also try integers other than zeros and ones. Where tables have no such row, this is an
        error, and on an accelerator it would be the end of the process.
    """
    x = random_examples(features, TRIED, torch.Generator().manual_seed(0))
    usual, zero = trees.mapped(lambda leaf: leaf[:1], x), zeros(targets, 1)
    of_targets, of_features = [zero, _odd_but_once(targets)], [x]
    if integers:
        of_targets += _with_odd_integers(zero, _ODD_CLASSES)
        of_features += _with_odd_integers(usual, (-1, *_last_rows(model), _HIGHEST[-1]))
    of_features.append(_odd_but_once(features))
    pairs = [(_repeated(usual, y), y) for y in of_targets]
    pairs += [(x, _repeated(zero, x)) for x in of_features]
    joined: tuple[Tree, Tree] = trees.mapped(lambda *leaves: torch.cat(leaves), *pairs)
    return joined


def _odd_but_once(examples: Tree) -> Tree:
    """Return `odd_examples`; of integers alone, only one of ones and one of zeros."""
    odd = odd_examples(examples)
    if any(leaf.is_floating_point() for _, leaf in trees.named("", examples)):
        return odd
    return trees.mapped(lambda leaf: leaf[-2:], odd)


def _last_rows(model: nn.Module) -> set[int]:
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return {table.num_embeddings - 1 for table in tables}


def _with_odd_integers(example: Tree, values: Sequence[int]) -> Iterator[Tree]:
    """Yield copies of an example, in each of which one tensor consists of one odd integer."""
    for _, leaf in trees.named("", example):
        if leaf.dtype == torch.bool or leaf.is_floating_point() or leaf.is_complex():
            continue
        limits = torch.iinfo(leaf.dtype)
        for value in sorted({min(max(value, limits.min), limits.max) for value in values}):
            yield _replaced(example, leaf, torch.full_like(leaf, value))


def _repeated(example: Tree, like: Tree) -> Tree:
    return trees.mapped(lambda leaf: leaf.expand(trees.length(like), *leaf.shape[1:]), example)


def _ranges(dtype: torch.dtype, model: nn.Module) -> list[tuple[int, int]]:
    """Return smallest and largest integers between which to draw random features."""
    if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
        return []
    ranges = {(0, high) for high in _HIGHEST}
    for table in model.modules():
        if isinstance(table, nn.Embedding | nn.EmbeddingBag):
            last, padding = table.num_embeddings - 1, table.padding_idx
            ranges |= {(0, last), (max(last - 1, 0), last)}
            if padding is not None:
                around = max(padding - 1, 0), min(padding + 1, last)
                ranges |= {around, (around[0], padding), (padding, around[1])}
    return sorted(pair for pair in ranges if pair[1] <= torch.iinfo(dtype).max)


def random_examples(features: Tree, count: int, generator: torch.Generator) -> Tree:
    """Return random examples with the shapes and types of ``features``.

    Integers are ones and zeros. If an example has several, the first is a one, as in masks. The
    first example consists of ones, and the last example ends with a zero.
    """

    def made(leaf: Tensor) -> Tensor:
        x = torch.randn(count, *leaf.shape[1:], generator=generator)
        if not leaf.is_floating_point():
            x = x > 0
            if x[0].numel() > 1:
                flat = x.view(count, -1)
                flat[0], flat[:, 0], flat[-1, -1] = True, True, False
        return x.to(leaf.device, leaf.dtype)

    return trees.mapped(made, features)


def _integers(
    like: Tensor, low: int, high: int, generator: torch.Generator
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield ``low``, ``high`` and random integers between them, three times.

    In two of them one end of the range fills the first example, and the other is in the last one:
    short examples would otherwise be alike in what a model counts in them, such as padding.
    """
    for ends in (None, (high, low), (low, high)):
        drawn = torch.randint(low, high + 1, like.shape, generator=generator)
        if ends is not None:
            flat = drawn.view(len(drawn), -1)
            flat[0], flat[:, 0], flat[-1, -1] = ends[0], ends[0], ends[1]
        yield low, high, drawn.to(like)


def odd_examples(features: Tree) -> Tree:
    """Return examples that consist of the values in `ODD`, one example for each."""

    def made(leaf: Tensor) -> Tensor:
        leaf = leaf.new_zeros((len(ODD), *leaf.shape[1:]))
        for row, odd in enumerate(ODD):
            leaf = _beside(odd, row, leaf)
        return leaf

    return trees.mapped(made, features)


def _beside(odd: float, place: int | slice, leaf: Tensor) -> Tensor:
    leaf = leaf.clone()
    leaf[place] = odd if leaf.is_floating_point() else bool(odd)
    return leaf


def _replaced(x: Tree, former: Tensor, leaf: Tensor) -> Tree:
    return trees.mapped(lambda other: leaf if other is former else other, x)


def _is_usable(output: Any) -> bool:
    return not isinstance(output, Tensor) or bool(output.isfinite().all())


def _random_directions(
    outputs: Any, rows: int, count: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return ``count`` random directions for each of the outputs that has ``rows`` rows."""
    return {
        name: torch.randn(count, *leaf.shape[1:], generator=generator).to(leaf.device)
        for name, leaf in trees.named("", outputs)
        if has_rows(leaf, rows) and leaf.is_floating_point()
    }


def _numbers(parts: Mapping[str, GradientRows]) -> list[Tensor]:
    """Return everything of which each example has one row."""
    return [tensor for part in parts.values() for tensor in (*part.factors, part.squares())]


def _equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def zeros(targets: Tree, count: int) -> Tree:
    """Return ``count`` targets of zeros, with the shapes and types of ``targets``."""
    return trees.mapped(lambda leaf: leaf.new_zeros((count, *leaf.shape[1:])), targets)


def _along(outputs: Any, directions: Mapping[str, Tensor]) -> Tensor:
    leaves = dict(trees.named("", outputs))
    return torch.stack([(leaves[name] * own).sum() for name, own in directions.items()]).sum()


def _alike(found: Params, expected: Params, zero_too: bool = False) -> bool:
    """Return True if all rows agree, and each name has a row that is not zero.

    With ``zero_too``, rows may all be zero. A bias's gradient may be nothing but rounding, as under
    softmax. It then counts as equal if the weight beside it agrees, which tests the same layer.
    """
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
        if not (zero_too or bool(largest.any())):
            return False
        if not bool(((own - other).abs().amax(dim=1) <= room).all()):
            return False
    return bool(found)
