"""Allocations of records to users and silos have the distributions that Uldp-FL describes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_ext.data import ClientData, Examples
from tests.support.apps import ULDP_FL
from tests.support.reference.uldp import records_of
from tests.support.silos import histogram

allocation = ULDP_FL.module("allocation")
allocate = allocation.allocate

TARGETS = np.random.default_rng(0).integers(0, 10, 6_000)


def rng(seed=0):
    return np.random.default_rng(seed)


@settings(max_examples=30, deadline=None)
@given(
    distribution=st.sampled_from(["uniform", "zipf"]),
    records=st.integers(1, 300),
    users=st.integers(1, 40),
    silos=st.integers(1, 7),
    seed=st.integers(0, 2**32),
)
def test_every_record_has_one_user_and_one_silo(distribution, records, users, silos, seed):
    allocation = allocate(
        distribution, TARGETS[:records], num_users=users, num_silos=silos, rng=rng(seed)
    )
    assert sorted(np.concatenate(allocation.rows)) == [*range(records)]
    assert list(map(len, allocation.owners)) == list(map(len, allocation.rows))
    assert len(allocation.rows) == silos
    assert records_of(allocation.owners, users).sum() == records


def test_uniform_users_hold_equal_shares_and_zipf_users_rank_to_minus_half():
    def totals(distribution):
        big = np.zeros(200_000, dtype=int)
        allocation = allocate(distribution, big, num_users=100, num_silos=5, rng=rng())
        return np.bincount(np.concatenate(allocation.owners), minlength=100)

    np.testing.assert_allclose(totals("uniform"), 2_000, rtol=0.1)
    expected = np.arange(1, 101) ** -0.5
    np.testing.assert_allclose(totals("zipf"), 200_000 * expected / expected.sum(), rtol=0.15)


def test_zipf_concentrates_a_user_in_one_silo_and_each_user_in_another():
    big = np.zeros(100_000, dtype=int)
    held = records_of(allocate("zipf", big, num_users=50, num_silos=5, rng=rng()).owners, 50)
    shares = np.sort(held / held.sum(axis=0), axis=0)[::-1].mean(axis=1)
    expected = np.arange(1, 6) ** -2.0
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.02)
    assert len(set(held.argmax(axis=0))) == 5
    even = records_of(allocate("uniform", big, num_users=50, num_silos=5, rng=rng()).owners, 50)
    np.testing.assert_allclose(even / even.sum(axis=0), 0.2, atol=0.05)


@pytest.mark.parametrize("distribution", ["uniform", "zipf"])
@pytest.mark.parametrize(("users", "labels"), [(100, 2), (2_000, 2), (5, 2), (10, 1), (30, 10)])
def test_users_hold_few_labels_and_about_as_many_records_as_without(distribution, users, labels):
    def owned(**options):
        allocation = allocate(
            distribution, TARGETS, num_users=users, num_silos=3, rng=rng(), **options
        )
        assert sorted(np.concatenate(allocation.rows)) == [*range(len(TARGETS))]
        return np.concatenate(allocation.rows), np.concatenate(allocation.owners)

    rows, owners = owned(labels_per_user=labels)
    pairs = set(zip(owners.tolist(), TARGETS[rows].tolist(), strict=True))
    most = max(np.bincount([owner for owner, _ in pairs]))
    assert most <= labels
    assert {label for _, label in pairs} == set(range(10))
    _, without = owned()
    sizes, plain = (np.bincount(o, minlength=users) for o in (owners, without))
    assert np.corrcoef(sizes, plain)[0, 1] > 0.8 or np.ptp(sizes) < 0.7 * sizes.mean()


def test_users_of_few_labels_do_not_all_hold_the_same_pairs():
    allocation = allocate(
        "uniform", TARGETS, num_users=200, num_silos=1, rng=rng(), labels_per_user=2
    )
    owned = [set(TARGETS[allocation.rows[0][allocation.owners[0] == u]]) for u in range(200)]
    assert len({tuple(sorted(labels)) for labels in owned}) > 25


@pytest.mark.parametrize("distribution", ["uniform", "zipf"])
def test_the_same_seed_gives_the_same_allocation(distribution):
    def drawn(seed):
        free = allocate(distribution, TARGETS, num_users=30, num_silos=3, rng=rng(seed))
        return np.concatenate(free.owners)

    np.testing.assert_array_equal(drawn(1), drawn(1))
    assert (drawn(1) != drawn(2)).any()


FREE = {"num_users": 10, "num_silos": 3}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: allocate("even", TARGETS, **FREE, rng=rng()), "distribution='even'"),
        (
            lambda: allocate("zipf", TARGETS, num_users=0, num_silos=3, rng=rng()),
            "num_users=0",
        ),
        (
            lambda: allocate("zipf", TARGETS, num_users=5, num_silos=0, rng=rng()),
            "num_silos=0",
        ),
        (
            lambda: allocate("zipf", TARGETS, **FREE, labels_per_user=11, rng=rng()),
            "labels_per_user=11: expected 1 … 10",
        ),
        (
            lambda: allocate(
                "uniform", TARGETS, num_users=4, num_silos=3, labels_per_user=2, rng=rng()
            ),
            "cannot own 10 labels",
        ),
    ],
)
def test_impossible_allocations_are_refused_with_what_is_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_dealt_silos_hold_their_allocated_examples_and_equal_shares_of_the_tests():
    pool = Examples(torch.arange(30.0).reshape(30, 1), torch.arange(30) % 3)
    data = ClientData(train=pool, test=pool.subset(range(11)))
    rng = np.random.default_rng(0)
    drawn = allocate("zipf", pool.targets.numpy(), num_users=4, num_silos=3, rng=rng)
    silos = allocation.deal_silos(data, drawn, rng)
    for silo, rows, owners in zip(silos, drawn.rows, drawn.owners, strict=True):
        assert silo.train.features.flatten().tolist() == rows.tolist()
        assert silo.owners.tolist() == owners.tolist()
    assert sorted(len(silo.test) for silo in silos) == [3, 4, 4]
    tests = torch.cat([silo.test.features.flatten() for silo in silos])
    assert sorted(tests.tolist()) == [*range(11)]
    held = histogram(silos, 4)
    assert held.sum() == 30
    assert [len(rows) for rows in drawn.rows] == held.sum(axis=1).tolist()
