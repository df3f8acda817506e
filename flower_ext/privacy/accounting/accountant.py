"""Compute the privacy loss (ε, δ) of a run's releases, through dp-accounting.

The result is the smallest of all upper bounds on ε that apply. Usually the accountant PLD (privacy
loss distributions) gives the smallest bound. For a tiny δ or very many rounds, PLD's Fourier
transforms lose precision, and the accountant RDP (Rényi divergences) gives the smallest one. If
sampling hides next to nothing, the bound that ignores sampling may be the smallest. If δ is at
least the probability that a unit is drawn at least once in the run, ε is 0 with any noise above 0.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, get_args

from flower_ext.checks import require_count, require_delta, require_one_of
from flower_ext.errors import InvalidValue
from flower_ext.privacy.accounting.events import Counts, PrivacyLoss, Release
from flower_ext.privacy.accounting.gaussian import without_amplification
from flower_ext.privacy.accounting.pld import pld_loss
from flower_ext.privacy.accounting.renyi import renyi_loss, without_replacement_loss

Accountant = Literal["pld", "rdp"]

_LARGEST_GRID_EPSILON = 1e6
"""Largest ε for which the accountant PLD runs. For a larger ε, its grid of privacy losses would not
fit into memory, and sampling no longer amplifies."""


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
        "pld" returns the smallest of all bounds that apply, which need not be PLD's bound. "rdp"
        returns the RDP bound. PLD does not cover sampling without replacement. If a release has
        such sampling, both choices return the smaller of two bounds: the RDP bound, and the bound
        that ignores sampling. The field ``accountant`` of the result names the bound.

    Raises
    ------
    ValueError
        ``delta`` is outside (0, 1), a count is below 0, the accountant is unknown, or the releases
        have different relations.
    """
    require_delta(delta)
    require_one_of("accountant", accountant, get_args(Accountant))
    counts = Counter(dict(releases)) if isinstance(releases, Mapping) else Counter(releases)
    for count in counts.values():
        require_count("count of a release", count)
    counts = +counts  # drops releases with a count of 0
    relations = {release.relation for release in counts}
    if len(relations) > 1:
        raise InvalidValue(
            f"releases have different relations {sorted(r.value for r in relations)}: account for "
            "the releases of each relation separately"
        )
    exact: Counter[Release] = Counter()
    for release, count in counts.items():
        exact[replace(release, approximation_error=0.0)] += count
    loss = with_approximation_error(
        lambda left: _loss(tuple(exact.items()), left, accountant), counts, delta
    )
    return replace(loss, releases=tuple(counts.items()))


def joint_loss(
    releases: Mapping[Release, int], spends: Sequence[PrivacyLoss], *, delta: float
) -> PrivacyLoss:
    """Bound (ε, δ) of releases together with mechanisms of which only (ε, δ) is known.

    ``spends`` are the (ε, δ) of these mechanisms. If their δ's add up to more than ``delta``, the
    resulting ε is infinite. If PLD does not cover a release, the function returns the bound of
    basic composition. Otherwise, it returns the smaller of two bounds:

    * Basic composition subtracts the mechanisms' δ's from ``delta``, computes ε of the releases at
      the remaining δ, and adds the mechanisms' ε's.
    * Optimal composition (Kairouz et al. 2015) replaces each mechanism by the worst mechanism with
      the same (ε, δ), and composes its privacy losses with those of the releases.
    """
    if not spends:
        return privacy_loss_of(releases, delta=delta)
    epsilon = math.fsum(spend.epsilon for spend in spends)
    left = delta - math.fsum(spend.delta for spend in spends)
    released = PrivacyLoss(epsilon=math.inf, delta=delta, accountant="")
    releases = +Counter(dict(releases))  # drops releases with a count of 0
    if not releases:
        if left >= -1e-12 * delta:  # rounding may hide that the δ's add up to δ
            released = replace(released, epsilon=0.0)
    elif left > 0:
        released = privacy_loss_of(releases, delta=left)
    basic = PrivacyLoss(
        epsilon=epsilon + released.epsilon,
        delta=delta,
        accountant=" + ".join(filter(None, (released.accountant, "basic composition"))),
    )
    if len(spends) + len(releases) == 1:
        return replace(basic, accountant=spends[0].accountant)
    if delta == 0 or not 0 < basic.epsilon <= _LARGEST_GRID_EPSILON:  # PLD needs a δ above 0
        return basic
    if any(each.approximation_error or each.is_without_replacement for each in releases):
        return basic  # PLD does not cover these releases
    counts = tuple(releases.items())
    return _least(basic, pld_loss(counts, tuple(spends), delta, rough=basic.epsilon))


