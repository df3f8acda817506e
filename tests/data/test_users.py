import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_ext.data import group_size, limit_contributions


def rng(seed=0):
    return np.random.default_rng(seed)


@settings(max_examples=30, deadline=None)
@given(
    silos=st.integers(1, 5),
    users=st.integers(1, 20),
    k=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
def test_users_keep_as_many_records_as_the_limit_allows_and_no_more(silos, users, k, seed):
    held = rng(seed).integers(0, 9, (silos, users))
    limits = limit_contributions(held, k, rng(seed))
    assert (limits <= held).all()
    np.testing.assert_array_equal(limits.sum(axis=0), np.minimum(held.sum(axis=0), k))


def test_keeping_records_is_fair_over_silos_and_repeats_with_the_generator():
    held = np.array([[30], [10]])
    drawn = [limit_contributions(held, 4, rng(seed))[:, 0] for seed in range(2_000)]
    np.testing.assert_allclose(np.mean(drawn, axis=0), [3, 1], atol=0.1)
    np.testing.assert_array_equal(drawn[7], limit_contributions(held, 4, rng(7))[:, 0])
    everything = limit_contributions(held, group_size(held, "max"), rng())
    np.testing.assert_array_equal(everything, held)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), k=st.integers(1, 6))
def test_which_records_of_a_user_are_kept_depends_on_nobody_else(seed, k):
    held = rng(seed).integers(0, 9, (3, 10))
    fewer = held.copy()
    fewer[:, 4] = 0
    limits, without = (limit_contributions(each, k, rng(seed)) for each in (held, fewer))
    others = np.arange(10) != 4
    np.testing.assert_array_equal(limits[:, others], without[:, others])


def test_group_sizes_are_numbers_the_maximum_or_the_median_of_owners():
    histogram = np.array([[3, 0, 1, 0], [2, 0, 1, 8]])
    assert group_size(histogram, "max") == 8
    assert group_size(histogram, "median") == 5
    assert group_size(histogram[:, :3], "median") == 3  # 3.5, rounded down
    assert group_size(histogram, 2) == group_size(histogram, np.int64(2)) == 2


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: group_size(np.ones((2, 2)), 0), "group_size=0: expected an integer >= 1"),
        (lambda: group_size(np.ones((2, 2)), True), "group_size=True: expected an integer >= 1"),
        (lambda: group_size(np.ones((2, 2)), "mean"), "group_size='mean'"),
        (lambda: group_size(np.zeros((2, 2)), "max"), "at least one record"),
        (
            lambda: limit_contributions(np.ones((2, 2), dtype=int), 0, rng()),
            "group_size=0",
        ),
    ],
)
def test_impossible_limits_are_refused_with_what_is_expected(call, said):
    with pytest.raises(ValueError, match=said):
        call()
