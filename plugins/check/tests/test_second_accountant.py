"""ε of measured noise, by another accountant than the package's."""

import pytest

from flower_ext.privacy import (
    FixedSizeSampling,
    FullParticipation,
    NeighboringRelation,
    PoissonSampling,
    Release,
    privacy_loss_of,
)
from flower_ext_check.mechanisms import Declared
from flower_ext_check.second_accountant import second_epsilon
from tests.support.grids import grid

ADD, REPLACE = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE


@pytest.mark.parametrize(
    ("sampling", "relation", "queries"),
    grid(
        [
            pytest.param(sampling, relation, queries, id=f"{name}-{queries}")
            for queries in (0, 4)
            for name, sampling, relation in (
                ("everyone", FullParticipation(100), ADD),
                ("poisson", PoissonSampling(100, 0.2), ADD),
                ("fixed size", FixedSizeSampling(100, 20), REPLACE),
            )
        ],
        {"everyone-0", "poisson-4", "fixed size-0"}.__contains__,
    ),
)
def test_the_declared_noise_has_the_epsilon_that_the_package_states(sampling, relation, queries):
    release = Release(sampling=sampling, noise_multiplier=4.0, relation=relation)
    query = Release(sampling=FullParticipation(100), noise_multiplier=9.0, relation=relation)
    others = {query: queries} if queries else {}
    declared = Declared(
        release=release, count=30, sensitivity=1.0, stddev=4.0, other_queries=others
    )
    stated = privacy_loss_of({release: 30, **others}, delta=1e-5).epsilon
    assert second_epsilon(declared, 4.0, 1e-5) == pytest.approx(stated, rel=0.01)
    assert second_epsilon(declared, 2.0, 1e-5) > 1.5 * stated
    assert second_epsilon(declared, 0.0, 1e-5) == float("inf")
