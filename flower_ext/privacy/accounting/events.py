"""Account for releases: compute (ε, δ) of what was released, through dp-accounting.

The result is the least of all upper bounds on ε that apply. Usually this is the bound of the PLD
accountant. For a tiny δ or very many rounds, PLD's Fourier transforms lose precision, and the RDP
accountant gives the lesser bound. Where sampling hides nothing, the bound that ignores sampling is
the least. With a δ of at least the chance that a unit is ever drawn, ε is 0 with any noise.

The two accountants of dp-accounting 0.6 read replace-one differently: PLD doubles a Gaussian's
sensitivity, RDP does not. This module therefore passes a Gaussian of sensitivity 2 for replace-one
and asks no accountant to double it.

=========================  =======================  ====================================
sampling                   relation                 accounted as
=========================  =======================  ====================================
Poisson                    add-or-remove-one        sub-sampled Gaussian, PLD or RDP
                                                    (or unamplified, if that is smaller)
Poisson                    any other                refused: no accountant covers it
fixed size                 replace-one              sub-sampled without replacement, RDP
                                                    (or unamplified, if that is smaller)
fixed size                 replace-special          Gaussian composition, no amplification
fixed size                 add-or-remove-one        refused: an added unit takes another's place,
                                                    which moves the sum by 2C
everyone                   any                      Gaussian composition
=========================  =======================  ====================================
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from flower_ext.checks import require_count, require_delta, require_not_negative
from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.loss import PrivacyLoss as PrivacyLoss  # known by this name
from flower_ext.privacy.accounting.renyi import sampled_gaussian_renyi
from flower_ext.privacy.accounting.residue import with_residue
from flower_ext.privacy.accounting.sampling import (
    FixedSizeSampling,
    PoissonSampling,
    Sampling,
    sampling_from_dict,
    sampling_to_dict,
)
from flower_ext.privacy.units import NeighboringRelation

if TYPE_CHECKING:  # the import takes a second, which clients should not pay: functions import it
    import dp_accounting

Accountant = Literal["pld", "rdp"]

EXACT_GAUSSIAN = "exact Gaussian composition"
"""Balle and Wang (2018), Theorem 8: tight, since every release is a Gaussian."""
SELDOM_DRAWN = "chance of being drawn"
"""Unless a unit is drawn, runs with and without it are equal; δ is no less than that chance."""

RDP_ORDERS = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *map(float, range(11, 64)),
    *(80.0, 96.0, 128.0, 192.0, 256.0, 512.0, 1024.0),
)
"""Orders α for Gaussians, sub-sampled by Poisson draws or not sub-sampled."""
_WITHOUT_REPLACEMENT_ORDERS = [*range(2, 64), 80, 96, 128, 192, 256, 512, 1024]

_MOST_NOISE, _LARGEST_GRID_EPSILON = 1e7, 1e6
"""Limits of accounting. More noise is accounted as this much, where RDP is still a number. Beyond
this ε a grid of privacy losses would not fit into memory, and sampling no longer amplifies."""

_ROUNDING = 1e-15
"""Bound on the δ that Fourier transforms lose in each composed step: 10 times the measured loss."""
FINEST_INTERVAL, WIDEST_INTERVAL = 1e-5, 100.0
"""Limits of a grid interval: a finer one loses δ to rounding, a wider one overflows exp."""
_MOST_CELLS = 50_000
"""Most grid intervals for the losses of one release, which take half a second."""
_MANY_CELLS = 20_000
"""Searches have a rough first look before they use a grid of more intervals."""
_MOST_AT_ONCE = 4096
"""Most copies of a grid that one Fourier transform composes. The bound by which dp-accounting cuts
the tails of a composition is loose for more copies, and its transforms become long."""
_COARSE, _CLEAR = 10.0, 1.25
"""Factors of a rough first look: its grid is as much wider, and ε as much too large is clear."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """The facts of one noised sum that accounting needs.

    Parameters
    ----------
    sampling : Sampling
    noise_multiplier : float
        Standard deviation of the noise on the sum, divided by the norm bound of one
        contribution. It does not depend on the relation.
    relation : NeighboringRelation
    residue : float
        Bound on two errors of the sum, in standard deviations of the noise: its distance from the
        exact sum, and the distance by which a unit that was not drawn moves it. See
        `with_residue`.
    """

    sampling: Sampling
    noise_multiplier: float
    relation: NeighboringRelation
    residue: float = 0.0

    def __post_init__(self) -> None:
        require_not_negative("noise_multiplier", self.noise_multiplier)
        require_not_negative("residue", self.residue)
        poisson = isinstance(self.sampling, PoissonSampling)
        if poisson and self.relation is not NeighboringRelation.ADD_OR_REMOVE_ONE:
            raise InvalidValue(
                f"relation={self.relation.value!r} with Poisson sampling: no accountant covers it; "
                "expected 'add-or-remove-one', or fixed-size sampling for 'replace-one'"
            )
        drawn = isinstance(self.sampling, FixedSizeSampling)
        if drawn and self.relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            raise InvalidValue(
                f"relation={self.relation.value!r} with fixed-size sampling: an added unit takes "
                "another's place, which moves a sum by 2C; expected 'replace-one', or Poisson "
                "sampling"
            )

    @property
    def event(self) -> dp_accounting.DpEvent:
        """Express the release as a dp-accounting event; replace-one is encoded as sensitivity 2."""
        import dp_accounting

        gaussian = dp_accounting.GaussianDpEvent(
            min(self.noise_multiplier / self.relation.sensitivity_factor, _MOST_NOISE)
        )
        if isinstance(self.sampling, PoissonSampling) and self.sampling.rate < 1:
            return dp_accounting.PoissonSampledDpEvent(self.sampling.rate, gaussian)
        if (
            isinstance(self.sampling, FixedSizeSampling)
            and self.sampling.size < self.sampling.population
            and self.relation is NeighboringRelation.REPLACE_ONE
        ):
            return dp_accounting.SampledWithoutReplacementDpEvent(
                self.sampling.population, self.sampling.size, gaussian
            )
        return gaussian

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form, which `from_dict` reads."""
        return {
            "sampling": sampling_to_dict(self.sampling),
            "noise_multiplier": self.noise_multiplier,
            "relation": self.relation.value,
            **({"residue": self.residue} if self.residue else {}),
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Release:
        """Return the release that `to_dict` wrote."""
        return cls(
            sampling=sampling_from_dict(facts["sampling"]),
            noise_multiplier=float(facts["noise_multiplier"]),
            relation=NeighboringRelation(facts["relation"]),
            residue=float(facts.get("residue", 0.0)),
        )


def privacy_loss_of(
    releases: Mapping[Release, int] | Iterable[Release],
    *,
    delta: float,
    accountant: Accountant = "pld",
) -> PrivacyLoss:
    """Return an upper bound on (ε, δ) of a whole run.

    With PLD this takes some 50 ms for a hundred sub-sampled rounds. Results are cached.

    Parameters
    ----------
    releases : Mapping[Release, int] | Iterable[Release]
        Each release with its count, or all releases one by one. An empty cohort is a release.
    delta : float
        In (0, 1).
    accountant : {"pld", "rdp"}
        "pld" takes the least of all bounds that apply (RDP for sampling without replacement).
        The result names the accountant that gave it.

    Raises
    ------
    ValueError
        ``delta`` is outside (0, 1), or the releases have different relations.
    """
    require_delta(delta)
    return _bound(releases, delta, accountant, enough=-1.0)


def meets(
    releases: Mapping[Release, int], *, epsilon: float, delta: float, accountant: Accountant
) -> bool:
    """Return True if `privacy_loss_of` is at most ``epsilon``; searches ask this, as it is faster.

    A bound that meets ``epsilon`` is not improved any further, nor is a bound far above it.
    """
    require_delta(delta)
    return _bound(releases, delta, accountant, enough=epsilon).epsilon <= epsilon


def _bound(
    releases: Mapping[Release, int] | Iterable[Release],
    delta: float,
    accountant: Accountant,
    *,
    enough: float,
) -> PrivacyLoss:
    counts = Counter(dict(releases)) if isinstance(releases, Mapping) else Counter(releases)
    counts = Counter({release: n for release, n in counts.items() if n > 0})
    relations = {release.relation for release in counts}
    if len(relations) > 1:
        raise InvalidValue(
            f"releases under different relations {sorted(r.value for r in relations)} "
            "do not compose: account for each relation separately"
        )
    exact: Counter[Release] = Counter()
    for release, count in counts.items():
        exact[replace(release, residue=0.0)] += count
    return with_residue(
        lambda left: _loss(tuple(exact.items()), left, accountant, enough),
        residue_of(counts),
        delta,
    )


def residue_of(releases: Mapping[Release, int]) -> float:
    """Return how far all sums together may be from exact ones, for `with_residue`."""
    return math.sqrt(
        sum(
            count * (release.relation.sensitivity_factor * release.residue) ** 2
            for release, count in releases.items()
        )
    )


def privacy_loss(
    *,
    sampling: Sampling,
    noise_multiplier: float,
    rounds: int,
    delta: float,
    relation: NeighboringRelation,
    accountant: Accountant = "pld",
) -> PrivacyLoss:
    """Return (ε, δ) after ``rounds`` equal releases (see `privacy_loss_of`)."""
    require_count("rounds", rounds)
    release = Release(sampling=sampling, noise_multiplier=noise_multiplier, relation=relation)
    return privacy_loss_of({release: rounds}, delta=delta, accountant=accountant)


def participations_loss(
    *,
    noise_multiplier: float,
    participations: float,
    relation: NeighboringRelation,
    delta: float,
) -> PrivacyLoss:
    """Return (ε, δ) for an adversary who sees who took part, so that sampling amplifies nothing.

    Parameters
    ----------
    noise_multiplier : float
        Noise multiplier of one release.
    participations : float
        The largest number of releases in which any one unit took part. A release whose noise was
        σ_t instead of σ counts (σ/σ_t)² times. This number must not depend on anybody's data.
    """
    return gaussian_loss(
        noise_multiplier / relation.sensitivity_factor, releases=participations, delta=delta
    )


def gaussian_loss(noise_multiplier: float, *, releases: float, delta: float) -> PrivacyLoss:
    """Return (ε, δ) of Gaussian releases, exactly (Balle and Wang 2018, Theorem 8).

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise, divided by the largest L2 distance of neighbours.
    releases : float
        Number of releases, or the sum of their weights.
    """
    if releases == 0:
        return PrivacyLoss(epsilon=0.0, delta=delta, accountant=EXACT_GAUSSIAN)
    return _one_gaussian(noise_multiplier / math.sqrt(releases), delta)


@lru_cache(maxsize=4096)
def _loss(
    counts: tuple[tuple[Release, int], ...],
    delta: float,
    accountant: Accountant,
    enough: float = -1.0,
) -> PrivacyLoss:
    """Return the least bound; if one is at most ``enough``, or clearly will not be, any bound."""
    if not counts:
        return PrivacyLoss(epsilon=0.0, delta=delta, accountant=accountant.upper())
    if any(release.noise_multiplier == 0 for release, _ in counts):
        return PrivacyLoss(epsilon=math.inf, delta=delta, accountant=accountant.upper())
    if _chance_drawn(counts) <= delta:
        return PrivacyLoss(epsilon=0.0, delta=delta, accountant=SELDOM_DRAWN)
    import dp_accounting

    events = [(release.event, count) for release, count in counts]
    kinds = {type(event) for event, _ in events}
    if kinds == {dp_accounting.GaussianDpEvent} and accountant == "pld":
        return _without_amplification(counts, delta)
    if dp_accounting.SampledWithoutReplacementDpEvent in kinds:
        plain = _without_amplification(counts, delta)
        if plain.epsilon <= enough:
            return plain
        return _least(_without_replacement(counts, delta), plain)
    renyi = _renyi(counts, delta)
    if accountant == "rdp":
        return renyi
    plain = _without_amplification(counts, delta)
    rough = _least(renyi, plain)
    if rough.epsilon <= max(0.0, enough) or rough.epsilon > _LARGEST_GRID_EPSILON:
        return rough
    steps = sum(count for _, count in counts)
    interval = _grid_interval(rough.epsilon, delta, steps=steps)
    interval = min(interval, max(1e-3, 2e-5 * rough.epsilon))
    widest = _widest_step(counts)
    interval = max(interval, widest / _MOST_CELLS)

    def on_grid(interval: float) -> PrivacyLoss:
        epsilon = pld_epsilon(events, delta, interval=interval)
        return PrivacyLoss(epsilon=epsilon, delta=delta, accountant="PLD")

    if enough > 0 and (steps > _MOST_AT_ONCE or widest > _MANY_CELLS * interval):
        rough = _least(on_grid(min(_COARSE * interval, WIDEST_INTERVAL)), rough)
        if not enough < rough.epsilon <= _CLEAR * enough:
            return rough
    return _least(on_grid(interval), rough)


def _chance_drawn(counts: Iterable[tuple[Release, int]]) -> float:
    """Return the chance that a unit is in any cohort, rounded up; 1 if its draws are no secret."""
    never = 0.0
    for release, count in counts:
        secret = (
            isinstance(release.sampling, PoissonSampling)
            or release.relation is NeighboringRelation.REPLACE_ONE
        )
        rate = release.sampling.sampling_rate
        if rate == 1 or not secret:
            return 1.0
        never += count * math.log1p(-rate)
    return -math.expm1(never * (1 + 1e-12))


def _widest_step(counts: Iterable[tuple[Release, int]]) -> float:
    """Return the range of one release's privacy loss within ten standard deviations of the noise.

    Releases that are not sub-sampled are composed to one Gaussian first.
    """
    widest = 0.0
    for release, count in counts:
        shift = release.relation.sensitivity_factor / min(release.noise_multiplier, _MOST_NOISE)
        rate = release.sampling.rate if isinstance(release.sampling, PoissonSampling) else 1.0
        if rate == 1:
            shift *= math.sqrt(count)
        log_absent = math.log1p(-rate) if rate < 1 else -math.inf
        ends = [
            float(np.logaddexp(log_absent, math.log(rate) + shift * z))
            for z in (shift / 2 + 10, -shift / 2 - 10)
        ]
        widest = max(widest, ends[0] - ends[1])
    return widest


def _least(*losses: PrivacyLoss) -> PrivacyLoss:
    return min(losses, key=lambda loss: loss.epsilon)


def _without_amplification(counts: Iterable[tuple[Release, int]], delta: float) -> PrivacyLoss:
    """Compose Gaussians of multipliers σ_i to one of (Σ σ_i⁻²)^(−1/2), which is exact."""
    precision = sum(
        count * (release.relation.sensitivity_factor / release.noise_multiplier) ** 2
        for release, count in counts
    )
    return _one_gaussian(1 / math.sqrt(precision), delta)


@lru_cache(maxsize=4096)
def _one_gaussian(noise_multiplier: float, delta: float) -> PrivacyLoss:
    import dp_accounting

    epsilon = math.inf
    if noise_multiplier > 0:
        epsilon = float(dp_accounting.get_epsilon_gaussian(noise_multiplier, delta))
    epsilon *= 1 + 1e-9  # the root finder stops on either side of the root
    return PrivacyLoss(epsilon=epsilon, delta=delta, accountant=EXACT_GAUSSIAN)


def _renyi(counts: Iterable[tuple[Release, int]], delta: float) -> PrivacyLoss:
    """Return the bound at the best order.

    The divergence is above 0 at every order, so rounding cannot turn a loss into none.
    """
    from dp_accounting import rdp

    curve = np.zeros(len(RDP_ORDERS))
    for release, count in counts:
        noise_multiplier = release.noise_multiplier / release.relation.sensitivity_factor
        sampling = release.sampling
        curve += count * sampled_gaussian_renyi(
            min(noise_multiplier, _MOST_NOISE),
            sampling.rate if isinstance(sampling, PoissonSampling) else 1.0,
            RDP_ORDERS,
        )
    epsilon = float(rdp.compute_epsilon(RDP_ORDERS, curve, delta)[0])
    return PrivacyLoss(epsilon=epsilon, delta=delta, accountant="RDP")


def _without_replacement(counts: Sequence[tuple[Release, int]], delta: float) -> PrivacyLoss:
    """Return the bound at the best order: of every fourth one, then of its neighbours."""
    from dp_accounting import rdp

    def best_of(orders: Sequence[float]) -> tuple[float, float]:
        curve = [
            sum(count * _renyi_without_replacement(release, order) for release, count in counts)
            for order in orders
        ]
        epsilon, order = rdp.compute_epsilon(orders, curve, delta)
        return float(epsilon), float(order)

    epsilon, order = best_of(_WITHOUT_REPLACEMENT_ORDERS[::4])
    if order in _WITHOUT_REPLACEMENT_ORDERS:  # not if the loss is 0 or infinite
        place = _WITHOUT_REPLACEMENT_ORDERS.index(order)
        epsilon, _ = best_of(_WITHOUT_REPLACEMENT_ORDERS[max(0, place - 3) : place + 4])
    name = "RDP (sampling without replacement)"
    return PrivacyLoss(epsilon=epsilon, delta=delta, accountant=name)


@lru_cache(maxsize=8192)
def _renyi_without_replacement(release: Release, order: float) -> float:
    """Return the divergence of one release; cached because a search asks for many counts of it."""
    import dp_accounting
    from dp_accounting import rdp

    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = rdp.RdpAccountant([order], relation)
    return float(accountant.compose(release.event).rdp[0])


def _grid_interval(epsilon: float, delta: float, *, steps: int) -> float:
    """Return the width of a grid of privacy losses that adds about a thousandth to ε (a guess).

    Many steps are nearly one Gaussian. With a shift of μ it loses about μ²/2 + μ √(2 log 1/δ)
    at δ, and its loss has variance μ². A grid of width w adds at most w²/4 to the variance in
    every step.
    """
    log = -math.log(delta)
    shift = math.sqrt(2) * (math.sqrt(log + epsilon) - math.sqrt(log))
    interval = 2 * shift * math.sqrt(1e-3 / steps)
    return min(max(interval, FINEST_INTERVAL), WIDEST_INTERVAL)


def pld_epsilon(
    events: Sequence[tuple[dp_accounting.DpEvent, int]], delta: float, *, interval: float
) -> float:
    """Return ε from a grid of privacy losses that are rounded up.

    The result is infinite if rounding in the Fourier transforms can lose as much as ``delta``.
    """
    from dp_accounting import pld

    resolved = delta - _ROUNDING * sum(count for _, count in events)
    if resolved <= 0:
        return math.inf
    total = pld.privacy_loss_distribution.identity(interval)
    for event, count in events:
        total = total.compose(_composed(*_grid_of(event, count, interval)))
    return float(total.get_epsilon_for_delta(resolved))


def _grid_of(event: dp_accounting.DpEvent, count: int, interval: float) -> tuple[Any, int]:
    """Return a grid of privacy losses, and how often to compose it."""
    import dp_accounting
    from dp_accounting.pld import privacy_loss_distribution as grids

    match event:
        case dp_accounting.GaussianDpEvent():
            noise = event.noise_multiplier / math.sqrt(count)
            return grids.from_gaussian_mechanism(noise, value_discretization_interval=interval), 1
        case dp_accounting.PoissonSampledDpEvent(event=dp_accounting.GaussianDpEvent()):
            return grids.from_gaussian_mechanism(
                event.event.noise_multiplier,
                value_discretization_interval=interval,
                sampling_prob=event.sampling_probability,
            ), count
        case dp_accounting.dp_event.MixtureOfGaussiansDpEvent():
            return grids.from_mixture_gaussian_mechanism(
                event.standard_deviation,
                event.sensitivities,
                event.sampling_probs,
                value_discretization_interval=interval,
            ), count
    raise TypeError(f"event={event!r}: expected a Gaussian, sub-sampled or a mixture, or neither")


def _composed(losses: Any, count: int) -> Any:
    """Compose a grid of privacy losses with itself, many copies block by block."""
    if count <= _MOST_AT_ONCE:
        return losses.self_compose(count)
    blocks, left = divmod(count, _MOST_AT_ONCE)
    total = _composed(losses.self_compose(_MOST_AT_ONCE), blocks)
    return total.compose(losses.self_compose(left)) if left else total
