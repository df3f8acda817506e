"""Refuse a setting that is out of range, by its name and value."""

from __future__ import annotations

import math

from flower_ext.errors import InvalidValue


def require_positive(name: str, value: float) -> None:
    """Refuse what is not a finite number above 0."""
    if not 0 < value < math.inf:
        raise InvalidValue(f"{name}={value!r}: expected a finite number > 0")


def require_not_negative(name: str, value: float) -> None:
    """Refuse what is not a finite number from 0."""
    if not 0 <= value < math.inf:
        raise InvalidValue(f"{name}={value!r}: expected a finite number >= 0")


def require_at_least_one(name: str, value: int) -> None:
    """Refuse what is below 1."""
    if value < 1:
        raise InvalidValue(f"{name}={value!r}: expected an integer >= 1")


def require_delta(delta: float) -> None:
    """Refuse what is no δ in (0, 1)."""
    if not 0 < delta < 1:
        raise InvalidValue(f"delta={delta!r}: expected a number in (0, 1)")
