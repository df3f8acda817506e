"""Statistics in one line of text, as settings and commands name them.

====================================  ==========================================================
text                                  statistic
====================================  ==========================================================
``count``                             number of people
``mean age 20:90``                    mean, with bounds
``variance age 20:90``                mean and variance
``histogram age 20:90:7``             7 bins between 20 and 90
``table sex 0:2:2 age 20:90:7``       numbers of people by two columns
``quantiles age 20:90 0.25,0.5``      quantiles; without probabilities, the quartiles
``survival days event 0:3650:20``     Kaplan–Meier's curve: columns of times and of events
====================================  ==========================================================

Semicolons separate several statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flower_ext.errors import InvalidValue
from flower_ext.statistics.cells import Bins, Histogram, Quantiles, SurvivalCurve
from flower_ext.statistics.moments import Count, Mean, Variance
from flower_ext.statistics.statistic import JointStatistics, Statistic


def _bounds(text: str) -> tuple[float, float]:
    lower, upper = text.split(":")
    return float(lower), float(upper)


def _bins(column: str, text: str) -> Bins:
    lower, upper, count = text.split(":")
    return Bins(column, float(lower), float(upper), int(count))


def _quantiles(column: str, bounds: str, probabilities: str = "0.25,0.5,0.75") -> Statistic:
    return Quantiles(column, *_bounds(bounds), tuple(map(float, probabilities.split(","))))


_FORMS: Mapping[str, tuple[str, Callable[..., Statistic]]] = {
    "count": ("count", Count),
    "mean": ("mean COLUMN LOWER:UPPER", lambda column, text: Mean(column, *_bounds(text))),
    "variance": (
        "variance COLUMN LOWER:UPPER",
        lambda column, text: Variance(column, *_bounds(text)),
    ),
    "histogram": (
        "histogram COLUMN LOWER:UPPER:BINS",
        lambda column, text: Histogram((_bins(column, text),)),
    ),
    "table": (
        "table COLUMN LOWER:UPPER:BINS COLUMN LOWER:UPPER:BINS",
        lambda one, bins, other, others: Histogram((_bins(one, bins), _bins(other, others))),
    ),
    "quantiles": ("quantiles COLUMN LOWER:UPPER [PROBABILITY,…]", _quantiles),
    "survival": (
        "survival TIME EVENT LOWER:UPPER:INTERVALS",
        lambda time, event, bins: SurvivalCurve(_bins(time, bins), event),
    ),
}
"""Statistics by their first word: the form that messages show, and a function of the other words
that returns the statistic."""


def read_statistics(text: str) -> JointStatistics:
    """Return the statistics that a text names; see the top of this module.

    Raises
    ------
    InvalidValue
        A statistic does not have one of the forms above; the message shows the expected form.
    """
    return JointStatistics(tuple(_read(part) for part in text.split(";") if part.strip()))


def _read(text: str) -> Statistic:
    name, *words = text.split()
    if name not in _FORMS:
        raise InvalidValue(f"statistic {text.strip()!r}: expected one of {', '.join(_FORMS)}")
    form, make = _FORMS[name]
    try:
        return make(*words)
    except InvalidValue as error:
        raise InvalidValue(f"statistic {text.strip()!r}: {error}") from None
    except (TypeError, ValueError):
        raise InvalidValue(f"statistic {text.strip()!r}: expected {form}") from None
