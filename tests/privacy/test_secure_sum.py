"""Parameters of secure sums: neighbours, thresholds, and what they withstand."""

import math

import numpy as np
import pytest
from scipy import stats

from flower_ext.privacy import (
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    PrivacyUnit,
    ReleasePlan,
    SecureNoise,
    SecureSum,
)
from flower_ext.privacy.secure_sum import SumParameters, ring_bits, threshold_of

TABLE = {
    (0.05, 0.1): {100: (15, 6), 300: (28, 14), 1_000: (35, 18), 10_000: (41, 21)},
    (0.1, 0.1): {100: (21, 11), 300: (36, 21), 1_000: (45, 26), 10_000: (53, 30)},
    (0.2, 0.1): {100: (31, 21), 300: (52, 34), 1_000: (67, 43), 10_000: (77, 49)},
    (0.1, 0.3): {100: (33, 11), 300: (65, 26), 1_000: (88, 36), 10_000: (106, 43)},
    (0.2, 0.2): {100: (40, 21), 300: (73, 40), 1_000: (98, 54), 10_000: (119, 65)},
}
"""The least k with its t, by γ, δ and n, computed without this package."""


@pytest.mark.parametrize(("shares", "row"), TABLE.items(), ids=str)
def test_the_least_number_of_neighbours_and_its_threshold(shares, row):
    for members, (neighbors, threshold) in row.items():
        colluders, lost = (math.floor(share * members + 1e-9) for share in shares)
        assert threshold_of(members, colluders, lost, neighbors) == threshold
        assert threshold_of(members, colluders, lost, neighbors - 1) is None


@pytest.mark.parametrize(("shares", "row"), TABLE.items(), ids=str)
def test_a_circle_has_an_even_number_of_neighbours_and_hardly_more_than_the_least(shares, row):
    for members, (neighbors, _) in row.items():
        found = SecureSum(colluding=shares[0], dropouts=shares[1]).for_cohort(members)
        assert neighbors <= found.neighbors <= neighbors + 3
        assert found.neighbors % 2 == 0
        assert found.threshold <= found.neighbors


@pytest.mark.parametrize("members", [3, 4, 5, 10, 11, 63, 64])
@pytest.mark.parametrize(("colluding", "dropouts"), [(0, 0), (0.1, 0.1), (0.3, 0.2), (0, 0.3)])
def test_in_a_complete_graph_colluders_are_below_the_threshold_and_all_others_reach_it(
    members, colluding, dropouts
):
    found = SecureSum(colluding=colluding, dropouts=dropouts).for_cohort(members)
    lost = members - found.least_answers
    assert found.neighbors == members - 1
    assert found.colluders < found.threshold <= members - 1 - lost
    assert lost >= dropouts * members - 1e-9
    assert found.honest_answers >= 2


def test_random_circles_withstand_what_they_are_made_for():
    """The number of colluding neighbours follows the formula, and stays below the threshold."""
    members, rounds, rng = 100, 2_000, np.random.default_rng(5)
    found = SecureSum(colluding=0.1, dropouts=0.1).for_cohort(members)
    half = found.neighbors // 2
    many = 0
    for _ in range(rounds):
        role = rng.permutation(np.repeat([0, 1, 2], [80, 10, 10]))  # honest, colluding, lost
        near = np.stack([np.roll(role, step) for step in range(-half, half + 1) if step])
        colluding, lost = (near == 1).sum(0)[role == 0], (near == 2).sum(0)
        assert colluding.max() < found.threshold
        assert found.neighbors - lost.max() >= found.threshold
        many += np.count_nonzero(colluding >= 5)
    expected = stats.hypergeom(members - 1, 10, found.neighbors).sf(4)
    assert many / (80 * rounds) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("members", [0, 1, 2])
def test_two_members_have_no_sum_that_hides_anything(members):
    with pytest.raises(ValueError, match="expected at least 3 for a secure sum"):
        SecureSum().for_cohort(members)


def test_what_no_sum_withstands_is_refused_by_what_to_change():
    for wrong in ({"colluding": 1.0}, {"dropouts": -0.1}, {"colluding": math.nan}):
        with pytest.raises(ValueError, match=r"expected a share in \[0, 1\)"):
            SecureSum(**wrong)
    with pytest.raises(ValueError, match="expected less than 1 together"):
        SecureSum(colluding=0.5, dropouts=0.5)
    with pytest.raises(ValueError, match="lower one of them, or take larger cohorts"):
        SecureSum(colluding=0.6, dropouts=0.39).for_cohort(20)
    with pytest.raises(ValueError, match="least_answers=3: expected 10 to 40"):
        SecureSum(least_answers=3).for_cohort(40)


def test_numbers_that_are_given_are_kept_where_they_withstand_what_is_asked():
    found = SecureSum(neighbors=23, threshold=12, least_answers=60).for_cohort(100)
    assert found == SumParameters(
        members=100, neighbors=24, threshold=12, least_answers=60, colluders=10
    )
    weak = [{"threshold": 1}, {"neighbors": 12, "threshold": 7}, {"neighbors": 24, "threshold": 24}]
    for numbers in weak:
        with pytest.raises(ValueError, match=r"in a cohort of 100: expected \(22, 12\)"):
            SecureSum(**numbers).for_cohort(100)
    for threshold in (4, 36, 40):
        with pytest.raises(ValueError, match=f"threshold={threshold} in a cohort of 40"):
            SecureSum(threshold=threshold).for_cohort(40)


def plan(**changes):
    facts = {
        "sampling": FullParticipation(100),
        "clipping_norm": 0.5,
        "noise_multiplier": 1.0,
        "rounds": 3,
        "delta": 0.01,
        "secure_aggregation": SecureSum(),
    }
    return ReleasePlan(**{**facts, **changes})


