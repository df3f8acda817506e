"""Account for releases: compute (ε, δ) of what was released, through dp-accounting.

The result is the least of all upper bounds on ε that apply. Usually this is the bound of the PLD
accountant. For a tiny δ or very many rounds, PLD's Fourier transforms lose precision, and the RDP
accountant gives the lesser bound. Where sampling hides nothing, the bound that ignores sampling is
the least. With a δ of at least the chance that a unit is ever drawn, ε is 0 with any noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from flower_ext.checks import require_count, require_delta
from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.approximation import with_approximation_error
from flower_ext.privacy.accounting.events import Release, total_approximation_error
from flower_ext.privacy.accounting.gaussian import without_amplification
from flower_ext.privacy.accounting.loss import PrivacyLoss
from flower_ext.privacy.accounting.pld import (
    MOST_AT_ONCE,
    MOST_CELLS,
    WIDEST_INTERVAL,
    grid_interval,
    pld_epsilon,
    widest_step,
)
from flower_ext.privacy.accounting.rdp import renyi_loss, without_replacement_loss
from flower_ext.privacy.accounting.sampling import PoissonSampling, Sampling
from flower_ext.privacy.units import NeighboringRelation

Accountant = Literal["pld", "rdp"]

SELDOM_DRAWN = "chance of being drawn"
"""Unless a unit is drawn, runs with and without it are equal; δ is no less than that chance."""

_LARGEST_GRID_EPSILON = 1e6
"""Limit of PLD: beyond this ε a grid of privacy losses would not fit into memory, and sampling no
longer amplifies."""
_MANY_CELLS = 20_000
"""Searches have a rough first look before they use a grid of more intervals."""
_COARSE, _CLEAR = 10.0, 1.25
"""Factors of a rough first look: its grid is as much wider, and ε as much too large is clear."""


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
        exact[replace(release, approximation_error=0.0)] += count
    return with_approximation_error(
        lambda left: _loss(tuple(exact.items()), left, accountant, enough),
        total_approximation_error(counts),
        delta,
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

    kinds = {type(release.event) for release, _ in counts}
    if kinds == {dp_accounting.GaussianDpEvent} and accountant == "pld":
        return without_amplification(counts, delta)
    if dp_accounting.SampledWithoutReplacementDpEvent in kinds:
        plain = without_amplification(counts, delta)
        if plain.epsilon <= enough:
            return plain
        return _least(without_replacement_loss(counts, delta), plain)
    renyi = renyi_loss(counts, delta)
    if accountant == "rdp":
        return renyi
    rough = _least(renyi, without_amplification(counts, delta))
    if rough.epsilon <= max(0.0, enough) or rough.epsilon > _LARGEST_GRID_EPSILON:
        return rough
    return _refined(rough, counts, delta, enough)


def _refined(
    rough: PrivacyLoss, counts: tuple[tuple[Release, int], ...], delta: float, enough: float
) -> PrivacyLoss:
    """Return the lesser of a rough bound and PLD's, whose grid is as fine as the rough ε asks."""
    events = [(release.event, count) for release, count in counts]
    steps, widest = sum(count for _, count in counts), widest_step(counts)
    interval = grid_interval(rough.epsilon, delta, steps=steps)
    interval = min(interval, max(1e-3, 2e-5 * rough.epsilon))
    interval = max(interval, widest / MOST_CELLS)

    def on_grid(interval: float) -> PrivacyLoss:
        epsilon = pld_epsilon(events, delta, interval=interval)
        return PrivacyLoss(epsilon=epsilon, delta=delta, accountant="PLD")

    if enough > 0 and (steps > MOST_AT_ONCE or widest > _MANY_CELLS * interval):
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


def _least(*losses: PrivacyLoss) -> PrivacyLoss:
    return min(losses, key=lambda loss: loss.epsilon)
