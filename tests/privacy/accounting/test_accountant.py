"""Accountants give known numbers, agree with independent ones, and never report too little."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

from flower_ext.privacy import (
    FixedSizeSampling,
    FullParticipation,
    NeighboringRelation,
    PoissonSampling,
    Release,
    privacy_loss_of,
)
from flower_ext.privacy.accounting.accountant import joint_loss
from flower_ext.privacy.accounting.events import PrivacyLoss
from flower_ext.privacy.accounting.gaussian import (
    EXACT_GAUSSIAN,
    gaussian_loss,
)
from flower_ext.privacy.accounting.pld import pld_epsilon
from tests.support.grids import grid
from tests.support.losses import privacy_loss

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighboringRelation.REPLACE_ONE
SPECIAL = NeighboringRelation.REPLACE_SPECIAL

POISSON = PoissonSampling(100, 0.1)
FIXED = FixedSizeSampling(100, 10)
EVERYONE = FullParticipation(100)


def epsilon(sampling, relation=ADD_OR_REMOVE, *, sigma=1.0, rounds=200, delta=1e-3, **how):
    """Return the ε of rounds under one sampling."""
    return privacy_loss(
        sampling=sampling,
        noise_multiplier=sigma,
        rounds=rounds,
        delta=delta,
        relation=relation,
        **how,
    ).epsilon


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return δ(ε) of a Gaussian mechanism of sensitivity/σ = mu (Balle and Wang, Theorem 8)."""
    from scipy.special import log_ndtr

    first = math.exp(log_ndtr(mu / 2 - epsilon / mu))
    return first - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))


def test_the_same_noise_under_three_samplings_gives_the_known_numbers():
    assert epsilon(POISSON) == pytest.approx(7.10, abs=0.01)
    with pytest.raises(ValueError, match="takes another's place"):
        epsilon(FIXED)
    assert epsilon(FIXED, REPLACE) == pytest.approx(153.1, abs=0.1)  # sensitivity 2C


SETTINGS = [
    (rate, sigma, rounds, delta)
    for rate, sigma, rounds, delta in itertools.product(
        (0.01, 0.05, 0.1, 0.3), (0.7, 1.0, 2.0, 5.0), (10, 100), (1e-2, 1e-5)
    )
    if not (rate > 0.2 and sigma < 1)
]


@pytest.mark.parametrize("every", grid([26, 4], lambda every: every == 26))
def test_pld_agrees_with_an_independent_accountant_on_sixty_settings(every):
    from opacus.accountants import PRVAccountant

    assert len(SETTINGS) >= 50
    for rate, sigma, rounds, delta in SETTINGS[::every]:
        other = PRVAccountant()
        other.history = [(sigma, rate, rounds)]
        theirs = other.get_epsilon(delta, eps_error=0.004, delta_error=delta / 1000)
        sampling = PoissonSampling(1000, rate)
        ours = epsilon(sampling, sigma=sigma, rounds=rounds, delta=delta)
        assert ours == pytest.approx(theirs, abs=0.02), (rate, sigma, rounds, delta)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("rounds", [1, 50])
