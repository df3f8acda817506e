"""A member's side of one round; `flower_ext.secure.aggregation` describes the protocol."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.aggregation.context import RoundContext
from flower_ext.secure.aggregation.masks import (
    Residues,
    apply_mask,
    channel_key,
    commitment,
    pair_mask_key,
    public_of,
    self_mask_key,
)
from flower_ext.secure.aggregation.member_state import MemberState, Stage
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
from flower_ext.secure.aggregation.shamir import SHARE_BYTES, field_value, split

_NONCE_BYTES = 12


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
    token_bytes : Callable[[int], bytes]
        Source of random bytes; by default the operating system.
    """

    def __init__(
        self,
        context: RoundContext,
        index: int,
        *,
        token_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        if not 0 <= index < context.members:
            raise InvalidValue(f"index={index}: expected 0 to {context.members - 1}")
        self._context = context
        self._index = index
        self._token_bytes = token_bytes
        self._state = MemberState()

    def __repr__(self) -> str:
        return f"Member(index={self._index}, stage={self._state.stage.name})"

    def to_bytes(self) -> bytes:
        """Return the member's state, with secrets in the clear. Store it on this node only."""
        return self._state.encode(self._context, self._index)

    @classmethod
    def from_bytes(
        cls,
        data: bytes,
        context: RoundContext,
        *,
        token_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> Member:
        """Restore a member; raise `InvalidValue` for a state of another round."""
        state, index = MemberState.decode(data, context)
        member = cls(context, index, token_bytes=token_bytes)
        member._state = state
        return member

    def advertise(self) -> Advert:
        """Draw this round's secrets and return the public keys, for the server."""
        self._expect(Stage.NEW)
        draw = self._token_bytes
        self._state = MemberState(
            stage=Stage.ADVERTISED,
            mask_private=draw(KEY_BYTES),
            channel_private=draw(KEY_BYTES),
            seed=draw(KEY_BYTES),
        )
        return Advert(digest=self._context.digest, member=self._index, keys=self._public)

    def share(self, message: Keys) -> SealedShares:
        """Return shares of this member's secrets, each sealed for one neighbour.

        Raises
        ------
        ProtocolError
            The call is out of order, the message belongs to another round, this member's key was
            changed, or fewer neighbours than the threshold have keys.
        InvalidValue
            A key is malformed, given twice, or does not belong to a neighbour.
        """
        self._expect(Stage.ADVERTISED)
        message.check(self._context)
        keys = dict(message.keys)
        if keys.pop(self._index, None) != self._public:
            raise ProtocolError(f"keys[{self._index}]: expected this member's own keys, unchanged")
        self._check_neighbours(set(keys))
        parts = [self._public, *keys.values()]
        halves = [part[at : at + KEY_BYTES] for part in parts for at in (0, KEY_BYTES)]
        if len(set(halves)) != len(halves):
            raise InvalidValue(
                "keys: the same key occurs twice; expected two keys of its own for each member"
            )
        state, threshold = self._state, self._context.threshold
        points = [other + 1 for other in sorted(keys)]
        of_seed = split(state.seed, points, threshold, self._token_bytes)
        of_key = split(state.mask_private, points, threshold, self._token_bytes)
        sealed = {}
        for other in sorted(keys):
            nonce = self._token_bytes(_NONCE_BYTES)
            text = of_seed[other + 1] + of_key[other + 1]
            cipher = self._cipher(keys[other], sender=self._index, receiver=other)
            sealed[other] = nonce + cipher.encrypt(nonce, text, self._context.digest)
        self._state = state.after(stage=Stage.SHARED, keys=keys)
        hashed = commitment(self._context.digest, state.seed, self._index)
        return SealedShares(
            digest=self._context.digest, member=self._index, commitment=hashed, sealed=sealed
        )

    def mask(self, message: Delivery, values: Residues) -> MaskedInput:
        """Return ``values`` under the member's own mask and a mask for each neighbour that shared.

        The member then forgets its own secrets, so that it can mask nothing else.

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
            Shares were changed or do not come from a neighbour, or ``values`` has a wrong shape or
            type.
        """
        self._expect(Stage.SHARED)
        context, state = self._context, self._state
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
        apply_mask(self_mask_key(context.digest, state.seed, self._index), masked)
        for other in held:
            key = pair_mask_key(
                context.digest,
                state.mask_private,
                member=self._index,
                other=other,
                other_public=state.keys[other][:KEY_BYTES],
            )
            apply_mask(key, masked, subtract=other < self._index)
        self._state = MemberState(stage=Stage.MASKED, held=held)
        return MaskedInput(digest=context.digest, member=self._index, values=masked.tobytes())

    def unmask(self, question: Question) -> Revealed:
        """Return seed shares of neighbours that answered and key shares of those that were lost.

        The member then forgets all other shares. It repeats its answer to the same question.

        Raises
        ------
        ProtocolError
            The call is out of order; another question was answered before; a member is named as
            both answered and lost; this member is not named as answered; fewer members answered
            than the context's least; or a named neighbour shared nothing with this member.
        """
        question.check(self._context)
        state, answered, lost = self._state, set(question.answered), set(question.lost)
        if state.stage is Stage.UNMASKED:
            if question.to_bytes() != state.question:
                raise ProtocolError(
                    "question: expected the one that this member answered before, because two "
                    "answers could reveal both secrets of one neighbour"
                )
            return Revealed.from_bytes(state.answer, self._context)
        self._expect(Stage.MASKED)
        if answered & lost:
            raise ProtocolError(
                f"members {sorted(answered & lost)} are named as both answered and lost: expected "
                "only one of the two"
            )
        if len(answered) < self._context.least_answers:
            raise ProtocolError(
                f"{len(answered)} members answered: expected at least "
                f"least_answers={self._context.least_answers}"
            )
        if self._index not in answered:
            raise ProtocolError(f"answered: expected member {self._index} in it, which answered")
        named = (answered | lost) & set(self._context.graph[self._index])
        if named != set(state.held):
            raise ProtocolError(
                f"neighbours {sorted(named)}: expected all that shared, {sorted(state.held)}"
            )
        shares = {}
        for other, both in state.held.items():
            if other in answered:
                shares[other] = OF_SEED + both[:SHARE_BYTES]
            else:
                shares[other] = OF_KEY + both[SHARE_BYTES:]
        reply = Revealed(digest=self._context.digest, member=self._index, shares=shares)
        self._state = MemberState(
            stage=Stage.UNMASKED, question=question.to_bytes(), answer=reply.to_bytes()
        )
        return reply

    @property
    def _public(self) -> bytes:
        return public_of(self._state.mask_private) + public_of(self._state.channel_private)

    def _expect(self, stage: Stage) -> None:
        if self._state.stage is not stage:
            raise ProtocolError(
                f"member {self._index} is {self._state.stage.name}: expected {stage.name}; take "
                "each step once, and send the stored reply if it is needed again"
            )

    def _check_neighbours(self, found: set[int]) -> None:
        neighbours = set(self._context.graph[self._index])
        if not found <= neighbours:
            raise InvalidValue(f"members {sorted(found - neighbours)}: expected only neighbours")
        if len(found) < self._context.threshold:
            raise ProtocolError(
                f"{len(found)} neighbours: expected at least threshold={self._context.threshold}"
            )

    def _cipher(self, public: bytes, *, sender: int, receiver: int) -> ChaCha20Poly1305:
        private, other = self._state.channel_private, public[KEY_BYTES:]
        digest = self._context.digest
        return ChaCha20Poly1305(
            channel_key(digest, private, other, sender=sender, receiver=receiver)
        )

    def _open(self, other: int, sealed: bytes) -> bytes:
        cipher = self._cipher(self._state.keys[other], sender=other, receiver=self._index)
        nonce, text = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            both = cipher.decrypt(nonce, text, self._context.digest)
        except InvalidTag as error:
            raise InvalidValue(
                f"shares from member {other}: expected shares sealed for member {self._index}"
            ) from error
        field_value(both[:SHARE_BYTES])
        field_value(both[SHARE_BYTES:])
        return both
