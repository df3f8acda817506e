"""Dataclasses as JSON: settings that parties agree on, and states that outlive a process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, ClassVar, Self

from flower_ext.errors import InvalidValue


class JsonRecord:
    """A dataclass as JSON, with bytes in hexadecimal and enumerations by name.

    A subclass sets ``kind``, which the JSON contains beside the fields. For each field type that
    `_READERS` does not list, the subclass gives a reader. A record may hold a party's secrets in
    the clear: store its bytes where nobody else can read them.
    """

    kind: ClassVar[str]
    readers: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}

    def to_bytes(self) -> bytes:
        """Return all fields as JSON."""
        return json.dumps(_plain(self), sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Undo `to_bytes`.

        Raises
        ------
        InvalidValue
            The bytes are malformed or of a different kind, or a field is out of range.
        """
        try:
            return cls.from_plain(json.loads(data))
        except InvalidValue:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise InvalidValue(
                f"{cls.__name__}: expected the JSON that {cls.__name__}.to_bytes() returns"
            ) from error

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """Make a record from plain JSON values, as they stand in a larger record."""
        types = {field.name: str(field.type) for field in fields(cls)}  # type: ignore[arg-type]
        if set(values) != {"kind", *types} or values["kind"] != cls.kind:
            raise KeyError("another kind")
        readers = {**_READERS, **cls.readers}

        def read(name: str) -> Any:
            value, kind = values[name], types[name].removesuffix(" | None")
            return None if value is None and kind != types[name] else readers[kind](value)

        return cls(**{name: read(name) for name in types})


def _plain(value: Any) -> Any:
    if isinstance(value, JsonRecord):
        names = [field.name for field in fields(value)]  # type: ignore[arg-type]
        return {"kind": value.kind, **{name: _plain(getattr(value, name)) for name in names}}
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, bytes):
        return value.hex()
    return value.name if isinstance(value, Enum) else value


def _exactly(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not kind:  # JSON's true is no integer
            raise TypeError(f"expected {kind.__name__}")
        return value

    return read


_integer = _exactly(int)
_READERS: dict[str, Callable[[Any], Any]] = {
    "int": _integer,
    "bool": _exactly(bool),
    "str": _exactly(str),
    "float": lambda value: float(value if type(value) is float else _integer(value)),
    "bytes": bytes.fromhex,
    "list[int]": lambda values: [_integer(value) for value in values],
    "list[bytes]": lambda values: [bytes.fromhex(value) for value in values],
    "tuple[int, ...]": lambda values: tuple(_integer(value) for value in values),
    "Mapping[int, bytes]": lambda values: {int(k): bytes.fromhex(v) for k, v in values.items()},
}