def test_gaussian_composition_meets_its_delta_exactly(sigma, rounds):
    eps = epsilon(EVERYONE, sigma=sigma, rounds=rounds, delta=1e-4)
    mu = math.sqrt(rounds) / sigma
    assert gaussian_delta(mu, eps) <= 1e-4
    assert gaussian_delta(mu, eps) == pytest.approx(1e-4, rel=1e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_replacing_one_is_sensitivity_two_under_both_accountants(accountant):
    doubled = epsilon(EVERYONE, REPLACE, sigma=3.0, rounds=5, accountant=accountant)
    halved = epsilon(EVERYONE, ADD_OR_REMOVE, sigma=1.5, rounds=5, accountant=accountant)
    assert doubled == halved
    assert doubled > 1.5 * epsilon(EVERYONE, sigma=3.0, rounds=5, accountant=accountant)


def test_replace_one_of_one_gaussian_is_not_the_halved_number():
    """dp-accounting's accountants give 9.997 and 4.729 for the same question; one is right."""
    assert epsilon(EVERYONE, REPLACE, rounds=1, delta=1e-5) == pytest.approx(9.997, abs=0.01)
    rdp = epsilon(EVERYONE, REPLACE, rounds=1, delta=1e-5, accountant="rdp")
    assert rdp == pytest.approx(9.997, rel=0.1)


@pytest.mark.parametrize("sampling", [POISSON, PoissonSampling(100, 0.02)])
def test_rdp_is_never_below_pld(sampling):
    for sigma in (0.8, 1.5, 4.0):
        assert epsilon(sampling, sigma=sigma, accountant="rdp") >= epsilon(sampling, sigma=sigma)


# The last column is PLD on grids from 3e-6 to 1e-5, which agree to a thousandth.
@pytest.mark.parametrize(
    ("rate", "sigma", "rounds", "delta", "fine"),
    [
        (0.01, 20.0, 100_000, 1e-5, 0.5619),
        (0.01, 50.0, 20_000, 1e-5, 0.08585),
        (0.001, 5.0, 100_000, 1e-6, 0.2462),
        (0.001, 3.0, 1_000_000, 1e-6, 1.494),
        (0.01, 5.0, 10, 1e-3, 0.004290),
    ],
)
def test_many_rounds_and_small_losses_are_resolved(rate, sigma, rounds, delta, fine):
    sampling, facts = PoissonSampling(1000, rate), {"sigma": sigma, "rounds": rounds}
    assert epsilon(sampling, delta=delta, **facts) == pytest.approx(fine, rel=2e-3)


@pytest.mark.parametrize("delta", [1e-3, 1e-12, 1e-14, 1e-15, 1e-30])
@pytest.mark.parametrize("rate", [0.01, 0.999])
def test_the_least_of_the_bounds_is_taken_and_named(rate, delta):
    facts = {"noise_multiplier": 1.0, "rounds": 10, "relation": ADD_OR_REMOVE, "delta": delta}
    sampled = PoissonSampling(1000, rate)
    least = privacy_loss(sampling=sampled, **facts)
    renyi = privacy_loss(sampling=sampled, accountant="rdp", **facts)
    plain = privacy_loss(sampling=EVERYONE, **facts)
    assert least.epsilon <= min(renyi.epsilon, plain.epsilon) < math.inf
    for other in (renyi, plain):
        assert (least.accountant == other.accountant) == (least == other)


@pytest.mark.parametrize("delta", [1e-5, 1e-12, 1e-13])
def test_no_rounding_takes_pld_below_the_exact_loss_of_gaussians(delta):
    gaussian = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        30.0, [1.0], [1.0], value_discretization_interval=1e-3
    )
    exact = gaussian_loss(30.0, releases=1000, delta=delta).epsilon
    epsilon_found = pld_epsilon([(gaussian, 1000)], delta, interval=1e-3)
    assert epsilon_found >= exact
    assert epsilon_found == pytest.approx(exact, rel=1e-3) or delta < 1e-11


def test_gaussians_alone_are_accounted_exactly_unless_renyi_divergences_are_asked_for():
    facts = {"noise_multiplier": 1.0, "rounds": 10, "relation": ADD_OR_REMOVE, "delta": 1e-5}
    exact, renyi = (
        privacy_loss(sampling=EVERYONE, accountant=accountant, **facts)
        for accountant in ("pld", "rdp")
    )
    assert (exact.accountant, renyi.accountant) == (EXACT_GAUSSIAN, "RDP")
    assert exact.epsilon < renyi.epsilon


def test_a_delta_that_rounding_could_take_up_resolves_no_epsilon():
    gaussian = privacy_loss_distribution.from_gaussian_mechanism(
        1.0, value_discretization_interval=1e-3
    )
    assert pld_epsilon([(gaussian, 1000)], 1e-12, interval=1e-3) == math.inf


