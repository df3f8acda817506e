"""Samplers that draw each round's cohort; the accountant reads the same object."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flower_ext.checks import is_integer, require_at_least_one, require_rate
from flower_ext.errors import InvalidValue


@dataclass(frozen=True)
class PoissonSampling:
    """Each of ``population`` units takes part independently with probability ``rate``.

    The cohort may be empty; an empty cohort is a release like any other.
    """

    population: int
    rate: float

    def __post_init__(self) -> None:
        require_at_least_one("population", self.population)
        require_rate("rate", self.rate)

    @property
    def sampling_rate(self) -> float:
        """The probability that one unit takes part in a round."""
        return self.rate

    @property
    def expected_cohort_size(self) -> float:
        """The public constant by which a round's sum is divided."""
        return self.population * self.rate

    def draw(self, rng: np.random.Generator) -> list[int]:
        """Draw a cohort; return its indices in ascending order."""
        # One number for every unit, so that a unit's draw does not depend on the others'.
        return np.flatnonzero(rng.random(self.population) < self.rate).tolist()

    def describe(self) -> str:
        """Describe the sampler in words."""
        return f"Poisson sampling at rate {self.rate:g} of {self.population}"


@dataclass(frozen=True)
class FixedSizeSampling:
    """Draw exactly ``size`` of ``population`` units, uniformly, without replacement."""

    population: int
    size: int

    def __post_init__(self) -> None:
        require_at_least_one("population", self.population)
        if not (is_integer(self.size) and 1 <= self.size <= self.population):
            raise InvalidValue(
                f"size={self.size!r}: expected an integer from 1 to population={self.population}"
            )

    @property
    def sampling_rate(self) -> float:
        """The probability that one unit takes part in a round."""
        return self.size / self.population

    @property
    def expected_cohort_size(self) -> float:
        """The public constant by which a round's sum is divided."""
        return float(self.size)

    def draw(self, rng: np.random.Generator) -> list[int]:
        """Draw a cohort; return its indices in ascending order."""
        return sorted(rng.choice(self.population, self.size, replace=False).tolist())

    def describe(self) -> str:
        """Describe the sampler in words."""
        return f"fixed-size sampling of {self.size} from {self.population}, without replacement"


@dataclass(frozen=True)
class FullParticipation:
    """All ``population`` units take part in every round."""

    sampling_rate = 1.0

    population: int

    def __post_init__(self) -> None:
        require_at_least_one("population", self.population)

    @property
    def expected_cohort_size(self) -> float:
        """The public constant by which a round's sum is divided."""
        return float(self.population)

    def draw(self, rng: np.random.Generator) -> list[int]:
        """Return all indices in ascending order; ``rng`` is not used."""
        return list(range(self.population))

    def describe(self) -> str:
        """Describe the sampler in words."""
        return f"all {self.population} in every round"


Sampling = PoissonSampling | FixedSizeSampling | FullParticipation

_KINDS: dict[str, type[Sampling]] = {
    "poisson": PoissonSampling,
    "fixed-size": FixedSizeSampling,
    "everyone": FullParticipation,
}


def sampling_to_dict(sampling: Sampling) -> dict[str, Any]:
    """Return a JSON-ready dictionary, which `sampling_from_dict` reads."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(sampling, cls))
    return {"kind": kind, **asdict(sampling)}


def sampling_from_dict(entry: Mapping[str, Any]) -> Sampling:
    """Return the sampler that `sampling_to_dict` wrote.

    Raises
    ------
    ValueError
        The kind is unknown, or a number is out of range.
    """
    fields = dict(entry)
    kind = fields.pop("kind", None)
    if kind not in _KINDS:
        raise InvalidValue(f"sampling kind={kind!r}: expected one of {', '.join(_KINDS)}")
    return _KINDS[kind](**fields)


def size_for_rate(population: int, rate: float) -> int:
    """Return the whole cohort size nearest to ``rate * population``, at least 1."""
    return max(1, math.floor(rate * population + 0.5))
