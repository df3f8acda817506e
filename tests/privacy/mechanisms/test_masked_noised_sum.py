"""Noised sums that a protocol computes in whole numbers."""

import math

import numpy as np
import pytest
from scipy import stats

from flower_ext.errors import InvalidValue
from flower_ext.privacy import (
    AdaptiveClipping,
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    SecureNoise,
    SecureSum,
)
from flower_ext.privacy.mechanisms.masked_noised_sum import MaskedNoisedSum
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.round_mechanism import RoundDiscarded
from flower_ext.privacy.mechanisms.secure_sum import ring_bits
from flower_ext.privacy.theorems.client_level import of_secure_sum
from tests.support.plans import plan, sums_of


@pytest.mark.parametrize("norm", [0.5, AdaptiveClipping()])
def test_only_a_plan_with_secure_sums_has_a_mechanism_that_hides_uploads(norm):
    terms = {"sampling": FixedSizeSampling(100, 40), "clipping_norm": norm}
    for placement in ("client", "server"):
        mechanism = plan(**terms, noise_placement=placement).mechanism()
        assert not isinstance(mechanism, MaskedNoisedSum)
        mechanism.begin_sum({"a": np.zeros(2)})
    masked = plan(**terms, noise_placement=SecureSum()).mechanism()
    assert isinstance(masked, MaskedNoisedSum)
    with pytest.raises(InvalidValue, match="the protocol of a secure sum adds up the uploads"):
        masked.begin_sum({"a": np.zeros(2)})


@pytest.mark.parametrize(
    ("kind", "placement"),
    [(NoisedSum, SecureSum()), (MaskedNoisedSum, "client"), (MaskedNoisedSum, "server")],
)
def test_a_mechanism_refuses_the_placement_of_the_other_kind(kind, placement):
    with pytest.raises(InvalidValue, match=f"noise_placement=.* of a {kind.__name__}: expected"):
        kind(
            sampling=FixedSizeSampling(100, 40),
            clipping_norm=1.0,
            noise_multiplier=1.0,
            rounds=3,
            delta=1e-5,
            noise_placement=placement,
        )


def test_a_guarantee_names_the_clients_that_may_collude_and_a_server_that_must_not_equivocate():
    sampling = FixedSizeSampling(population=1_000, size=100)
    for resist in (True, False):
        sums = SecureSum(resist_equivocation=resist)
        drawn = sums_of(sampling=sampling, rounds=60, noise_placement=sums)
        text = "; ".join(of_secure_sum(drawn))
        assert "at most 100 of 1000 clients collude" in text
        assert "at most 36 of each cohort of 100 collude, all but surely" in text
        assert ("resist_equivocation is off" in text) is not resist
    assert "all but surely" not in "; ".join(of_secure_sum(sums_of()))


def test_the_noise_that_is_reported_is_in_random_cohorts_and_a_share_of_each_would_not_be():
    """Of 1,000 clients 100 collude; in 42 % of cohorts of 100 they are more than ten."""
    sampling = FixedSizeSampling(population=1_000, size=100)
    drawn = sums_of(sampling=sampling, rounds=1_000)
    rng, parameters = np.random.default_rng(3), drawn.sum_parameters
    colluders = np.array([np.sum(np.array(sampling.draw(rng)) < 100) for _ in range(5_000)])
    assert parameters.least_answers - colluders.max() >= parameters.honest_answers
    planted = parameters.least_answers - 10  # γ as a share of each cohort
    too_little = np.mean(parameters.least_answers - colluders < planted)
    assert too_little == pytest.approx(0.42, abs=0.05)
    assert (parameters.colluders, planted) == (37, 80)


@pytest.mark.parametrize(("members", "noise"), [(100, 1.0), (1_000, 0.5), (10_000, 0.01)])
def test_no_sum_leaves_its_ring(members, noise):
    own = sums_of(sampling=FullParticipation(members), noise_multiplier=noise)
    bits = own.sum_bits
    assert bits == (64 if noise == 0.01 else 32)
    most = members * own.clipping_norm / own.cell
    share = own.cells_protection.noise_stddev / own.cell
    assert most + 11 * share * math.sqrt(members) < 2 ** (bits - 1)
    with pytest.raises(ValueError, match=r"expected less than 2\*\*63"):
        ring_bits(2.0**63, 1.0)


@pytest.mark.parametrize("members", [5, 100, 1_000])
def test_any_number_of_answers_is_worth_its_part_of_the_planned_noise(members):
    own = sums_of(sampling=FullParticipation(members))
    parameters = own.sum_parameters
    share = own.cells_protection.noise_stddev / own.cell
    cells = own.noise_stddev / own.cell
    for answers in (1, parameters.honest_answers, parameters.least_answers):
        worth = answers * share**2 - 16
        assert worth >= cells**2 * answers / parameters.least_answers * (1 - 1e-12)
    assert parameters.least_answers * share**2 == pytest.approx(cells**2, rel=1e-4)


