"""The server's side of one round; `flower_ext.secure.aggregation` describes the protocol."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from enum import Enum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from flower_ext.errors import IncompleteRound, InvalidValue, ProtocolError
from flower_ext.secure.aggregation.aggregation_messages import (
    HASH_BYTES,
    OF_KEY,
    OF_SEED,
    SEALED_BYTES,
    Advert,
    Delivery,
    Keys,
    MaskedInput,
    Revealed,
    SealedShares,
    UnmaskRequest,
    key_pair,
)
from flower_ext.secure.aggregation.context import Graph, Invitation, RoundContext, graph_digest
from flower_ext.secure.aggregation.mask_streams import (
    Residues,
    apply_mask,
    commitment,
    pair_mask_key,
    self_mask_key,
    share_hash,
)
from flower_ext.secure.aggregation.shamir import combine
from flower_ext.secure.keys_and_ciphers import check_public, public_of

Answer: TypeAlias = Advert | SealedShares | MaskedInput | Revealed
_STAGES: Mapping[type[Answer], str] = {
    Advert: "adverts",
    SealedShares: "shares",
    MaskedInput: "masked inputs",
    Revealed: "revealed shares",
}
"""Messages that the server takes in each stage, with their names in errors."""


class ShareFault(Enum):
    """Fault in a member's shares. The value describes the fault; "it" and "its" mean the member."""

    UNOPENED = "its sealed shares could not be opened by {neighbors}"
    WRONG = (
        "it revealed wrong shares of the secrets of {neighbors}, unless these members sealed "
        "wrong shares"
    )
    UNFIT = "no secret fits both its shares and what it sent before, so the round is discarded"


