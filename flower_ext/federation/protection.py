"""Write a protection into a training message, and read it back on the client.

A message names the class of the protection (`privacy.mechanisms.protections`) and its fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.privacy.mechanisms.protections import (
    ClipSteps,
    ClipToCells,
    ClipUnits,
    ClipUnitsToCells,
    ClipUpdate,
    ObjectivePerturbation,
    OutputPerturbation,
    ProtectedByServer,
    ProtectedByTraining,
    Protection,
)

_KINDS: Mapping[str, type[Protection]] = {
    kind.__name__: kind
    for kind in (
        ClipUpdate,
        ClipUnits,
        ClipToCells,
        ClipUnitsToCells,
        OutputPerturbation,
        ClipSteps,
        ObjectivePerturbation,
        ProtectedByTraining,
        ProtectedByServer,
    )
}
"""The protections that a message may ask for, by the names of their classes."""
KIND, SEEDED = "protection", "seeded-noise"
_OF_ROUNDS = frozenset(
    ("run", "number", "seed", "diagnostics", "training-loss", "report-size", "remembered", "query")
)
"""Facts of a round besides its protection."""


def to_facts(protection: Protection | None, *, seeded_noise: bool) -> dict[str, Any]:
    """Return a protection as facts of a message.

    Raises
    ------
    TypeError
        No message may ask for this protection, so a client would apply another one, or none.
    """
    if protection is None:
        return {}
    name = type(protection).__name__
    if _KINDS.get(name) is not type(protection):
        raise TypeError(f"{name}: no message may ask for it; add it to _KINDS in {__name__}")
    # Where the server adds the noise, how it draws is no business of the client.
    by_client = not isinstance(protection, ProtectedByServer)
    facts: dict[str, Any] = {KIND: name, SEEDED: seeded_noise and by_client}
    for part in _parts_of(type(protection)):
        if (value := getattr(protection, part.name)) is not None:
            facts[_in_messages(part.name)] = value
    return facts


def from_facts(facts: Mapping[str, Any]) -> Protection | None:
    """Return the protection in the facts of a message; the inverse of `to_facts`.

    The function ignores the other facts of a round.

    Raises
    ------
    InvalidValue
        The protection is incomplete or unknown, or one of its numbers is out of range.
    TypeError
        A fact has the wrong type.
    """
    kind = _KINDS.get(str(facts[KIND])) if KIND in facts else Protection
    parts = {} if kind is None else {_in_messages(part.name): part for part in _parts_of(kind)}
    unknown = set(facts) - _OF_ROUNDS - set(parts) - ({KIND, SEEDED} if KIND in facts else set())
    if kind is None or unknown:
        raise InvalidValue(
            f"the server's message has {sorted(unknown)} and {KIND}={facts.get(KIND)!r}: expected "
            "a known protection"
        )
    if kind is Protection:
        return None
    if type(facts.get(SEEDED)) is not bool:
        raise TypeError(f"{SEEDED}={facts.get(SEEDED)!r}: expected true or false")
    numbers: dict[str, float] = {}
    for name, part in parts.items():
        if name in facts or part.default is MISSING:
            value = numbers[part.name] = _number(facts, name)
            if not 0 < value < math.inf and value != part.default:
                raise InvalidValue(
                    f"{name}={value!r} in the server's message: expected a finite number > 0"
                )
    return kind(**numbers)


def check_facts(facts: Mapping[str, Any]) -> Protection | None:
    """Check the facts of a round, and return the protection that they ask for.

    Raises
    ------
    InvalidValue
        A fact is missing or out of range; the message names it.
    TypeError
        A fact has the wrong type.
    """
    numbers = {"remembered": 0, **facts}  # sent only to clients that may have to forget
    for name, least in (("number", 1), ("seed", 0), ("remembered", 0)):
        if type(numbers.get(name)) is not int or numbers[name] < least:
            raise InvalidValue(f"{name}={numbers.get(name)!r}: expected an integer >= {least}")
    if type(facts.get("run", "")) is not str:
        raise TypeError(f"run={facts['run']!r} in the server's message: expected a string")
    return from_facts(facts)


def _parts_of(kind: type[Protection]) -> tuple[Field[Any], ...]:
    return fields(kind) if is_dataclass(kind) else ()


def _in_messages(name: str) -> str:
    return name.replace("_", "-")


def _number(facts: Mapping[str, Any], name: str) -> float:
    value = facts.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} in the server's message: expected a number")
    return value
