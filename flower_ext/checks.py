"""Checks of settings; each error names the setting, its value and the values allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

from flower_ext.errors import InvalidValue


def is_number(value: object) -> bool:
    """Return True for a real number of Python or NumPy; False for a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Return True for a value of an integer type; False for 2.0 and for a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def require_positive(name: str, value: float) -> None:
    """Refuse a value that is not a finite number above 0."""
    if not (is_number(value) and 0 < value < math.inf):
        raise InvalidValue(f"{name}={value!r}: expected a finite number > 0")


def require_not_negative(name: str, value: float) -> None:
    """Refuse a value that is not a finite number of 0 or more."""
    if not (is_number(value) and 0 <= value < math.inf):
        raise InvalidValue(f"{name}={value!r}: expected a finite number >= 0")


def require_at_least_one(name: str, value: int) -> None:
    """Refuse a value that is not an integer of 1 or more."""
    if not (is_integer(value) and value >= 1):
        raise InvalidValue(f"{name}={value!r}: expected an integer >= 1")


def require_count(name: str, value: int) -> None:
    """Refuse a value that is not an integer of 0 or more."""
    if not (is_integer(value) and value >= 0):
        raise InvalidValue(f"{name}={value!r}: expected an integer >= 0")


def require_rate(name: str, value: float) -> None:
    """Refuse a value that is not a number in (0, 1]."""
    if not (is_number(value) and 0 < value <= 1):
        raise InvalidValue(f"{name}={value!r}: expected a number in (0, 1]")


def require_below_one(name: str, value: float) -> None:
    """Refuse a value that is not a number in [0, 1)."""
    if not (is_number(value) and 0 <= value < 1):
        raise InvalidValue(f"{name}={value!r}: expected a number in [0, 1)")


def require_one_of(name: str, value: str, expected: Sequence[str]) -> None:
    """Refuse a value that is not among ``expected``."""
    if value not in expected:
        words = " or ".join(expected) if len(expected) < 3 else f"one of {', '.join(expected)}"
        raise InvalidValue(f"{name}={value!r}: expected {words}")


def require_delta(delta: float) -> None:
    """Refuse a δ that is not a number in (0, 1)."""
    if not (is_number(delta) and 0 < delta < 1):
        raise InvalidValue(f"delta={delta!r}: expected a number in (0, 1)")
