"""Trees of tensors, which are the inputs, outputs and targets of models.

A tree is a tensor, or a tuple or mapping of trees. All tensors of a tree of examples have the same
leading dimension, with one row per example. The functions here also accept lists and dataclasses,
which models may return. They treat every other object as a leaf.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

Tree = Any
"""``Tensor | tuple[Tree, ...] | Mapping[str, Tree]``. Declared as any type, so that code with plain
tensors passes a type checker without casts."""


def checked(name: str, tree: Tree) -> Tree:
    """Return the tree with plain dictionaries as its mappings; refuse parts that are no trees."""
    if isinstance(tree, Tensor):
        return tree
    if isinstance(tree, tuple | Mapping) and len(tree):
        children = _children(tree)
        if isinstance(tree, tuple) or all(isinstance(key, str) for key in children):
            parts = {key: checked(f"{name}[{key!r}]", part) for key, part in children.items()}
            return _like(tree, parts) if isinstance(tree, tuple) else parts
    raise TypeError(
        f"{name} of type {type(tree).__name__}: expected a torch.Tensor, or a tuple or mapping "
        "(with strings as keys) of at least one tensor"
    )


def named(name: str, tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its place, such as ``features['mask']``."""
    children = _children(tree)
    if children is None:
        yield name, tree
        return
    for key, part in children.items():
        yield from named(f"{name}[{key!r}]", part)


def leaves(tree: Tree) -> Iterator[Any]:
    """Yield each leaf."""
    return (leaf for _, leaf in named("", tree))


def first(tree: Tree) -> Tensor:
    """Return the first leaf. All leaves have its length and its device."""
    while not isinstance(tree, Tensor):
        tree = next(iter(_children(tree).values()))
    return tree


def length(tree: Tree) -> int:
    """Return the number of rows."""
    return int(first(tree).shape[0])


def row_type(tree: Tree) -> tuple[Hashable, ...]:
    """Return the shape and type of one row. The order of a mapping's names does not matter."""
    if isinstance(tree, Tensor):
        return tree.shape[1:], tree.dtype
    parts = [(key, row_type(part)) for key, part in _children(tree).items()]
    return tuple(sorted(parts, key=lambda part: part[0]))


def mapped(function: Callable[..., Any], tree: Tree, *more: Tree) -> Tree:
    """Apply a function to matching leaves of trees of one structure; return a tree of results."""
    if isinstance(tree, Tensor) or (children := _children(tree)) is None:
        return function(tree, *more)
    others = [_children(other) for other in more]
    images = {
        key: mapped(function, part, *(other[key] for other in others))
        for key, part in children.items()
    }
    return _like(tree, images)


def rows(tree: Tree, indices: Tensor) -> Tree:
    """Return the rows at ``indices``, integers >= 0, in this order."""
    return mapped(lambda leaf: torch.index_select(leaf, 0, indices.to(leaf.device)), tree)


def zeros(tree: Tree, count: int) -> Tree:
    """Return ``count`` rows of zeros, with the shapes and types of the tree's rows."""
    return mapped(lambda leaf: leaf.new_zeros((count, *leaf.shape[1:])), tree)


def split(tree: Tree, sizes: int | list[int]) -> Sequence[Tree]:
    """Apply `torch.split` to all leaves; return a sequence of trees."""
    return _cut(lambda leaf: torch.split(leaf, sizes), tree)


def each(tree: Tree) -> Sequence[Tree]:
    """Return a sequence of trees, one for each row, without the leading dimension."""
    return _cut(Tensor.unbind, tree)


def to(tree: Tree, device: torch.device) -> Tree:
    """Return the same tree on ``device``."""
    return mapped(lambda leaf: leaf.to(device), tree)


def double(tree: Tree) -> Tree:
    """Convert floating-point leaves to float64. Other leaves, such as tokens, stay unchanged."""
    return mapped(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, tree)


def _cut(function: Callable[[Tensor], Sequence[Tensor]], tree: Tree) -> Sequence[Tree]:
    if isinstance(tree, Tensor):
        return function(tree)
    children = _children(tree)
    pieces = zip(*(_cut(function, part) for part in children.values()), strict=True)
    return [_like(tree, dict(zip(children, piece, strict=True))) for piece in pieces]


def _children(tree: Any) -> Any:
    """Return the parts by name or place; None for a leaf."""
    if isinstance(tree, Tensor):
        return None
    if isinstance(tree, Mapping):
        return tree
    if isinstance(tree, tuple | list):
        return dict(enumerate(tree))
    if is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in fields(tree)}
    return None


def _like(tree: Any, children: dict[Any, Any]) -> Any:
    """Return an object of the type of ``tree`` with ``children`` as its parts."""
    if isinstance(tree, tuple | list):
        return getattr(tree, "_make", type(tree))(children.values())  # named tuples have _make
    return children if type(tree) is dict else type(tree)(**children)
