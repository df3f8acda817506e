"""Run several ways of the same work in turn, and keep the best measurement of each."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """Milliseconds of a unit of work, and megabytes at the peak; NaN if memory is not measured."""

    milliseconds: float
    megabytes: float = math.nan


def best_of(turns: int, ways: Mapping[str, Callable[[], Measured | None]]) -> dict[str, Measured]:
    """Return the smallest time and the largest memory of each way in any of several turns.

    The smallest time counts, because other work of the machine only slows a way down. The largest
    memory counts, because a peak that falls between two measurements is missed. Both may come from
    different turns. A way that returns None failed in that turn; without any success it is absent.
    """
    best: dict[str, Measured] = {}
    for _ in range(turns):
        for name, way in ways.items():
            if (measured := way()) is not None:
                earlier = best.get(name, measured)
                best[name] = Measured(
                    min(earlier.milliseconds, measured.milliseconds),
                    max(earlier.megabytes, measured.megabytes),
                )
    return best