def test_the_server_adds_the_shares_of_those_who_did_not_answer():
    own = sums_of()
    like = {"a": np.zeros(200_000, np.float64)}
    cells = {"a": np.zeros(200_000, np.int64)}
    share = own.cells_protection.noise_stddev
    for answered in (90, 99, 100):
        found = own.aggregate_sum(cells, answered=answered, noise=SecureNoise(), like=like)
        expected = share * math.sqrt(100 - answered)
        assert found.topped_up_stddev == pytest.approx(expected)
        assert found.value["a"].std() * 100 == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("stddevs", [0.01, 1.0, 1.04, 1.99])
@pytest.mark.parametrize("dropouts", [0.0, 0.5, 0.75])
def test_whatever_a_plan_accepts_its_clients_and_its_server_can_add(stddevs, dropouts):
    sums = SecureSum(colluding=0.0, dropouts=dropouts, resist_equivocation=False)
    own = sums_of(noise_multiplier=stddevs, noise_placement=sums)
    update = {"a": np.ones(3)}
    cells = own.cells_protection.released(update, SecureNoise())
    least = own.sum_parameters.least_answers
    found = own.aggregate_sum(cells, answered=least, noise=SecureNoise(), like=update)
    assert np.isfinite(found.value["a"]).all()


def test_a_plan_whose_noise_or_losses_nobody_could_add_is_refused_before_it_runs():
    with pytest.raises(
        ValueError, match="lose 90 members, which leaves 10 answers: expected at least 25"
    ):
        sums_of(noise_placement=SecureSum(colluding=0.0, dropouts=0.9))
    for multiplier in (1e-6, 1e6):
        with pytest.raises(ValueError, match="choose a noise multiplier from"):
            sums_of(noise_multiplier=multiplier)


def test_cohorts_of_a_secret_size_have_no_secure_sum():
    """The noise of a sum would reveal the size of the cohort."""
    sampling = PoissonSampling(population=1_000, rate=0.1)
    with pytest.raises(ValueError, match="with Poisson sampling"):
        sums_of(sampling=sampling)
    with pytest.raises(ValueError, match="a cohort of 2: expected at least 3"):
        sums_of(sampling=FixedSizeSampling(population=100, size=2))


def test_silos_are_members_whatever_users_are_drawn():
    """The number of silos alone decides who is asked and how much noise there is."""
    users = {"noise_placement": SecureSum(colluding=0.0, dropouts=0.2)}
    sampled = PoissonSampling(population=1_000, rate=0.1)
    mechanisms = [
        sums_of(sampling=sampling, silos=5, **users)
        for sampling in (sampled, FullParticipation(1_000), PoissonSampling(10, 0.9))
    ]
    assert {own.cohort_size for own in mechanisms} == {5}
    assert {own.sum_parameters.least_answers for own in mechanisms} == {4}
    assert len({own.cells_protection.noise_stddev for own in mechanisms}) == 1
    for silos, said in ((2, "a cohort of 2"), (None, "with Poisson sampling")):
        with pytest.raises(ValueError, match=said):
            sums_of(sampling=sampled, silos=silos, **users)


@pytest.mark.parametrize("users", [10, 1_000, 100_000])
def test_the_ring_has_room_for_all_users_and_does_not_show_how_many_are_drawn(users):
    own, everyone = (
        sums_of(sampling=sampling, silos=5)
        for sampling in (PoissonSampling(users, 0.01), FullParticipation(users))
    )
    assert own.sum_bits == everyone.sum_bits == (64 if users == 100_000 else 32)
    most = users * own.clipping_norm / own.cell
    assert most < 2 ** (own.sum_bits - 1)


def test_a_sum_in_cells_becomes_the_average_over_the_expected_cohort():
    own = sums_of()
    like = {"b": np.zeros((2, 2), np.float32), "a": np.zeros(3, np.float32)}
    cells = {"a": np.array([1, -2, 3]), "b": np.array([[2**20, 0], [0, -7]])}
    found = own.aggregate_sum(cells, answered=100, noise=SecureNoise(), like=like)
    assert found.answered == 100
    for name, array in like.items():
        assert found.value[name].dtype == array.dtype
        expected = (cells[name] * own.cell / 100).astype(np.float32)
        np.testing.assert_array_equal(found.value[name], expected)


@pytest.mark.parametrize("numbers", [1, 3, 10_000])
@pytest.mark.parametrize("silos", [None, 5])
def test_a_sum_of_the_largest_honest_answers_is_released_and_a_larger_one_is_not(numbers, silos):
    """All units send C in one direction, and their noise lies there too, as far as it ever does."""
    own = sums_of(silos=silos)
    largest = own.sampling.population * own.clipping_norm
    stddev = own.cells_protection.noise_stddev * math.sqrt(own.cohort_size)
    honest = largest + stddev * math.sqrt(stats.chi2(numbers).isf(2.0**-40))
    like = {"a": np.zeros(numbers)}

    def released(norm):
        cells = {"a": np.full(numbers, int(norm / math.sqrt(numbers) / own.cell))}
        return own.aggregate_sum(cells, answered=own.cohort_size, noise=SecureNoise(), like=like)

    assert released(honest).answered == own.cohort_size
    spoiled = largest + 1.5 * (honest - largest)
    with pytest.raises(RoundDiscarded, match="a member spoiled it"):
        released(spoiled)
