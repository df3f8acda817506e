"""Messages between the parties, and their bytes, which are the same under every scheme.

Every message begins with four letters that name its kind, followed by integers of eight bytes
(big-endian) and a body whose length the settings determine. Each scheme adds messages of its own:
the server's public key, encrypted weights and masked sums.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from flower_ext.errors import IncompleteRound, InvalidValue, ProtocolError
from flower_ext.secure.labels import check_public
from flower_ext.secure.weighting.oblivious import POINT_BYTES
from flower_ext.secure.weighting.party_settings import PartySettings

SEED_BYTES = 32
"""Length in bytes of seeds and X25519 keys."""
MessageT = TypeVar("MessageT", bound="Message")
_SEALED_SEED_BYTES = 12 + SEED_BYTES + 16  # nonce, seed, tag


class Message:
    """A frozen dataclass of integers, followed by one or more fields of bytes.

    Subclasses name their kind and define the lengths of their fields of bytes, in order.
    """

    kind: ClassVar[bytes]
    integers: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[tuple[str, ...]]

    @classmethod
    def _lengths(cls, settings: Any) -> tuple[int, ...]:
        raise NotImplementedError

    @classmethod
    def size(cls, settings: PartySettings) -> int:
        """Return the length of a message in bytes."""
        return cls._head_bytes() + sum(cls._lengths(settings))

    def to_bytes(self) -> bytes:
        """Return the message's bytes."""
        head = struct.pack(f">{len(self.integers)}Q", *(getattr(self, i) for i in self.integers))
        return b"".join([self.kind, head, *(getattr(self, part) for part in self.parts)])

    @classmethod
    def from_bytes(cls, data: bytes, settings: PartySettings) -> Self:
        """Undo `to_bytes`.

        Raises
        ------
        ValueError
            The bytes are not a message of this kind under these settings: a length is wrong, or a
            silo's number is out of range.
        """
        name, lengths, start = cls.__name__, cls._lengths(settings), cls._head_bytes()
        if len(data) != cls.size(settings):
            raise InvalidValue(f"{name} of {len(data)} bytes: expected {cls.size(settings)}")
        view = memoryview(data)
        if view[: len(cls.kind)] != cls.kind:
            raise InvalidValue(f"{name}: expected bytes that begin with {cls.kind!r}")
        integers = struct.unpack_from(f">{len(cls.integers)}Q", data, len(cls.kind))
        fields: dict[str, object] = dict(zip(cls.integers, integers, strict=True))
        for part, length in zip(cls.parts, lengths, strict=True):
            fields[part] = bytes(view[start : start + length])
            start += length
        message = cls(**fields)
        message.check(settings)
        return message

    def check(self, settings: PartySettings) -> None:
        """Refuse a message that does not fit ``settings``. Parties check every received message.

        Raises
        ------
        ValueError
            A field has a wrong length, or a silo's number is out of range.
        """
        for part, length in zip(self.parts, self._lengths(settings), strict=True):
            if len(getattr(self, part)) != length:
                raise InvalidValue(
                    f"{type(self).__name__}.{part} of {len(getattr(self, part))} bytes: "
                    f"expected {length}"
                )
        for name in ("silo", "receiver"):
            if name in self.integers and not 0 <= getattr(self, name) < settings.silos:
                raise InvalidValue(
                    f"{name}={getattr(self, name)}: expected an integer from 0 to "
                    f"{settings.silos - 1}"
                )

    @classmethod
    def _head_bytes(cls) -> int:
        return len(cls.kind) + 8 * len(cls.integers)


@dataclass(frozen=True, kw_only=True)
class SiloKey(Message):
    """A silo's X25519 public key, for all other silos."""

    kind = b"PWsk"
    integers = ("silo",)
    parts = ("public",)

    silo: int
    public: bytes

    @classmethod
    def _lengths(cls, settings: PartySettings) -> tuple[int, ...]:
        return (SEED_BYTES,)


