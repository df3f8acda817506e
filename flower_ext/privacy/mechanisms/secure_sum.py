"""Parameters of a secure sum, from the fractions of clients that may collude or be lost.

Source: Bonawitz et al. 2017; Bell et al. 2020 for neighbours on a random graph.
`flower_ext.secure.aggregation` has the protocol.

A run has T rounds. In each round, the server draws n of N clients and places them on a circle in
random order. K = ⌈γN⌉ of the N clients collude with the server, where γ is the field ``colluding``
of a `SecureSum`. A cohort contains C ~ Hypergeometric(N, K, n) colluders, and c is the smallest
number with T P(C > c) ≤ 2⁻⁴⁰. Up to D = ⌈δn⌉ members may be lost in a round, where δ is the field
``dropouts``, and not the δ of a guarantee. Each member has two secrets, a mask key and a seed. It
shares both with k neighbours on the circle, and any t of the shares reveal a secret. Of the
neighbours, X ~ Hypergeometric(N - 1, K, k) collude. Of the neighbours of a member that stays, Y ~
Hypergeometric(n - 1, n - 1 - D, k) stay as well. The graph has the smallest even k for which some t
meets all these bounds, the second only with ``resist_equivocation``:

* T n P(X ≥ t) ≤ 2⁻⁴⁰: no honest member has t colluding neighbours, who could unmask it.
* T n P(X ≥ 2t - k) ≤ 2⁻⁴⁰: the server might tell some neighbours that a member answered, and the
  others that it was lost. Each honest neighbour then gives a share of one of the two secrets, and
  each colluder gives shares of both. The server then has at most k + X shares, and t shares of each
  secret only if X ≥ 2t - k.
* T n(n-1)/2 P(k given places are empty) ≤ 2⁻⁴⁰: the remaining honest members are connected. A
  circle with k/2 neighbours on each side splits only at two gaps of k/2 places. There are n(n-1)/2
  pairs of gaps. A place is empty if its member colludes or does not answer. Of the n members, at
  most c collude, and at most D do not answer.
* T n P(Y < t) ≤ 2⁻²⁰: enough shares arrive, or the round is discarded.

In a complete graph, as of any cohort of at most `COMPLETE` members, all members are neighbours, and
only C is random. The bounds are then c < t ≤ n - 1 - D and, as above, 2t > n - 1 + c.

The server of a *signed* sum may lie about the members that were lost. All members are neighbours,
t = n - 1 - D, and members sign their keys, so the server cannot replace keys. The server can tell
each honest member that D other members were lost. Each of the n - c honest members then gives away
at most D shares of mask keys. The colluders hold c shares of each mask key, so the server needs
t - c of the shares from honest members to learn it. The server thus learns at most
L = ⌊(n - c) D / (t - c)⌋ mask keys of honest members.

Besides its mask key, each member has a seed, whose mask also hides its vector. Suppose the server
learns the seed of an honest member A. Then at least t - c honest neighbours believe that A
answered, and A's vector has a mask with each of them. The server knows the mask keys of at most L
of them. It therefore sees the vectors of the other t - c - L or more only in one sum with A's
vector. So every sum that the server can learn contains at least 1 + t - c - L = n - D - c - L
honest answers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from flower_ext.checks import Checked, FractionBelowOne
from flower_ext.errors import InvalidValue

COMPLETE = 64
"""Largest number of members for which all members are neighbours."""
LEAST_MEMBERS = 3
"""Least number of members of a sum. Each of two members could compute the other's vector."""
_INSECURE, _FAILED = 2.0**-40, 2.0**-20
"""Largest probability that colluders break the secrecy of any round of a run, and largest
probability that lost members make any round fail."""
_RIPPLE = 16
"""Number of even k to try below the k that bisection finds.

A smaller k may suffice, because t is a whole number.
"""
_NOISE_STDDEVS = 11.0
"""Room for a sum's noise, in stddevs. 2⁴⁰ numbers all stay below, except with probability 2⁻⁴⁰."""


@dataclass(frozen=True, kw_only=True)
class SumParameters:
    """Parameters of one round's secure sum.

    Parameters
    ----------
    members : int
        n: number of members.
    num_neighbors : int
        k: number of neighbours of each member.
    threshold : int
        t: number of neighbours whose shares together unmask a member.
    least_answers : int
        Least number of masked vectors; with fewer, the round is discarded.
    colluders : int
        c: number of members that may share everything they know with the server. The probability
        that any round of a run has more such members is at most 2⁻⁴⁰.
    signed : bool
        As in `SecureSum`.
    """

    members: int
    num_neighbors: int
    threshold: int
    least_answers: int
    colluders: int
    signed: bool = False

    @property
    def honest_answers(self) -> int:
        """Least number of answers in a sum that come from honest clients.

        Colluders can subtract their own noise from the sum, but not the noise of these clients. The
        number is smaller in a signed sum, because the server may lie about the members that were
        lost, and so unmask some honest members (see the top of this module).
        """
        honest = self.least_answers - self.colluders
        if not self.signed:
            return honest
        lost = self.members - self.least_answers
        return honest - (self.members - self.colluders) * lost // (self.threshold - self.colluders)

    @property
    def honest_noise(self) -> float:
        """Fraction of noise variance that honest clients add if only ``least_answers`` arrive."""
        return self.honest_answers / self.least_answers


