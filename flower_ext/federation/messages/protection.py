"""Write a protection into a training message, and read it back on the client.

A message holds the kind of the protection, which is a key of `_KINDS`. The kind fixes some fields
of the protection. The message also holds the values of all other fields (see
`privacy.mechanisms.protections`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.privacy.mechanisms.protections import (
    ClipAndNoise,
    ClipSteps,
    ObjectivePerturbation,
    OutputPerturbation,
    ProtectedByServer,
    ProtectedByTraining,
    Protection,
)


@dataclass(frozen=True)
class Unprotected(Protection):
    """No protection: the client sends its update unchanged, or an error if its training fails."""

    bounds_uploads = False
    hides_failures = False


_KINDS: Mapping[str, tuple[type[Protection], Mapping[str, Any]]] = {
    "ClipUpdate": (ClipAndNoise, {"of_units": False, "cell": None}),
    "ClipUnits": (ClipAndNoise, {"of_units": True, "cell": None}),
    "ClipToCells": (ClipAndNoise, {"of_units": False, "noise_grid": None}),
    "ClipUnitsToCells": (ClipAndNoise, {"of_units": True, "noise_grid": None}),
    **{
        kind.__name__: (kind, {})
        for kind in (
            OutputPerturbation,
            ClipSteps,
            ObjectivePerturbation,
            ProtectedByTraining,
            ProtectedByServer,
        )
    },
}
"""The kinds of protection that a message may ask for: for each, its class and its fixed fields."""
KIND = "protection"
"""Entry with the kind of the protection."""


def to_entries(protection: Protection) -> dict[str, Any]:
    """Return the entries of a round's record that ask clients for a protection.

    Refuse a protection that no entries can describe, because clients would apply a different
    protection, or none.
    """
    if protection == Unprotected():
        return {}
    name = _kind_of(protection)
    if name is None:
        raise TypeError(
            f"{type(protection).__name__}: no message can ask for this protection; add it to "
            f"_KINDS in {__name__}"
        )
    fixed = {entry.replace("_", "-") for entry in _KINDS[name][1]}
    parts = {n: value for n, value in entries_of(protection).items() if n not in fixed}
    return {KIND: name, **parts}


def from_entries(entries: Mapping[str, Any]) -> Protection:
    """Return the protection that a message's entries ask for, as `to_entries` wrote them.

    Refuse a protection that is incomplete or unknown, or whose numbers are out of range.
    """
    name = str(entries.get(KIND))
    parts = _parts_of(name) if name in _KINDS else {}
    known = {KIND, *parts} if name in _KINDS else set()
    if unknown := set(entries) - known:
        raise InvalidValue(
            f"the server's message has {sorted(unknown)}, which {KIND}={entries.get(KIND)!r} "
            "does not use: expected a known protection with only its own entries"
        )
    if name not in _KINDS:
        return Unprotected()
    numbers: dict[str, float] = {}
    for entry, part in parts.items():
        if entry in entries or part.default is MISSING:
            value = entries.get(entry)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{entry}={value!r} in the server's message: expected a number")
            numbers[part.name] = value
            if not 0 < value < math.inf and value != part.default:
                raise InvalidValue(
                    f"{entry}={value!r} in the server's message: expected a finite number > 0"
                )
    kind, fixed = _KINDS[name]
    protection = kind(**numbers, **fixed)
    if _kind_of(protection) != name:  # "ClipToCells" without a cell would be "ClipUpdate"
        raise InvalidValue(
            f"{KIND}={name!r} without cell in the server's message: expected cell > 0"
        )
    return protection


def fields_of(kind: Any) -> dict[str, Field[Any]]:
    """Return the fields of a dataclass by the names of their entries in messages."""
    return {part.name.replace("_", "-"): part for part in fields(kind)}


def values_of(kind: Any, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a dataclass's fields by name, as entries give them.

    A field without entry keeps its default. A field without entry and without default is None.
    """
    return {
        part.name: entries.get(name)
        for name, part in fields_of(kind).items()
        if name in entries or part.default is MISSING
    }


def entries_of(value: Any) -> dict[str, Any]:
    """Return the entries of a dataclass's fields, without fields that have their default."""
    return {
        name: entry
        for name, part in fields_of(value).items()
        if (entry := getattr(value, part.name)) != part.default
    }


def _kind_of(protection: Protection) -> str | None:
    """Return the name of a protection in messages; None if no message can ask for it."""
    for name, (kind, fixed) in _KINDS.items():
        if type(protection) is kind and all(getattr(protection, n) == v for n, v in fixed.items()):
            return name
    return None


def _parts_of(name: str) -> dict[str, Field[Any]]:
    """Return the fields that a kind does not fix, by the name of their entries in messages."""
    kind, fixed = _KINDS[name]
    parts: tuple[Field[Any], ...] = fields(kind)  # type: ignore[arg-type]
    return {part.name.replace("_", "-"): part for part in parts if part.name not in fixed}
