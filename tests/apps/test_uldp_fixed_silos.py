"""Allocations of records to users where the data set itself has silos."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.apps import ULDP_FL
from tests.support.reference.uldp import records_of

allocate_within = ULDP_FL.module("fixed_silos").allocate_within

TCGA = [248, 156, 164, 129, 129, 40]
HEART = [199, 172, 30, 85]


def rng(seed=0):
    return np.random.default_rng(seed)


@settings(max_examples=30, deadline=None)
@given(
    distribution=st.sampled_from(["uniform", "zipf"]),
    sizes=st.lists(st.integers(3, 60), min_size=1, max_size=6),
    users=st.integers(1, 40),
    at_least=st.integers(1, 3),
    main_share=st.sampled_from([0.5, 0.8, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_given_silos_keep_their_records_and_users_have_enough_or_none(
    distribution, sizes, users, at_least, main_share, seed
):
    owners = allocate_within(
        distribution,
        sizes,
        num_users=users,
        rng=rng(seed),
        at_least=at_least,
        main_share=main_share,
    )
    assert list(map(len, owners)) == sizes
    held = records_of(owners, users)
    assert ((held == 0) | (held >= at_least)).all()


@pytest.mark.parametrize(("sizes", "at_least"), [(HEART, 1), (TCGA, 2)])
def test_in_given_silos_zipf_users_have_most_of_their_records_in_one(sizes, at_least):
    def main_share(distribution, seed):
        owners = allocate_within(
            distribution, sizes, num_users=50, rng=rng(seed), at_least=at_least
        )
        held = records_of(owners, 50)
        return held.max(axis=0).sum() / held.sum()

    zipf = np.mean([main_share("zipf", seed) for seed in range(5)])
    assert 0.72 < zipf < 0.9
    assert np.mean([main_share("uniform", seed) for seed in range(5)]) < 0.6


@pytest.mark.parametrize("distribution", ["uniform", "zipf"])
def test_the_same_seed_gives_the_same_owners(distribution):
    def drawn(seed):
        return np.concatenate(allocate_within(distribution, HEART, num_users=30, rng=rng(seed)))

    np.testing.assert_array_equal(drawn(1), drawn(1))
    assert (drawn(1) != drawn(2)).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: allocate_within("even", [5], num_users=4, rng=rng()), "distribution='even'"),
        (lambda: allocate_within("zipf", [], num_users=4, rng=rng()), "at least one silo"),
        (
            lambda: allocate_within("zipf", [5, 1], num_users=4, rng=rng(), at_least=2),
            "2 records or more",
        ),
        (
            lambda: allocate_within("zipf", [5], num_users=4, rng=rng(), main_share=0.0),
            r"main_share=0\.0",
        ),
        (
            lambda: allocate_within("zipf", [5], num_users=4, rng=rng(), at_least=0),
            "at_least=0",
        ),
    ],
)
def test_impossible_allocations_are_refused_with_what_is_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()
