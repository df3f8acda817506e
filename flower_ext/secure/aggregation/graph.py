"""Neighbours in a secure sum: members on a circle in random order share keys with the k nearest.

Bell et al. 2020: a circulant (Harary) graph on a secretly drawn order needs O(log n) neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flower_ext.errors import InvalidValue


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


def neighbours_of(member: int, order: Sequence[int], neighbours: int) -> tuple[int, ...]:
    """Return the members next to ``member`` in ``order``, ascending; the relation is symmetric.

    ``neighbours`` must come from `degree`.
    """
    size = len(order)
    if neighbours >= size - 1:
        return tuple(other for other in sorted(order) if other != member)
    place, half = order.index(member), neighbours // 2
    steps = [*range(-half, 0), *range(1, half + 1)]
    return tuple(sorted(order[(place + step) % size] for step in steps))