def test_zeroing_one_is_accounted_like_removing_one():
    assert epsilon(EVERYONE, SPECIAL) == epsilon(EVERYONE, ADD_OR_REMOVE)


@pytest.mark.parametrize("relation", [REPLACE, SPECIAL])
def test_poisson_with_another_relation_is_refused_rather_than_guessed(relation):
    with pytest.raises(ValueError, match="Poisson sampling: no accountant covers it"):
        epsilon(POISSON, relation)


def test_amplification_never_hurts_and_the_smaller_bound_is_taken():
    for sigma in (0.2, 1.0, 5.0):
        assert epsilon(FIXED, REPLACE, sigma=sigma) <= epsilon(EVERYONE, REPLACE, sigma=sigma)
    assert epsilon(FIXED, REPLACE, sigma=5.0) < 0.3 * epsilon(EVERYONE, REPLACE, sigma=5.0)


def test_more_rounds_cost_more_and_no_rounds_cost_nothing():
    release = Release(sampling=POISSON, noise_multiplier=1.0, relation=ADD_OR_REMOVE)
    curve = [privacy_loss_of({release: n}, delta=1e-3).epsilon for n in (0, 1, 10, 100)]
    assert curve[0] == 0.0
    assert curve == sorted(curve)
    assert len(set(curve)) == 4


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_no_noise_means_no_privacy_whatever_noise_others_have(accountant):
    assert epsilon(POISSON, sigma=0.0, accountant=accountant) == math.inf
    bare, noised = (
        Release(sampling=POISSON, noise_multiplier=sigma, relation=ADD_OR_REMOVE)
        for sigma in (0.0, 1.0)
    )
    mixed = privacy_loss_of({noised: 3, bare: 1}, delta=1e-3, accountant=accountant)
    assert mixed.epsilon == math.inf


def test_no_rounds_cost_nothing_and_a_number_below_zero_is_refused():
    assert epsilon(POISSON, rounds=0) == 0.0
    with pytest.raises(ValueError, match="count of a release=-1"):
        epsilon(POISSON, rounds=-1)
    spend = PrivacyLoss(epsilon=1.0, delta=1e-6, accountant="PLD")
    one, none = (
        Release(sampling=POISSON, noise_multiplier=sigma, relation=ADD_OR_REMOVE)
        for sigma in (1.0, 2.0)
    )
    joint = joint_loss({one: 5, none: 0}, [spend, spend], delta=1e-5)
    assert joint.epsilon == joint_loss({one: 5}, [spend, spend], delta=1e-5).epsilon


def test_an_unknown_accountant_is_refused():
    with pytest.raises(ValueError, match="accountant='moments': expected pld or rdp"):
        epsilon(POISSON, accountant="moments")


def test_different_releases_compose_to_between_each_part_and_the_worst():
    weak = Release(sampling=POISSON, noise_multiplier=0.9, relation=ADD_OR_REMOVE)
    strong = Release(
        sampling=PoissonSampling(100, 0.05), noise_multiplier=2.0, relation=ADD_OR_REMOVE
    )
    both = privacy_loss_of({weak: 10, strong: 10}, delta=1e-3).epsilon
    assert privacy_loss_of({weak: 10}, delta=1e-3).epsilon < both
    assert both < privacy_loss_of({weak: 20}, delta=1e-3).epsilon
    assert privacy_loss_of([weak] * 10 + [strong] * 10, delta=1e-3).epsilon == both


def test_poisson_sampling_at_rate_1_has_the_loss_of_full_participation():
    sampling = PoissonSampling(9, 1.0)
    usual = Release(sampling=sampling, noise_multiplier=2.0, relation=ADD_OR_REMOVE)
    special = usual.under(SPECIAL)
    assert special.sampling == FullParticipation(9)
    losses = [privacy_loss_of({release: 3}, delta=1e-5).epsilon for release in (usual, special)]
    assert losses[0] == losses[1]


