"""Neighbours in a secure sum: members on a circle in random order share keys with the k nearest.

Bell et al. 2020: a circulant (Harary) graph on a secretly drawn order needs O(log n) neighbours.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import TypeAlias

import numpy as np

from flower_ext.errors import InvalidValue

Graph: TypeAlias = Sequence[Sequence[int]]
"""The neighbours of every member, ascending, in the order of the members."""


def degree(members: int, neighbours: int) -> int:
    """Return the smallest possible number of neighbours that is at least ``neighbours``.

    The number is even, because half of the neighbours are on each side of a circle, or it is
    ``members - 1``, which makes every member a neighbour of all others. If ``neighbours`` is above
    ``members - 1``, the result is ``members - 1``.

    Raises
    ------
    InvalidValue
        There are fewer than two members, or less than one neighbour.
    """
    if members < 2:
        raise InvalidValue(f"members={members}: expected at least 2")
    if neighbours < 1:
        raise InvalidValue(f"neighbours={neighbours}: expected at least 1")
    return min(neighbours + neighbours % 2, members - 1)


def draw_order(members: int, generator: np.random.Generator) -> tuple[int, ...]:
    """Return the members from 0 to ``members - 1`` in a random order, uniform over all orders.

    Seed ``generator`` from the operating system, because an adversary that predicts the order can
    place colluders.
    """
    return tuple(int(member) for member in generator.permutation(members))


def graph_of(order: Sequence[int], neighbours: int) -> Graph:
    """Return each member's neighbours on the circle of ``order``, ascending.

    The relation is symmetric. ``neighbours`` must come from `degree`.
    """
    size = len(order)
    if neighbours >= size - 1:
        members = sorted(order)
        return tuple((*members[:place], *members[place + 1 :]) for place in range(size))
    half = neighbours // 2
    rows: list[tuple[int, ...]] = [()] * size
    steps = [*range(-half, 0), *range(1, half + 1)]
    for place, member in enumerate(order):
        rows[member] = tuple(sorted(order[(place + step) % size] for step in steps))
    return tuple(rows)


def graph_digest(graph: Graph) -> bytes:
    """Return a hash of all members' neighbours, 32 bytes."""
    hashed = sha256(b"flower-ext secure sum graph 1")
    for row in graph:
        hashed.update(struct.pack(f"<{len(row) + 1}I", len(row), *row))
    return hashed.digest()
