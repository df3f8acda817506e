"""Limits on the records of each user, and a silo's examples by user."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_ext.data import Examples, SiloData, group_size, limit_contributions


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
    ("call", "message"),
    [
        (lambda: group_size(np.ones((2, 2)), 0), "group_size=0: expected an integer >= 1"),
        (lambda: group_size(np.ones((2, 2)), True), "group_size=True: expected an integer >= 1"),
        (lambda: group_size(np.ones((2, 2)), "mean"), "group_size='mean'"),
        (lambda: group_size(np.zeros((2, 2)), "max"), "at least one record"),
        (
            lambda: limit_contributions(np.ones((2, 2), dtype=int), 0, rng()),
            "records_per_user=0",
        ),
    ],
)
def test_impossible_limits_are_refused_with_what_is_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def examples(count: int) -> Examples:
    return Examples(torch.arange(2.0 * count).reshape(count, 2), torch.arange(count))


def silo(owners, count: int = 6) -> SiloData:
    return SiloData(train=examples(count), test=examples(2), owners=owners)


def test_a_silo_hands_out_each_users_examples_in_their_order():
    owners = torch.tensor([4, 0, 4, 2, 0, 4])
    data = silo(owners)
    by_user = data.by_user()
    assert list(by_user) == [0, 2, 4]
    for user, user_examples in by_user.items():
        rows = [row for row, owner in enumerate(owners.tolist()) if owner == user]
        assert user_examples.targets.tolist() == rows
        assert torch.equal(user_examples.features, data.train.features[rows])


def test_users_examples_share_one_copy_of_the_silos():
    by_user = silo(torch.tensor([1, 0, 1, 0, 1, 0])).by_user()
    storages = {
        user_examples.features.untyped_storage().data_ptr() for user_examples in by_user.values()
    }
    assert len(storages) == 1


def test_an_empty_silo_has_no_users():
    empty = silo(torch.zeros(0, dtype=torch.int64), count=0)
    assert empty.by_user() == {}
    assert len(empty.limited(np.array([1]), np.random.default_rng(0)).train) == 0


def test_a_limited_silo_keeps_a_random_choice_of_each_users_examples():
    owners = torch.arange(300) % 3
    data = SiloData(train=examples(300), test=examples(2), owners=owners)
    kept = data.limited(np.array([5, 0, 1_000]), np.random.default_rng(0))
    assert {user: len(user_examples) for user, user_examples in kept.by_user().items()} == {
        0: 5,
        2: 100,
    }
    rows = kept.train.targets  # each example's target is its row
    assert torch.equal(kept.owners, owners[rows])
    again = data.limited(np.array([5, 0, 1_000]), np.random.default_rng(1))
    assert again.train.targets.tolist() != rows.tolist()
    with pytest.raises(ValueError, match="limits for users 0 … 1, but the silo has user 2"):
        data.limited(np.array([5, 5]), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        (None, "expected a tensor with the user of each training example"),
        (torch.zeros(5, dtype=torch.int64), r"owners of shape \(5,\): expected \(6,\)"),
        (torch.zeros(6, 1, dtype=torch.int64), r"owners of shape \(6, 1\)"),
        (torch.zeros(6), "owners of type torch.float32: expected integers"),
        (torch.zeros(6, dtype=torch.bool), "owners of type torch.bool: expected integers"),
        (torch.tensor([0, 1, 2, -1, 0, 0]), "expected users >= 0, found -1"),
    ],
)
def test_owners_that_do_not_fit_the_examples_are_refused(owners, message):
    with pytest.raises(ValueError, match=message):
        silo(owners)
