"""Checks of settings; each error names the setting, its value and the values allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flower_ext.errors import InvalidValue


def require_positive(name: str, value: float) -> None:
    """Refuse a value that is not a finite number above 0."""
    if not 0 < value < math.inf:
        raise InvalidValue(f"{name}={value!r}: expected a finite number > 0")


def require_not_negative(name: str, value: float) -> None:
    """Refuse a value that is not a finite number of 0 or more."""
    if not 0 <= value < math.inf:
        raise InvalidValue(f"{name}={value!r}: expected a finite number >= 0")


def require_at_least_one(name: str, value: float) -> None:
    """Refuse a value below 1."""
    if not value >= 1:
        raise InvalidValue(f"{name}={value!r}: expected an integer >= 1")


def require_count(name: str, value: int) -> None:
    """Refuse a value below 0."""
    if not value >= 0:
        raise InvalidValue(f"{name}={value!r}: expected an integer >= 0")


def require_rate(name: str, value: float) -> None:
    """Refuse a value that is not a number in (0, 1]."""
    if not 0 < value <= 1:
        raise InvalidValue(f"{name}={value!r}: expected a number in (0, 1]")


def require_one_of(name: str, value: str, expected: Sequence[str]) -> None:
    """Refuse a word that is not among the ``expected`` ones."""
    if value not in expected:
        raise InvalidValue(f"{name}={value!r}: expected {' or '.join(expected)}")


def require_delta(delta: float) -> None:
    """Refuse a δ outside (0, 1)."""
    if not 0 < delta < 1:
        raise InvalidValue(f"delta={delta!r}: expected a number in (0, 1)")