@pytest.mark.parametrize(("members", "noise"), [(100, 1.0), (1_000, 0.5), (10_000, 0.01)])
def test_no_sum_leaves_its_ring(members, noise):
    own = plan(sampling=FullParticipation(members), noise_multiplier=noise)
    bits = own.sum_bits
    assert bits == (64 if noise == 0.01 else 32)
    most = members * own.clipping_norm / own.cell
    share = own.cells_protection.share_stddev / own.cell
    assert most + 11 * share * math.sqrt(members) < 2 ** (bits - 1)
    with pytest.raises(ValueError, match=r"expected less than 2\*\*63"):
        ring_bits(2.0**63, 1.0)


@pytest.mark.parametrize("members", [3, 100, 1_000])
def test_any_number_of_answers_is_worth_its_part_of_the_planned_noise(members):
    own = plan(sampling=FullParticipation(members))
    parameters = own.sum_parameters
    share = own.cells_protection.share_stddev / own.cell
    cells = own.noise_stddev / own.cell
    for answers in (1, parameters.honest_answers, parameters.least_answers):
        worth = answers * share**2 - 16
        assert worth >= cells**2 * answers / parameters.least_answers * (1 - 1e-12)
    assert parameters.least_answers * share**2 == pytest.approx(cells**2, rel=1e-4)


def test_the_server_adds_the_shares_of_those_who_did_not_answer():
    own = plan()
    like = {"a": np.zeros(200_000, np.float64)}
    cells = {"a": np.zeros(200_000, np.int64)}
    share = own.cells_protection.share_stddev
    for answered in (90, 99, 100):
        found = own.aggregate_sum(cells, answered=answered, noise=SecureNoise(), like=like)
        expected = share * math.sqrt(100 - answered)
        assert found.topped_up_stddev == pytest.approx(expected)
        assert found.value["a"].std() * 100 == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("stddevs", [0.01, 1.0, 1.04, 1.99])
@pytest.mark.parametrize("dropouts", [0.0, 0.5, 0.75])
def test_whatever_a_plan_accepts_its_clients_and_its_server_can_add(stddevs, dropouts):
    sums = SecureSum(colluding=0.0, dropouts=dropouts)
    own = plan(noise_multiplier=stddevs, secure_aggregation=sums)
    update = {"a": np.ones(3)}
    cells = own.cells_protection.released(update, SecureNoise())
    least = own.sum_parameters.least_answers
    found = own.aggregate_sum(cells, answered=least, noise=SecureNoise(), like=update)
    assert np.isfinite(found.value["a"]).all()


def test_a_plan_whose_noise_or_losses_nobody_could_add_is_refused_before_it_runs():
    with pytest.raises(ValueError, match="least_answers=10: expected 25 to 100"):
        plan(secure_aggregation=SecureSum(colluding=0.0, dropouts=0.9))
    for multiplier in (1e-6, 1e6):
        with pytest.raises(ValueError, match="a noise multiplier of"):
            plan(noise_multiplier=multiplier)


def test_cohorts_of_a_secret_size_have_no_secure_sum():
    """The noise of a sum would reveal the size of the cohort."""
    sampling = PoissonSampling(population=1_000, rate=0.1)
    with pytest.raises(ValueError, match="secure_aggregation with Poisson sampling"):
        plan(sampling=sampling)
    with pytest.raises(ValueError, match="a cohort of 2: expected at least 3"):
        plan(sampling=FixedSizeSampling(population=100, size=2))


def test_silos_are_members_whatever_users_are_drawn():
    """The number of silos alone decides who is asked and how much noise there is."""
    users = {"unit": PrivacyUnit.USER, "secure_aggregation": SecureSum(colluding=0.0, dropouts=0.2)}
    sampled = PoissonSampling(population=1_000, rate=0.1)
    plans = [
        plan(sampling=sampling, silos=5, **users)
        for sampling in (sampled, FullParticipation(1_000), PoissonSampling(10, 0.9))
    ]
    assert {own.cohort_size for own in plans} == {5}
    assert {own.sum_parameters.least_answers for own in plans} == {4}
    assert len({own.cells_protection.share_stddev for own in plans}) == 1
    assert plan(sampling=sampled, **users).silos is None  # until the strategy says how many
    for silos, said in ((2, "a cohort of 2"), (None, "with Poisson sampling")):
        unit = PrivacyUnit.USER if silos else PrivacyUnit.CLIENT
        with pytest.raises(ValueError, match=said):
            plan(sampling=sampled, silos=silos, **{**users, "unit": unit})


@pytest.mark.parametrize("users", [10, 1_000, 100_000])
def test_the_ring_has_room_for_all_users_and_does_not_show_how_many_are_drawn(users):
    own, everyone = (
        plan(sampling=sampling, silos=5, unit=PrivacyUnit.USER)
        for sampling in (PoissonSampling(users, 0.01), FullParticipation(users))
    )
    assert own.sum_bits == everyone.sum_bits == (64 if users == 100_000 else 32)
    most = users * own.clipping_norm / own.cell
    assert most < 2 ** (own.sum_bits - 1)


def test_a_sum_in_cells_becomes_the_average_over_the_expected_cohort():
    own = plan()
    like = {"b": np.zeros((2, 2), np.float32), "a": np.zeros(3, np.float32)}
    cells = {"a": np.array([1, -2, 3]), "b": np.array([[2**40, 0], [0, -7]])}
    found = own.aggregate_sum(cells, answered=100, noise=SecureNoise(), like=like)
    assert found.answered == 100
    for name, array in like.items():
        assert found.value[name].dtype == array.dtype
        expected = (cells[name] * own.cell / 100).astype(np.float32)
        np.testing.assert_array_equal(found.value[name], expected)
