"""Samplers, which draw each round's cohort. The accountant computes ε from the same objects.

If sampling amplifies privacy, the proof holds for the sampler's ``default_relation``.
"""

import math
from dataclasses import dataclass

import numpy as np

from flower_ext.checks import Checked, Count, Fraction
from flower_ext.errors import InvalidValue
from flower_ext.json_record import JsonRecord
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.units import NeighboringRelation


@dataclass(frozen=True)
class PoissonSampling(Checked, JsonRecord):
    """Each of ``population`` units takes part independently with probability ``rate``.

    The cohort may be empty; an empty cohort is a release like any other.
    """

    kind = "poisson"
    default_relation = NeighboringRelation.ADD_OR_REMOVE_ONE

    population: Count
    rate: Fraction

    @property
    def sampling_rate(self) -> float:
        """The probability that one unit takes part in a round."""
        return self.rate

    @property
    def expected_cohort_size(self) -> float:
        """The public constant by which a round's sum is divided."""
        return self.population * self.rate

    def draw(self, rng: np.random.Generator, so_far: Participations | None = None) -> list[int]:
        """Draw a cohort; return its indices in ascending order. ``so_far`` is not used."""
        # One number for every unit, so that a unit's draw does not depend on the others'.
        return np.flatnonzero(rng.random(self.population) < self.rate).tolist()

    def describe(self) -> str:
        """Describe the sampler in words."""
        return f"Poisson sampling at rate {self.rate:g} of {self.population}"


@dataclass(frozen=True)
class _OfFixedSize(Checked, JsonRecord):
    """Base class of samplers whose cohorts have a fixed size."""

    population: Count
    size: Count

    @property
    def sampling_rate(self) -> float:
        """The fraction of the units that take part in a round."""
        return self.size / self.population

    @property
    def expected_cohort_size(self) -> float:
        """The public constant by which a round's sum is divided."""
        return float(self.size)


@dataclass(frozen=True)
class FixedSizeSampling(_OfFixedSize):
    """Draw exactly ``size`` of ``population`` units, uniformly, without replacement."""

    kind = "fixed-size"
    default_relation = NeighboringRelation.REPLACE_ONE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size > self.population:
            raise InvalidValue(f"size={self.size}: expected at most population={self.population}")

    def draw(self, rng: np.random.Generator, so_far: Participations | None = None) -> list[int]:
        """Draw a cohort; return its indices in ascending order. ``so_far`` is not used."""
        return sorted(rng.choice(self.population, self.size, replace=False).tolist())

    def describe(self) -> str:
        """Describe the sampler in words."""
        return f"fixed-size sampling of {self.size} from {self.population}, without replacement"


@dataclass(frozen=True)
class FullParticipation(Checked, JsonRecord):
    """All ``population`` units take part in every round."""

    sampling_rate = 1.0

    kind = "everyone"
    default_relation = NeighboringRelation.ADD_OR_REMOVE_ONE

    population: Count

    @property
    def expected_cohort_size(self) -> float:
        """The public constant by which a round's sum is divided."""
        return float(self.population)

    def draw(self, rng: np.random.Generator, so_far: Participations | None = None) -> list[int]:
        """Return all indices in ascending order; the arguments are not used."""
        return list(range(self.population))

    def describe(self) -> str:
        """Describe the sampler in words."""
        return f"all {self.population} in every round"


@dataclass(frozen=True)
class SpacedSampling(_OfFixedSize):
    """Take units in turn: a unit takes part at most k times, and its rounds are at least b apart.

    Units that never took part come first, in the order of their indices. Then come the units that
    have waited longest. Cohorts are neither random nor secret, so sampling amplifies nothing. A
    unit that is asked and does not answer has used one of its k turns.

    Parameters
    ----------
    population : int
    size : int
        Number of units in a cohort, and the public constant by which a round's sum is divided. The
        cohort is smaller if fewer units may take part in the round.
    rounds_apart : int
        b: a unit that takes part in round t may take part again in round t + b or later.
    participations : int
        k: the largest number of rounds in which one unit takes part.
    """

    kind = "spaced"
    default_relation = NeighboringRelation.REPLACE_SPECIAL  # its cohorts are visible

    rounds_apart: Count
    participations: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size * self.rounds_apart > self.population:
            raise InvalidValue(
                f"rounds_apart={self.rounds_apart!r} with size={self.size} of "
                f"population={self.population}: expected at most {self.population // self.size}, "
                "because otherwise the units that have waited long enough are fewer than a cohort"
            )

    @property
    def limits(self) -> dict[str, int]:
        """The limits b and k on a unit's participations, by the names of their fields."""
        return {"rounds_apart": self.rounds_apart, "participations": self.participations}

    def draw(self, rng: np.random.Generator, so_far: Participations | None = None) -> list[int]:
        """Return the indices of the next cohort in ascending order; ``rng`` is not used."""
        so_far = so_far or Participations()
        newest = so_far.newest
        latest = so_far.rounds + 1 - self.rounds_apart
        waiting = [
            unit
            for unit in range(self.population)
            if so_far.uploads[unit] < self.participations and newest.get(unit, latest) <= latest
        ]
        waiting.sort(key=lambda unit: newest.get(unit, 0))
        return sorted(waiting[: self.size])

    def describe(self) -> str:
        """Describe the sampler in words."""
        return (
            f"{self.size} of {self.population} in turn, each at most {self.participations} times "
            f"and {self.rounds_apart} rounds apart"
        )


Sampling = PoissonSampling | FixedSizeSampling | FullParticipation | SpacedSampling


def size_for_rate(population: int, rate: float) -> int:
    """Return ``rate * population``, rounded to the nearest whole cohort size of at least 1."""
    return max(1, math.floor(rate * population + 0.5))
