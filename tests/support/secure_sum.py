"""A whole round of the secure sum in one process, with every message and state as bytes."""

from __future__ import annotations

import numpy as np

from flower_ext.secure.aggregation.aggregation_server import SumServer
from flower_ext.secure.aggregation.context import (
    Invitation,
    RoundContext,
    degree,
    graph_digest,
    graph_of,
)
from flower_ext.secure.aggregation.member import Member

_FIELD = 2**255 - 19
_OF_ORDER_EIGHT = (
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
)
LOW_ORDER = tuple(
    number.to_bytes(32, "little")
    for number in (
        *(0, 1, _FIELD - 1, *_OF_ORDER_EIGHT),
        *(_FIELD, _FIELD + 1, 2**255, 2**255 + 1, 2**256 - 1),  # the same, and others, not reduced
    )
)
"""X25519 keys with which everybody agrees on zero, and keys that are not written canonically."""


def graph_for(members=6, num_neighbors=4, number=1):
    """Return the graph of `round_context`."""
    order = np.random.default_rng(number).permutation(members).tolist()
    return graph_of(order, degree(members, num_neighbors))


def round_context(
    members=6, num_neighbors=4, threshold=2, least=3, *, bits=32, length=50, number=1
):
    """Return the context of a small round."""
    return RoundContext(
        run=b"run",
        round_number=number,
        members=members,
        graph=graph_digest(graph_for(members, num_neighbors, number)),
        bits=bits,
        length=length,
        num_neighbors=degree(members, num_neighbors),
        colluders=0,
        threshold=threshold,
        least_answers=least,
    )


def vectors_of(context, seed=0):
    """Return one uniform vector for each member."""
    return np.random.default_rng(seed).integers(
        0, 2**context.bits, size=(context.members, context.length), dtype=context.dtype.type
    )


def member_of(context, index, neighbors):
    """Return a member that has taken no step."""
    invitation = Invitation(context=context, index=index, neighbors=tuple(neighbors))
    return Member(invitation=invitation)


def stored(member):
    """Return the member as another process would restore it."""
    return Member.from_bytes(member.to_bytes())


class Round:
    """Server and members, stage by stage; each stage takes the members that are lost before it."""

    def __init__(self, context, *, seed=0):
        self.context = context
        self.graph = graph_for(context.members, context.num_neighbors, context.round_number)
        self.server = SumServer(context, self.graph)
        self.members = {
            index: member_of(context, index, near) for index, near in enumerate(self.graph)
        }
        self.vectors = vectors_of(context, seed)
        self.wire = []

    def sent(self, message):
        self.wire.append(message.to_bytes())
        return type(message).from_bytes(self.wire[-1], self.context)

    def restore(self):
        self.members = {i: stored(m) for i, m in self.members.items()}

    def advertise(self, lost=()):
        for index, member in self.members.items():
            if index not in lost:
                self.server.add(self.sent(member.advertise()))
        self.restore()
        return {index: self.sent(keys) for index, keys in self.server.keys().items()}

    def share(self, keys, lost=()):
        for index, message in keys.items():
            if index not in lost:
                self.server.add(self.sent(self.members[index].share(message)))
        self.restore()
        return {index: self.sent(one) for index, one in self.server.deliveries().items()}

    def mask(self, deliveries, lost=()):
        for index, message in deliveries.items():
            if index not in lost:
                masked = self.members[index].mask(message, self.vectors[index])
                self.server.add(self.sent(masked))
        self.restore()
        return {index: self.sent(one) for index, one in self.server.unmask_requests().items()}

    def unmask(self, questions, lost=()):
        for index in sorted(self.server.answered - set(lost)):
            self.server.add(self.sent(self.members[index].unmask(questions[index])))
        return self.server.total()

    def run(self, lost=((), (), (), ())):
        questions = self.mask(self.share(self.advertise(lost[0]), lost[1]), lost[2])
        return self.unmask(questions, lost[3])

    def plain_sum(self):
        """Return the sum of the vectors that arrived, each number nearest to 0 modulo 2^bits."""
        total = self.vectors[sorted(self.server.answered)].astype(object).sum(axis=0)
        half = 2 ** (self.context.bits - 1)
        return np.array([(number + half) % (2 * half) - half for number in total])
