"""Random and unusual examples for trials, with the shapes and types of real ones.

The examples depend on nobody's values, so a trial reveals nothing about any record.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from flower_ext.data import trees
from flower_ext.data.trees import Tree

NUM_RANDOM_EXAMPLES = 3
"""Number of random examples whose own gradients a trial computes."""
UNUSUAL_VALUES = (math.nan, math.inf, -math.inf, 300.0, -300.0, 0.0)
"""Unusual values, which may make a model treat all other examples differently."""
_LARGEST_INTEGERS = (2, 3, 255, 10_000)
"""Largest integers of random features other than zeros and ones: 2 and 3 for marks such as
padding, 255 for images, and 10,000 for counts."""
_UNUSUAL_TARGETS = (-100, -1, 2, _LARGEST_INTEGERS[-1])
"""Targets for which a loss may store something; negative integers often mark missing labels."""


def random_examples(features: Tree, count: int, generator: torch.Generator) -> Tree:
    """Return random examples with the shapes and types of ``features``.

    Integers are ones and zeros. If an example has several integers, three rules hold, as in masks
    for texts: the first integer of each example is 1, the first example consists of ones, and the
    last example ends with a zero.
    """

    def draw(leaf: Tensor) -> Tensor:
        x = torch.randn(count, *leaf.shape[1:], generator=generator)
        if not leaf.is_floating_point():
            x = x > 0
            if x[0].numel() > 1:
                flat = x.view(count, -1)
                flat[0], flat[:, 0], flat[-1, -1] = True, True, False
        return x.to(leaf.device, leaf.dtype)

    return trees.mapped(draw, features)


def with_unusual_rows(examples: Tree, rows: int | slice, value: float) -> Tree:
    """Return a copy of examples in which the given ``rows`` consist of ``value``.

    Tensors of integers get 1 instead, or 0 if ``value`` is 0.
    """

    def fill(leaf: Tensor) -> Tensor:
        leaf = leaf.clone()
        leaf[rows] = value if leaf.is_floating_point() else bool(value)
        return leaf

    return trees.mapped(fill, examples)


def unlike_examples(
    features: Tree, targets: Tree, model: nn.Module, *, integers: bool
) -> tuple[Tree, Tree]:
    """Return very different examples, so that a trial finds a model or a loss that remembers them.

    The first is random, with a target of zero; the last ones consist of unusual values. With
    ``integers``, some examples contain integers other than 0 and 1, such as the number of the last
    row of each embedding table of the model. Use False on an accelerator, where looking up a number
    without a row ends the process.
    """
    x = random_examples(features, NUM_RANDOM_EXAMPLES, torch.Generator().manual_seed(0))
    first, zero = trees.mapped(lambda leaf: leaf[:1], x), trees.zeros(targets, 1)
    unlike_targets, unlike_features = [zero, _unusual_examples(targets)], [x]
    if integers:
        last_rows = {table.num_embeddings - 1 for table in _tables(model)}
        unlike_targets += _with_unusual_integers(zero, _UNUSUAL_TARGETS)
        unlike_features += _with_unusual_integers(first, (-1, *last_rows, _LARGEST_INTEGERS[-1]))
    unlike_features.append(_unusual_examples(features))
    pairs = [(_repeated(first, y), y) for y in unlike_targets]
    pairs += [(x, _repeated(zero, x)) for x in unlike_features]
    joined: tuple[Tree, Tree] = trees.mapped(lambda *leaves: torch.cat(leaves), *pairs)
    return joined


def integer_examples(
    x: Tree, model: nn.Module, generator: torch.Generator
) -> Iterator[tuple[Tree, list[Tree]]]:
    """Yield variants of examples in which one of the features consists of random integers.

    The integers come from a range such as 0 … 255. Each variant comes with copies in which all
    integers of the first example are the smallest of the range, or the largest.
    """
    for leaf in trees.leaves(x):
        for low, high in _ranges(leaf.dtype, model):
            # The first example consists of one end of the range, and the last example contains the
            # other end. Otherwise short examples might all have as many padding words, for example.
            for ends in (None, (high, low), (low, high)) if low < high else (None,):
                drawn = torch.randint(low, high + 1, leaf.shape, generator=generator)
                if ends is not None:
                    flat = drawn.view(len(drawn), -1)
                    flat[0], flat[:, 0], flat[-1, -1] = ends[0], ends[0], ends[1]
                extremes = []
                for value in (low, high):
                    extreme = drawn.clone()
                    extreme[0] = value
                    if not torch.equal(extreme, drawn):
                        extremes.append(_replaced(x, leaf, extreme.to(leaf)))
                yield _replaced(x, leaf, drawn.to(leaf)), extremes


def _ranges(dtype: torch.dtype, model: nn.Module) -> list[tuple[int, int]]:
    """Return ranges of integer features to try: pairs of the smallest and the largest integer."""
    if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
        return []
    ranges = {(0, high) for high in _LARGEST_INTEGERS}
    for table in _tables(model):
        last, padding = table.num_embeddings - 1, table.padding_idx
        ranges |= {(0, last), (max(last - 1, 0), last)}
        if padding is not None:
            around = max(padding - 1, 0), min(padding + 1, last)
            ranges |= {around, (around[0], padding), (padding, around[1])}
    return sorted(pair for pair in ranges if pair[1] <= torch.iinfo(dtype).max)


def _tables(model: nn.Module) -> Iterator[nn.Embedding | nn.EmbeddingBag]:
    return (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))


def _unusual_examples(examples: Tree) -> Tree:
    """Return one example for each value in `UNUSUAL_VALUES`. The example consists of this value.

    If examples have only integers, return one example of ones and one of zeros.
    """
    unusual = trees.zeros(examples, len(UNUSUAL_VALUES))
    for row, value in enumerate(UNUSUAL_VALUES):
        unusual = with_unusual_rows(unusual, row, value)
    if any(leaf.is_floating_point() for leaf in trees.leaves(examples)):
        return unusual
    return trees.mapped(lambda leaf: leaf[-2:], unusual)


def _with_unusual_integers(example: Tree, values: Sequence[int]) -> Iterator[Tree]:
    """Yield copies of an example. In each, one tensor of integers consists of one of ``values``."""
    for leaf in trees.leaves(example):
        if leaf.dtype == torch.bool or leaf.is_floating_point() or leaf.is_complex():
            continue
        limits = torch.iinfo(leaf.dtype)
        for value in sorted({min(max(value, limits.min), limits.max) for value in values}):
            yield _replaced(example, leaf, torch.full_like(leaf, value))


def _repeated(example: Tree, like: Tree) -> Tree:
    return trees.mapped(lambda leaf: leaf.expand(trees.length(like), *leaf.shape[1:]), example)


def _replaced(x: Tree, former: Tensor, leaf: Tensor) -> Tree:
    return trees.mapped(lambda other: leaf if other is former else other, x)
