"""The numbers that a mechanism of noised sums passes on, and those that it refuses."""

import math
from dataclasses import replace

import numpy as np
import pytest

from flower_ext.errors import InvalidValue
from flower_ext.privacy import (
    FixedSizeSampling,
    PoissonSampling,
    PrivacyUnit,
    ReleasePlan,
    SecureSum,
    SeededNoise,
)
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.mechanisms.bounds import ClippedSum
from flower_ext.privacy.mechanisms.noise import largest_noised_norm
from flower_ext.privacy.mechanisms.updates import RunningSum
from flower_ext.privacy.run_summary import MethodTraits, RunSummary
from tests.support.plans import mechanism_of

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
    assert noised_sum(FixedSizeSampling(50, 10), placement=sums).cohort_size == 10
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


def test_an_honest_upload_may_be_as_large_as_its_sum_of_units_and_its_share_of_the_noise():
    share = 0.4 / math.sqrt(10)
    assert noised_sum().client_noise_stddev(10) == pytest.approx(share)
    limit = protection_of(noised_sum()).largest_upload(7, norms=3.0)
    assert limit == pytest.approx(largest_noised_norm(0.3, share, 7))
    by_server = noised_sum(placement="server")
    assert protection_of(by_server).largest_upload(7) == math.inf


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        *(({"sensitivity": value}, "sensitivity=") for value in (0.0, 0.5, math.inf, math.nan)),
        *(({"approximation_error": value}, "approximation_error=") for value in (-0.1, math.inf)),
        ({"silos": 0}, "silos=0"),
    ],
)
def test_costs_that_no_sum_can_have_are_refused_by_name(costs, said):
    with pytest.raises(InvalidValue, match=said):
        noised_sum(**costs)


def test_a_unit_that_moves_a_sum_further_is_accounted_with_less_noise():
    far = noised_sum(sensitivity=2.0)
    assert far.release == replace(noised_sum(), noise_multiplier=2.0).release
    assert far.noise_stddev == pytest.approx(4.0 * far.clipping_norm)


def test_the_unit_is_a_client_or_among_silos_a_user():
    assert noised_sum().unit is PrivacyUnit.CLIENT
    assert noised_sum(silos=3).unit is PrivacyUnit.USER
