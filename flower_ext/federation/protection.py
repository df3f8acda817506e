"""Protections as facts of a message: the server asks for one, and the client reads and applies it.

The classes are in `privacy.mechanisms.protections`; only this module turns them into facts and
back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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

_SHARE = {"noise-stddev": "noise_stddev", "noise-grid": "noise_grid"}
_IN_CELLS = {"share-stddev": "noise_stddev", "cell": "cell"}
_NUMBERS: Mapping[type[Protection], Mapping[str, str]] = {
    ClipUpdate: {"clipping-norm": "clipping_norm", **_SHARE},
    ClipUnits: {"unit-clipping-norm": "clipping_norm", **_SHARE},
    ClipUnitsToCells: {"unit-clipping-norm": "clipping_norm", **_IN_CELLS},
    ClipToCells: {"clipping-norm": "clipping_norm", **_IN_CELLS},
    OutputPerturbation: {
        "model-clipping-norm": "clipping_norm",
        "model-noise-stddev": "noise_stddev",
        "agreed-examples": "num_examples",
    },
    ClipSteps: {
        "model-clipping-norm": "clipping_norm",
        "gradient-clipping-norm": "gradient_clipping_norm",
        "step-noise-stddev": "noise_stddev",
        "agreed-examples": "num_examples",
    },
    ObjectivePerturbation: {"objective-rate": "rate", "least-examples": "least_examples"},
    ProtectedByTraining: {},
}
"""For each protection, its fields by their names in a message."""
_OPTIONAL = frozenset({"agreed-examples", "noise-grid"})
_BY_SERVER, SEEDED = "server-protects", "seeded-noise"
_OTHER_FACTS = frozenset(
    {"run", "number", "seed", "diagnostics", "training-loss", "report-size", "remembered"}
    | {"query"}
    | {_BY_SERVER, SEEDED}
    | _OPTIONAL
)


def to_facts(protection: Protection | None, *, seeded_noise: bool) -> dict[str, float]:
    """Return a protection as facts of a message.

    Raises
    ------
    TypeError
        Messages have no names for this protection, so a client would apply another one, or none.
    """
    if protection is None:
        return {}
    if type(protection) is ProtectedByServer:
        return {_BY_SERVER: True}
    if type(protection) not in _NUMBERS:
        raise TypeError(
            f"{type(protection).__name__}: messages have no names for its fields; add them to "
            f"_NUMBERS in {__name__}, as a set of names that no other protection has"
        )
    names = _NUMBERS[type(protection)]
    fields_by_name = {name: getattr(protection, field) for name, field in names.items()}
    given = {name: value for name, value in fields_by_name.items() if value is not None}
    return {**given, SEEDED: seeded_noise}


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
    present = frozenset(facts) - _OTHER_FACTS
    if not present:
        seeded = _is_seeded(facts)
        if facts.get(_BY_SERVER):
            return ProtectedByServer()
        return None if seeded is None else ProtectedByTraining()
    kinds = [kind for kind, names in _NUMBERS.items() if present == frozenset(names) - _OPTIONAL]
    if not kinds:
        raise InvalidValue(
            f"the server's message has {sorted(present)}: expected a known protection"
        )
    for name in present:
        value = _number(facts, name)
        if not 0 < value < math.inf and (name, value) != ("least-examples", 0):
            raise InvalidValue(
                f"{name}={value!r} in the server's message: expected a finite number > 0"
            )
    if _is_seeded(facts) is None:
        raise TypeError(f"{SEEDED}=None: expected true or false")
    (kind,) = kinds
    fields: dict[str, Any] = {
        field: _number(facts, name) for name, field in _NUMBERS[kind].items() if name in facts
    }
    return kind(**fields)


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


def _is_seeded(facts: Mapping[str, Any]) -> bool | None:
    """Return True if the client's noise follows a seed; None if the client adds no noise."""
    seeded = facts.get(SEEDED)
    if seeded is not None and type(seeded) is not bool:
        raise TypeError(f"{SEEDED}={seeded!r}: expected true or false")
    return seeded


def _number(facts: Mapping[str, Any], name: str) -> float:
    value = facts[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} in the server's message: expected a number")
    return value
