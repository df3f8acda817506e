"""Checks of values; each error names the value and what would be accepted.

A dataclass that inherits from `Checked` checks its fields of types such as `Positive` when it is
made. For other values, there is a function such as `require_positive`.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeGuard, get_args, get_origin

from flower_ext.errors import InvalidValue


def is_number(value: object) -> bool:
    """Return True for a real number of Python or NumPy that fits a float; False for a bool."""
    is_huge = isinstance(value, Integral) and abs(int(value)) > sys.float_info.max
    return isinstance(value, Real) and not isinstance(value, bool) and not is_huge


def is_integer(value: object) -> TypeGuard[int]:
    """Return True for a value of an integer type; False for 2.0 and for a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def are_integers(values: Any, *, least: int, most: float = math.inf) -> TypeGuard[Sequence[int]]:
    """Return True for a list or tuple of ``int`` from ``least`` to ``most`` that is not empty."""
    is_list = isinstance(values, list | tuple) and len(values) > 0
    return is_list and all(type(each) is int and least <= each <= most for each in values)


@dataclass(frozen=True)
class Rule:
    """A condition on a value: a function that tests the value, and the text of its error."""

    expected: str
    accepts: Callable[[Any], bool]

    def check(self, name: str, value: object) -> None:
        """Refuse a value that the rule does not accept; ``name`` names it in the error."""
        if not self.accepts(value):
            raise InvalidValue(f"{name}={value!r}: expected {self.expected}")


_POSITIVE = Rule("a finite number > 0", lambda x: is_number(x) and 0 < x < math.inf)
_ABOVE_ZERO = Rule("a number > 0", lambda x: is_number(x) and x > 0)
_SCALE = Rule("a number from 1e-30 to 1e30", lambda x: is_number(x) and 1e-30 <= float(x) <= 1e30)
_NOT_NEGATIVE = Rule("a finite number >= 0", lambda x: is_number(x) and 0 <= x < math.inf)
_FRACTION = Rule("a number in (0, 1]", lambda x: is_number(x) and 0 < x <= 1)
_FRACTION_OR_ZERO = Rule("a number in [0, 1]", lambda x: is_number(x) and 0 <= x <= 1)
_BELOW_ONE = Rule("a number in [0, 1)", lambda x: is_number(x) and 0 <= x < 1)
_PROPER = Rule("a number in (0, 1)", lambda x: is_number(x) and 0 < x < 1)
_COUNT = Rule("an integer >= 1", lambda x: is_integer(x) and x >= 1)
_SEVERAL = Rule("an integer >= 2", lambda x: is_integer(x) and x >= 2)
_COUNT_OR_ZERO = Rule("an integer >= 0", lambda x: is_integer(x) and x >= 0)
_FLAG = Rule("true or false", lambda x: type(x) is bool)

Positive = Annotated[float, _POSITIVE]
Scale = Annotated[float, _SCALE]
"""A bound or standard deviation whose products and squares a float can hold."""
AboveZero = Annotated[float, _ABOVE_ZERO]
"""A number above 0, which may be infinite."""
NotNegative = Annotated[float, _NOT_NEGATIVE]
Fraction = Annotated[float, _FRACTION]
FractionOrZero = Annotated[float, _FRACTION_OR_ZERO]
FractionBelowOne = Annotated[float, _BELOW_ONE]
ProperFraction = Annotated[float, _PROPER]
Count = Annotated[int, _COUNT]
Several = Annotated[int, _SEVERAL]
CountOrZero = Annotated[int, _COUNT_OR_ZERO]
Flag = Annotated[bool, _FLAG]

require_positive = _POSITIVE.check
require_scale = _SCALE.check
require_not_negative = _NOT_NEGATIVE.check
require_rate = _FRACTION.check
require_at_least_one = _COUNT.check
require_count = _COUNT_OR_ZERO.check


def require_delta(delta: float) -> None:
    """Refuse a δ that is not a number in (0, 1)."""
    _PROPER.check("delta", delta)


def require_one_of(name: str, value: str, expected: Sequence[str]) -> None:
    """Refuse a value that is not among ``expected``."""
    _one_of(expected).check(name, value)


def _one_of(expected: Sequence[str]) -> Rule:
    words = " or ".join(expected) if len(expected) < 3 else f"one of {', '.join(expected)}"
    return Rule(words, lambda value: value in expected)


class Checked:
    """Base class of dataclasses that check the value of each field when they are made.

    The type of a field, such as `Positive` or a ``Literal`` of strings, says which values it
    accepts. A number of another type, such as NumPy's, becomes an ``int`` or a ``float``.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)  # mypy treats the class of a frozen dataclass as unhashable
        for name, rule, may_be_none in _rules(kind):
            value = getattr(self, name)
            if value is not None or not may_be_none:
                rule.check(name, value)
            if is_number(value) and type(value) not in (int, float):
                # Arithmetic with NumPy's shorter numbers rounds, which may lower ε.
                plain = int(value) if is_integer(value) else float(value)
                object.__setattr__(self, name, plain)


@cache
def _rules(kind: type) -> list[tuple[str, Rule, bool]]:
    """Return (name, rule, True if None is accepted) for each field whose type has a rule.

    If a subclass gives a field a type without a rule, the rule of the base class stays.
    """
    rules: dict[str, tuple[str, Rule, bool]] = {}
    for owner in kind.__mro__:
        scope = getattr(sys.modules.get(owner.__module__), "__dict__", {})
        for name, hint in vars(owner).get("__annotations__", {}).items():
            if isinstance(hint, str):
                try:
                    hint = eval(hint, scope)
                except NameError:  # a type that only type checkers import has no rule
                    continue
            alternatives = get_args(hint)
            if get_origin(hint) is Literal:
                rules.setdefault(name, (name, _one_of(alternatives), False))
            for part in (hint, *alternatives):
                for rule in getattr(part, "__metadata__", ()):
                    if isinstance(rule, Rule):
                        rules.setdefault(name, (name, rule, type(None) in alternatives))
    return [*rules.values()]