@dataclass(frozen=True, kw_only=True)
class SecureSum(Checked):
    """Settings of secure sums. The server sees the sum, its members, and the times of answers.

    Parameters
    ----------
    colluding : float
        γ: fraction of the population that may collude with the server; the number of clients is
        rounded up. Cohorts are random, so the fraction may be larger in a cohort. A guarantee
        against the server counts only the noise of honest clients.
    dropouts : float
        δ: fraction of a cohort that may be lost during a round; the number is rounded up. If more
        members are lost, the round is discarded. Clients scale their noise so that the remaining
        answers carry all of it.
    resist_equivocation : bool
        True chooses the threshold t so large that a server cannot unmask a client, even if the
        server tells some neighbours that this client answered and the others that it was lost. With
        False, a client needs fewer neighbours, and a round succeeds even if it loses more clients.
    signed : bool
        True if clients sign their keys. Each owner of a node lists the identities of the others
        (``sum-identity-key`` and ``sum-members`` in the node config). The guarantee then also holds
        against a server that lies. All members are then neighbours, so a cohort should have some
        hundred clients at most.

    Raises
    ------
    InvalidValue
        A fraction is outside [0, 1), the two add up to 1 or more, or ``signed`` is True and
        ``resist_equivocation`` False.
    """

    colluding: FractionBelowOne = 0.1
    dropouts: FractionBelowOne = 0.1
    resist_equivocation: bool = True
    signed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.signed and not self.resist_equivocation:
            raise InvalidValue(
                "resist_equivocation=False with signed=True: expected resist_equivocation=True, "
                "because the server of a signed sum may lie"
            )
        if self.colluding + self.dropouts >= 1:
            raise InvalidValue(
                f"colluding={self.colluding:g} and dropouts={self.dropouts:g}: expected a sum "
                "below 1, so that honest members are left"
            )

    def colluders_among(self, population: int) -> int:
        """Return the number of a population's clients that may collude, rounded up."""
        return math.ceil(self.colluding * population - 1e-9)

    def for_cohort(
        self, members: int, *, population: int | None = None, rounds: int = 1
    ) -> SumParameters:
        """Return the parameters for cohorts of ``members`` clients.

        Parameters
        ----------
        members : int
            Number of clients in each cohort.
        population : int, optional
            Number of clients from which cohorts are drawn uniformly. By default all clients are
            members in every round.
        rounds : int
            Planned number of rounds. The bounds on the probability of failure hold for all these
            rounds together. In a longer run, the probability grows in proportion.

        Raises
        ------
        InvalidValue
            For a cohort of this size, no parameters protect against so many colluding clients and
            so many lost clients.
        """
        population = members if population is None else population
        cohort = self._cohort(members, population, rounds)
        if (graph := _parameters(cohort)) is None:
            # Name resist_equivocation=False in the error if this setting would suffice.
            weaker = replace(cohort, equivocation=False)
            suffices = not self.signed and _parameters(weaker) is not None
            raise InvalidValue(
                f"no secure sum of {members} members withstands colluding={self.colluding:g} and "
                f"dropouts={self.dropouts:g} ({cohort.colluders} colluders and {cohort.lost} lost "
                "members): lower colluding or dropouts, or take larger cohorts"
                + (", or set SecureSum(resist_equivocation=False)" if suffices else "")
            )
        num_neighbors, threshold = graph
        parameters = SumParameters(
            members=members,
            num_neighbors=num_neighbors,
            threshold=threshold,
            least_answers=members - cohort.lost,
            colluders=cohort.colluders,
            signed=self.signed,
        )
        if parameters.honest_answers < 2:
            raise InvalidValue(
                f"signed=True with dropouts={self.dropouts:g} and {members} members: expected "
                f"smaller dropouts, because a server that lies about {cohort.lost} lost members "
                "could see the vector of a single honest member"
            )
        return parameters

    def _cohort(self, members: int, population: int, rounds: int) -> _Cohort:
        """Return a cohort with its collusion and losses; refuse one that leaves too few answers."""
        if members < LEAST_MEMBERS:
            raise InvalidValue(
                f"a cohort of {members}: expected at least {LEAST_MEMBERS} members for a secure "
                "sum; take more clients or silos, draw larger cohorts, or use no secure sum"
            )
        corrupt = self.colluders_among(population)
        colluders = _most_colluders(members, population, corrupt, rounds)
        lost = math.ceil(self.dropouts * members - 1e-9)  # 0.1 · 30 is a little above 3 in floats
        least, fewest = members - lost, max(colluders + 2, math.ceil(members / 4))
        if least < fewest:
            raise InvalidValue(
                f"a cohort of {members} from {population} clients may have {colluders} colluders "
                f"and lose {lost} members, which leaves {least} answers: expected at least "
                f"{fewest} answers, so that two honest members and a quarter of all members "
                "answer; lower dropouts or colluding, or take larger cohorts"
            )
        return _Cohort(
            members=members,
            population=population,
            corrupt=corrupt,
            colluders=colluders,
            lost=lost,
            rounds=rounds,
            equivocation=self.resist_equivocation,
            complete=self.signed,
        )

    def describe(self) -> str:
        """Describe the settings in one line, for the log."""
        kind = "signed secure sums" if self.signed else "secure sums"
        return f"{kind} (up to {self.colluding:g} collude, {self.dropouts:g} are lost)"


