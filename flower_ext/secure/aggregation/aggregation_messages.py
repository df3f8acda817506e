"""Messages between the parties of a secure sum, as values and as bytes.

=================  ================  =====================================================
message            from, to          carries
=================  ================  =====================================================
`Advert`           member, server    two public keys
`Keys`             server, member    the public keys of the member and its neighbours
`SealedShares`     member, server    a share of its two secrets for each neighbour, sealed
`Delivery`         server, member    the shares that neighbours sealed for the member
`MaskedInput`      member, server    the masked vector
`UnmaskRequest`    server, member    which of a neighbour's two secrets to reveal a share of
`Revealed`         member, server    for each neighbour a share of one of its secrets
=================  ================  =====================================================

As bytes, every message begins with its kind and the digest of its round. It holds no lengths,
because the round's context determines them: entries for members fill the rest of a message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar, Self

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.aggregation.context import RoundContext
from flower_ext.secure.aggregation.shamir import SHARE_BYTES

KEY_BYTES = 32
SEALED_BYTES = 12 + 2 * SHARE_BYTES + 16  # nonce, two shares, tag
OF_SEED, OF_KEY = b"s", b"k"  # first byte of a revealed share: its kind
REVEALED_BYTES = 1 + SHARE_BYTES
_HEADER = 1 + 32


def key_pair(keys: bytes) -> tuple[bytes, bytes]:
    """Return the two public keys of a member: one for masks, one for sealing."""
    return keys[:KEY_BYTES], keys[KEY_BYTES:]


@dataclass(frozen=True, kw_only=True)
class _Message:
    """A message with fields of three types: numbers, bytes, and bytes of one length by member.

    Entries by member come last. ``sizes`` holds the length of each field of bytes or of each entry;
    the context determines the length of a masked vector.
    """

    digest: bytes
    kind: ClassVar[bytes]
    sizes: ClassVar[Mapping[str, int]] = {}

    def to_bytes(self) -> bytes:
        """Return the message as bytes."""
        parts = [self.kind, self.digest]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if isinstance(value, int):
                parts.append(struct.pack("<I", value))
            elif isinstance(value, bytes):
                parts.append(value)
            else:
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
        rest, values = memoryview(data)[_HEADER:], dict[str, Any]()  # slices copy nothing
        for field in fields(cls)[1:]:
            size = 4 if field.type == "int" else cls._size(field.name, context)
            if field.type in ("int", "bytes"):
                if len(rest) < size:
                    raise InvalidValue(
                        f"{cls.__name__} of {len(data)} bytes: expected more, as it is cut off"
                    )
                part, rest = bytes(rest[:size]), rest[size:]
                values[field.name] = part if field.type == "bytes" else _number(part)
            else:
                values[field.name] = _entries(bytes(rest), size, field.name)
                rest = rest[:0]
        if rest:
            raise InvalidValue(
                f"{cls.__name__} of {len(data)} bytes: expected {len(data) - len(rest)}"
            )
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
            name, value = field.name, getattr(self, field.name)
            if isinstance(value, int):
                if name == "member":
                    self._check_members(name, [value], context)
                continue
            size, entries = self._size(name, context), [value]
            if isinstance(value, Mapping):
                self._check_members(name, value, context)
                entries = [*value.values()]
            for entry in entries:
                if len(entry) != size:
                    raise InvalidValue(f"{name} of {len(entry)} bytes: expected {size}")

    @classmethod
    def _size(cls, name: str, context: RoundContext) -> int:
        return cls.sizes.get(name) or context.length * context.bits // 8

    @staticmethod
    def _check_members(name: str, members: Iterable[int], context: RoundContext) -> None:
        if any(not 0 <= member < context.members for member in members):
            raise InvalidValue(f"{name}: expected members below {context.members}")


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _entries(data: bytes, size: int, name: str) -> dict[int, bytes]:
    """Return the entries of ``size`` bytes that fill ``data``, each after its member's number."""
    step = 4 + size
    if len(data) % step:
        raise InvalidValue(f"{name} of {len(data)} bytes: expected entries of {step} bytes each")
    starts = range(0, len(data), step)
    members = [_number(data[start : start + 4]) for start in starts]
    if any(later <= member for member, later in pairwise(members)):
        raise InvalidValue(f"{name}: expected each member once, ascending")
    return {m: data[at + 4 : at + step] for m, at in zip(members, starts, strict=True)}


@dataclass(frozen=True, kw_only=True)
class Advert(_Message):
    """A member's public keys: one for masks, one for sealing."""

    kind = b"A"
    sizes: ClassVar[Mapping[str, int]] = {"keys": 2 * KEY_BYTES}
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
    sizes: ClassVar[Mapping[str, int]] = {"commitment": 32, "sealed": SEALED_BYTES}
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
    member: int
    values: bytes


@dataclass(frozen=True, kw_only=True)
class UnmaskRequest(_Message):
    """Request to one member after the training: the kind of share to reveal of each neighbour.

    Parameters
    ----------
    answers : int
        Number of all members whose masked vectors arrived.
    kinds : Mapping[int, bytes]
        For each neighbour that sent shares of its secrets, `OF_SEED` if its masked vector arrived,
        and `OF_KEY` if it was lost.
    """

    kind = b"Q"
    sizes: ClassVar[Mapping[str, int]] = {"kinds": 1}
    answers: int
    kinds: Mapping[int, bytes]

    def check(self, context: RoundContext) -> None:
        """Refuse anything but a request of this round for one of the two kinds of shares."""
        if not 0 <= self.answers <= context.members:
            raise InvalidValue(f"answers={self.answers}: expected 0 to {context.members}")
        if not set(self.kinds.values()) <= {OF_SEED, OF_KEY}:
            raise InvalidValue(f"kinds: expected {OF_SEED!r} or {OF_KEY!r} for each member")
        super().check(context)


@dataclass(frozen=True, kw_only=True)
class Revealed(_Message):
    """For each neighbour, a byte for the kind of share, and a share of its seed or mask key.

    A neighbour is missing if the member could not open the shares that came from it.
    """

    kind = b"R"
    sizes: ClassVar[Mapping[str, int]] = {"shares": REVEALED_BYTES}
    member: int
    shares: Mapping[int, bytes]
