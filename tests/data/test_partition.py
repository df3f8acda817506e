"""Partitions of examples among clients, and splits into training and test parts."""

import numpy as np
import pytest

from flower_ext.data import dirichlet, iid, partition, pathological, split

TARGETS = np.random.default_rng(0).integers(0, 10, 6_000)


def rng(seed=0):
    return np.random.default_rng(seed)


def disjoint(parts) -> bool:
    together = np.concatenate(parts)
    return len(together) == len(set(together.tolist()))


@pytest.mark.parametrize(("clients", "classes"), [(100, 2), (50, 5), (30, 1), (7, 10), (5, 2)])
def test_pathological_gives_every_client_exactly_s_classes_and_every_example_once(clients, classes):
    parts = pathological(TARGETS, num_partitions=clients, classes_per_partition=classes, rng=rng())
    assert len(parts) == clients
    assert disjoint(parts)
    assert sum(map(len, parts)) == len(TARGETS)
    assert {len(np.unique(TARGETS[part])) for part in parts} == {classes}
    sizes = [len(part) for part in parts]
    assert max(sizes) < 3 * min(sizes)


def test_clients_do_not_all_hold_the_same_pairs():
    parts = pathological(TARGETS, num_partitions=100, classes_per_partition=2, rng=rng())
    pairs = {tuple(np.unique(TARGETS[part])) for part in parts}
    assert len(pairs) > 20


def test_dirichlet_is_uneven_for_small_alpha_and_even_for_large():
    def spread(alpha):
        parts = dirichlet(TARGETS, num_partitions=10, alpha=alpha, rng=rng())
        assert disjoint(parts)
        assert sum(map(len, parts)) == len(TARGETS)
        shares = np.array([np.bincount(TARGETS[p], minlength=10) / len(p) for p in parts])
        return shares.std()

    assert spread(0.3) > 3 * spread(100.0)


def test_iid_shares_are_equal_up_to_one_and_disjoint():
    parts = iid(TARGETS, num_partitions=7, rng=rng())
    assert disjoint(parts)
    assert {len(p) for p in parts} == {857, 858}


@pytest.mark.parametrize("kind", ["pathological", "dirichlet", "iid"])
def test_the_same_seed_gives_the_same_partition(kind):
    def divide(seed):
        return partition(kind, TARGETS, num_partitions=12, rng=rng(seed))

    assert all(np.array_equal(a, b) for a, b in zip(divide(1), divide(1), strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(divide(1), divide(2), strict=True))


def test_a_split_is_by_class_disjoint_and_never_empty():
    classes = pathological(TARGETS, num_partitions=20, classes_per_partition=2, rng=rng())[3]
    train, test = split(classes, TARGETS, train_fraction=0.9, rng=rng())
    assert disjoint([train, test])
    assert set(train) | set(test) == set(classes)
    assert len(train) == round(0.9 * len(classes))
    shares = [np.bincount(TARGETS[part], minlength=10) / len(part) for part in (train, test)]
    np.testing.assert_allclose(shares[0], shares[1], atol=0.05)
    for size in (2, 3, 5):
        parts = split(classes[:size], TARGETS, train_fraction=0.99, rng=rng())
        assert all(len(part) > 0 for part in parts)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition("even", TARGETS, num_partitions=3, rng=rng()), "partition='even'"),
        (lambda: iid(TARGETS, num_partitions=0, rng=rng()), "num_partitions=0"),
        (lambda: iid(TARGETS, num_partitions=6_001, rng=rng()), "num_partitions=6001"),
        (
            lambda: pathological(TARGETS, num_partitions=3, classes_per_partition=11, rng=rng()),
            "classes_per_partition=11",
        ),
        (
            lambda: pathological(TARGETS, num_partitions=3, classes_per_partition=2, rng=rng()),
            "cannot hold 10 classes",
        ),
        (
            lambda: pathological(TARGETS, num_partitions=1_600, classes_per_partition=2, rng=rng()),
            "fewer than two each",
        ),
        (lambda: dirichlet(TARGETS, num_partitions=3, alpha=0.0, rng=rng()), "alpha=0.0"),
        (lambda: dirichlet(TARGETS, num_partitions=40, alpha=0.01, rng=rng()), "raise alpha"),
        (
            lambda: dirichlet(TARGETS, num_partitions=1_000, alpha=1e6, min_size=10, rng=rng()),
            "min_size=10: expected 1 … 6,",
        ),
        (
            lambda: partition(
                "dirichlet", TARGETS, num_partitions=3, alpha=0.5, min_size=2_001, rng=rng()
            ),
            "min_size=2001: expected 1 … 2000,.* in an app, change the setting dirichlet-min-size",
        ),
        (lambda: split(np.array([1]), TARGETS, rng=rng()), "1 examples cannot"),
        (lambda: split(np.arange(9), TARGETS, train_fraction=1.0, rng=rng()), "train_fraction=1.0"),
    ],
)
def test_impossible_partitions_are_refused_with_what_to_change(call, message):
    with pytest.raises(ValueError, match=message):
        call()


ROWS = np.random.default_rng(1).random((100, 3))
WITH_NAN = np.where(np.arange(100) < 7, np.nan, np.arange(100) % 4)
BY_CLASS = {
    "pathological": lambda targets: partition("pathological", targets, num_partitions=4, rng=rng()),
    "dirichlet": lambda targets: partition("dirichlet", targets, num_partitions=4, rng=rng()),
    "split": lambda targets: split(np.arange(100), targets, rng=rng()),
}


@pytest.mark.parametrize("kind", BY_CLASS)
def test_targets_that_are_no_classes_are_refused_where_classes_are_divided(kind):
    with pytest.raises(ValueError, match=r"shape \(100, 3\): expected a class for each example"):
        BY_CLASS[kind](ROWS)
    with pytest.raises(ValueError, match="7 of 100 are NaN, expected a class for each example"):
        BY_CLASS[kind](WITH_NAN)
    for names in (np.array(["a", "b", "c", "d"] * 25), np.arange(100) % 4):
        assert sorted(np.concatenate(BY_CLASS[kind](names))) == [*range(100)]


@pytest.mark.parametrize("targets", [ROWS, WITH_NAN])
def test_equal_shares_need_no_classes(targets):
    parts = partition("iid", targets, num_partitions=7, rng=rng())
    assert sorted(np.concatenate(parts)) == [*range(100)]


def test_every_client_has_the_smallest_size_asked_for():
    for least in (1, 60):
        parts = partition(
            "dirichlet", TARGETS, num_partitions=30, alpha=0.3, min_size=least, rng=rng()
        )
        assert min(map(len, parts)) >= least