class SumServer:
    """The server of one round.

    A round has four stages. `add` takes the members' messages of a stage, and a further method
    closes the stage: `keys`, `deliveries`, `unmask_requests` and `total`. If too few members are
    left, the method that closes the stage raises an `IncompleteRound`, and the round is discarded.

    Attributes
    ----------
    awaited : type
        Class of the messages that the open stage takes; None after the last stage.
    faults : dict[tuple[int, ShareFault], set[int]]
        Faults that the server found so far. A key is a member and the fault in its shares. The
        value is the set of members to fill in for ``{neighbors}`` in the text of the fault.
    """

    def __init__(self, context: RoundContext, graph: Graph) -> None:
        if graph_digest(graph) != context.graph or len(graph) != context.members:
            raise InvalidValue("graph: expected the graph whose digest is context.graph")
        self._context, self._graph = context, graph
        self.faults: dict[tuple[int, ShareFault], set[int]] = {}
        self._stages = iter(_STAGES)
        self.awaited: type[Answer] | None = next(self._stages)
        self._senders: set[int] = set()
        self._expected: Collection[int] = range(context.members)
        self._keys: dict[int, bytes] = {}
        self._known_keys: set[bytes] = set()
        self._shared: dict[int, SealedShares] = {}
        self._answered: set[int] = set()
        self._sharing: set[int] = set()
        self._revealed: dict[tuple[int, bytes], dict[int, bytes]] = {}
        self._sum: Residues = np.zeros(context.length, dtype=context.dtype)

    @property
    def answered(self) -> frozenset[int]:
        """The members whose vectors are in the sum."""
        return frozenset(self._answered)

    def invitations(self) -> dict[int, Invitation]:
        """Return the first message to each member."""
        return {
            member: Invitation(context=self._context, index=member, neighbors=tuple(neighbors))
            for member, neighbors in enumerate(self._graph)
        }

    def receive(self, member: int, data: bytes) -> None:
        """Take the bytes of a member's message of the open stage; see `add`.

        Raises
        ------
        ProtocolError
            As in `add`, or no stage is open.
        InvalidValue
            The bytes are malformed, or the message is in the name of another member.
        """
        if self.awaited is None:
            raise ProtocolError("a message after the last stage: expected none")
        message = self.awaited.from_bytes(data, self._context)
        if message.member != member:
            raise InvalidValue(
                f"member={message.member}: expected {member}, the number of the client that sent "
                "the message"
            )
        self.add(message)

    def add(self, message: Answer) -> None:
        """Take a member's message of the open stage. Messages may come in any order.

        The server adds masked vectors up as they arrive and keeps none. It records wrong and
        missing shares in `faults`. A refused message changes nothing, and the caller continues
        without it.

        Raises
        ------
        ProtocolError
            The message is of a different round or stage, the member has already sent a message in
            this stage, or the member has left the round.
        InvalidValue
            The content is malformed.
        """
        message.check(self._context)
        self._require(type(message))
        name = _STAGES[type(message)]
        if message.member in self._senders:
            raise ProtocolError(f"member {message.member} has already sent its {name}")
        if message.member not in self._expected:
            raise ProtocolError(f"member {message.member} has already left this round")
        if isinstance(message, Advert):
            self._take_keys(message)
        elif isinstance(message, SealedShares):
            self._take_shares(message)
        elif isinstance(message, MaskedInput):
            self._sum += np.frombuffer(message.values, dtype=self._context.dtype)
            self._answered.add(message.member)
        else:
            self._take_revealed(message)
        self._senders.add(message.member)

    def keys(self) -> dict[int, Keys]:
        """Close the first stage, and return the keys that each remaining member needs.

        Two kinds of members leave the round: members that sent no keys, and members with fewer
        remaining neighbours than the threshold.
        """
        staying = self._close(Advert, set(self._keys))
        return {
            member: Keys(
                digest=self._context.digest,
                keys={one: self._keys[one] for one in (member, *self._near(member, staying))},
            )
            for member in staying
        }

    def deliveries(self) -> dict[int, Delivery]:
        """Close the second stage as `keys` does; return the shares sealed for each member."""
        self._sharing = self._close(SealedShares, set(self._shared))
        return {
            member: Delivery(
                digest=self._context.digest,
                sealed={
                    one: self._shared[one].sealed[member][:SEALED_BYTES]
                    for one in self._near(member, self._sharing)
                },
            )
            for member in self._sharing
        }

    def unmask_requests(self) -> dict[int, UnmaskRequest]:
        """Close the third stage, and return the request for every member that answered."""
        self._next(MaskedInput, set(self._answered))
        return {
            member: UnmaskRequest(
                digest=self._context.digest, answers=len(self._answered), kinds=self._kinds(member)
            )
            for member in sorted(self._answered)
        }

    def total(self) -> NDArray[np.int64]:
        """Close the round: remove the masks, and return the sum over `answered`, shape (length,).

        The server knows each number modulo 2^bits, and returns the possible value nearest to 0.

        Raise an `IncompleteRound` if too few valid shares of a secret arrived, or if the rebuilt
        secret does not fit the hash or public key that the member sent.
        """
        self._require(Revealed)
        self.awaited = None
        digest = self._context.digest
        # Rebuild only one secret of each member: with both, the server could unmask its vector.
        seeds = {member: self._rebuild(member, OF_SEED) for member in sorted(self._answered)}
        lost = sorted(self._sharing - self._answered)
        privates = {member: self._rebuild(member, OF_KEY) for member in lost}
        for member, seed in seeds.items():
            apply_mask(self_mask_key(digest, seed, member), self._sum, subtract=True)
        for member, private in privates.items():
            for other in self._near(member, self._answered):
                public = key_pair(self._keys[other])[0]
                key = pair_mask_key(
                    digest, private, member=member, other=other, other_public=public
                )
                # The neighbour added this mask if its number is lower, else it subtracted it.
                apply_mask(key, self._sum, subtract=other < member)
        self._revealed.clear()
        return self._sum.view(f"<i{self._sum.itemsize}").astype(np.int64)

    def _take_keys(self, message: Advert) -> None:
        pair = set(key_pair(message.keys))
        if len(pair) < 2 or pair & self._known_keys:
            raise InvalidValue(
                f"keys of member {message.member}: expected two different keys that no other "
                "member sent"
            )
        for public in pair:
            check_public(public)
        self._known_keys |= pair
        self._keys[message.member] = message.keys

    def _take_shares(self, message: SealedShares) -> None:
        expected = set(self._near(message.member, self._expected))
        if set(message.sealed) != expected:
            raise InvalidValue(
                f"shares of member {message.member}: expected shares for exactly its neighbours "
                f"{sorted(expected)}"
            )
        self._shared[message.member] = message

    def _take_revealed(self, message: Revealed) -> None:
        kinds = self._kinds(message.member)
        if not {o: share[:1] for o, share in message.shares.items()}.items() <= kinds.items():
            raise InvalidValue(
                f"shares of member {message.member}: expected only the kinds of share that the "
                "server requested"
            )
        for other, kind in kinds.items():
            if other not in message.shares:
                self.faults.setdefault((other, ShareFault.UNOPENED), set()).add(message.member)
            elif self._is_right(message.member, other, message.shares[other]):
                shares = self._revealed.setdefault((other, kind), {})
                shares[message.member + 1] = message.shares[other][1:]
            else:
                self.faults.setdefault((message.member, ShareFault.WRONG), set()).add(other)

    def _rebuild(self, member: int, kind: bytes) -> bytes:
        shares = self._revealed.get((member, kind), {})
        what = "seed" if kind == OF_SEED else "mask key"
        if len(shares) < self._context.threshold:
            raise IncompleteRound(
                f"{what} of member {member}: expected at least {self._context.threshold} valid "
                f"shares, but {len(shares)} arrived; the round is discarded"
            )
        # Hashes check each share. The member may still have shared a different secret than it used.
        with suppress(InvalidValue):  # raised if the shares rebuild no secret of 32 bytes
            secret = combine(shares, self._context.threshold)
            if self._fits(member, kind, secret):
                return secret
        self.faults[member, ShareFault.UNFIT] = set()
        raise IncompleteRound(
            f"{what} of member {member}: expected shares of a secret that fits the hash or public "
            "key that the member sent; the round is discarded"
        )

    def _is_right(self, holder: int, owner: int, revealed: bytes) -> bool:
        """Return True if the share that ``holder`` revealed has the hash that ``owner`` sent."""
        kind, share = revealed[:1], revealed[1:]
        start = SEALED_BYTES + HASH_BYTES * (kind == OF_KEY)
        published = self._shared[owner].sealed[holder][start : start + HASH_BYTES]
        digest = self._context.digest
        return published == share_hash(digest, share, owner=owner, holder=holder, kind=kind)

    def _fits(self, member: int, kind: bytes, secret: bytes) -> bool:
        """Return True if a rebuilt secret fits the hash or public key that the member sent."""
        if kind == OF_SEED:
            published = self._shared[member].commitment
            return published == commitment(self._context.digest, secret, member)
        return public_of(secret) == key_pair(self._keys[member])[0]

    def _kinds(self, member: int) -> dict[int, bytes]:
        """Return the kind of share to reveal for each neighbour of ``member`` that sent shares."""
        return {
            other: OF_SEED if other in self._answered else OF_KEY
            for other in self._near(member, self._sharing)
        }

    def _near(self, member: int, among: Collection[int]) -> list[int]:
        return [other for other in self._graph[member] if other in among]

    def _close(self, stage: type[Answer], left: set[int]) -> set[int]:
        """Open the next stage for the remaining members with enough neighbours; return them."""
        threshold = self._context.threshold
        while few := {m for m in left if len(self._near(m, left)) < threshold}:
            left = left - few  # a member that leaves may leave its neighbours with too few
        self._next(stage, left)
        return left

    def _next(self, stage: type[Answer], expected: set[int]) -> None:
        """Open the stage after ``stage`` for the ``expected`` members, if these are enough."""
        self._require(stage)
        if len(expected) < self._context.least_answers:
            raise IncompleteRound(
                f"{len(expected)} members are left: expected at least "
                f"least_answers={self._context.least_answers}; the round is discarded"
            )
        self.awaited = next(self._stages)
        self._senders, self._expected = set(), expected

    def _require(self, kind: type[Answer]) -> None:
        if self.awaited is not kind:
            awaited = "nothing" if self.awaited is None else _STAGES[self.awaited]
            raise ProtocolError(
                f"{_STAGES[kind]} are out of order: the server now expects {awaited}"
            )