def test_releases_under_different_relations_are_not_composed():
    mixed = [
        Release(sampling=EVERYONE, noise_multiplier=1.0, relation=relation)
        for relation in (ADD_OR_REMOVE, REPLACE)
    ]
    with pytest.raises(ValueError, match="different relations"):
        privacy_loss_of(mixed, delta=1e-3)


@pytest.mark.parametrize(
    ("sampling", "relation", "accountant", "named"),
    [
        (POISSON, ADD_OR_REMOVE, "pld", "PLD"),
        (POISSON, ADD_OR_REMOVE, "rdp", "RDP"),
        (FIXED, REPLACE, "pld", "RDP (sampling without replacement)"),
        (EVERYONE, ADD_OR_REMOVE, "pld", "exact Gaussian composition"),
    ],
)
def test_the_answer_names_the_accountant_that_gave_it(sampling, relation, accountant, named):
    loss = privacy_loss(
        sampling=sampling,
        noise_multiplier=4.0,
        rounds=10,
        delta=1e-3,
        relation=relation,
        accountant=accountant,
    )
    assert loss.accountant == named


def test_participations_compose_like_full_rounds_and_weights_like_more_noise():
    def of(sigma, participations):
        return gaussian_loss(sigma, releases=participations, delta=1e-3).epsilon

    assert of(2.0, 9) == epsilon(EVERYONE, SPECIAL, sigma=2.0, rounds=9)
    assert of(2.0, 36) == pytest.approx(of(1.0, 9))  # a weight of four halves the noise
    assert of(2.0, 0) == 0.0


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-3, math.nan])
def test_unfit_deltas_are_refused(delta):
    with pytest.raises(ValueError, match="delta"):
        epsilon(POISSON, delta=delta)


def test_releases_survive_json():
    for sampling, relation in ((POISSON, ADD_OR_REMOVE), (FIXED, REPLACE), (EVERYONE, SPECIAL)):
        release = Release(sampling=sampling, noise_multiplier=1.3, relation=relation)
        assert Release.from_dict(release.to_dict()) == release


@pytest.mark.parametrize("noise_multiplier", [1e-9, 1e-4, 1e9, 1e30])
@pytest.mark.parametrize(
    ("sampling", "relation"),
    [
        (PoissonSampling(100, 0.1), NeighboringRelation.ADD_OR_REMOVE_ONE),
        (FixedSizeSampling(100, 10), NeighboringRelation.REPLACE_ONE),
    ],
)
def test_absurd_noise_has_an_epsilon_between_nothing_and_no_amplification(
    noise_multiplier, sampling, relation
):
    facts = {"rounds": 60, "delta": 0.01, "relation": relation}
    loss = privacy_loss(sampling=sampling, noise_multiplier=noise_multiplier, **facts)
    alone = noise_multiplier / relation.sensitivity_factor
    plain = gaussian_loss(alone, releases=60, delta=0.01)
    assert 0 <= loss.epsilon <= plain.epsilon
    assert (loss.epsilon == 0) == (noise_multiplier > 1)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("sampling", "relation"),
    [(POISSON, ADD_OR_REMOVE), (FIXED, REPLACE), (EVERYONE, ADD_OR_REMOVE)],
)
def test_vanishing_noise_never_lowers_epsilon(sampling, relation, accountant):
    last = 1e3
    for exponent in range(2, 321):  # the last numbers are subnormal
        noise = Release(sampling=sampling, noise_multiplier=10.0**-exponent, relation=relation)
        loss = privacy_loss_of({noise: 1}, delta=1e-5, accountant=accountant).epsilon
        assert loss >= last
        last = loss


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.longdouble])
@pytest.mark.parametrize("sigma", [1.1, 37.0])
def test_epsilon_does_not_depend_on_the_type_of_a_number(kind, sigma):
    short = kind(sigma)
    number = float(short) * (1 + 1e-12)  # equal numbers would share a cached result
    for sampling, relation in ((POISSON, ADD_OR_REMOVE), (FIXED, REPLACE)):
        expected = epsilon(sampling, relation, sigma=number)
        assert epsilon(sampling, relation, sigma=short) == pytest.approx(expected, rel=1e-6)
        assert expected > 0
    expected = gaussian_loss(number, releases=3, delta=1e-5).epsilon
    assert gaussian_loss(short, releases=3, delta=1e-5).epsilon == pytest.approx(expected, rel=1e-9)


