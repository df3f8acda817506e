"""The clients that a round asks, and the units whose data count as having gone into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flower_ext.privacy import FullParticipation, Sampling
from flower_ext.privacy.participations import Participations


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """One round's draw.

    Parameters
    ----------
    asked : Sequence[int]
        Partitions that are asked for an upload.
    units : Sequence[int]
        Privacy units whose data go into the round.
    norms : Mapping[int, float]
        By partition, how many clipping norms its upload may have before noise: 1 where not named,
        more where it is a sum.
    """

    asked: Sequence[int]
    units: Sequence[int]
    norms: Mapping[int, float] = field(default_factory=dict)


class Population:
    """Clients who are the privacy units, or stand for theirs: each has one upload a round.

    Parameters
    ----------
    sampling : Sampling
        Draws them.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.participations = Participations()

    @property
    def num_nodes(self) -> int:
        """How many Flower nodes take part."""
        return self.sampling.population

    def draw(self, rng: np.random.Generator) -> Cohort:
        """Draw a round's cohort."""
        drawn = self.sampling.draw(rng)
        return Cohort(asked=drawn, units=drawn)

    def count(self, cohort: Cohort, answered: int) -> None:
        """Count a round of which ``answered`` uploads can be used."""
        self.participations.record(cohort.units, answered, asked=len(cohort.asked))

    def count_abandoned(self, units: Sequence[int], answered: int, *, asked: int) -> None:
        """Count a round that was asked for and never finished, since its uploads may be known."""
        self.participations.record(units, answered, asked=asked)

    def forget_who(self) -> None:
        """Count for every unit what counts for the one that took part most.

        For when it is no longer known which of them is which.
        """
        self.participations.level(range(self.sampling.population))


class UsersInSilos(Population):
    """Users, of whom every silo has some records: they are drawn, and all silos are asked.

    Parameters
    ----------
    sampling : Sampling
        Draws users.
    num_silos : int
        The nodes.
    """

    def __init__(self, sampling: Sampling, num_silos: int) -> None:
        super().__init__(sampling)
        self.num_silos = num_silos

    @property
    def num_nodes(self) -> int:
        """The silos."""
        return self.num_silos

    def draw(self, rng: np.random.Generator) -> Cohort:
        """Draw users; each silo is asked for its part of them."""
        return Cohort(asked=range(self.num_silos), units=self.sampling.draw(rng))


class HiddenUsers(UsersInSilos):
    """Users whose parts are added up under masks: nobody sees less than the sum over all silos.

    Parameters
    ----------
    sampling, num_silos
        As for `UsersInSilos`.
    oblivious : bool
        Nobody knows who is drawn: it may be any of them.
    """

    def __init__(self, sampling: Sampling, num_silos: int, *, oblivious: bool) -> None:
        super().__init__(sampling, num_silos)
        self.oblivious = oblivious

    def draw(self, rng: np.random.Generator) -> Cohort:
        """Draw places in an order that the silos keep to themselves, or name everyone."""
        if not self.oblivious:
            return super().draw(rng)
        return Cohort(asked=range(self.num_silos), units=range(self.sampling.population))

    def count(self, cohort: Cohort, answered: int) -> None:
        """Count a round as complete: who misses a silo's part of a sum sees no sum at all."""
        self.participations.record(cohort.units, self.num_silos, asked=self.num_silos)

    def count_abandoned(self, units: Sequence[int], answered: int, *, asked: int) -> None:
        """Count it for all alike: the places that were drawn were those of an order now lost."""
        self.forget_order()
        self.participations.record(units, self.num_silos, asked=self.num_silos)
        self.forget_order()

    def forget_order(self) -> None:
        """Forget whose place is whose, where only some places are drawn."""
        if not isinstance(self.sampling, FullParticipation):
            self.forget_who()
