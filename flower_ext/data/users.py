"""Allocations of records to users whose records may lie in several silos.

These are the allocations of Uldp-FL, Section 5.1. Users and silos are numbers from 0.

The authors' code deals uniform records out evenly, gives every Zipf user of fixed silos one record
to begin with, and hands left-over labels to user 0. This module instead draws users and silos for
every record, as the paper's text says. Some users may therefore own nothing, and no user is
special.
"""

from __future__ import annotations

from numbers import Integral
from typing import Literal, NamedTuple

import numpy as np

from flower_ext.checks import require_at_least_one, require_one_of
from flower_ext.errors import InvalidValue

Distribution = Literal["uniform", "zipf"]

USER_EXPONENT = 0.5
SILO_EXPONENT = 2.0


class Allocation(NamedTuple):
    """For each silo, rows of the pool and the owner of each row, as int64 arrays."""

    rows: list[np.ndarray]
    owners: list[np.ndarray]


def limit_contributions(
    histogram: np.ndarray, group_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Return the number of records that each user keeps in each silo.

    A user keeps at most ``group_size`` records in all silos together, namely min(N_u, k), so as
    few as possible are wasted. All records of a user are equally likely to be kept. The choice
    reads exact numbers of records in all silos at once, which no guarantee covers.

    Parameters
    ----------
    histogram : numpy.ndarray
        n_{s,u} as integers (silos, users).

    Returns
    -------
    numpy.ndarray
        int64 (silos, users), for `SiloData.limited` silo by silo.

    Raises
    ------
    ValueError
        ``group_size`` is below 1.
    """
    require_at_least_one("group_size", group_size)
    silos, users = histogram.shape
    silo, owner = (
        np.repeat(index.ravel(), histogram.ravel()) for index in np.indices((silos, users))
    )
    kept = choose(owner, np.full(users, group_size), rng)
    limits: np.ndarray = np.zeros((silos, users), dtype=np.int64)
    # Unlike ``+= 1``, this counts a pair of silo and user as often as it occurs.
    np.add.at(limits, (silo[kept], owner[kept]), 1)
    return limits


def choose(owners: np.ndarray, limits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a mask of at most ``limits[u]`` records of each user u, all equally likely.

    For the same state of ``rng`` a user's choice does not depend on other users' records.
    """
    order = np.argsort(owners, kind="stable")
    grouped = owners[order]
    rank = np.arange(len(owners)) - np.searchsorted(grouped, grouped)
    # A record's lot depends on its user and its rank alone. Lots drawn from ``rng`` would move with
    # the number of other users' records.
    key = rng.integers(2**64, dtype=np.uint64)
    lots = _scrambled(_scrambled(grouped.astype(np.uint64) ^ key) + rank.astype(np.uint64))
    chosen = np.zeros(len(owners), dtype=bool)
    chosen[order[np.lexsort((lots, grouped))]] = rank < limits[grouped]
    return chosen


def _scrambled(numbers: np.ndarray) -> np.ndarray:
    """Return 64-bit numbers that look random, from numbers that do not (SplitMix64)."""
    z = numbers * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


def group_size(histogram: np.ndarray, size: int | Literal["max", "median"]) -> int:
    """Return the k of ULDP-GROUP-k: a number, or the maximum or median of users' record counts.

    The median is over users who own a record, rounded down.

    Raises
    ------
    ValueError
        The number is below 1, the word is unknown, or there is no record.
    """
    if isinstance(size, Integral) and not isinstance(size, bool) and size >= 1:
        return int(size)
    if size not in ("max", "median"):
        raise InvalidValue(f"group_size={size!r}: expected an integer >= 1, 'max' or 'median'")
    totals = histogram.sum(axis=0)
    totals = totals[totals > 0]
    if len(totals) == 0:
        raise InvalidValue("histogram: expected at least one record")
    return int(totals.max() if size == "max" else np.median(totals))


def allocate(
    distribution: Distribution,
    targets: np.ndarray,
    *,
    num_users: int,
    num_silos: int,
    rng: np.random.Generator,
    labels_per_user: int | None = None,
) -> Allocation:
    """Draw a user and a silo for every record of a pool.

    * ``uniform``: all users and all silos are equally likely.
    * ``zipf``: user u has probability ∝ (u + 1)^-½. That user's silo of rank r has
      probability ∝ r^-2; every user ranks the silos in another random order.

    Parameters
    ----------
    targets : numpy.ndarray
        One label per record. Without ``labels_per_user`` only their number counts.
    labels_per_user : int, optional
        The most different labels that one user's records may have. Users then own about as many
        records as they would without a limit; the labels with the fewest owners so far come first.

    Raises
    ------
    ValueError
        An argument is out of range, or there are too few users to own all labels.
    """
    require_at_least_one("num_users", num_users)
    require_at_least_one("num_silos", num_silos)
    weights = _weights(distribution, num_users, USER_EXPONENT)
    records = len(targets)
    owners = rng.choice(num_users, size=records, p=weights)
    if labels_per_user is not None:
        sizes = np.bincount(owners, minlength=num_users)
        owners = _few_labels(targets, sizes, labels_per_user, rng)
    rank = rng.choice(num_silos, size=records, p=_weights(distribution, num_silos, SILO_EXPONENT))
    # One row per user: the silos in that user's order.
    silo_of_rank = rng.permuted(np.tile(np.arange(num_silos), (num_users, 1)), axis=1)
    silos = silo_of_rank[owners, rank]
    rows = [np.flatnonzero(silos == silo) for silo in range(num_silos)]
    return Allocation(rows, [owners[silo_rows] for silo_rows in rows])


def _few_labels(
    targets: np.ndarray, sizes: np.ndarray, labels_per_user: int, rng: np.random.Generator
) -> np.ndarray:
    """Return owners so that user u has about ``sizes[u]`` records of at most so many labels."""
    labels, counts = np.unique(targets, return_counts=True)
    if not 1 <= labels_per_user <= len(labels):
        raise InvalidValue(f"labels_per_user={labels_per_user!r}: expected 1 … {len(labels)}")
    users = rng.permutation(np.flatnonzero(sizes))
    if len(users) * labels_per_user < len(labels):
        raise InvalidValue(
            f"{len(users)} users of {labels_per_user} labels cannot own {len(labels)} labels; "
            "raise num_users or labels_per_user"
        )
    quota = np.zeros((len(sizes), len(labels)))
    load = np.zeros(len(labels))
    typical = sizes[users].mean() / counts.mean()
    for user in users:
        # Labels without an owner come first; then the least taken ones, give or take one user.
        taken = np.where(load == 0, -1.0, load + typical * rng.random(len(labels)))
        order = np.lexsort((rng.random(len(labels)), taken))[:labels_per_user]
        quota[user, order] = sizes[user] / labels_per_user
        load[order] += quota[user, order] / counts[order]
    owners = np.empty(len(targets), dtype=np.int64)
    for number, label in enumerate(labels):
        records = rng.permutation(np.flatnonzero(targets == label))
        # Rounded cumulative shares hand out every record exactly once.
        shares = np.cumsum(quota[:, number]) / quota[:, number].sum()
        ends = np.round(shares * len(records)).astype(int)
        owners[records] = np.repeat(np.arange(len(sizes)), np.diff(ends, prepend=0))
    return owners


def _weights(distribution: str, count: int, exponent: float) -> np.ndarray:
    require_one_of("distribution", distribution, ("uniform", "zipf"))
    weights = np.arange(1, count + 1, dtype=float) ** (-exponent if distribution == "zipf" else 0)
    normalised: np.ndarray = weights / weights.sum()
    return normalised
