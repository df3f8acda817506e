"""Write a protection into a training message, and read it back on the client.

A message holds the kind of the protection, which is a key of `_KINDS`, and the values of its fields
(see `privacy.mechanisms.protections`). The class of the protection checks the values.
"""

from __future__ import annotations

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


_KINDS: Mapping[str, type[Protection]] = {
    kind.__name__: kind
    for kind in (
        ClipAndNoise,
        OutputPerturbation,
        ClipSteps,
        ObjectivePerturbation,
        ProtectedByTraining,
        ProtectedByServer,
    )
}
"""The kinds of protection that a message may ask for."""
KIND = "protection"
"""Entry with the kind of the protection."""


def to_entries(protection: Protection) -> dict[str, Any]:
    """Return the entries of a round's record that ask clients for a protection.

    Refuse a protection that no entries can describe, because clients would apply a different
    protection, or none.
    """
    kind = type(protection)
    if kind is Unprotected:
        return {}
    if kind not in _KINDS.values():
        raise TypeError(
            f"{kind.__name__}: no message can ask for this protection; add it to _KINDS in "
            f"{__name__}"
        )
    return {KIND: kind.__name__, **entries_of(protection)}


def from_entries(entries: Mapping[str, Any]) -> Protection:
    """Return the protection that a message's entries ask for, as `to_entries` wrote them.

    Refuse a protection that is incomplete or unknown, or whose numbers are out of range. An entry
    that a message leaves out keeps its default.
    """
    name = str(entries.get(KIND))
    known = {KIND, *fields_of(_KINDS[name])} if name in _KINDS else set()
    if unknown := set(entries) - known:
        raise InvalidValue(
            f"{sorted(unknown)} with {KIND}={entries.get(KIND)!r}: expected a known protection "
            "with only its own entries"
        )
    return _KINDS[name](**values_of(_KINDS[name], entries)) if entries else Unprotected()


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
