"""Parameters of a secure sum: how many may collude or be lost, and what follows from it.

Source: Bonawitz et al. 2017; Bell et al. 2020 for neighbours on a random graph. The protocol itself
is in `flower_ext.secure.aggregation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flower_ext.checks import require_at_least_one
from flower_ext.errors import InvalidValue

COMPLETE = 64
"""Members up to which everybody is everybody's neighbour."""
LEAST_MEMBERS = 3
"""Of a sum: with two members each could take its own vector off and see the other's."""
_INSECURE, _FAILED = 2.0**-40, 2.0**-20
"""Probability of a graph that colluders break, and of a round that fails for lost members."""
_NOISE_STDDEVS = 11.0
"""Of a sum's noise, which none of 2⁴⁰ numbers exceeds but with a probability below 2⁻⁴⁰."""


@dataclass(frozen=True, kw_only=True)
class SumParameters:
    """Numbers that one round's secure sum runs with.

    Parameters
    ----------
    members : int
        n.
    neighbors : int
        k, of each member.
    threshold : int
        t: shares of so many neighbours unmask a member.
    least_answers : int
        Fewer masked vectors, and the round is discarded.
    colluders : int
        Members that may tell the server all they know.
    """

    members: int
    neighbors: int
    threshold: int
    least_answers: int
    colluders: int

    @property
    def honest_answers(self) -> int:
        """Answers of honest members in every sum, whose noise the colluders cannot take off."""
        return self.least_answers - self.colluders


@dataclass(frozen=True, kw_only=True)
class SecureSum:
    """A sum of uploads of which the server sees nothing but the sum, who took part, and when.

    Parameters
    ----------
    colluding : float
        γ: share of a cohort that may collude with the server. A guarantee against the server
        counts the noise of the others alone.
    dropouts : float
        δ: share of a cohort that may be lost in the course of a round, rounded up; of more, the
        round is discarded.
    threshold, neighbors : int, optional
        t and k, for every cohort alike. By default they follow from γ, δ and a cohort's size: the
        sum is secure but with probability 2⁻⁴⁰, and fails for lost members with 2⁻²⁰ at most.
    least_answers : int, optional
        By default a cohort's size less its dropouts. The clients' noise is scaled for so many.

    Raises
    ------
    InvalidValue
        A share is below 0, or both together reach 1.
    """

    colluding: float = 0.1
    dropouts: float = 0.1
    threshold: int | None = None
    neighbors: int | None = None
    least_answers: int | None = None

    def __post_init__(self) -> None:
        for name in ("colluding", "dropouts"):
            if not 0 <= getattr(self, name) < 1:
                raise InvalidValue(f"{name}={getattr(self, name)!r}: expected a share in [0, 1)")
        if self.colluding + self.dropouts >= 1:
            raise InvalidValue(
                f"colluding={self.colluding:g} and dropouts={self.dropouts:g}: expected less than "
                "1 together, as honest members have to be left"
            )
        for name in ("threshold", "neighbors", "least_answers"):
            if getattr(self, name) is not None:
                require_at_least_one(name, getattr(self, name))

    def for_cohort(self, members: int) -> SumParameters:
        """Return the parameters for a cohort of that size.

        Raises
        ------
        InvalidValue
            No parameters make the sum of so few members secure under these shares.
        """
        if members < LEAST_MEMBERS:
            raise InvalidValue(
                f"a cohort of {members}: expected at least {LEAST_MEMBERS} for a secure sum"
            )
        colluders = math.floor(self.colluding * members + 1e-9)
        lost = math.ceil(self.dropouts * members - 1e-9)
        least = members - lost if self.least_answers is None else self.least_answers
        neighbors, threshold = self._graph(members, colluders, lost)
        if not _sound(members, colluders, lost, neighbors, threshold):
            raise InvalidValue(
                f"neighbors={neighbors} and threshold={threshold} in a cohort of {members}: "
                f"expected {_parameters(members, colluders, lost)}, or others that withstand "
                f"{colluders} colluders and {lost} losses"
            )
        fewest = max(colluders + 2, math.ceil(members / 4))
        if not fewest <= least <= members:
            raise InvalidValue(
                f"least_answers={least}: expected {fewest} to {members} in a cohort of {members} "
                f"with {colluders} colluders, so that two honest members and a quarter of all "
                "answer; lower dropouts"
            )
        return SumParameters(
            members=members,
            neighbors=neighbors,
            threshold=threshold,
            least_answers=least,
            colluders=colluders,
        )

    def _graph(self, members: int, colluders: int, lost: int) -> tuple[int, int]:
        """Return k and t, as given or as they follow."""
        if self.neighbors is not None:
            neighbors = min(self.neighbors + self.neighbors % 2, members - 1)
            return neighbors, self.threshold or neighbors // 2 + 1
        if (found := _parameters(members, colluders, lost)) is None:
            raise InvalidValue(
                f"no secure sum of {members} members withstands colluding={self.colluding:g} and "
                f"dropouts={self.dropouts:g}: lower one of them, or take larger cohorts"
            )
        return found[0], self.threshold or found[1]

    def describe(self) -> str:
        """For the log."""
        return f"secure sums (up to {self.colluding:g} collude, {self.dropouts:g} are lost)"