def told_by_the_sum(rate, sigma, rounds, deltas):
    """Return, for each δ, an ε that no valid bound can undercut.

    They come from tests on which side of c the sum lies.
    """
    from scipy import special, stats

    spread = math.sqrt(rounds * rate * (1 - rate))
    around = 12 * spread + 30
    taken = np.arange(max(0, int(rounds * rate - around)), min(rounds, rounds * rate + around) + 1)
    chance = stats.binom.pmf(taken, rounds, rate)
    shift = taken / (math.sqrt(rounds) * sigma)
    bounds = [0.0 for _ in deltas]
    for c in np.linspace(-3, 9, 49):
        for side in (1, -1):
            absent = special.ndtr(side * c)
            present = np.dot(chance, special.ndtr(side * (c - shift)))
            pair = (absent, present) if side == 1 else (present, absent)
            for place, delta in enumerate(deltas):
                if pair[0] > delta and pair[1] > 0:
                    epsilon_found = math.log((pair[0] - delta) / pair[1])
                    bounds[place] = max(bounds[place], epsilon_found)
    return bounds


@pytest.mark.parametrize("accountant", grid(["pld", "rdp"], lambda accountant: accountant == "rdp"))
def test_no_rounding_takes_epsilon_below_what_the_sum_of_all_outputs_tells(accountant):
    noises, rates = (1.0, 1e3, 1e7), (1e-6, 1e-2, 0.3)
    seen = set()
    # PLD takes minutes for so many rounds and so small a δ.
    most, small = (10**6, (1e-15, 1e-12)) if accountant == "rdp" else (10**3, (1e-12,))
    deltas = (*small, 1e-5, 0.1)
    for sigma, rate, rounds in itertools.product(noises, rates, (1, most)):
        bounds = told_by_the_sum(rate, sigma, rounds, deltas)
        for delta, least in zip(deltas, bounds, strict=True):
            facts = {"sigma": sigma, "rounds": rounds, "delta": delta, "accountant": accountant}
            reported = epsilon(PoissonSampling(10**6, rate), **facts)
            assert reported >= least * (1 - 1e-6) - 1e-9, (sigma, rate, rounds, delta)
            seen.add(least > 1e-7)
    assert seen == {True, False}


def test_noise_that_hides_a_million_rounds_still_counts_as_a_loss():
    facts = {"sigma": 1e7, "rounds": 10**6, "delta": 1e-12}
    assert told_by_the_sum(1e-2, 1e7, 10**6, [1e-12])[0] > 4e-6
    for accountant in ("pld", "rdp"):
        assert epsilon(PoissonSampling(10**6, 1e-2), accountant=accountant, **facts) > 4.4e-6


def test_orders_below_two_are_searched_where_sampling_hides_little():
    facts = {"sigma": 1.0, "rounds": 100, "delta": 1e-5}
    renyi = epsilon(PoissonSampling(100, 0.7), accountant="rdp", **facts)
    assert epsilon(PoissonSampling(100, 0.7), **facts) <= renyi < 64


def test_many_rounds_composed_by_blocks_lie_slightly_above_the_exact_gaussian():
    # At a rate of nearly 1 the run is one Gaussian of multiplier σ/√T, whose ε is known exactly.
    for rounds in (5_000, 100_003):
        noise, interval = math.sqrt(rounds), 2 * math.sqrt(1e-3 / rounds)
        losses = privacy_loss_distribution.from_gaussian_mechanism(
            noise, value_discretization_interval=interval, sampling_prob=1 - 1e-12
        )
        exact = gaussian_loss(noise, releases=rounds, delta=1e-5).epsilon
        assert exact <= pld_epsilon([(losses, rounds)], 1e-5, interval=interval) <= 1.002 * exact
