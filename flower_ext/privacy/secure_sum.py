"""Parameters of a secure sum, from the shares of members that may collude or be lost.

Source: Bonawitz et al. 2017; Bell et al. 2020 for neighbours on a random graph.
`flower_ext.secure.aggregation` has the protocol.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flower_ext.checks import require_at_least_one
from flower_ext.errors import InvalidValue

COMPLETE = 64
"""Largest number of members for which all members are neighbours."""
LEAST_MEMBERS = 3
"""Least members of a sum. Of two members, each could subtract its vector and see the other's."""
_INSECURE, _FAILED = 2.0**-40, 2.0**-20
"""Probability of a graph that colluders break, and of a round that fails for lost members."""
_NOISE_STDDEVS = 11.0
"""Room for a sum's noise: 2⁴⁰ numbers all stay below it except with probability 2⁻⁴⁰."""


@dataclass(frozen=True, kw_only=True)
class SumParameters:
    """Parameters of one round's secure sum.

    Parameters
    ----------
    members : int
        Number of members, n.
    neighbors : int
        Number of neighbours of each member, k.
    threshold : int
        Number of neighbours whose shares unmask a member, t.
    least_answers : int
        Least number of masked vectors; with fewer, the round is discarded.
    colluders : int
        Number of members that may share everything they know with the server.
    """

    members: int
    neighbors: int
    threshold: int
    least_answers: int
    colluders: int

    @property
    def honest_answers(self) -> int:
        """Least number of answers in a sum that come from honest clients.

        Colluders can subtract their own noise, but not the noise of these clients.
        """
        return self.least_answers - self.colluders


@dataclass(frozen=True, kw_only=True)
class SecureSum:
    """A sum of uploads; the server sees only the sum, the members that took part, and when.

    Parameters
    ----------
    colluding : float
        γ: share of a cohort that may collude with the server. A guarantee against the server counts
        only the noise of the others.
    dropouts : float
        δ: share of a cohort that may be lost during a round, rounded up. If more are lost, the
        round is discarded.
    threshold, neighbors : int, optional
        t and k for cohorts of every size. By default they follow from γ, δ and a cohort's size, so
        that the sum is secure except with probability 2⁻⁴⁰, and fails for lost members with
        probability at most 2⁻²⁰.
    least_answers : int, optional
        Least number of answers, for which the clients' noise is scaled. By default a cohort's size
        minus its dropouts.

    Raises
    ------
    InvalidValue
        A share is outside [0, 1), or both together reach 1.
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
                "1 together, so that honest members are left"
            )
        for name in ("threshold", "neighbors", "least_answers"):
            if getattr(self, name) is not None:
                require_at_least_one(name, getattr(self, name))

    def for_cohort(self, members: int) -> SumParameters:
        """Return the parameters for a cohort of ``members`` clients.

        Raises
        ------
        InvalidValue
            In a cohort of this size, no parameters protect against the planned shares of colluding
            and lost clients.
        """
        if members < LEAST_MEMBERS:
            raise InvalidValue(
                f"a cohort of {members}: expected at least {LEAST_MEMBERS} for a secure sum; take "
                "more clients, or a larger share of them"
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
        """Return k and t, as given or as they follow from the shares."""
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
        """Return one line for the log."""
        return f"secure sums (up to {self.colluding:g} collude, {self.dropouts:g} are lost)"


def ring_bits(cells: float, noise_stddev: float) -> int:
    """Return the bits of a ring in which a sum does not overflow: 32 or 64.

    Parameters
    ----------
    cells : float
        Largest magnitude of the sum of members' values in one coordinate.
    noise_stddev : float
        Standard deviation, in cells, of the noise on a sum of all members.

    Raises
    ------
    InvalidValue
        The sum needs more than 64 bits.
    """
    most = cells + _NOISE_STDDEVS * noise_stddev
    for bits in (32, 64):
        if most < 2.0 ** (bits - 1):
            return bits
    raise InvalidValue(
        f"a sum of up to {most:.3g} cells: expected less than 2**63; take fewer members or more "
        "noise"
    )


def _sound(members: int, colluders: int, lost: int, neighbors: int, threshold: int) -> bool:
    """Return True if a graph withstands these numbers of colluders and losses."""
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
    """Return the distributions of colluding, remaining, and lost or colluding neighbours."""
    from scipy.stats import hypergeom  # takes half a second

    others = members - 1
    return (
        hypergeom(others, colluders, neighbors),
        hypergeom(others, others - lost, neighbors),
        hypergeom(others, min(colluders + lost, others), neighbors),
    )


@lru_cache(maxsize=1024)
def _parameters(members: int, colluders: int, lost: int) -> tuple[int, int] | None:
    """Return the least k and its t for these numbers of members, colluders and losses."""
    others = members - 1
    if members <= COMPLETE:
        return (others, others - lost) if others - lost > colluders else None
    for neighbors in [*range(2, others, 2), others]:
        if (threshold := threshold_of(members, colluders, lost, neighbors)) is not None:
            return neighbors, threshold
    return None


def threshold_of(members: int, colluders: int, lost: int, neighbors: int) -> int | None:
    """Return the largest t for a random graph with k = ``neighbors``; None if no t suffices.

    Of an honest member's k neighbours, X collude, Y remain, and Z are lost or collude, all
    hypergeometric. Then n P(X ≥ t) ≤ 2⁻⁴⁰, n P(Y < t) ≤ 2⁻²⁰, and n P(Z = k) ≤ 2⁻⁴⁰ must hold.
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