def ring_bits(cells: float, noise_stddev: float) -> int:
    """Return the bits of a ring in which a sum does not overflow: 32 or 64.

    Parameters
    ----------
    cells : float
        The most that members' values add up to in one coordinate.
    noise_stddev : float
        Of the noise on a sum to which all members answered, in cells.

    Raises
    ------
    InvalidValue
        64 bits are too few.
    """
    most = cells + _NOISE_STDDEVS * noise_stddev
    for bits in (32, 64):
        if most < 2.0 ** (bits - 1):
            return bits
    raise InvalidValue(f"a sum of up to {most:.3g} cells: expected less than 2**63")


def _sound(members: int, colluders: int, lost: int, neighbors: int, threshold: int) -> bool:
    """Return whether a graph withstands colluders, and the losses that it is to withstand."""
    others = members - 1
    if neighbors == others:
        return colluders < threshold <= others - lost
    colluding, staying, without = _neighbours(members, colluders, lost, neighbors)
    return bool(
        1 <= threshold <= neighbors < others
        and members * without.pmf(neighbors) <= _INSECURE
        and members * colluding.sf(threshold - 1) <= _INSECURE
        and members * staying.cdf(threshold - 1) <= _FAILED
    )


def _neighbours(members: int, colluders: int, lost: int, neighbors: int) -> tuple[Any, Any, Any]:
    """Return the distributions of colluding, staying, and gone or colluding neighbours."""
    from scipy.stats import hypergeom  # half a second to import

    others = members - 1
    return (
        hypergeom(others, colluders, neighbors),
        hypergeom(others, others - lost, neighbors),
        hypergeom(others, min(colluders + lost, others), neighbors),
    )


@lru_cache(maxsize=1024)
def _parameters(members: int, colluders: int, lost: int) -> tuple[int, int] | None:
    """Return the least k and its t for so many members, colluders and losses."""
    others = members - 1
    if members <= COMPLETE:
        return (others, others - lost) if others - lost > colluders else None
    for neighbors in [*range(2, others, 2), others]:
        if (threshold := threshold_of(members, colluders, lost, neighbors)) is not None:
            return neighbors, threshold
    return None


def threshold_of(members: int, colluders: int, lost: int, neighbors: int) -> int | None:
    """Return the largest t for a random graph with so many neighbours, None where none will do.

    With X of an honest member's k neighbours colluding, Y staying and Z gone or colluding, all
    hypergeometric: n P(X ≥ t) ≤ 2⁻⁴⁰, n P(Y < t) ≤ 2⁻²⁰, and n P(Z = k) ≤ 2⁻⁴⁰.
    """
    colluding, staying, without = _neighbours(members, colluders, lost, neighbors)
    if members * without.pmf(neighbors) > _INSECURE:
        return None
    for threshold in range(neighbors, 0, -1):
        if members * colluding.sf(threshold - 1) > _INSECURE:
            return None
        if members * staying.cdf(threshold - 1) <= _FAILED:
            return threshold
    return None
