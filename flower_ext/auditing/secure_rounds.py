"""A secure round as its server sees it, from the messages on the grid.

The adversary of `AdversaryView.SUM_ONLY` is this server: it follows the protocol, keeps everything
that it receives, and computes all it can. `SecureTranscript` does the same, from the clients'
messages only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, Message

from flower_ext.auditing.experiment import Arrays
from flower_ext.errors import FlowerExtError
from flower_ext.federation import records
from flower_ext.federation.sums.masked import BEGIN, SENT
from flower_ext.secure.aggregation import (
    Advert,
    Invitation,
    MaskedInput,
    Revealed,
    RoundContext,
    SealedShares,
    SumServer,
)
from flower_ext.secure.aggregation.aggregation_messages import OF_SEED
from flower_ext.secure.aggregation.mask_streams import apply_mask, self_mask_key
from flower_ext.secure.aggregation.shamir import combine

M = TypeVar("M", Advert, SealedShares, MaskedInput, Revealed)
LEAST_NUMBERS, _CENTRAL, _MOST = 64, 1 / 4, 5 / 8
"""An upload counts as bare (not masked) if more than five eighths of its numbers lie in the central
quarter of the ring. For a uniform upload of 64 numbers or more, the probability is below 1e-9."""


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
                arrays = records.to_arrays(message.content.array_records[records.SECURE_SUM])
                if BEGIN not in arrays:
                    continue
                invited = Invitation.from_bytes(arrays[BEGIN].tobytes())
                self._context = self._context or invited.context
                if invited.context.digest == self._context.digest:
                    self._members[message.metadata.dst_node_id] = invited.index
                    self._graph[invited.index] = invited.neighbours
        if self._context is not None:
            self._replies += [reply for reply in replies if not reply.has_error()]

    def sum(self, like: Arrays) -> Arrays | None:
        """Return the sum in steps of its grid, shaped as ``like``; None without a sum."""
        if self._context is None or not self._is_of(like):
            return None
        server = SumServer(self._context, [self._graph[m] for m in sorted(self._graph)])
        stages: tuple[tuple[Any, Any, Any], ...] = (
            (Advert, server.add_advert, server.keys),
            (SealedShares, server.add_shares, server.deliveries),
            (MaskedInput, server.add_masked, server.unmask_requests),
        )
        # The package's own server computes the sum, so that an audit judges the real one.
        try:
            for kind, add, close in stages:
                for message in self._received(kind):
                    add(message)
                close()
            for message in self._received(Revealed):
                server.add_revealed(message)
            total = server.total()
        except FlowerExtError:
            return None  # the round was discarded
        return self._shaped(total, like)

    def bare(self, like: Arrays) -> Mapping[int, Arrays]:
        """Return the uploads that the server can read in the clear, by node.

        A client adds two kinds of masks to its upload: its own mask, and one mask for each of its
        neighbours. The server learns the seed of a client's own mask and can subtract it. After
        that only the masks of neighbours hide the upload. The result holds the uploads on which
        these masks are missing.
        """
        if self._context is None or not self._is_of(like) or self._context.length < LEAST_NUMBERS:
            return {}
        nodes = {member: node for node, member in self._members.items()}
        uploads = {}
        for message in self._received(MaskedInput):
            values = np.frombuffer(message.values, dtype=self._context.dtype).copy()
            seed = self._seed(message.member)
            if seed is not None:
                key = self_mask_key(self._context.digest, seed, message.member)
                apply_mask(key, values, subtract=True)
            near = np.abs(self._signed(values)) < _CENTRAL / 2 * 2.0**self._context.bits
            if np.mean(near) > _MOST:
                uploads[nodes[message.member]] = self._shaped(values, like)
        return uploads

    def _is_of(self, like: Arrays) -> bool:
        assert self._context is not None
        return self._context.length == sum(array.size for array in like.values())

    def _seed(self, member: int) -> bytes | None:
        assert self._context is not None
        # Shamir's shares are points of a polynomial at 1, 2, …; its secret is the value at 0.
        shares = {
            revealed.member + 1: revealed.shares[member][1:]
            for revealed in self._received(Revealed)
            if revealed.shares.get(member, b"")[:1] == OF_SEED
        }
        try:
            return combine(shares, self._context.threshold)
        except FlowerExtError:
            return None

    def _received(self, kind: type[M]) -> list[M]:
        assert self._context is not None
        messages = []
        for reply in self._replies:
            for name in (records.ANSWER, records.UPDATE):
                record = reply.content.get(name)
                if isinstance(record, ArrayRecord) and SENT in record:
                    try:
                        data = record[SENT].numpy().tobytes()
                        messages.append(kind.from_bytes(data, self._context))
                    except FlowerExtError:
                        continue  # a message of another stage
        return messages

    def _signed(self, values: np.ndarray) -> np.ndarray:
        assert self._context is not None
        kind = np.int32 if self._context.bits == 32 else np.int64
        return values.view(kind).astype(np.float64)

    def _shaped(self, values: np.ndarray, like: Arrays) -> Arrays:
        flat, start, arrays = self._signed(values), 0, {}
        for name in sorted(like):
            size = like[name].size
            arrays[name] = flat[start : start + size].reshape(like[name].shape)
            start += size
        return arrays


def is_secure(message: Message) -> bool:
    """Return True for a message of the server in a secure sum."""
    return records.SECURE_SUM in message.content
