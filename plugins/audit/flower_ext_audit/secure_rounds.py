"""A secure round as its server sees it, from the messages on the grid.

The adversary of `AdversaryView.SUM_ONLY` is this server: it follows the protocol, keeps everything
that it receives, and computes all it can. `SecureTranscript` does the same, from the clients'
messages only.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, Message

from flower_ext.errors import FlowerExtError
from flower_ext.federation.messages import records
from flower_ext.federation.sums.masked import BEGIN, MASKED_SUM
from flower_ext.secure.aggregation.aggregation_messages import (
    OF_SEED,
    Advert,
    MaskedInput,
    Revealed,
    SealedShares,
)
from flower_ext.secure.aggregation.aggregation_server import SumServer
from flower_ext.secure.aggregation.context import Invitation, RoundContext
from flower_ext.secure.aggregation.mask_streams import apply_mask, self_mask_key
from flower_ext.secure.aggregation.shamir import combine
from flower_ext_audit.experiment import Arrays

M = TypeVar("M", Advert, SealedShares, MaskedInput, Revealed)
LEAST_NUMBERS, _CENTRAL, _MOST = 64, 1 / 4, 5 / 8
"""An upload counts as bare (not masked) if more than five eighths of its numbers lie in the quarter
of the ring around 0. A masked upload is uniform: if it has 64 numbers or more, it counts as bare
with a probability below 1e-9."""


class SecureTranscript:
    """The messages of a round's first secure sum, and the values that its server can compute.

    The first sum adds updates. A later sum may add scores, in vectors of another length.
    """

    def __init__(self) -> None:
        self._context: RoundContext | None = None
        self._members: dict[int, int] = {}
        self._graph: dict[int, Sequence[int]] = {}
        self._replies: list[Message] = []

    def record(self, requests: Iterable[Message], replies: Iterable[Message]) -> None:
        """Record a stage: the server's messages and the clients' replies."""
        for message in requests:
            if is_secure(message):
                arrays = records.to_arrays(message.content.array_records[MASKED_SUM])
                if BEGIN not in arrays:
                    continue
                invited = Invitation.from_bytes(arrays[BEGIN].tobytes())
                self._context = self._context or invited.context
                if invited.context.digest == self._context.digest:
                    self._members[message.metadata.dst_node_id] = invited.index
                    self._graph[invited.index] = invited.neighbors
        if self._context is not None:
            self._replies += [reply for reply in replies if not reply.has_error()]

    def sum(self, like: Arrays) -> Arrays | None:
        """Return the sum in units of its rounding step, shaped as ``like``; None without a sum."""
        if (context := self._context) is None or context.length != _length(like):
            return None
        server = SumServer(context, [self._graph[member] for member in sorted(self._graph)])
        # The package's server computes the sum, so that an audit judges the code that runs use.
        try:
            for close in (server.keys, server.deliveries, server.unmask_requests):
                self._add_received(server, context)
                close()
            self._add_received(server, context)
            return records.shaped(server.total().astype(np.float64), dict(like))
        except FlowerExtError:
            return None  # the round was discarded

    def _add_received(self, server: SumServer, context: RoundContext) -> None:
        awaited: Any = server.awaited  # not None: `sum` closes each stage once
        for message in self._received(awaited, context):
            server.add(message)

    def bare(self, like: Arrays) -> Mapping[int, Arrays]:
        """Return the uploads that the server can read in the clear, by node.

        A client adds two kinds of masks to its upload: its own mask, and one mask for each of its
        neighbours. The server learns the seed of a client's own mask and can subtract it. After
        that only the masks of neighbours hide the upload. The result holds the uploads on which
        these masks are missing.
        """
        context = self._context
        if context is None or context.length != _length(like) or context.length < LEAST_NUMBERS:
            return {}
        nodes = {member: node for node, member in self._members.items()}
        revealed, uploads = self._received(Revealed, context), {}
        for message in self._received(MaskedInput, context):
            values = np.frombuffer(message.values, dtype=context.dtype).copy()
            # Shamir's shares are points of a polynomial at 1, 2, …; its secret is the value at 0.
            shares = {
                one.member + 1: one.shares[message.member][1:]
                for one in revealed
                if one.shares.get(message.member, b"")[:1] == OF_SEED
            }
            with suppress(FlowerExtError):  # too few shares: the server does not learn the seed
                seed = combine(shares, context.threshold)
                apply_mask(
                    self_mask_key(context.digest, seed, message.member), values, subtract=True
                )
            upload = _signed(values, context)
            if np.mean(np.abs(upload) < _CENTRAL / 2 * 2.0**context.bits) > _MOST:
                uploads[nodes[message.member]] = records.shaped(upload, dict(like))
        return uploads

    def _received(self, kind: type[M], context: RoundContext) -> list[M]:
        messages = []
        for reply in self._replies:
            for name in (records.ANSWER, records.UPDATE):
                record = reply.content.get(name)
                if isinstance(record, ArrayRecord):
                    with suppress(FlowerExtError):  # a message of another stage
                        _, content = records.single_message(records.to_arrays(record))
                        messages.append(kind.from_bytes(content, context))
        return messages


def _length(like: Arrays) -> int:
    return sum(array.size for array in like.values())


def _signed(values: np.ndarray, context: RoundContext) -> np.ndarray:
    return values.view(np.int32 if context.bits == 32 else np.int64).astype(np.float64)


def is_secure(message: Message) -> bool:
    """Return True for a message of the server in a secure sum."""
    return MASKED_SUM in message.content