@dataclass(frozen=True, kw_only=True)
class SealedSeed(Message):
    """Silo 0's part of the silos' seed, sealed for one silo; the server cannot open it."""

    kind = b"PWse"
    integers = ("receiver",)
    parts = ("sealed",)

    receiver: int
    sealed: bytes

    @classmethod
    def _lengths(cls, settings: PartySettings) -> tuple[int, ...]:
        return (_SEALED_SEED_BYTES,)


@dataclass(frozen=True, kw_only=True)
class MaskedCounts(Message):
    """A silo's record counts for the server, hidden by a mask for each user."""

    kind = b"PWmc"
    integers = ("silo",)
    parts = ("counts",)

    silo: int
    counts: bytes

    @classmethod
    def _lengths(cls, settings: PartySettings) -> tuple[int, ...]:
        return (settings.users * settings.count_bytes,)


@dataclass(frozen=True, kw_only=True)
class DrawOffer(Message):
    """The server's offer to draw users in secret, for the silo that answers.

    ``number`` is that of the round or epoch that the draw is for.
    """

    kind = b"PWdo"
    integers = ("number",)
    parts = ("public",)

    number: int
    public: bytes

    @classmethod
    def _lengths(cls, settings: PartySettings) -> tuple[int, ...]:
        return (POINT_BYTES,)


@dataclass(frozen=True, kw_only=True)
class DrawAnswer(Message):
    """The silos' choices of a secret draw, one per user, which the server cannot read."""

    kind = b"PWda"
    integers = ("number",)
    parts = ("answer",)

    number: int
    answer: bytes

    @classmethod
    def _lengths(cls, settings: PartySettings) -> tuple[int, ...]:
        return (settings.users * POINT_BYTES,)


def read_from(silo: int, kind: type[MessageT], data: bytes, settings: PartySettings) -> MessageT:
    """Return a silo's message.

    Raises
    ------
    ValueError
        The message is malformed, or names another silo than the one that sent it.
    """
    message = kind.from_bytes(data, settings)
    named = vars(message)["silo"]
    if named != silo:
        raise InvalidValue(f"{kind.__name__} of silo {named}: expected silo {silo}, its sender")
    return message


def pack_numbers(numbers: Sequence[int], size: int) -> bytes:
    """Return the numbers, joined, in ``size`` big-endian bytes each."""
    return b"".join(int(number).to_bytes(size, "big") for number in numbers)


def unpack_numbers(data: bytes, size: int) -> list[int]:
    """Undo `pack_numbers`."""
    return [int.from_bytes(data[at : at + size], "big") for at in range(0, len(data), size)]


def check_senders(senders: Sequence[int], expected: range) -> None:
    """Raise a ValueError unless each expected silo sent exactly one message."""
    if sorted(senders) != list(expected):
        raise InvalidValue(
            f"messages of silos {sorted(senders)}: expected one each from {list(expected)}"
        )


def check_keys(keys: Mapping[int, bytes]) -> None:
    """Raise a ValueError that names the first silo whose public key nobody can agree with.

    A key that two silos sent is such a key: one of them repeats what the other said.
    """
    first: dict[bytes, int] = {}
    for silo, public in keys.items():
        if (other := first.setdefault(public, silo)) != silo:
            raise InvalidValue(f"silos {other} and {silo}: expected a different public key of each")
        try:
            check_public(public)
        except InvalidValue as error:
            raise InvalidValue(f"silo {silo}: {error}") from error


def check_all_there(senders: Sequence[int], silos: int) -> None:
    """Raise IncompleteRound if a silo sent nothing, and ValueError for surplus messages."""
    missing = sorted(set(range(silos)) - set(senders))
    if missing:
        raise IncompleteRound(f"silos {missing} sent nothing: expected messages from all {silos}")
    check_senders(senders, range(silos))


def check_later(name: str, number: int, last: int) -> None:
    """Raise a ProtocolError unless the number of a round or epoch is above the last one."""
    if number <= last:
        raise ProtocolError(f"{name} {number}: expected a number above {last}")
