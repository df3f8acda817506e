"""Messages between the server and the members of a secure sum, in the order of the protocol.

As bytes, every message begins with its kind and the digest of its round.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.aggregation.context import RoundContext
from flower_ext.secure.aggregation.shamir import SHARE_BYTES
from flower_ext.secure.keys_and_ciphers import ENCRYPTION_OVERHEAD_BYTES, KEY_BYTES
from flower_ext.secure.messages import ProtocolMessage

IDENTITY_BYTES, SIGNATURE_BYTES = 32, 64
SEALED_BYTES = 2 * SHARE_BYTES + ENCRYPTION_OVERHEAD_BYTES
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

    digest: bytes

    @classmethod
    def _lengths(cls, context: RoundContext) -> Mapping[str, int]:
        # In a signed round, a member's identity and signature follow its keys.
        signature = (IDENTITY_BYTES + SIGNATURE_BYTES) * context.signed
        lengths = {
            "digest": _DIGEST_BYTES,
            "keys": 2 * KEY_BYTES + signature,
            "commitment": HASH_BYTES,
            "sealed": SEALED_BYTES,
            "values": context.length * context.bits // 8,
            "kinds": 1,
            "shares": REVEALED_BYTES,
        }
        names = [field.name for field in fields(cls)]
        return {name: lengths[name] for name in names if name in lengths}

    def check(self, context: RoundContext) -> None:
        """Refuse a message of a different round, with unknown members, or with wrong lengths."""
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
    """From a member: its public keys, one for masks, one for sealing."""

    kind = b"A"
    member: int
    keys: bytes


@dataclass(frozen=True, kw_only=True)
class Keys(_RoundMessage):
    """To a member: its public keys, and the public keys that its neighbours sent."""

    kind = b"K"
    keys: Mapping[int, bytes]


@dataclass(frozen=True, kw_only=True)
class SealedShares(_RoundMessage):
    """From a member: a hash of its seed, and encrypted shares of its seed and mask key.

    ``sealed`` has one entry for each neighbour. The entry holds one share of each secret, encrypted
    so that only this neighbour can read them, and then a hash of each share. If the neighbour later
    reveals a wrong share, the server recognises it by the hash.
    """

    kind = b"S"
    member: int
    commitment: bytes
    sealed: Mapping[int, bytes]

    @classmethod
    def _lengths(cls, context: RoundContext) -> Mapping[str, int]:
        return {**super()._lengths(context), "sealed": SEALED_BYTES + 2 * HASH_BYTES}


@dataclass(frozen=True, kw_only=True)
class Delivery(_RoundMessage):
    """To a member: the shares that its neighbours sealed for it."""

    kind = b"D"
    sealed: Mapping[int, bytes]


@dataclass(frozen=True, kw_only=True)
class MaskedInput(_RoundMessage):
    """From a member: its masked vector."""

    kind = b"M"
    member: int
    values: bytes


@dataclass(frozen=True, kw_only=True)
class UnmaskRequest(_RoundMessage):
    """To a member, after the training: for each neighbour, the kind of share to reveal.

    ``answers`` counts all members whose masked vectors arrived. ``kinds`` has an entry for each
    neighbour that sent shares of its secrets. The entry is `OF_SEED` if the neighbour's masked
    vector arrived, and `OF_KEY` if the neighbour was lost.
    """

    kind = b"Q"
    answers: int
    kinds: Mapping[int, bytes]

    def check(self, context: RoundContext) -> None:
        """Refuse a request of a different round, or for an unknown kind of share."""
        if not 0 <= self.answers <= context.members:
            raise InvalidValue(f"answers={self.answers}: expected 0 to {context.members}")
        if not set(self.kinds.values()) <= {OF_SEED, OF_KEY}:
            raise InvalidValue(f"kinds: expected {OF_SEED!r} or {OF_KEY!r} for each neighbour")
        super().check(context)


@dataclass(frozen=True, kw_only=True)
class Revealed(_RoundMessage):
    """From a member: for each neighbour, a share of the neighbour's seed or of its mask key.

    A neighbour is missing if the member could not open that neighbour's shares.
    """

    kind = b"R"
    member: int
    shares: Mapping[int, bytes]
