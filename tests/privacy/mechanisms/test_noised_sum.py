"""The numbers that a mechanism of noised sums passes on, and those that it refuses."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from flower_ext.errors import InvalidValue
from flower_ext.privacy import (
    AdaptiveClipping,
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    PrivacyUnit,
    ReleasePlan,
    SecureNoise,
    SecureSum,
    SeededNoise,
)
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.mechanisms.bounds import ClippedSum
from flower_ext.privacy.mechanisms.noise import largest_noised_norm
from flower_ext.privacy.mechanisms.quantization import CellSum
from flower_ext.privacy.mechanisms.round_mechanism import RoundDiscarded
from flower_ext.privacy.mechanisms.secure_sum import ring_bits
from flower_ext.privacy.mechanisms.updates import RunningSum
from flower_ext.privacy.run_summary import MethodTraits, RunSummary
from flower_ext.privacy.theorems.assumptions import of_secure_sum
from tests.support.plans import mechanism_of, plan, sums_of

POISSON = PoissonSampling(50, 0.2)


def noised_sum(sampling=POISSON, *, placement="client", **costs):
    plan = ReleasePlan(
        sampling=sampling,
        clipping_norm=0.1,
        noise_multiplier=4.0,
        rounds=3,
        delta=1e-3,
        noise_placement=placement,
    )
    return mechanism_of(plan, **costs)


def protection_of(mechanism):
    run = RunSummary(method=MethodTraits(name="test"), participations=Participations())
    return mechanism.protection(run, 10)


def test_a_masked_sum_of_clients_refuses_cohorts_whose_size_is_secret():
    sums = SecureSum(colluding=0.0, dropouts=0.2)
    with pytest.raises(InvalidValue, match="expected cohorts of a fixed size"):
        noised_sum(placement=sums)
    assert noised_sum(FixedSizeSampling(50, 10), placement=sums).num_members == 10
    with pytest.raises(InvalidValue, match="a cohort of 2: expected at least 3"):
        noised_sum(FixedSizeSampling(50, 2), placement=sums)


def test_a_sum_of_the_server_that_did_not_clip_is_refused():
    mechanism, like = noised_sum(placement="server"), {"w": np.zeros(3, np.float32)}
    looser = ClippedSum(like, 2 * mechanism.clipping_norm)
    for summed in (RunningSum(like), looser):
        with pytest.raises(InvalidValue, match="expected at most 0.1, the clipping norm"):
            mechanism.aggregate(summed, cohort_size=1, noise=SeededNoise(1))
    assert mechanism.aggregate(mechanism.begin_sum(like), cohort_size=1, noise=SeededNoise(1))


def test_a_release_counts_noise_and_residue_in_the_units_of_its_sum():
    release = noised_sum(approximation_error=0.5, sensitivity=2.0).release
    assert release.approximation_error == pytest.approx(0.125)
    assert release.noise_multiplier == pytest.approx(2.0)


def test_an_honest_upload_may_be_its_sum_of_units_plus_noise_share():
    share = 0.4 / math.sqrt(10)
    assert noised_sum().client_noise_stddev(10) == pytest.approx(share)
    limit = protection_of(noised_sum()).largest_upload(7, norms=3.0)
    assert limit == pytest.approx(largest_noised_norm(0.3, share, 7))
    by_server = noised_sum(placement="server")
    assert protection_of(by_server).largest_upload(7) == math.inf


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        *(({"sensitivity": value}, "sensitivity=") for value in (0.0, 0.5, math.inf, math.nan)),
        *(({"approximation_error": value}, "approximation_error=") for value in (-0.1, math.inf)),
        ({"silos": 0}, "silos=0"),
    ],
)
def test_costs_that_no_sum_can_have_are_refused_by_name(costs, message):
    with pytest.raises(InvalidValue, match=message):
        noised_sum(**costs)


def test_a_unit_that_moves_a_sum_further_is_accounted_with_less_noise():
    far = noised_sum(sensitivity=2.0)
    assert far.release == replace(noised_sum(), noise_multiplier=2.0).release
    assert far.noise_stddev == pytest.approx(4.0 * far.clipping_norm)


def test_the_unit_is_a_client_or_among_silos_a_user():
    assert noised_sum().unit is PrivacyUnit.CLIENT
    assert noised_sum(silos=3).unit is PrivacyUnit.USER


@pytest.mark.parametrize("norm", [0.5, AdaptiveClipping()])
def test_only_a_plan_with_secure_sums_has_a_mechanism_that_hides_uploads(norm):
    terms = {"sampling": FixedSizeSampling(100, 40), "clipping_norm": norm}
    update = {"a": np.zeros(2)}
    for placement in ("client", "server"):
        mechanism = plan(**terms, noise_placement=placement).mechanism()
        assert mechanism.masked is None
        mechanism.begin_sum(update).add(update)
    masked = plan(**terms, noise_placement=SecureSum()).mechanism()
    assert masked.masked is not None
    with pytest.raises(TypeError, match="int64"):  # only a protocol may add up the uploads
        masked.begin_sum(update).add(update)
    for summed in (RunningSum(update), CellSum(update, 2 * masked.masked.cell)):
        with pytest.raises(InvalidValue, match=r"make the sum with begin_sum\(\)"):
            masked.aggregate(summed, cohort_size=40, noise=SecureNoise())


def released_sum(mechanism, cells, *, answered, like):
    """Return the release of a secure sum whose result is ``cells``."""
    summed = mechanism.begin_sum(like)
    summed.add(cells)
    summed.count = answered
    return mechanism.aggregate(summed, cohort_size=mechanism.num_members, noise=SecureNoise())


def test_a_guarantee_names_possible_colluders_and_a_server_that_does_not_equivocate():
    sampling = FixedSizeSampling(population=1_000, size=100)
    for resist in (True, False):
        sums = SecureSum(resist_equivocation=resist)
        drawn = sums_of(sampling=sampling, rounds=60, noise_placement=sums)
        text = "; ".join(of_secure_sum(drawn))
        assert "at most 100 of 1000 clients collude" in text
        assert "at most 36 of each cohort of 100 collude, with probability" in text
        assert ("resist_equivocation is off" in text) is not resist
    assert "with probability at least" not in "; ".join(of_secure_sum(sums_of()))


def test_the_reported_noise_is_in_random_cohorts_unlike_fixed_shares():
    """Of 1,000 clients 100 collude; in 42 % of cohorts of 100 they are more than ten."""
    sampling = FixedSizeSampling(population=1_000, size=100)
    drawn = sums_of(sampling=sampling, rounds=1_000)
    rng, parameters = np.random.default_rng(3), drawn.masked.parameters
    colluders = np.array([np.sum(np.array(sampling.draw(rng)) < 100) for _ in range(5_000)])
    assert parameters.least_answers - colluders.max() >= parameters.honest_answers
    planted = parameters.least_answers - 10  # γ as a share of each cohort
    too_little = np.mean(parameters.least_answers - colluders < planted)
    assert too_little == pytest.approx(0.42, abs=0.05)
    assert (parameters.colluders, planted) == (37, 80)


@pytest.mark.parametrize(("members", "noise"), [(100, 1.0), (1_000, 0.5), (10_000, 0.01)])
def test_no_sum_leaves_its_ring(members, noise):
    sums = sums_of(sampling=FullParticipation(members), noise_multiplier=noise)
    bits = sums.masked.bits
    assert bits == (64 if noise == 0.01 else 32)
    most = members * sums.clipping_norm / sums.masked.cell
    share = sums.masked.share_stddev / sums.masked.cell
    assert most + 11 * share * math.sqrt(members) < 2 ** (bits - 1)
    with pytest.raises(ValueError, match=r"expected less than 2\*\*63"):
        ring_bits(2.0**63, 1.0)


@pytest.mark.parametrize("members", [5, 100, 1_000])
def test_any_number_of_answers_is_worth_its_part_of_the_planned_noise(members):
    sums = sums_of(sampling=FullParticipation(members))
    parameters = sums.masked.parameters
    share = sums.masked.share_stddev / sums.masked.cell
    cells = sums.noise_stddev / sums.masked.cell
    for answers in (1, parameters.honest_answers, parameters.least_answers):
        worth = answers * share**2 - 16
        assert worth >= cells**2 * answers / parameters.least_answers * (1 - 1e-12)
    assert parameters.least_answers * share**2 == pytest.approx(cells**2, rel=1e-4)


def test_the_server_adds_the_noise_shares_of_clients_that_dropped_out():
    sums = sums_of()
    like = {"a": np.zeros(200_000, np.float64)}
    cells = {"a": np.zeros(200_000, np.int64)}
    share = sums.masked.share_stddev
    for answered in (90, 99, 100):
        released = released_sum(sums, cells, answered=answered, like=like)
        expected = share * math.sqrt(100 - answered)
        assert released.topped_up_stddev == pytest.approx(expected)
        assert released.value["a"].std() * 100 == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("stddevs", [0.01, 1.0, 1.04, 1.99])
@pytest.mark.parametrize("dropouts", [0.0, 0.5, 0.75])
def test_whatever_a_plan_accepts_its_clients_and_its_server_can_add(stddevs, dropouts):
    sums = SecureSum(colluding=0.0, dropouts=dropouts, resist_equivocation=False)
    mechanism = sums_of(noise_multiplier=stddevs, noise_placement=sums)
    update = {"a": np.ones(3)}
    cells = mechanism.client_protection(mechanism.num_members).released(update, SecureNoise())
    least = mechanism.masked.parameters.least_answers
    released = released_sum(mechanism, cells, answered=least, like=update)
    assert np.isfinite(released.value["a"]).all()


def test_a_plan_whose_noise_or_losses_cannot_be_added_is_refused():
    with pytest.raises(
        ValueError, match="lose 90 members, which leaves 10 answers: expected at least 25"
    ):
        sums_of(noise_placement=SecureSum(colluding=0.0, dropouts=0.9))
    for multiplier in (1e-6, 1e6):
        with pytest.raises(
            ValueError, match=r"noise multiplier of about .* expected one from 2\*\*-13 to"
        ):
            sums_of(noise_multiplier=multiplier)
    for multiplier in (2.0**-13, 2.0**15):
        assert sums_of(noise_multiplier=multiplier).masked is not None
    with pytest.raises(ValueError, match=r"'SecureSum': expected 'client', 'server' or SecureSum"):
        sums_of(noise_placement="SecureSum")


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
    assert {mechanism.num_members for mechanism in mechanisms} == {5}
    assert {mechanism.masked.parameters.least_answers for mechanism in mechanisms} == {4}
    assert len({mechanism.masked.share_stddev for mechanism in mechanisms}) == 1
    for silos, message in ((2, "a cohort of 2"), (None, "with Poisson sampling")):
        with pytest.raises(ValueError, match=message):
            sums_of(sampling=sampled, silos=silos, **users)


@pytest.mark.parametrize("users", [10, 1_000, 100_000])
def test_the_ring_has_room_for_all_users_and_hides_how_many(users):
    sums, everyone = (
        sums_of(sampling=sampling, silos=5)
        for sampling in (PoissonSampling(users, 0.01), FullParticipation(users))
    )
    assert sums.masked.bits == everyone.masked.bits == (64 if users == 100_000 else 32)
    most = users * sums.clipping_norm / sums.masked.cell
    assert most < 2 ** (sums.masked.bits - 1)


def test_a_sum_in_cells_becomes_the_average_over_the_expected_cohort():
    sums = sums_of()
    like = {"b": np.zeros((2, 2), np.float32), "a": np.zeros(3, np.float32)}
    cells = {"a": np.array([1, -2, 3]), "b": np.array([[2**20, 0], [0, -7]])}
    released = released_sum(sums, cells, answered=100, like=like)
    assert released.answered == 100
    for name, array in like.items():
        assert released.value[name].dtype == array.dtype
        expected = (cells[name] * sums.masked.cell / 100).astype(np.float32)
        np.testing.assert_array_equal(released.value[name], expected)


@pytest.mark.parametrize("numbers", [1, 3, 10_000])
@pytest.mark.parametrize("silos", [None, 5])
def test_a_sum_of_the_largest_honest_answers_is_released_but_none_larger(numbers, silos):
    """All units send C in one direction, and their noise lies there too, as far as it ever does."""
    sums = sums_of(silos=silos)
    largest = sums.sampling.population * sums.clipping_norm
    stddev = sums.masked.share_stddev * math.sqrt(sums.num_members)
    honest = largest + stddev * math.sqrt(stats.chi2(numbers).isf(2.0**-40))
    like = {"a": np.zeros(numbers)}

    def released(norm):
        cells = {"a": np.full(numbers, int(norm / math.sqrt(numbers) / sums.masked.cell))}
        return released_sum(sums, cells, answered=sums.num_members, like=like)

    assert released(honest).answered == sums.num_members
    spoiled = largest + 1.5 * (honest - largest)
    with pytest.raises(RoundDiscarded, match="a member spoiled it"):
        released(spoiled)
