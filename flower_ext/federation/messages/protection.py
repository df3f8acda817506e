"""Write a protection into a training message, and read it back on the client.

A message holds the kind of the protection, which is a key of `_KINDS`. The kind fixes some fields
of the protection. The message also holds the values of all other fields (see
`privacy.mechanisms.protections`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
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
KIND, SEEDED = "protection", "seeded-noise"
_OF_ROUNDS = {
    *("run", "number", "seed", "diagnostics", "training-loss"),
    *("report-size", "remembered", "query", "withdrawn"),
}
"""Entries of a round's record that do not belong to the protection."""


def to_entries(protection: Protection | None, *, seeded_noise: bool) -> dict[str, Any]:
    """Return the entries of a round's record that ask clients for a protection.

    Refuse a protection that no entries can describe, because clients would apply a different
    protection, or none.
    """
    if protection is None:
        return {}
    name = _kind_of(protection)
    if name is None:
        raise TypeError(
            f"{type(protection).__name__}: no message can ask for this protection; add it to "
            f"_KINDS in {__name__}"
        )
    # If the server adds the noise, the client need not know how it is drawn.
    by_client = not isinstance(protection, ProtectedByServer)
    entries: dict[str, Any] = {KIND: name, SEEDED: seeded_noise and by_client}
    values = {entry: getattr(protection, part.name) for entry, part in _parts_of(name).items()}
    return entries | {entry: value for entry, value in values.items() if value is not None}


def from_entries(entries: Mapping[str, Any]) -> Protection | None:
    """Return the protection that a message's entries ask for, as `to_entries` wrote them.

    Refuse a protection that is incomplete or unknown, or whose numbers are out of range.
    """
    name = str(entries.get(KIND))
    parts = _parts_of(name) if name in _KINDS else {}
    known = {KIND, SEEDED, *parts} if name in _KINDS else set()
    if unknown := set(entries) - _OF_ROUNDS - known:
        raise InvalidValue(
            f"the server's message has {sorted(unknown)}, which {KIND}={entries.get(KIND)!r} "
            "does not use: expected a known protection with only its own entries"
        )
    if name not in _KINDS:
        return None
    if type(entries.get(SEEDED)) is not bool:
        raise TypeError(f"{SEEDED}={entries.get(SEEDED)!r}: expected true or false")
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


def check_entries(entries: Mapping[str, Any]) -> Protection | None:
    """Check the entries of a round, and return the protection that they ask for."""
    numbers = {"remembered": 0, **entries}  # only clients that may have to forget get this entry
    for name, least in (("number", 1), ("seed", 0), ("remembered", 0)):
        if type(numbers.get(name)) is not int or numbers[name] < least:
            raise InvalidValue(f"{name}={numbers.get(name)!r}: expected an integer >= {least}")
    if type(entries.get("run", "")) is not str:
        raise TypeError(f"run={entries['run']!r} in the server's message: expected a string")
    if any(type(user) is not int for user in entries.get("withdrawn", ())):
        raise TypeError("withdrawn in the server's message: expected integers, the users' numbers")
    return from_entries(entries)


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