def with_approximation_error(
    loss: Callable[[float], PrivacyLoss], releases: Mapping[Release, int], delta: float
) -> PrivacyLoss:
    """Return an upper bound on (ε, δ) of a run whose sums differ a little from sampled Gaussians.

    A protocol that computes sums under encryption changes each sum a little. Besides, a unit that
    was not drawn may still move a sum a little; the proof calls this small move the unit's trace.
    The proof compares the real run with a unit (A) and the real run without this unit (E). Three
    imagined runs lie between them, so the proof goes from A to E in four steps:

    * A: the real run with the unit;
    * B: as A, but the unit's trace is the only error of the sums;
    * C: as B, but the unit contributes nothing except its trace;
    * D: as C, but without the trace, so the sums are exact sums without the unit;
    * E: the real run without the unit.

    The accountant's loss (ε₁, δ₁) covers the step from B to C. In each of the three other steps,
    the two runs are Gaussians with means that are at most μ standard deviations of the noise apart.
    Such a step costs (ε₂, δ₂) with ε₂ = μ²/2 + μ √(2 ln 1/δ₂), because the step's privacy loss is
    Gaussian with mean μ²/2 and standard deviation μ. All steps together cost ε₁ + 3ε₂ and a δ of at
    most e^(3ε₂) (δ₁ + 3 e^ε₁ δ₂).

    ``loss`` takes δ, and returns the loss without approximation errors. The errors of all
    ``releases`` together bound μ. If μ is above about 0.01, ε is infinite.
    """
    shift = math.sqrt(
        sum(
            count * (release.relation.sensitivity_factor * release.approximation_error) ** 2
            for release, count in releases.items()
        )
    )
    if not shift:
        return loss(delta)
    steps = 3
    # Fractions of δ to try for the three Gaussian steps, the smallest first.
    for fraction in (2.0**-10, 2.0**-5, 0.5):
        delta_for_steps = fraction * delta
        core_loss = loss(delta - delta_for_steps)
        # Half of this δ pays for δ₂, and half for the factor e^(3ε₂).
        log_inverse_delta2 = core_loss.epsilon + math.log(2 * steps / delta_for_steps)
        step_epsilon = shift**2 / 2 + shift * math.sqrt(2 * log_inverse_delta2)
        # The loop compares e^(3ε₂) with at most 4/3, so the cap of 1 changes no result.
        surplus = math.expm1(min(1.0, steps * step_epsilon))
        if surplus * (delta - delta_for_steps / 2) <= delta_for_steps / 2:
            epsilon = core_loss.epsilon + steps * step_epsilon
            return replace(core_loss, epsilon=epsilon, delta=delta, releases=None)
    return replace(core_loss, epsilon=math.inf, delta=delta, releases=None)


@lru_cache(maxsize=4096)
def _loss(counts: Counts, delta: float, accountant: Accountant) -> PrivacyLoss:
    if not counts:
        return PrivacyLoss(epsilon=0.0, delta=delta, accountant=accountant.upper())
    if any(release.relative_noise == 0 for release, _ in counts):
        return PrivacyLoss(epsilon=math.inf, delta=delta, accountant=accountant.upper())
    if _chance_drawn(counts) <= delta:
        # If the unit is never drawn, the runs with and without this unit are equal.
        return PrivacyLoss(epsilon=0.0, delta=delta, accountant="chance of being drawn")
    unsampled = without_amplification(counts, delta)
    if any(release.is_without_replacement for release, _ in counts):
        return _least(without_replacement_loss(counts, delta), unsampled)
    if accountant == "rdp":
        return renyi_loss(counts, delta)
    # If no release is sub-sampled, Gaussians compose exactly, and no bound can be smaller.
    if all(release.poisson_rate == 1 for release, _ in counts):
        return unsampled
    # The width of PLD's grid depends on ε, so a cheaper bound estimates ε first.
    rough = _least(renyi_loss(counts, delta), unsampled)
    if not 0 < rough.epsilon <= _LARGEST_GRID_EPSILON:
        return rough
    return _least(pld_loss(counts, (), delta, rough=rough.epsilon), rough)


def _chance_drawn(counts: Iterable[tuple[Release, int]]) -> float:
    """Return the probability that one unit is drawn at least once in a run, rounded up.

    The result is 1 if the draws are not secret.
    """
    never = 0.0
    for release, count in counts:
        if release.poisson_rate == 1 and not release.is_without_replacement:
            return 1.0
        never += count * math.log1p(-release.sampling.sampling_rate)
    return -math.expm1(never * (1 + 1e-12))


def _least(*losses: PrivacyLoss) -> PrivacyLoss:
    return min(losses, key=lambda loss: loss.epsilon)
