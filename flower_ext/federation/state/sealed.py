"""Pack arrays and plain values into bytes with a checksum, which shows torn or altered files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from flower_ext.errors import InvalidValue
from flower_ext.federation.records import Arrays

_MAGIC = b"flower_ext 1\n"
_START = len(_MAGIC) + hashlib.sha256().digest_size


class Damaged(InvalidValue):
    """Stored bytes differ from the bytes that were written."""


@dataclass(frozen=True)
class Packed:
    """The result of `unpack`: plain values, and groups of named arrays in their original order."""

    values: dict[str, Any]
    arrays: dict[str, Arrays]


def pack(values: Mapping[str, Any], arrays: Mapping[str, Mapping[str, np.ndarray]]) -> bytes:
    """Return JSON-compatible values and groups of arrays as bytes with a checksum."""
    groups = {group: list(members) for group, members in arrays.items()}
    every = [array for members in arrays.values() for array in members.values()]
    body = save(
        {str(number): np.asarray(array, order="C") for number, array in enumerate(every)},
        {"values": json.dumps(dict(values)), "groups": json.dumps(groups)},
    )
    return _MAGIC + hashlib.sha256(body).digest() + body


def unpack(content: bytes) -> Packed:
    """Return the values and arrays that `pack` put into these bytes.

    Raises
    ------
    Damaged
        The bytes are incomplete or altered.
    """
    body = content[_START:]
    if not content.startswith(_MAGIC) or content[len(_MAGIC) : _START] != _digest(body):
        raise Damaged("torn or altered: the checksum does not match the content")
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"]
    arrays = load(body)
    numbers = iter(range(len(arrays)))
    groups = {
        group: {name: arrays[str(next(numbers))] for name in names}
        for group, names in json.loads(header["groups"]).items()
    }
    return Packed(json.loads(header["values"]), groups)


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()
