"""Messages between the parties of a secure sum, as values and as bytes.

=================  ================  =====================================================
message            from, to          carries
=================  ================  =====================================================
`Advert`           member, server    two public keys
`Keys`             server, member    the public keys of the member and its neighbours
`SealedShares`     member, server    a share of its two secrets for each neighbour, sealed
`Delivery`         server, member    the shares that neighbours sealed for the member
`MaskedInput`      member, server    the masked vector
`Question`         server, member    who answered, and who was lost after sharing
`Revealed`         member, server    for each neighbour a share of one of its secrets
=================  ================  =====================================================

As bytes, every message begins with its kind and the digest of its round.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Self

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.aggregation.context import RoundContext
from flower_ext.secure.aggregation.shamir import SHARE_BYTES

KEY_BYTES = 32
SEALED_BYTES = 12 + 2 * SHARE_BYTES + 16  # nonce, two shares, tag
OF_SEED, OF_KEY = b"s", b"k"  # first byte of a revealed share: its kind
REVEALED_BYTES = 1 + SHARE_BYTES
_HEADER = 1 + 32


@dataclass(frozen=True, kw_only=True)
class _Message:
    """A message with fields of three types: a number, bytes, or bytes of one length by member."""

    digest: bytes
    kind: ClassVar[bytes]
    sizes: ClassVar[Mapping[str, int]]

    def to_bytes(self) -> bytes:
        """Return the message as bytes."""
        parts = [self.kind, self.digest]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if isinstance(value, int):
                parts.append(struct.pack("<I", value))
            elif isinstance(value, bytes):
                parts += [struct.pack("<Q", len(value)), value]
            else:
                parts.append(struct.pack("<I", len(value)))
                for member, entry in sorted(value.items()):
                    parts += [struct.pack("<I", member), entry]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes, context: RoundContext) -> Self:
        """Read a message of the round of ``context``.

        Raises
        ------
        ProtocolError
            The message belongs to another round or is of another kind.
        InvalidValue
            The bytes are malformed: too short, too long, or with members that the round lacks.
        """
        if data[:_HEADER] != cls.kind + context.digest:
            raise ProtocolError(
                f"message: expected {cls.__name__} of round {context.round_number} of this run"
            )
        at, values = _HEADER, {}
        try:
            for field in fields(cls)[1:]:
                size = cls.sizes[field.name]
                if field.type == "int":
                    (values[field.name],) = struct.unpack_from("<I", data, at)
                    at += 4
                elif field.type == "bytes":
                    (length,) = struct.unpack_from("<Q", data, at)
                    values[field.name] = data[at + 8 : at + 8 + length]
                    at += 8 + length
                else:
                    (count,) = struct.unpack_from("<I", data, at)
                    end = at + 4 + count * (4 + size)
                    if end > len(data):
                        raise InvalidValue(f"{field.name}: expected {count} entries")
                    starts = range(at + 4, end, 4 + size)
                    members = [struct.unpack_from("<I", data, start)[0] for start in starts]
                    if members != sorted(set(members)):
                        raise InvalidValue(f"{field.name}: expected each member once, ascending")
                    values[field.name] = {
                        member: data[start + 4 : start + 4 + size]
                        for member, start in zip(members, starts, strict=True)
                    }
                    at = end
        except struct.error as error:
            raise InvalidValue(
                f"{cls.__name__} of {len(data)} bytes: expected more, as it is cut off"
            ) from error
        if at != len(data):
            raise InvalidValue(f"{cls.__name__} of {len(data)} bytes: expected {at}")
        message = cls(digest=context.digest, **values)
        message.check(context)
        return message

    def check(self, context: RoundContext) -> None:
        """Refuse a message of another round, and members or lengths that the round lacks."""
        if self.digest != context.digest:
            raise ProtocolError(
                f"{type(self).__name__}: expected a message of round {context.round_number} of "
                "this run"
            )
        for field in fields(self)[1:]:
            value, size = getattr(self, field.name), self.sizes[field.name]
            members = (
                [value] if isinstance(value, int) else [] if isinstance(value, bytes) else value
            )
            if any(not 0 <= member < context.members for member in members):
                raise InvalidValue(f"{field.name}: expected members below {context.members}")
            entries = value.values() if isinstance(value, Mapping) else [value]
            for entry in entries:
                if isinstance(entry, bytes) and len(entry) != (
                    size or context.length * context.bits // 8
                ):
                    raise InvalidValue(f"{field.name} of {len(entry)} bytes: expected {size}")


@dataclass(frozen=True, kw_only=True)
class Advert(_Message):
    """A member's public keys: one for masks, one for sealing."""

    kind = b"A"
    sizes: ClassVar[Mapping[str, int]] = {"member": 0, "keys": 2 * KEY_BYTES}
    member: int
    keys: bytes


@dataclass(frozen=True, kw_only=True)
class Keys(_Message):
    """The public keys of a member and of its neighbours that advertised."""

    kind = b"K"
    sizes: ClassVar[Mapping[str, int]] = {"keys": 2 * KEY_BYTES}
    keys: Mapping[int, bytes]


@dataclass(frozen=True, kw_only=True)
class SealedShares(_Message):
    """A hash of the member's seed, and shares of seed and mask key that neighbours can open."""

    kind = b"S"
    sizes: ClassVar[Mapping[str, int]] = {"member": 0, "commitment": 32, "sealed": SEALED_BYTES}
    member: int
    commitment: bytes
    sealed: Mapping[int, bytes]


@dataclass(frozen=True, kw_only=True)
class Delivery(_Message):
    """Shares that neighbours sealed for one member."""

    kind = b"D"
    sizes: ClassVar[Mapping[str, int]] = {"sealed": SEALED_BYTES}
    sealed: Mapping[int, bytes]


@dataclass(frozen=True, kw_only=True)
class MaskedInput(_Message):
    """A member's masked vector."""

    kind = b"M"
    sizes: ClassVar[Mapping[str, int]] = {"member": 0, "values": 0}
    member: int
    values: bytes


@dataclass(frozen=True, kw_only=True)
class Question(_Message):
    """Question to the members after the training: all members receive the same one.

    Parameters
    ----------
    answered : Mapping[int, bytes]
        Members whose masked vectors arrived, as keys; the values are empty.
    lost : Mapping[int, bytes]
        Members that sent shares of their secrets but no masked vector, as keys; the values are
        empty.
    """

    kind = b"Q"
    sizes: ClassVar[Mapping[str, int]] = {"answered": 0, "lost": 0}
    answered: Mapping[int, bytes]
    lost: Mapping[int, bytes]

    def check(self, context: RoundContext) -> None:
        """Refuse anything but two sets of members of this round."""
        if any(self.answered.values()) or any(self.lost.values()):
            raise InvalidValue("answered, lost: expected members without further bytes")
        if self.digest != context.digest:
            raise ProtocolError(f"Question: expected a message of round {context.round_number}")
        if any(not 0 <= member < context.members for member in (*self.answered, *self.lost)):
            raise InvalidValue(f"answered, lost: expected members below {context.members}")


@dataclass(frozen=True, kw_only=True)
class Revealed(_Message):
    """For each neighbour, a byte for the kind of share, and a share of its seed or mask key."""

    kind = b"R"
    sizes: ClassVar[Mapping[str, int]] = {"member": 0, "shares": REVEALED_BYTES}
    member: int
    shares: Mapping[int, bytes]
