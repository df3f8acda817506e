"""Messages between parties, their encoding as bytes, and checks that all protocols share."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Self

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.json_record import field_types

_INTEGER_BYTES = 8
_MEMBER_BYTES = 4


class ProtocolMessage:
    """A message: a frozen dataclass of integers, bytes, and mappings from members to bytes.

    The encoding begins with the message's kind, and the fields follow in order. An integer takes
    eight bytes (big-endian). A field of bytes has a length that follows from the protocol's public
    settings. If there is a mapping, it is the last field and fills the rest of the message. Each of
    its entries is a member's number and bytes.
    """

    kind: ClassVar[bytes]

    @classmethod
    def _lengths(cls, settings: Any) -> Mapping[str, int]:
        """Return the length in bytes of each field of bytes, and of one entry of each mapping."""
        raise NotImplementedError

    @classmethod
    def size(cls, settings: Any) -> int:
        """Return the length in bytes of a message that has no mapping among its fields."""
        lengths = cls._lengths(settings)
        names = field_types(cls)  # type: ignore[arg-type]
        return len(cls.kind) + sum(lengths.get(name, _INTEGER_BYTES) for name in names)

    def to_bytes(self) -> bytes:
        """Return the message's bytes."""
        parts = [self.kind]
        for value in vars(self).values():
            if isinstance(value, int):
                parts.append(value.to_bytes(_INTEGER_BYTES, "big"))
            elif isinstance(value, bytes):
                parts.append(value)
            else:
                for member, entry in sorted(value.items()):
                    parts += [member.to_bytes(_MEMBER_BYTES, "big"), entry]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes, settings: Any) -> Self:
        """Read a message from the bytes of `to_bytes`, and `check` it."""
        name, lengths, view = cls.__name__, cls._lengths(settings), memoryview(data)
        if view[: len(cls.kind)] != cls.kind:
            raise InvalidValue(f"{name}: expected bytes that begin with {cls.kind!r}")
        values, start = dict[str, Any](), len(cls.kind)
        for field, kind in field_types(cls).items():  # type: ignore[arg-type]
            if kind not in (int, bytes):
                values[field] = _entries(bytes(view[start:]), lengths[field], field)
                start = len(data)
                continue
            end = start + lengths.get(field, _INTEGER_BYTES)
            if end > len(data):  # no memory is claimed beyond the bytes that arrived
                raise InvalidValue(f"{name} of {len(data)} bytes is cut off: expected more bytes")
            part, start = bytes(view[start:end]), end
            values[field] = part if kind is bytes else int.from_bytes(part, "big")
        check_length(name, data, start)
        message = cls(**values)
        message.check(settings)
        return message

    def check(self, settings: Any) -> None:
        """Raise an error if a field, or an entry of a field, has a wrong length."""
        for name, length in self._lengths(settings).items():
            value = vars(self)[name]
            for part in value.values() if isinstance(value, Mapping) else [value]:
                check_length(f"{type(self).__name__}.{name}", part, length)


def _entries(data: bytes, size: int, name: str) -> dict[int, bytes]:
    """Read a mapping from ``data``, where each entry is a member's number and ``size`` bytes."""
    step = _MEMBER_BYTES + size
    if len(data) % step:
        raise InvalidValue(f"{name} of {len(data)} bytes: expected a multiple of {step}")
    starts = range(0, len(data), step)
    members = [int.from_bytes(data[start : start + _MEMBER_BYTES], "big") for start in starts]
    if any(later <= member for member, later in pairwise(members)):
        raise InvalidValue(f"{name}: expected members in ascending order, each member once")
    return {
        member: data[start + _MEMBER_BYTES : start + step]
        for member, start in zip(members, starts, strict=True)
    }


def pack_numbers(numbers: Sequence[int], size: int) -> bytes:
    """Join the numbers, each as ``size`` big-endian bytes."""
    return b"".join(int(number).to_bytes(size, "big") for number in numbers)


def unpack_numbers(data: bytes, size: int) -> list[int]:
    """Return the numbers that `pack_numbers` joined, each of ``size`` bytes."""
    return [int.from_bytes(data[at : at + size], "big") for at in range(0, len(data), size)]


def check_length(name: str, data: bytes, size: int) -> None:
    """Raise an InvalidValue unless ``data`` has ``size`` bytes."""
    if len(data) != size:
        raise InvalidValue(f"{name} of {len(data)} bytes: expected {size}")


def check_later(name: str, number: int, last: int) -> None:
    """Raise a ProtocolError unless the round or epoch ``number`` is above ``last``."""
    if number <= last:
        raise ProtocolError(f"{name} {number}: expected a number above {last}")
