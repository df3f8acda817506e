"""The clients that a round asks, and the privacy units whose data the round uses.

A `Population` draws units, names the nodes to ask and counts whose data were used. The same code
for rounds and accounting therefore serves both clients and users in silos.
"""

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

import numpy as np

from flower_ext.errors import InvalidValue
from flower_ext.federation.messages.records import Arrays, is_reserved
from flower_ext.privacy import FullParticipation, Sampling
from flower_ext.privacy.accounting.participations import Participations


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """The clients and units of one round.

    Parameters
    ----------
    partitions : Sequence[int]
        Partitions that the server asks for an upload.
    units : Sequence[int]
        Privacy units whose data the round uses.
    norms : Mapping[int, float]
        By partition, the largest norm that an upload may have before noise, as a multiple of the
        clipping norm. The default is 1; a sum over several units may have a larger norm.
    population : int
        Number of units from which ``units`` were drawn.
    models : Mapping[int, Mapping[str, ndarray]]
        By partition, a model that this client receives in place of the shared model.
    requests : Mapping[int, Mapping[str, Mapping[str, ndarray]]]
        By partition, the groups of arrays that only this client receives. Each group becomes a
        record of the message, under the group's name.

    Raises
    ------
    InvalidValue
        A group has the name of another record of a message.
    """

    partitions: Sequence[int]
    units: Sequence[int]
    population: int
    norms: Mapping[int, float] = field(default_factory=dict)
    models: Mapping[int, Arrays] = field(default_factory=dict)
    requests: Mapping[int, Mapping[str, Arrays]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {name for groups in self.requests.values() for name in groups}
        if taken := sorted(name for name in names if is_reserved(name)):
            raise InvalidValue(
                f"requests of a Cohort: expected names other than {taken}, because messages have "
                "records of these names"
            )


class Population:
    """Clients from which each round draws a cohort; every drawn client is asked for one upload.

    The drawn clients count as the privacy units. If the unit is a record, the participations of a
    client count for all of its records.

    Parameters
    ----------
    sampling : Sampling
        Draws the clients of a round.
    """

    repeats = True
    """True if a seed makes a repeated round use the same units as the first attempt."""
    shows_users = False
    """True if the server knows how many users a round draws, and reports that."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.num_nodes = sampling.population
        """The number of Flower nodes that take part."""
        self.participations = Participations()

    def draw(self, rng: np.random.Generator) -> Cohort:
        """Draw a round's cohort."""
        drawn = self.sampling.draw(rng, self.participations)
        return Cohort(partitions=drawn, units=drawn, population=self.sampling.population)

    def leaving(self, withdrawn: Collection[int]) -> frozenset[int]:
        """Return the partitions that the server stops asking once units ``withdrawn`` have left."""
        return frozenset(withdrawn)

    def without(self, cohort: Cohort, withdrawn: Collection[int]) -> Cohort:
        """Return a drawn cohort without units that withdrew.

        Units are left out after the draw, so that a withdrawal does not change the draw of other
        units. A drawn unit that withdrew still counts as drawn.
        """
        staying = [partition for partition in cohort.partitions if partition not in withdrawn]
        return replace(cohort, partitions=staying)

    def count(self, units: Sequence[int], uploads: int, *, needed: int) -> None:
        """Count a round: its units, and how many uploads are usable and needed (`UploadCounts`)."""
        self.participations.record(units, uploads, needed=needed)

    def after(self, cohort: Cohort) -> Participations:
        """Return the participations after a round in which every client of a cohort answers."""
        ahead, size = deepcopy(self), len(cohort.partitions)
        ahead.count(cohort.units, size, needed=size)
        return ahead.participations

    def count_abandoned(self, units: Sequence[int], uploads: int, *, needed: int) -> None:
        """Count a round that was never finished, because clients may already have uploaded."""
        self.count(units, uploads, needed=needed)

    def forget_order(self) -> None:
        """Adjust the counts to a new secret order of silos' users; by default, change nothing."""

    def equalise_counts(self) -> None:
        """Give every unit the count of the unit that took part most.

        Call it when the server no longer knows which unit is which.
        """
        self.participations.level(range(self.sampling.population))


class UsersInSilos(Population):
    """Users whose records lie in several silos: a round draws users and asks every silo."""

    shows_users = True

    def __init__(self, sampling: Sampling, num_silos: int) -> None:
        super().__init__(sampling)
        self.num_nodes = num_silos

    def draw(self, rng: np.random.Generator) -> Cohort:
        """Draw users, and return a cohort of these users and all silos."""
        return replace(super().draw(rng), partitions=range(self.num_nodes))

    def leaving(self, withdrawn: Collection[int]) -> frozenset[int]:
        """Return no partition, because a silo stays when one of its users leaves."""
        return frozenset()

    def without(self, cohort: Cohort, withdrawn: Collection[int]) -> Cohort:
        """Return a drawn cohort without users that withdrew."""
        return replace(cohort, units=[user for user in cohort.units if user not in withdrawn])


class HiddenUsers(UsersInSilos):
    """Users whose records lie in silos that hide from the server which users are drawn.

    If ``drawn_by_server`` is True, the server draws indices in a secret order of the users, which
    only the silos know. Otherwise the server knows nothing of the draw, so any user may have been
    drawn.
    """

    repeats = False  # new secret keys change the draw

    def __init__(self, sampling: Sampling, num_silos: int, *, drawn_by_server: bool) -> None:
        super().__init__(sampling, num_silos)
        self.shows_users = drawn_by_server

    def draw(self, rng: np.random.Generator) -> Cohort:
        """Draw indices in the silos' secret order; if the silos draw, return all users."""
        if self.shows_users:
            return super().draw(rng)
        users = range(self.sampling.population)
        return Cohort(partitions=range(self.num_nodes), units=users, population=len(users))

    def without(self, cohort: Cohort, withdrawn: Collection[int]) -> Cohort:
        """Return the whole cohort: only silos know the order, so they leave out withdrawn users."""
        return cohort

    def count(self, units: Sequence[int], uploads: int, *, needed: int) -> None:
        """Count a round with an upload of every silo, because a weighted sum needs all uploads.

        If the silos draw the users, ε depends on the number of rounds, and not on any uploads.
        """
        super().count(units, self.num_nodes, needed=self.num_nodes)

    def count_abandoned(self, units: Sequence[int], uploads: int, *, needed: int) -> None:
        """Count the round as if all users took part, because nobody knows who did any more."""
        # The silos' order of the users is lost. Nobody knows to which user a count belongs, so give
        # all users the same count, before and after.
        self.forget_order()
        self.count(units, uploads, needed=needed)
        self.forget_order()

    def forget_order(self) -> None:
        """Give every user the count of the user that took part most, unless rounds use all users.

        The server draws indices in the silos' secret order of the users. In a new order, any user
        may have had any of the earlier indices.
        """
        if not isinstance(self.sampling, FullParticipation):
            self.equalise_counts()
