"""Releases: noised sums as accounting sees them, and their privacy losses.

Under replace-one, the two accountants of dp-accounting 0.6 differ: PLD doubles a Gaussian's
sensitivity, and RDP does not. For replace-one, the accountants therefore get a Gaussian that
already has sensitivity 2 (`Release.relative_noise`), and no accountant doubles this sensitivity.

In this table, C is the clipping norm, and *spaced* stands for `SpacedSampling`:

=========================  =======================  ====================================
sampling                   relation                 accounted as
=========================  =======================  ====================================
Poisson                    add-or-remove-one        sub-sampled Gaussian, PLD or RDP; or as if
                                                    all took part, if ε is then smaller
Poisson                    any other                refused: no accountant covers this pair
fixed size                 replace-one              sub-sampled without replacement, RDP; or as
                                                    if all took part, if ε is then smaller
fixed size                 replace-special          Gaussian composition, no amplification
fixed size                 add-or-remove-one        refused: an added unit takes another's place,
                                                    which moves the sum by 2C
everyone                   any                      Gaussian composition
spaced                     add-or-remove-one        refused: an added unit delays many others'
                                                    turns, which changes many rounds
spaced                     any other                Gaussian composition: each round is a part of
                                                    one Gaussian (see `correlated_noise`)
=========================  =======================  ====================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from flower_ext.checks import Checked, NotNegative
from flower_ext.errors import InvalidValue
from flower_ext.json_record import JsonRecord
from flower_ext.privacy.accounting.sampling import (
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    Sampling,
    SpacedSampling,
)
from flower_ext.privacy.units import NeighboringRelation

MOST_NOISE = 1e7
"""Largest relative noise in the accounting. Larger noise would overflow RDP, and counts as 1e7."""
LEAST_NOISE = 1e-100
"""Least relative noise in the accounting. Squares of less noise underflow, and it counts as 0."""


@dataclass(frozen=True, kw_only=True)
class PrivacyLoss:
    """An upper bound (ε, δ), and the accountant that computed it.

    To compose the loss with other releases, compose its ``releases``, because (ε, δ) alone give a
    larger bound.
    """

    epsilon: float
    delta: float
    accountant: str
    releases: Counts | None = field(default=None, compare=False, repr=False)
    """Releases that together have at most this loss; None if only (ε, δ) is known."""

    @classmethod
    def unbounded(cls, delta: float) -> PrivacyLoss:
        """Return the loss of a release that promises nothing: its ε is infinite."""
        return cls(epsilon=math.inf, delta=delta, accountant="none")


@dataclass(frozen=True, kw_only=True)
class Release(Checked, JsonRecord):
    """One noised sum, as accounting sees it.

    Parameters
    ----------
    sampling : Sampling
    noise_multiplier : float
        Standard deviation of the noise on the sum, divided by the norm bound of one
        contribution. The relation does not change it.
    relation : NeighboringRelation
    approximation_error : float
        Bound on each of two errors of the sum, in standard deviations of the noise. The first error
        is the L2 distance between the sum and the exact sum. The second is the L2 distance by which
        a unit that was not drawn moves the sum. See `with_approximation_error`.
    """

    sampling: Sampling
    noise_multiplier: NotNegative
    relation: NeighboringRelation
    approximation_error: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        adds = self.relation is NeighboringRelation.ADD_OR_REMOVE_ONE
        if isinstance(self.sampling, PoissonSampling) and not adds:
            why = (
                "Poisson sampling: no accountant covers it; use 'add-or-remove-one', or fixed-size "
                "sampling with 'replace-one'"
            )
        elif isinstance(self.sampling, FixedSizeSampling) and adds:
            why = (
                "fixed-size sampling: an added unit takes another's place, which moves a sum by "
                "2C; use 'replace-one', or Poisson sampling"
            )
        elif isinstance(self.sampling, SpacedSampling) and adds:
            why = (
                "spaced sampling: an added unit delays the turns of all others; use "
                "'replace-special' or 'replace-one'"
            )
        else:
            return
        raise InvalidValue(f"relation={self.relation.value!r} with {why}")

    @property
    def relative_noise(self) -> float:
        """Standard deviation of the noise, divided by the largest L2 move that one unit causes."""
        noise = min(self.noise_multiplier / self.relation.sensitivity_factor, MOST_NOISE)
        return noise if noise > LEAST_NOISE else 0.0

    @property
    def poisson_rate(self) -> float:
        """The sampling rate under Poisson sampling; 1 under every other sampling."""
        return self.sampling.rate if isinstance(self.sampling, PoissonSampling) else 1.0

    @property
    def is_without_replacement(self) -> bool:
        """True if sampling without replacement amplifies the release."""
        return (
            isinstance(self.sampling, FixedSizeSampling)
            and self.sampling.size < self.sampling.population
            and self.relation is NeighboringRelation.REPLACE_ONE
        )

    def under(self, relation: NeighboringRelation) -> Release:
        """Return a release under another relation, with the noise that gives it the same loss.

        Call it only for a release that sampling does not amplify.
        """
        noise, sampling = self.relative_noise * relation.sensitivity_factor, self.sampling
        if isinstance(sampling, PoissonSampling):  # at rate 1, which draws all units
            sampling = FullParticipation(sampling.population)
        return replace(self, sampling=sampling, relation=relation, noise_multiplier=noise)

    def with_noise(self, fraction: float) -> Release:
        """Return the release of a sum that carries ``fraction`` of the noise's standard deviation.

        The errors of the sum stay the same, and so are larger when counted in standard deviations.
        """
        return replace(
            self,
            noise_multiplier=self.noise_multiplier * fraction,
            approximation_error=self.approximation_error / fraction,
        )


Counts = tuple[tuple[Release, int], ...]
"""Pairs of a release and the number of times that the run made it."""
