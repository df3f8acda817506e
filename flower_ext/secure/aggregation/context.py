"""Public values of one round: all parties agree on them, and all keys and messages depend on them.

A member agrees on masks with k of the n members, its neighbours. The server places all members on a
circle in a random order, which it keeps secret. A member's neighbours are the k members nearest to
it on the circle (a circulant or Harary graph). O(log n) neighbours suffice (Bell et al. 2020).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np

from flower_ext.checks import Checked, Count, CountOrZero
from flower_ext.errors import InvalidValue
from flower_ext.json_record import JsonRecord
from flower_ext.privacy.mechanisms.secure_sum import SumParameters

Graph: TypeAlias = Sequence[Sequence[int]]
"""For each member, in the order of their numbers, its neighbours in ascending order."""
GRAPH_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class RoundContext(SumParameters, Checked, JsonRecord):
    """Public values that the server announces before a round.

    Members are numbered from 0. A node does not rely on the announced number of ``colluders``. It
    uses the number that its owner configures (see `federation.sums.masked.check_limits`).

    Parameters
    ----------
    members, num_neighbors, threshold, least_answers, colluders
        As for `SumParameters`; ``num_neighbors`` is a number that `degree` returns.
    run : bytes
        Name of the run, different for every run.
    round_number : int
        Number of the round, different for every round of the run, even for a repeated one.
    graph : bytes
        `graph_digest` of all members' neighbours. Each member learns its own neighbours only.
    bits, length : int
        Each member's vector has ``length`` numbers, and sums are modulo 2^bits (32 or 64).
    signed : bool
        True if members sign their keys, and all members are neighbours. No server can then choose a
        member's neighbours, or send keys in a neighbour's name.
    """

    kind = "secure sum"

    run: bytes
    round_number: CountOrZero
    graph: bytes
    bits: int
    length: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.members
        if len(self.graph) != GRAPH_BYTES:
            raise InvalidValue(
                f"graph of {len(self.graph)} bytes: expected the {GRAPH_BYTES} bytes of a "
                "graph_digest"
            )
        if self.bits not in (32, 64):
            raise InvalidValue(f"bits={self.bits}: expected 32 or 64")
        if degree(size, self.num_neighbors) != self.num_neighbors:
            raise InvalidValue(
                f"num_neighbors={self.num_neighbors}: expected an even number below {size - 1}, or "
                f"{size - 1} (all others); flower_ext.secure.aggregation.context.degree("
                f"{size}, {self.num_neighbors}) returns a valid number"
            )
        if not 1 <= self.threshold <= self.num_neighbors:
            raise InvalidValue(
                f"threshold={self.threshold}: expected 1 to {self.num_neighbors}, the number of "
                "neighbours"
            )
        if not 2 <= self.least_answers <= size:
            raise InvalidValue(
                f"least_answers={self.least_answers}: expected 2 to {size}, the number of members"
            )
        if self.signed and self.num_neighbors < size - 1:
            raise InvalidValue(
                f"num_neighbors={self.num_neighbors} of a signed round: expected {size - 1}, "
                "because every member of a signed round is a neighbour of all others"
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of a vector's numbers in messages."""
        return np.dtype("<u4" if self.bits == 32 else "<u8")

    @cached_property
    def digest(self) -> bytes:
        """Return a hash of all fields, 32 bytes, which identifies this round."""
        return sha256(b"flower-ext secure sum 1" + self.to_bytes()).digest()


@dataclass(frozen=True, kw_only=True)
class Invitation(JsonRecord):
    """The first message to a member in a round: the context, the member's number and neighbours."""

    kind = "invitation"

    context: RoundContext
    index: int
    neighbors: tuple[int, ...]

    def __post_init__(self) -> None:
        context, index, near = self.context, self.index, set(self.neighbors)
        if not 0 <= index < context.members:
            raise InvalidValue(f"index={index}: expected 0 to {context.members - 1}")
        if index in near or not all(0 <= other < context.members for other in near):
            raise InvalidValue(
                f"neighbors={sorted(near)}: expected members from 0 to {context.members - 1}, "
                f"without {index}, the member itself"
            )
        if not len(self.neighbors) == len(near) == context.num_neighbors:
            raise InvalidValue(
                f"neighbors={list(self.neighbors)}: expected {context.num_neighbors} different "
                "members, the number of neighbours in the context"
            )


def degree(members: int, num_neighbors: int) -> int:
    """Round ``num_neighbors`` up to a number of neighbours that every member can have.

    The result is even, because members are on a circle, and half of a member's neighbours are on
    each side of it. But if ``members - 1`` is smaller, that is the result: every member is then a
    neighbour of all others.
    """
    if members < 2:
        raise InvalidValue(f"members={members}: expected at least 2")
    if num_neighbors < 1:
        raise InvalidValue(f"num_neighbors={num_neighbors}: expected at least 1")
    return min(num_neighbors + num_neighbors % 2, members - 1)


def graph_of(order: Sequence[int], num_neighbors: int) -> Graph:
    """Return each member's neighbours, in ascending order.

    ``order`` lists the members around a circle. A member's neighbours are the ``num_neighbors``
    members nearest to it, so if A is a neighbour of B, then B is a neighbour of A.
    ``num_neighbors`` must come from `degree`. Draw ``order`` uniformly with randomness of the
    operating system, because an adversary that predicts it can surround a member with neighbours
    that collude.
    """
    size = len(order)
    if num_neighbors >= size - 1:
        members = sorted(order)
        return tuple((*members[:place], *members[place + 1 :]) for place in range(size))
    half = num_neighbors // 2
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
