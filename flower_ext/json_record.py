"""Dataclasses as JSON: agreements between parties, entries of accounts, and states of a run."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from flower_ext.errors import InvalidValue

NOT_WRITTEN: Mapping[str, Any] = {"json": False}
"""Metadata of a field that `JsonRecord` does not write; a reader gets the field's default."""

_EXPECTED = "expected JSON with a value for each of its fields"


class JsonRecord:
    """Base class of dataclasses that are written as JSON, and read by the types of their fields.

    JSON holds bytes in hexadecimal, enumerations as their values, and an infinite number as null.
    A field may hold another record. If a field may hold records of several classes, each of these
    classes needs its own name in the class attribute ``kind``. The JSON then holds this name, too.

    A record may hold a party's secrets in the clear: store its bytes where nobody else can read
    them.
    """

    kind: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as values that JSON can hold."""
        record: Any = type(self)  # mypy takes the class of a frozen dataclass for unhashable
        kind = {"kind": self.kind} if self.kind else {}
        return {**kind, **{name: _plain(getattr(self, name)) for name in field_types(record)}}

    def to_bytes(self) -> bytes:
        """Return all fields as JSON."""
        return json.dumps(self.to_dict(), sort_keys=True).encode()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the record whose `to_dict` is ``values``; refuse values that fit no record."""
        try:
            record: Any = cls
            types = field_types(record)
            names = {*types, "kind"} if cls.kind else {*types}
            if differing := sorted(names ^ values.keys()):
                raise InvalidValue(
                    f"{cls.__name__} has an unknown or missing field {differing[0]!r}: {_EXPECTED}"
                )
            if cls.kind and values["kind"] != cls.kind:
                raise InvalidValue(
                    f"{cls.__name__}: expected kind={cls.kind!r}, got {values['kind']!r}"
                )
            return cls(**{name: _read(kind, values[name]) for name, kind in types.items()})
        except InvalidValue:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise InvalidValue(f"{cls.__name__}: {_EXPECTED}") from error

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the record whose `to_bytes` is ``data``; refuse data that fit no record."""
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InvalidValue(f"{cls.__name__}: {_EXPECTED}") from error
        return cls.from_dict(values)


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, except fields marked `NOT_WRITTEN`."""
    hints = get_type_hints(cls)
    written = [field for field in fields(cls) if field.metadata != NOT_WRITTEN]
    return {field.name: hints[field.name] for field in written}


def _plain(value: Any) -> Any:
    if isinstance(value, JsonRecord):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):  # NumPy's numbers, too
        return None if value == math.inf else float(value)
    return value


def _read(kind: Any, value: Any) -> Any:
    """Return the object of type ``kind`` for which `_plain` returned ``value``."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in parts:
            return None
        kinds = [part for part in parts if part is not NoneType]
        if len(kinds) == 1:
            return _read(kinds[0], value)
        for record in kinds:
            if record.kind == value["kind"]:
                return record.from_dict(value)
        expected = ", ".join(record.kind for record in kinds)
        raise InvalidValue(f"kind={value['kind']!r}: expected one of {expected}")
    if origin is Literal:
        return parts[parts.index(value)]
    if issubclass(origin, JsonRecord):
        return origin.from_dict(value)
    if issubclass(origin, Enum):
        return origin(value)
    if issubclass(origin, Mapping):
        # JSON has only texts as keys. The type of a Counter names no type of entries: they are int.
        of_key, of_entry = (*parts, int)[:2]
        entries = {of_key(key): _read(of_entry, entry) for key, entry in value.items()}
        return entries if origin is Mapping else origin(entries)
    if issubclass(origin, list | tuple) and type(value) is list:
        return origin(_read(parts[0], entry) for entry in value)
    if origin is bytes:
        return bytes.fromhex(value)
    if origin is float:
        if value is None:
            return math.inf
        return float(value if type(value) is float else _read(int, value))
    if type(value) is not origin:  # JSON's true must not pass for the integer 1
        raise TypeError(f"expected {origin.__name__}")
    return value
