"""The numbers that a plan of one noised sum a round passes on, and the plans that it refuses."""

import math

import pytest

from flower_ext.errors import InvalidValue
from flower_ext.privacy import FixedSizeSampling, PoissonSampling, ReleasePlan, SecureSum
from flower_ext.privacy.mechanisms.noise import largest_noised_norm

POISSON = PoissonSampling(50, 0.2)


def plan(sampling=POISSON, **changes) -> ReleasePlan:
    facts = {"clipping_norm": 0.1, "noise_multiplier": 4.0, "rounds": 3, "delta": 1e-3}
    return ReleasePlan(sampling=sampling, **{**facts, **changes})


def test_a_masked_sum_of_clients_refuses_cohorts_whose_size_is_secret():
    sums = SecureSum(colluding=0.0, dropouts=0.2)
    with pytest.raises(InvalidValue, match="expected cohorts of a fixed size"):
        plan(noise_placement=sums)
    assert plan(FixedSizeSampling(50, 10), noise_placement=sums).cohort_size == 10
    with pytest.raises(InvalidValue, match="a cohort of 2: expected at least 3"):
        plan(FixedSizeSampling(50, 2), noise_placement=sums)


def test_a_release_counts_noise_and_residue_in_the_units_of_its_sum():
    release = plan(approximation_error=0.5, sensitivity=2.0).release
    assert release.approximation_error == pytest.approx(0.125)
    assert release.noise_multiplier == pytest.approx(2.0)


def test_an_honest_upload_may_be_as_large_as_its_sum_of_units_and_its_share_of_the_noise():
    share = 0.4 / math.sqrt(10)
    assert plan().client_noise_stddev(10) == pytest.approx(share)
    limit = plan().largest_upload(cohort_size=10, numbers=7, norms=3.0)
    assert limit == pytest.approx(largest_noised_norm(0.3, share, 7))
    by_server = plan(noise_placement="server")
    assert by_server.largest_upload(cohort_size=10, numbers=7) == math.inf
