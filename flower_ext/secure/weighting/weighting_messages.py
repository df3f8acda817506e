"""Messages of a scheme, and their bytes: the server's key, encrypted weights and masked sums.

Every message begins with four letters that name its kind, followed by integers of eight bytes
(big-endian) and a body whose length the settings determine.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, Self

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.weighting.party_settings import PartySettings


class Message:
    """A frozen dataclass of integers, followed by one or more fields of bytes.

    Subclasses name their kind and define the lengths of their fields of bytes, in order.
    """

    kind: ClassVar[bytes]

    @classmethod
    def _lengths(cls, settings: Any) -> tuple[int, ...]:
        raise NotImplementedError

    @classmethod
    def size(cls, settings: PartySettings) -> int:
        """Return the length of a message in bytes."""
        return cls._head_bytes() + sum(cls._lengths(settings))

    def to_bytes(self) -> bytes:
        """Return the message's bytes."""
        integers = [vars(self)[name] for name in self._named("int")]
        head = struct.pack(f">{len(integers)}Q", *integers)
        return b"".join([self.kind, head, *(vars(self)[name] for name in self._named("bytes"))])

    @classmethod
    def from_bytes(cls, data: bytes, settings: PartySettings) -> Self:
        """Undo `to_bytes`.

        Raises
        ------
        ValueError
            The bytes are not a message of this kind under these settings: a length is wrong, or a
            silo's number is out of range.
        """
        check_length(cls.__name__, data, cls.size(settings))
        if data[: len(cls.kind)] != cls.kind:
            raise InvalidValue(f"{cls.__name__}: expected bytes that begin with {cls.kind!r}")
        names, start = cls._named("int"), cls._head_bytes()
        integers = struct.unpack_from(f">{len(names)}Q", data, len(cls.kind))
        values: dict[str, object] = dict(zip(names, integers, strict=True))
        view = memoryview(data)  # slices copy nothing
        for name, length in zip(cls._named("bytes"), cls._lengths(settings), strict=True):
            values[name] = bytes(view[start : start + length])
            start += length
        message = cls(**values)
        message.check(settings)
        return message

    def check(self, settings: PartySettings) -> None:
        """Refuse a message that does not fit ``settings``. Parties check every received message.

        Raises
        ------
        ValueError
            A field has a wrong length, or a silo's number is out of range.
        """
        for name, length in zip(self._named("bytes"), self._lengths(settings), strict=True):
            check_length(f"{type(self).__name__}.{name}", vars(self)[name], length)
        silo = vars(self).get("silo", 0)
        if not 0 <= silo < settings.silos:
            raise InvalidValue(f"silo={silo}: expected an integer from 0 to {settings.silos - 1}")

    @classmethod
    def _named(cls, kind: str) -> list[str]:
        return [field.name for field in fields(cls) if field.type == kind]  # type: ignore[arg-type]

    @classmethod
    def _head_bytes(cls) -> int:
        return len(cls.kind) + 8 * len(cls._named("int"))


def pack_numbers(numbers: Sequence[int], size: int) -> bytes:
    """Return the numbers, joined, in ``size`` big-endian bytes each."""
    return b"".join(int(number).to_bytes(size, "big") for number in numbers)


def unpack_numbers(data: bytes, size: int) -> list[int]:
    """Undo `pack_numbers`."""
    return [int.from_bytes(data[at : at + size], "big") for at in range(0, len(data), size)]


def check_length(name: str, data: bytes, size: int) -> None:
    """Raise a ValueError unless a message has ``size`` bytes."""
    if len(data) != size:
        raise InvalidValue(f"{name} of {len(data)} bytes: expected {size}")


def check_later(name: str, number: int, last: int) -> None:
    """Raise a ProtocolError unless the number of a round or epoch is above the last one."""
    if number <= last:
        raise ProtocolError(f"{name} {number}: expected a number above {last}")
