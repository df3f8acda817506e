"""The server's side of one round; `flower_ext.secure.aggregation` describes the protocol."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

import numpy as np

from flower_ext.errors import IncompleteRound, InvalidValue, ProtocolError
from flower_ext.secure.aggregation.context import RoundContext
from flower_ext.secure.aggregation.masks import (
    Residues,
    apply_mask,
    commitment,
    pair_mask_key,
    public_of,
    self_mask_key,
)
from flower_ext.secure.aggregation.messages import (
    KEY_BYTES,
    OF_KEY,
    OF_SEED,
    Advert,
    Delivery,
    Keys,
    MaskedInput,
    Question,
    Revealed,
    SealedShares,
)
from flower_ext.secure.aggregation.shamir import combine, field_value

_STAGES = ("adverts", "shares", "masked inputs", "revealed shares", "nothing")
M = TypeVar("M", Advert, SealedShares, MaskedInput, Revealed)


class SumServer:
    """The server of one round.

    A round has four stages. In each, the server collects messages in any order and then closes the
    stage: `add_advert` and `keys`, `add_shares` and `deliveries`, `add_masked` and `question`,
    `add_revealed` and `total`. It refuses a member's second message of a stage, and messages of a
    closed stage. A refused message changes nothing, and the caller continues without it. The server
    adds masked vectors up as they arrive and keeps none.

    Parameters
    ----------
    context : RoundContext
        The context of all members.
    """

    def __init__(self, context: RoundContext) -> None:
        self._context = context
        self._stage = 0
        self._heard: set[int] = set()
        self._expected: Collection[int] = range(context.members)
        self._keys: dict[int, bytes] = {}
        self._shared: dict[int, SealedShares] = {}
        self._answered: set[int] = set()
        self._sharing: set[int] = set()
        self._revealed: dict[tuple[int, bytes], dict[int, bytes]] = {}
        self._sum: Residues = np.zeros(context.length, dtype=context.dtype)

    @property
    def answered(self) -> frozenset[int]:
        """Return the members whose vectors are in the sum."""
        return frozenset(self._answered)

    def add_advert(self, message: Advert) -> None:
        """Take a member's public keys.

        Raises
        ------
        ProtocolError
            The message is late, early, repeated, from another round, or from a member that left.
        InvalidValue
            The message is malformed, or holds a key of another member.
        """
        self._check(0, message)
        pair = {message.keys[:KEY_BYTES], message.keys[KEY_BYTES:]}
        known = {key[at : at + KEY_BYTES] for key in self._keys.values() for at in (0, KEY_BYTES)}
        if len(pair) < 2 or pair & known:
            raise InvalidValue(
                f"keys of member {message.member}: expected two keys that nobody else sent"
            )
        self._keys[message.member] = message.keys
        self._heard.add(message.member)

    def keys(self) -> dict[int, Keys]:
        """Close the first stage, and return the keys that each remaining member needs.

        Raises
        ------
        IncompleteRound
            Fewer members than ``least_answers`` are left. Members with fewer neighbours than the
            threshold do not count.
        """
        self._require(0)
        staying = self._close(set(self._keys))
        return {
            member: Keys(
                digest=self._context.digest,
                keys={one: self._keys[one] for one in (member, *self._near(member, staying))},
            )
            for member in staying
        }

    def add_shares(self, message: SealedShares) -> None:
        """Take a member's sealed shares; raise the errors of `add_advert`."""
        self._check(1, message)
        expected = set(self._near(message.member, self._expected))
        if set(message.sealed) != expected:
            raise InvalidValue(
                f"shares of member {message.member}: expected shares for each of {sorted(expected)}"
            )
        self._shared[message.member] = message
        self._heard.add(message.member)

    def deliveries(self) -> dict[int, Delivery]:
        """Close the second stage, and return the shares that neighbours sealed for each member.

        Raises
        ------
        IncompleteRound
            As `keys`.
        """
        self._require(1)
        self._sharing = self._close(set(self._shared))
        return {
            member: Delivery(
                digest=self._context.digest,
                sealed={
                    one: self._shared[one].sealed[member]
                    for one in self._near(member, self._sharing)
                },
            )
            for member in self._sharing
        }

    def add_masked(self, message: MaskedInput) -> None:
        """Add a member's masked vector to the sum; raise the errors of `add_advert`."""
        self._check(2, message)
        self._sum += np.frombuffer(message.values, dtype=self._context.dtype)
        self._answered.add(message.member)
        self._heard.add(message.member)

    def question(self) -> Question:
        """Close the third stage, and return the question for every member that answered.

        Raises
        ------
        IncompleteRound
            Fewer members answered than ``least_answers``, so the round is discarded.
        """
        self._require(2)
        self._enough(len(self._answered))
        self._next(set(self._answered))
        lost = self._sharing - self._answered
        return Question(
            digest=self._context.digest,
            answered=dict.fromkeys(sorted(self._answered), b""),
            lost=dict.fromkeys(sorted(lost), b""),
        )

    def add_revealed(self, message: Revealed) -> None:
        """Take the shares that a member reveals; raise the errors of `add_advert`."""
        self._check(3, message)
        expected = {
            other: OF_SEED if other in self._answered else OF_KEY
            for other in self._near(message.member, self._sharing)
        }
        if {other: share[:1] for other, share in message.shares.items()} != expected:
            raise InvalidValue(
                f"shares of member {message.member}: expected the kinds in the server's question"
            )
        for share in message.shares.values():
            field_value(share[1:])
        for other, share in message.shares.items():
            place = self._revealed.setdefault((other, share[:1]), {})
            place[message.member + 1] = share[1:]
        self._heard.add(message.member)

    def total(self) -> Residues:
        """Close the round: remove the masks and return the sum of the vectors that arrived.

        Returns
        -------
        numpy.ndarray
            Shape (length,): the sum over `answered`, modulo 2^32 or 2^64.

        Raises
        ------
        IncompleteRound
            A secret cannot be rebuilt, because too few shares of it arrived or a share is wrong.
            The round is discarded.
        """
        self._require(3)
        self._next(set())
        context, digest = self._context, self._context.digest
        seeds = {member: self._rebuild(member, OF_SEED) for member in sorted(self._answered)}
        lost = sorted(self._sharing - self._answered)
        privates = {member: self._rebuild(member, OF_KEY) for member in lost}
        for member, seed in seeds.items():
            apply_mask(self_mask_key(digest, seed, member), self._sum, subtract=True)
        for member, private in privates.items():
            for other in self._near(member, self._answered):
                public = self._keys[other][:KEY_BYTES]
                key = pair_mask_key(
                    digest, private, member=member, other=other, other_public=public
                )
                # The neighbour added this mask if its number is lower, else it subtracted it.
                apply_mask(key, self._sum, subtract=other < member)
        self._revealed.clear()
        return self._sum.astype(np.uint32 if context.bits == 32 else np.uint64, copy=False)

    def _rebuild(self, member: int, kind: bytes) -> bytes:
        shares = self._revealed.get((member, kind), {})
        what = "seed" if kind == OF_SEED else "mask key"
        if len(shares) < self._context.threshold:
            raise IncompleteRound(
                f"{what} of member {member}: {len(shares)} shares, expected "
                f"{self._context.threshold}; the round is discarded"
            )
        try:
            secret = combine(shares, self._context.threshold)
        except InvalidValue:
            secret = b""
        if kind == OF_SEED:
            expected = self._shared[member].commitment
            right = bool(secret) and expected == commitment(self._context.digest, secret, member)
        else:
            right = bool(secret) and public_of(secret) == self._keys[member][:KEY_BYTES]
        if not right:
            raise IncompleteRound(
                f"{what} of member {member}: the shares do not fit what the member published; "
                "the round is discarded"
            )
        return secret

    def _near(self, member: int, among: Collection[int]) -> list[int]:
        return [other for other in self._context.graph[member] if other in among]

    def _close(self, left: set[int]) -> set[int]:
        """Drop members with too few neighbours until all have enough; open the next stage."""
        while True:
            few = {m for m in left if len(self._near(m, left)) < self._context.threshold}
            if not few:
                break
            left = left - few
        self._enough(len(left))
        self._next(left)
        return left

    def _enough(self, count: int) -> None:
        if count < self._context.least_answers:
            raise IncompleteRound(
                f"{count} members are left: expected at least "
                f"least_answers={self._context.least_answers}; the round is discarded"
            )

    def _next(self, expected: set[int]) -> None:
        self._stage += 1
        self._heard, self._expected = set(), expected

    def _require(self, stage: int) -> None:
        if self._stage != stage:
            raise ProtocolError(f"{_STAGES[stage]}: the server expects {_STAGES[self._stage]} now")

    def _check(self, stage: int, message: M) -> None:
        message.check(self._context)
        self._require(stage)
        if message.member in self._heard:
            raise ProtocolError(f"member {message.member} sent its {_STAGES[stage]} before")
        if message.member not in self._expected:
            raise ProtocolError(f"member {message.member} left this round before")
