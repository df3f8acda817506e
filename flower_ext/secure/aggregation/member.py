"""A member's side of one round; `flower_ext.secure.aggregation` describes the protocol."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.json_record import JsonRecord
from flower_ext.secure.aggregation.aggregation_messages import (
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
from flower_ext.secure.aggregation.context import Invitation, RoundContext
from flower_ext.secure.aggregation.identities import Identities
from flower_ext.secure.aggregation.mask_streams import (
    Residues,
    apply_mask,
    channel_key,
    commitment,
    pair_mask_key,
    self_mask_key,
    share_hash,
)
from flower_ext.secure.aggregation.shamir import SHARE_BYTES, field_value, split_secret
from flower_ext.secure.keys_and_ciphers import KEY_BYTES, check_public, decrypt, encrypt, public_of


class MemberStage(Enum):
    """The last step that a member has taken."""

    NEW = auto()
    ADVERTISED = auto()
    SHARED = auto()
    MASKED = auto()
    UNMASKED = auto()


@dataclass(kw_only=True, repr=False)
class Member(JsonRecord):
    """One member of one round. Call `advertise`, `share`, `mask` and `unmask` in order, each once.

    After each call, store the bytes of `to_bytes` before you send the call's reply. A member that
    is restored from an older state could answer one message in two ways. The bytes hold secrets
    without encryption: store them on this node only. A call that raises an error changes nothing.
    A call out of order, or with a different round's message, raises a `ProtocolError`. Give
    ``identities`` in a signed round, and only there: otherwise `advertise` and `share` raise a
    `ProtocolError`.

    A new member has only the server's ``invitation``. Each step fills fields for later steps, and
    `from_bytes` restores all fields. ``keys`` maps each neighbour to its public keys. ``held``
    maps each neighbour to the shares of its seed and mask key that this member received. The shares
    are empty bytes if this member could not open them.
    """

    kind = "member"

    invitation: Invitation
    stage: MemberStage = MemberStage.NEW
    mask_private: bytes = b""
    channel_private: bytes = b""
    seed: bytes = b""
    request: bytes = b""
    answer: bytes = b""
    keys: Mapping[int, bytes] = field(default_factory=dict)
    held: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def context(self) -> RoundContext:
        """The context that the server announced."""
        return self.invitation.context

    @property
    def index(self) -> int:
        """Number of this member, from 0."""
        return self.invitation.index

    def __repr__(self) -> str:
        return f"Member(index={self.index}, stage={self.stage.name})"

    def advertise(self, *, identities: Identities | None = None) -> Advert:
        """Draw this round's secrets and return the public keys, for the server."""
        self._expect(MemberStage.NEW)
        self._check_signed(identities)
        mask_private, channel_private, seed = (secrets.token_bytes(KEY_BYTES) for _ in range(3))
        keys = public_of(mask_private) + public_of(channel_private)
        if identities is not None:
            keys += identities.sign(self.context, self.index, keys)
        advert = Advert(digest=self.context.digest, member=self.index, keys=keys)
        # Only now, when no step can fail any more, may the member change.
        self.stage, self.seed = MemberStage.ADVERTISED, seed
        self.mask_private, self.channel_private = mask_private, channel_private
        return advert

    def share(self, message: Keys, *, identities: Identities | None = None) -> SealedShares:
        """Return shares of this member's secrets, each sealed for one neighbour.

        Raises
        ------
        ProtocolError
            The message has different keys for this member than this member sent, fewer neighbours
            than the threshold sent keys, or a neighbour's signature is missing, wrong or not
            trusted.
        InvalidValue
            A key is malformed, of low order, given twice, or does not belong to a neighbour.
        """
        self._expect(MemberStage.ADVERTISED)
        context, index = self.context, self.index
        message.check(context)
        keys = dict(message.keys)
        self._check_signed(identities)
        if b"".join(key_pair(keys.pop(index, b""))) != self._public:
            raise ProtocolError(
                f"keys[{index}]: expected the keys that this member sent, unchanged"
            )
        self._check_neighbors(set(keys))
        if identities is not None:
            identities.check(context, keys)
        halves = [part for pair in (self._public, *keys.values()) for part in key_pair(pair)]
        if len(set(halves)) != len(halves):
            raise InvalidValue(
                "keys: the same key occurs twice; expected two different keys for each member"
            )
        for public in halves:
            check_public(public)
        points = [other + 1 for other in sorted(keys)]
        of_seed = split_secret(self.seed, points, context.threshold)
        of_key = split_secret(self.mask_private, points, context.threshold)
        sealed = {}
        for other in sorted(keys):
            key = self._channel_key(keys[other], sender=index, receiver=other)
            both = of_seed[other + 1] + of_key[other + 1]
            sealed[other] = encrypt(key, both, context.digest)
            for kind, share in ((OF_SEED, of_seed[other + 1]), (OF_KEY, of_key[other + 1])):
                # The server later recognises a wrong share by its hash, and blames its holder.
                sealed[other] += share_hash(
                    context.digest, share, owner=index, holder=other, kind=kind
                )
        hashed = commitment(context.digest, self.seed, index)
        self.stage, self.keys = MemberStage.SHARED, keys
        return SealedShares(digest=context.digest, member=index, commitment=hashed, sealed=sealed)

    def mask(self, message: Delivery, values: Residues) -> MaskedInput:
        """Return ``values`` plus masks: one of this member alone, and one for each neighbour.

        A neighbour that sent no shares has no mask. ``values`` itself stays unchanged. The member
        then forgets its secrets, so that it can mask nothing else.

        If a neighbour sealed its shares wrongly, or the server changed them, the member cannot open
        them. It then masks as usual, and later reveals no share for this neighbour. This tells the
        server that the shares could not be opened. The server rebuilds the neighbour's secret from
        the shares of other members.

        Raises
        ------
        ProtocolError
            Fewer neighbours than the threshold sent shares, or a sender of shares sent no keys.
        InvalidValue
            ``values`` does not have the context's length and type, or a sender is no neighbour.
        """
        self._expect(MemberStage.SHARED)
        context = self.context
        message.check(context)
        if values.shape != (context.length,) or values.dtype != context.dtype:
            raise InvalidValue(
                f"values of {values.dtype} in shape {values.shape}: expected {context.dtype} in "
                f"shape {(context.length,)}"
            )
        self._check_neighbors(set(message.sealed))
        if not set(message.sealed) <= set(self.keys):
            unknown = sorted(set(message.sealed) - set(self.keys))
            raise ProtocolError(
                f"shares from members {unknown}: expected shares only from neighbours that sent "
                "their keys before"
            )
        held = {other: self._open(other, sealed) for other, sealed in message.sealed.items()}
        masked: Residues = np.array(values, dtype=context.dtype)
        apply_mask(self_mask_key(context.digest, self.seed, self.index), masked)
        for other in held:
            key = pair_mask_key(
                context.digest,
                self.mask_private,
                member=self.index,
                other=other,
                other_public=self.keys[other][:KEY_BYTES],
            )
            # One member of each pair adds the mask and the other subtracts it, so it cancels.
            apply_mask(key, masked, subtract=other < self.index)
        reply = MaskedInput(digest=context.digest, member=self.index, values=masked.tobytes())
        self._forget(stage=MemberStage.MASKED, held=held)
        return reply

    def unmask(self, request: UnmaskRequest) -> Revealed:
        """Return one share for each neighbour that sent shares to this member.

        If the neighbour's vector arrived, this is a share of its seed; if the neighbour was lost, a
        share of its mask key. The member then forgets the other share of each neighbour. If the
        same request comes again, the member returns the same answer.

        Raises
        ------
        ProtocolError
            This member answered a different request before; fewer members than ``least_answers``
            answered; the request names more lost neighbours than members that did not answer; or
            it does not name exactly the neighbours that sent shares to this member.
        """
        context = self.context
        request.check(context)
        if self.stage is MemberStage.UNMASKED:
            if request.to_bytes() != self.request:
                raise ProtocolError(
                    "request: expected the same request that this member answered before, because "
                    "answers to two different requests could reveal both secrets of a neighbour"
                )
            return Revealed.from_bytes(self.answer, context)
        self._expect(MemberStage.MASKED)
        if request.answers < context.least_answers:
            raise ProtocolError(
                f"{request.answers} members answered: expected at least "
                f"least_answers={context.least_answers}"
            )
        lost = sum(kind == OF_KEY for kind in request.kinds.values())
        if lost > context.members - request.answers:
            raise ProtocolError(
                f"request with {lost} lost neighbours: expected at most "
                f"{context.members - request.answers}, because it says that {request.answers} of "
                f"{context.members} members answered"
            )
        if set(request.kinds) != set(self.held):
            raise ProtocolError(
                f"request for neighbours {sorted(request.kinds)}: expected exactly the neighbours "
                f"that sent shares to this member, {sorted(self.held)}"
            )
        shares = {}
        for other, both in self.held.items():
            if both:
                kind = request.kinds[other]
                share = both[:SHARE_BYTES] if kind == OF_SEED else both[SHARE_BYTES:]
                shares[other] = kind + share
        reply = Revealed(digest=context.digest, member=self.index, shares=shares)
        self._forget(
            stage=MemberStage.UNMASKED, request=request.to_bytes(), answer=reply.to_bytes()
        )
        return reply

    @property
    def _public(self) -> bytes:
        return public_of(self.mask_private) + public_of(self.channel_private)

    def _forget(self, **kept: Any) -> None:
        """Delete what no later step needs: reset all fields but ``invitation`` and ``kept``."""
        vars(self).update(vars(Member(invitation=self.invitation, **kept)))

    def _expect(self, stage: MemberStage) -> None:
        if self.stage is not stage:
            raise ProtocolError(
                f"member {self.index} is in stage {self.stage.name}: expected stage {stage.name}; "
                "take each step once, and send the stored reply if it is needed again"
            )

    def _check_signed(self, identities: Identities | None) -> None:
        if self.context.signed != (identities is not None):
            raise ProtocolError(
                "this round is signed: set sum-identity-key and sum-members in the node config"
                if self.context.signed
                else "this round is not signed, but the node config sets sum-members, so this node "
                "takes part in signed rounds only: set signed-sums=true in the run config"
            )

    def _check_neighbors(self, members: set[int]) -> None:
        neighbors = set(self.invitation.neighbors)
        if not members <= neighbors:
            raise InvalidValue(
                f"members {sorted(members - neighbors)}: expected only this member's neighbours, "
                f"{sorted(neighbors)}"
            )
        if len(members) < self.context.threshold:
            raise ProtocolError(
                f"{len(members)} neighbours take part: expected at least "
                f"threshold={self.context.threshold}"
            )

    def _channel_key(self, public: bytes, *, sender: int, receiver: int) -> bytes:
        private, other = self.channel_private, key_pair(public)[1]
        return channel_key(self.context.digest, private, other, sender=sender, receiver=receiver)

    def _open(self, other: int, sealed: bytes) -> bytes:
        """Return a neighbour's two shares, of its seed and its mask key; empty if unreadable."""
        key = self._channel_key(self.keys[other], sender=other, receiver=self.index)
        try:
            both = decrypt(key, sealed, self.context.digest)
            field_value(both[:SHARE_BYTES])
            field_value(both[SHARE_BYTES:])
        except InvalidValue:
            return b""
        return both