def ring_bits(cells: float, noise_stddev: float) -> int:
    """Return the number of bits of a ring in which a sum does not overflow: 32 or 64.

    A coordinate of the members' sum has at most ``cells`` cells before noise, and noise of the
    standard deviation ``noise_stddev``, in cells. Refuse a sum that needs more bits.
    """
    most = cells + _NOISE_STDDEVS * noise_stddev
    for bits in (32, 64):
        if most < 2.0 ** (bits - 1):
            return bits
    raise InvalidValue(
        f"a secure sum may reach {most:.3g} grid steps: expected less than 2**63; take fewer "
        "members, or more noise, which makes the grid steps larger"
    )


@dataclass(frozen=True, kw_only=True)
class _Cohort:
    """A cohort, and the collusion and losses that its graph must withstand."""

    members: int
    population: int
    corrupt: int
    colluders: int
    lost: int
    rounds: int
    equivocation: bool
    complete: bool = False

    def threshold(self, num_neighbors: int) -> int:
        """Return the largest threshold t that meets all bounds with k neighbours, or 0."""
        others = self.members - 1
        if num_neighbors == others:
            threshold = others - self.lost
            return threshold if self.colluders < self._shares(num_neighbors, threshold) else 0
        # A larger t withstands more colluders, so test the largest t with which rounds succeed.
        threshold = _least(lambda t: not self._succeeds(num_neighbors, t), 1, num_neighbors + 1) - 1
        return threshold if threshold and self._is_secure(num_neighbors, threshold) else 0

    def _shares(self, num_neighbors: int, threshold: int) -> int:
        """Return the smallest number of colluding neighbours that could unmask a member."""
        return 2 * threshold - num_neighbors if self.equivocation else threshold

    def _succeeds(self, num_neighbors: int, threshold: int) -> bool:
        """Return True if each remaining member keeps at least ``threshold`` neighbours.

        The probability that a run has a member with fewer neighbours must be at most 2⁻²⁰.
        """
        others = self.members - 1
        few = _hypergeometric().cdf(threshold - 1, others, others - self.lost, num_neighbors)
        return bool(self.rounds * self.members * few <= _FAILED)

    def _is_secure(self, num_neighbors: int, threshold: int) -> bool:
        """Return True if colluders unmask nobody and the honest members' graph stays connected.

        For each of these properties, the probability that a run violates it must be at most 2⁻⁴⁰.
        """
        law, members = _hypergeometric(), self.members
        shares = self._shares(num_neighbors, threshold)
        unmasked = members * law.sf(shares - 1, self.population - 1, self.corrupt, num_neighbors)
        empty = min(self.colluders + self.lost, members)
        split = members * (members - 1) / 2 * law.pmf(num_neighbors, members, empty, num_neighbors)
        return bool(self.rounds * max(unmasked, split) <= _INSECURE)


@lru_cache(maxsize=1024)
def _parameters(cohort: _Cohort) -> tuple[int, int] | None:
    """Return the smallest k that suffices for a cohort, and its t; None if no k suffices.

    k is the number of neighbours of each member, and t the number of shares that unmask a member.
    """
    others = cohort.members - 1
    half = (others - 1) // 2  # the largest even k below the complete graph is twice this
    if cohort.members > COMPLETE and not cohort.complete and cohort.threshold(2 * half):
        pairs = _least(lambda tried: cohort.threshold(2 * tried) > 0, 1, half)
        # A smaller k may suffice: t is a whole number, so the probabilities need not fall with k.
        for num_neighbors in range(2 * max(1, pairs - _RIPPLE), 2 * pairs + 1, 2):
            if threshold := cohort.threshold(num_neighbors):
                return num_neighbors, threshold
    threshold = cohort.threshold(others)
    return (others, threshold) if threshold else None


@lru_cache(maxsize=1024)
def _most_colluders(members: int, population: int, corrupt: int, rounds: int) -> int:
    """Return c: with probability 1 - 2⁻⁴⁰ or more, no cohort of a run has more than c colluders."""
    if members == population:
        return corrupt
    law = _hypergeometric()
    return _least(
        lambda number: rounds * law.sf(number, population, corrupt, members) <= _INSECURE,
        0,
        min(members, corrupt),
    )


def _least(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the smallest number from ``low`` to ``high`` for which ``holds`` is true.

    ``holds`` must be true for ``high``, and for all numbers above the result.
    """
    return low + bisect_left(range(low, high), True, key=holds)


def _hypergeometric() -> Any:
    """Import and return SciPy's hypergeometric distribution; the import takes 0.5 s."""
    from scipy.stats import hypergeom

    return hypergeom
