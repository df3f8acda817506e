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

from collections.abc import Callable, Mapping
from functools import partial

from flower_ext.errors import InvalidValue
from flower_ext_consortium.statistics.kinds import (
    Bins,
    Count,
    Histogram,
    Mean,
    Quantiles,
    SurvivalCurve,
    Variance,
)
from flower_ext_consortium.statistics.statistic import JointStatistics, Statistic


def _mean(column: str, bounds: str, kind: type[Mean] = Mean) -> Statistic:
    return kind(column, *map(float, bounds.split(":")))


def _bins(column: str, text: str) -> Bins:
    lower, upper, count = text.split(":")
    return Bins(column, float(lower), float(upper), int(count))


def _quantiles(column: str, bounds: str, probabilities: str = "0.25,0.5,0.75") -> Statistic:
    lower, upper = bounds.split(":")
    numbers = tuple(map(float, probabilities.split(",")))
    return Quantiles(column, float(lower), float(upper), numbers)


_FORMS: Mapping[str, tuple[str, Callable[..., Statistic]]] = {
    "count": ("count", Count),
    "mean": ("mean COLUMN LOWER:UPPER", _mean),
    "variance": ("variance COLUMN LOWER:UPPER", partial(_mean, kind=Variance)),
    "histogram": (
        "histogram COLUMN LOWER:UPPER:BINS",
        lambda column, text: Histogram(_bins(column, text)),
    ),
    "table": (
        "table COLUMN LOWER:UPPER:BINS COLUMN LOWER:UPPER:BINS",
        lambda one, bins, other, others: Histogram(_bins(one, bins), _bins(other, others)),
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
    statistics: dict[str, Statistic] = {}
    for part in filter(str.strip, text.split(";")):
        name, *words = part.split()
        wrong = f"statistic {part.strip()!r}"
        if name not in _FORMS:
            raise InvalidValue(f"{wrong}: expected one of {', '.join(_FORMS)}")
        form, make = _FORMS[name]
        try:
            statistic = make(*words)
        except InvalidValue as error:
            raise InvalidValue(f"{wrong}: {error}") from None
        except (TypeError, ValueError):
            raise InvalidValue(f"{wrong}: expected {form}") from None
        if (key := " ".join(part.split())) in statistics:
            raise InvalidValue(
                f"{wrong}: expected each statistic once, because all statistics share one ε; leave "
                "the repetition out"
            )
        statistics[key] = statistic
    return JointStatistics(tuple(statistics.values()))
