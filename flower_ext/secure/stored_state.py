"""State of a party of a protocol as JSON, which outlives the party's process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, ClassVar, Self

from flower_ext.errors import InvalidValue


class StoredState:
    """A frozen dataclass as JSON, with bytes in hexadecimal and enumerations by name.

    A subclass names the types of its fields, and gives a reader for each type that `_READERS` has
    not. It holds secrets in the clear: store its bytes where nobody else can read them.
    """

    readers: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}

    def encode(self) -> bytes:
        """Return the state as bytes."""
        return json.dumps({name: _stored(getattr(self, name)) for name in self._kinds()}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Undo `encode`.

        Raises
        ------
        InvalidValue
            The bytes are malformed, or belong to another kind of party.
        """
        readers, kinds = {**_READERS, **cls.readers}, cls._kinds()
        try:
            values = json.loads(data)
            if set(values) != set(kinds):
                raise KeyError("other fields")
            return cls(**{name: readers[kind](values[name]) for name, kind in kinds.items()})
        except InvalidValue:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise InvalidValue("state: expected the bytes that this party stored") from error

    @classmethod
    def _kinds(cls) -> dict[str, str]:
        return {field.name: str(field.type) for field in fields(cls)}  # type: ignore[arg-type]


def _stored(value: Any) -> Any:
    if is_dataclass(value):
        return value.to_bytes().decode()  # type: ignore[union-attr]
    if isinstance(value, Mapping):
        return {str(key): _stored(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_stored(entry) for entry in value]
    if isinstance(value, bytes):
        return value.hex()
    return value.name if isinstance(value, Enum) else value


_READERS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "bytes": bytes.fromhex,
    "list[int]": lambda values: [int(value) for value in values],
    "list[bytes]": lambda values: [bytes.fromhex(value) for value in values],
    "tuple[int, ...]": lambda values: tuple(int(value) for value in values),
    "Mapping[int, bytes]": lambda values: {int(k): bytes.fromhex(v) for k, v in values.items()},
}
