"""The plans that Uldp-FL's methods accept."""

from functools import partial

import pytest

from flower_ext.algorithms.uldp.silo_method import sums_of_users
from flower_ext.privacy import FixedSizeSampling
from tests.support.plans import mechanism_of, release_plan

plan = partial(release_plan, 100, clipping_norm=1.0, noise_multiplier=5.0, rounds=100, delta=1e-5)


@pytest.mark.parametrize(
    ("changes", "num_silos", "message"),
    [
        ({"noise_placement": "server"}, 5, "noise_placement='server'"),
        ({"sampling": FixedSizeSampling(100, 5)}, 5, "FullParticipation or PoissonSampling"),
        ({}, 0, "silos=0"),
    ],
)
def test_plans_of_other_methods_are_refused(changes, num_silos, message):
    with pytest.raises(ValueError, match=message):
        sums_of_users(mechanism_of(plan(**changes), silos=num_silos))
