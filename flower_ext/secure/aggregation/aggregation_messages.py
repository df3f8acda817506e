"""Messages between the parties of a secure sum, as values and as bytes.

=================  ================  =============================================================
message            from, to          carries
=================  ================  =============================================================
`Advert`           member, server    two public keys
`Keys`             server, member    the public keys of the member and its neighbours
`SealedShares`     member, server    for each neighbour, sealed shares of the member's two secrets
`Delivery`         server, member    the shares that neighbours sealed for the member
`MaskedInput`      member, server    the masked vector
`UnmaskRequest`    server, member    for each neighbour, the kind of share to reveal
`Revealed`         member, server    for each neighbour, a share of one of its secrets
=================  ================  =============================================================

As bytes, every message begins with its kind and the digest of its round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.aggregation.context import RoundContext
from flower_ext.secure.aggregation.shamir import SHARE_BYTES
from flower_ext.secure.messages import ProtocolMessage

KEY_BYTES = 32
IDENTITY_BYTES, SIGNATURE_BYTES = 32, 64
SEALED_BYTES = 12 + 2 * SHARE_BYTES + 16  # nonce, two shares, tag
HASH_BYTES = 32
OF_SEED, OF_KEY = b"s", b"k"  # first byte of a revealed share: its kind
REVEALED_BYTES = 1 + SHARE_BYTES
_DIGEST_BYTES = 32


def key_pair(keys: bytes) -> tuple[bytes, bytes]:
    """Split the bytes of a member's keys into its two public keys: for masks, and for sealing."""
    return keys[:KEY_BYTES], keys[KEY_BYTES : 2 * KEY_BYTES]


@dataclass(frozen=True, kw_only=True)
class _RoundMessage(ProtocolMessage):
    """A message of one round."""

    sizes: ClassVar[Mapping[str, int]] = {}
    """Lengths in bytes that are the same in every round: of a field, or of a mapping's entries."""

    digest: bytes

    @classmethod
    def _lengths(cls, context: RoundContext) -> Mapping[str, int]:
        # A member's keys are followed by its identity and signature in a signed round.
        signature = (IDENTITY_BYTES + SIGNATURE_BYTES) * context.signed
        lengths = {
            "digest": _DIGEST_BYTES,
            "keys": 2 * KEY_BYTES + signature,
            "values": context.length * context.bits // 8,
            **cls.sizes,
        }
        names = [field.name for field in fields(cls)]
        return {name: lengths[name] for name in names if name in lengths}

    def check(self, context: RoundContext) -> None:
        """Refuse a message of another round, with unknown members, or with wrong lengths."""
        if self.digest != context.digest:
            name, number = type(self).__name__, context.round_number
            raise ProtocolError(f"message: expected {name} of round {number} of this run")
        super().check(context)
        for name, value in vars(self).items():
            members = [value] if name == "member" else value if isinstance(value, Mapping) else ()
            label = "member" if name == "member" else f"{name} of member"
            for member in members:
                if not 0 <= member < context.members:
                    raise InvalidValue(f"{label} {member}: expected 0 to {context.members - 1}")


@dataclass(frozen=True, kw_only=True)
class Advert(_RoundMessage):
    """A member's public keys: one for masks, one for sealing."""

    kind = b"A"
    member: int
    keys: bytes


@dataclass(frozen=True, kw_only=True)
class Keys(_RoundMessage):
    """A member's public keys, and the public keys that its neighbours sent."""

    kind = b"K"
    keys: Mapping[int, bytes]


@dataclass(frozen=True, kw_only=True)
class SealedShares(_RoundMessage):
    """A hash of the member's seed, and encrypted shares of its seed and mask key.

    ``sealed`` has one entry for each neighbour. The entry holds one share of each secret, encrypted
    so that only this neighbour can read them, and then a hash of each share. If the neighbour later
    reveals a wrong share, the server recognises it by the hash.
    """

    kind = b"S"
    sizes: ClassVar[Mapping[str, int]] = {
        "commitment": HASH_BYTES,
        "sealed": SEALED_BYTES + 2 * HASH_BYTES,
    }
    member: int
    commitment: bytes
    sealed: Mapping[int, bytes]


@dataclass(frozen=True, kw_only=True)
class Delivery(_RoundMessage):
    """Shares that neighbours sealed for one member."""

    kind = b"D"
    sizes: ClassVar[Mapping[str, int]] = {"sealed": SEALED_BYTES}
    sealed: Mapping[int, bytes]


@dataclass(frozen=True, kw_only=True)
class MaskedInput(_RoundMessage):
    """A member's masked vector."""

    kind = b"M"
    member: int
    values: bytes


@dataclass(frozen=True, kw_only=True)
class UnmaskRequest(_RoundMessage):
    """Request to one member after the training: for each neighbour, the kind of share to reveal.

    ``answers`` counts all members whose masked vectors arrived. The kind of a neighbour that sent
    shares of its secrets is `OF_SEED` if its masked vector arrived, and `OF_KEY` if it was lost.
    """

    kind = b"Q"
    sizes: ClassVar[Mapping[str, int]] = {"kinds": 1}
    answers: int
    kinds: Mapping[int, bytes]

    def check(self, context: RoundContext) -> None:
        """Refuse a request of another round, or for an unknown kind of share."""
        if not 0 <= self.answers <= context.members:
            raise InvalidValue(f"answers={self.answers}: expected 0 to {context.members}")
        if not set(self.kinds.values()) <= {OF_SEED, OF_KEY}:
            raise InvalidValue(f"kinds: expected {OF_SEED!r} or {OF_KEY!r} for each neighbour")
        super().check(context)


@dataclass(frozen=True, kw_only=True)
class Revealed(_RoundMessage):
    """For each neighbour, a byte for the kind of share, and a share of its seed or mask key.

    A neighbour is missing if the member could not open that neighbour's shares.
    """

    kind = b"R"
    sizes: ClassVar[Mapping[str, int]] = {"shares": REVEALED_BYTES}
    member: int
    shares: Mapping[int, bytes]
