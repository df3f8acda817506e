"""A member's side of one round; `flower_ext.secure.aggregation` describes the protocol."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, ClassVar

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.aggregation.aggregation_messages import (
    KEY_BYTES,
    OF_KEY,
    OF_SEED,
    Advert,
    Delivery,
    Keys,
    MaskedInput,
    Revealed,
    SealedShares,
    UnmaskRequest,
    key_pair,
)
from flower_ext.secure.aggregation.context import RoundContext
from flower_ext.secure.aggregation.mask_streams import (
    Residues,
    apply_mask,
    channel_key,
    commitment,
    pair_mask_key,
    self_mask_key,
    share_hash,
)
from flower_ext.secure.aggregation.shamir import SHARE_BYTES, field_value, split
from flower_ext.secure.json_record import JsonRecord
from flower_ext.secure.labels import check_public, public_of

_NONCE_BYTES = 12


class MemberStage(Enum):
    """The last step that a member has taken."""

    NEW = auto()
    ADVERTISED = auto()
    SHARED = auto()
    MASKED = auto()
    UNMASKED = auto()


@dataclass(frozen=True, kw_only=True)
class MemberState(JsonRecord):
    """Everything that a member needs for its next steps, and nothing else.

    ``keys`` holds its neighbours' public keys. ``held`` holds, for each neighbour that shared, its
    shares of seed and key; they are empty if this member could not open them.
    """

    kind = "member"
    readers: ClassVar = {
        "RoundContext": RoundContext.from_plain,
        "MemberStage": MemberStage.__getitem__,
    }

    context: RoundContext
    index: int
    neighbours: tuple[int, ...]
    stage: MemberStage = MemberStage.NEW
    mask_private: bytes = b""
    channel_private: bytes = b""
    seed: bytes = b""
    request: bytes = b""
    answer: bytes = b""
    keys: Mapping[int, bytes] = field(default_factory=dict)
    held: Mapping[int, bytes] = field(default_factory=dict)

    def forgetting(self, **changes: Any) -> MemberState:
        """Return a state with the given fields, which has forgotten all other secrets."""
        return MemberState(
            context=self.context, index=self.index, neighbours=self.neighbours, **changes
        )


class Member:
    """One member of one round. Call `advertise`, `share`, `mask` and `unmask` in order, each once.

    Store `to_bytes` after each call and before its reply leaves, because a member restored from an
    older state could answer twice. A call that raises changes nothing.

    Parameters
    ----------
    context : RoundContext
        The context that the server announced.
    index : int
        Number of this member, from 0.
    neighbours : Sequence[int]
        Numbers of its neighbours, from the server.
    token_bytes : Callable[[int], bytes]
        Source of random bytes; by default the operating system.
    """

    def __init__(
        self,
        context: RoundContext,
        index: int,
        neighbours: Sequence[int],
        *,
        token_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        near = tuple(sorted(set(neighbours)))
        if not 0 <= index < context.members:
            raise InvalidValue(f"index={index}: expected 0 to {context.members - 1}")
        if index in near or not all(0 <= other < context.members for other in near):
            raise InvalidValue(f"neighbours: expected members below {context.members}, not {index}")
        if not len(neighbours) == len(near) == context.neighbours:
            raise InvalidValue(
                f"{len(near)} different neighbours: expected {context.neighbours}, "
                "the number in the context"
            )
        self._token_bytes = token_bytes
        self._state = MemberState(context=context, index=index, neighbours=near)

    @property
    def context(self) -> RoundContext:
        """The context that the server announced."""
        return self._state.context

    def __repr__(self) -> str:
        return f"Member(index={self._state.index}, stage={self._state.stage.name})"

    def to_bytes(self) -> bytes:
        """Return the member's state, with secrets in the clear. Store it on this node only."""
        return self._state.to_bytes()

    @classmethod
    def from_bytes(
        cls,
        data: bytes,
        *,
        token_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> Member:
        """Restore a member; raise `InvalidValue` for anything but a member's state."""
        state = MemberState.from_bytes(data)
        member = cls(state.context, state.index, state.neighbours, token_bytes=token_bytes)
        member._state = state
        return member

    def advertise(self) -> Advert:
        """Draw this round's secrets and return the public keys, for the server."""
        self._expect(MemberStage.NEW)
        draw = self._token_bytes
        self._state = replace(
            self._state,
            stage=MemberStage.ADVERTISED,
            mask_private=draw(KEY_BYTES),
            channel_private=draw(KEY_BYTES),
            seed=draw(KEY_BYTES),
        )
        return Advert(digest=self.context.digest, member=self._state.index, keys=self._public)

    def share(self, message: Keys) -> SealedShares:
        """Return shares of this member's secrets, each sealed for one neighbour.

        Raises
        ------
        ProtocolError
            The call is out of order, the message belongs to another round, this member's key was
            changed, or fewer neighbours than the threshold have keys.
        InvalidValue
            A key is malformed, of low order, given twice, or does not belong to a neighbour.
        """
        self._expect(MemberStage.ADVERTISED)
        context, state = self.context, self._state
        message.check(context)
        keys = dict(message.keys)
        if keys.pop(state.index, None) != self._public:
            raise ProtocolError(f"keys[{state.index}]: expected this member's own keys, unchanged")
        self._check_neighbours(set(keys))
        halves = [part for pair in (self._public, *keys.values()) for part in key_pair(pair)]
        if len(set(halves)) != len(halves):
            raise InvalidValue(
                "keys: the same key occurs twice; expected two keys of its own for each member"
            )
        for public in halves:
            check_public(public)
        points = [other + 1 for other in sorted(keys)]
        of_seed = split(state.seed, points, context.threshold, self._token_bytes)
        of_key = split(state.mask_private, points, context.threshold, self._token_bytes)
        sealed = {}
        for other in sorted(keys):
            nonce = self._token_bytes(_NONCE_BYTES)
            text = of_seed[other + 1] + of_key[other + 1]
            cipher = self._cipher(keys[other], sender=state.index, receiver=other)
            sealed[other] = nonce + cipher.encrypt(nonce, text, context.digest)
            for kind, share in ((OF_SEED, of_seed[other + 1]), (OF_KEY, of_key[other + 1])):
                sealed[other] += share_hash(
                    context.digest, share, owner=state.index, holder=other, kind=kind
                )
        self._state = replace(state, stage=MemberStage.SHARED, keys=keys)
        hashed = commitment(context.digest, state.seed, state.index)
        return SealedShares(
            digest=context.digest, member=state.index, commitment=hashed, sealed=sealed
        )

    def mask(self, message: Delivery, values: Residues) -> MaskedInput:
        """Return ``values`` under the member's own mask and a mask for each neighbour that shared.

        The member then forgets its own secrets, so that it can mask nothing else. Shares that it
        cannot open do not end the round: the member masks as usual, and later reveals no share of
        the neighbour that sent them. The server uses the shares that other members hold, and learns
        from the missing one that it was sealed badly, by the neighbour or by the server itself.

        Parameters
        ----------
        message : Delivery
            The shares that the neighbours sealed for this member.
        values : numpy.ndarray
            Shape (length,), uint32 or uint64 according to the context's bits. It stays unchanged.

        Raises
        ------
        ProtocolError
            The call is out of order or repeated, the message belongs to another round, or fewer
            neighbours than the threshold shared.
        InvalidValue
            Shares do not come from a neighbour, or ``values`` has a wrong shape or type.
        """
        self._expect(MemberStage.SHARED)
        context, state = self.context, self._state
        message.check(context)
        if values.shape != (context.length,) or values.dtype != context.dtype:
            raise InvalidValue(
                f"values of {values.dtype} in shape {values.shape}: expected {context.dtype} in "
                f"shape {(context.length,)}"
            )
        self._check_neighbours(set(message.sealed))
        if not set(message.sealed) <= set(state.keys):
            raise ProtocolError("sealed: expected shares only from neighbours with known keys")
        held = {other: self._open(other, sealed) for other, sealed in message.sealed.items()}
        masked: Residues = np.array(values, dtype=context.dtype)
        apply_mask(self_mask_key(context.digest, state.seed, state.index), masked)
        for other in held:
            key = pair_mask_key(
                context.digest,
                state.mask_private,
                member=state.index,
                other=other,
                other_public=state.keys[other][:KEY_BYTES],
            )
            apply_mask(key, masked, subtract=other < state.index)
        self._state = state.forgetting(stage=MemberStage.MASKED, held=held)
        return MaskedInput(digest=context.digest, member=state.index, values=masked.tobytes())

    def unmask(self, request: UnmaskRequest) -> Revealed:
        """Return seed shares of neighbours that answered and key shares of those that were lost.

        The member then forgets all other shares. It repeats its answer to the same request.

        Raises
        ------
        ProtocolError
            The call is out of order; another request was answered before; fewer members answered
            than the context's least; or the request is not for exactly the neighbours that shared
            secrets with this member.
        """
        context, state = self.context, self._state
        request.check(context)
        if state.stage is MemberStage.UNMASKED:
            if request.to_bytes() != state.request:
                raise ProtocolError(
                    "request: expected the one that this member answered before, because two "
                    "answers could reveal both secrets of one neighbour"
                )
            return Revealed.from_bytes(state.answer, context)
        self._expect(MemberStage.MASKED)
        if request.answers < context.least_answers:
            raise ProtocolError(
                f"{request.answers} members answered: expected at least "
                f"least_answers={context.least_answers}"
            )
        if set(request.kinds) != set(state.held):
            raise ProtocolError(
                f"neighbours {sorted(request.kinds)}: expected all that shared secrets, "
                f"{sorted(state.held)}"
            )
        shares = {}
        for other, both in state.held.items():
            if both:
                kind = request.kinds[other]
                share = both[:SHARE_BYTES] if kind == OF_SEED else both[SHARE_BYTES:]
                shares[other] = kind + share
        reply = Revealed(digest=context.digest, member=state.index, shares=shares)
        self._state = state.forgetting(
            stage=MemberStage.UNMASKED, request=request.to_bytes(), answer=reply.to_bytes()
        )
        return reply

    @property
    def _public(self) -> bytes:
        return public_of(self._state.mask_private) + public_of(self._state.channel_private)

    def _expect(self, stage: MemberStage) -> None:
        if self._state.stage is not stage:
            raise ProtocolError(
                f"member {self._state.index} is {self._state.stage.name}: expected {stage.name}; "
                "take each step once, and send the stored reply if it is needed again"
            )

    def _check_neighbours(self, members: set[int]) -> None:
        neighbours = set(self._state.neighbours)
        if not members <= neighbours:
            raise InvalidValue(f"members {sorted(members - neighbours)}: expected only neighbours")
        if len(members) < self.context.threshold:
            raise ProtocolError(
                f"{len(members)} neighbours: expected at least threshold={self.context.threshold}"
            )

    def _cipher(self, public: bytes, *, sender: int, receiver: int) -> ChaCha20Poly1305:
        private, other = self._state.channel_private, public[KEY_BYTES:]
        return ChaCha20Poly1305(
            channel_key(self.context.digest, private, other, sender=sender, receiver=receiver)
        )

    def _open(self, other: int, sealed: bytes) -> bytes:
        """Return the shares of seed and key from a neighbour, or nothing if they are no shares."""
        cipher = self._cipher(self._state.keys[other], sender=other, receiver=self._state.index)
        nonce, text = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            both = cipher.decrypt(nonce, text, self.context.digest)
            field_value(both[:SHARE_BYTES])
            field_value(both[SHARE_BYTES:])
        except (InvalidTag, InvalidValue):
            return b""
        return both
