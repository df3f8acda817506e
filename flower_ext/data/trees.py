"""Trees: one tensor, or a tuple or mapping of trees; what a model takes in, puts out or aims at.

All tensors of a tree of examples have one leading dimension, a row an example. The functions here
also know lists and dataclasses, which a model may put out, and hold all else for leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

Tree = Any
"""``Tensor | tuple[Tree, ...] | Mapping[str, Tree]``; any type, so that who has plain tensors need
not say so to a type checker."""


def checked(name: str, tree: Tree) -> Tree:
    """Return the tree, its mappings as plain dictionaries.

    Raises
    ------
    TypeError
        Names what is neither a tensor nor a tuple or mapping of some.
    """
    if isinstance(tree, Tensor):
        return tree
    if isinstance(tree, tuple | Mapping) and len(tree):
        children = _children(tree)
        if isinstance(tree, tuple) or all(isinstance(key, str) for key in children):
            made = {key: checked(f"{name}[{key!r}]", own) for key, own in children.items()}
            return _like(tree, made) if isinstance(tree, tuple) else made
    raise TypeError(
        f"{name} of type {type(tree).__name__}: expected a torch.Tensor, or a tuple or mapping "
        "(with names for keys) of at least one"
    )


def named(name: str, tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its place, as ``features['mask']``."""
    children = _children(tree)
    if children is None:
        yield name, tree
        return
    for key, own in children.items():
        yield from named(f"{name}[{key!r}]", own)


def first(tree: Tree) -> Tensor:
    """Return some leaf: all have the same length, and lie on one device."""
    while not isinstance(tree, Tensor):
        tree = next(iter(_children(tree).values()))
    return tree


def length(tree: Tree) -> int:
    """Return the number of rows."""
    return int(first(tree).shape[0])


def row_bytes(tree: Tree) -> int:
    """Return how many bytes the numbers of one row take."""
    if isinstance(tree, Tensor):
        return math.prod(tree.shape[1:]) * tree.element_size()
    return sum(map(row_bytes, _children(tree).values()))


def form(tree: Tree) -> tuple[Hashable, ...]:
    """Return shapes and types of one row; of a mapping by name, whatever its order."""
    if isinstance(tree, Tensor):
        return tree.shape[1:], tree.dtype
    made = [(key, form(own)) for key, own in _children(tree).items()]
    return tuple(sorted(made, key=lambda part: part[0]))


def mapped(function: Callable[..., Any], tree: Tree, *more: Tree) -> Tree:
    """Return the tree of ``function(leaf, …)`` of the leaves in the same place of each tree."""
    if isinstance(tree, Tensor) or (children := _children(tree)) is None:
        return function(tree, *more)
    others = [_children(other) for other in more]
    made = {
        key: mapped(function, own, *(other[key] for other in others))
        for key, own in children.items()
    }
    return _like(tree, made)


def rows(tree: Tree, indices: Tensor) -> Tree:
    """Return the rows at ``indices``, in their order."""
    return mapped(lambda leaf: leaf[indices.to(leaf.device)], tree)


def selected(tree: Tree, indices: Tensor) -> Tree:
    """As `rows`, several times faster, for integers >= 0 where the tree is."""
    return mapped(lambda leaf: torch.index_select(leaf, 0, indices), tree)


def split(tree: Tree, sizes: int | list[int]) -> Sequence[Tree]:
    """Return what `torch.split` makes of all leaves: a sequence of trees."""
    return _cut(lambda leaf: torch.split(leaf, sizes), tree)


def each(tree: Tree) -> Sequence[Tree]:
    """Return the rows one by one, without the dimension of examples."""
    return _cut(Tensor.unbind, tree)


def to(tree: Tree, device: torch.device) -> Tree:
    """Return the same on ``device``."""
    return mapped(lambda leaf: leaf.to(device), tree)


def double(tree: Tree) -> Tree:
    """Return floating-point leaves in double precision; others, such as words, as they are."""
    return mapped(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, tree)


def _cut(function: Callable[[Tensor], Sequence[Tensor]], tree: Tree) -> Sequence[Tree]:
    if isinstance(tree, Tensor):
        return function(tree)
    children = _children(tree)
    pieces = zip(*(_cut(function, own) for own in children.values()), strict=True)
    return [_like(tree, dict(zip(children, piece, strict=True))) for piece in pieces]


def _children(tree: Any) -> Any:
    """Return parts by name or place; None of a leaf."""
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
    """Return an object of the same type with other parts."""
    if isinstance(tree, tuple | list):
        return getattr(tree, "_make", type(tree))(children.values())  # of a named tuple
    return children if type(tree) is dict else type(tree)(**children)
