"""Limits on the records of users whose records may lie in several silos, for group privacy."""

from __future__ import annotations

from numbers import Integral
from typing import Literal

import numpy as np

from flower_ext.checks import require_at_least_one
from flower_ext.errors import InvalidValue


def limit_contributions(
    histogram: np.ndarray, group_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Return the number of records that each user keeps in each silo.

    A user keeps min(N_u, ``group_size``) records in all silos together, so no record is left out
    needlessly. All records of a user are equally likely to be kept. The choice reads the exact
    numbers of records of all silos at once, and no guarantee covers this access.

    Parameters
    ----------
    histogram : numpy.ndarray
        Number n_{s,u} of each user's records in each silo, integers (silos, users).

    Returns
    -------
    numpy.ndarray
        int64 (silos, users). Each row is the ``limits`` of `SiloData.limited` in one silo.

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
    """Return booleans (n,): True for at most ``limits[u]`` records of each user u.

    All records of a user are equally likely to be chosen. For the same state of ``rng``, the choice
    among a user's records does not depend on other users' records.
    """
    order = np.argsort(owners, kind="stable")
    grouped = owners[order]
    rank = np.arange(len(owners)) - np.searchsorted(grouped, grouped)
    # A record's lot depends on its user and its rank alone. If each lot were a draw from ``rng``,
    # the lots would change with the number of other users' records.
    key = rng.integers(2**64, dtype=np.uint64)
    lots = _scrambled(_scrambled(grouped.astype(np.uint64) ^ key) + rank.astype(np.uint64))
    chosen = np.zeros(len(owners), dtype=bool)
    chosen[order[np.lexsort((lots, grouped))]] = rank < limits[grouped]
    return chosen


def _scrambled(numbers: np.ndarray) -> np.ndarray:
    """Turn each 64-bit number into one that looks random. Equal numbers stay equal (SplitMix64)."""
    z = numbers * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


def group_size(histogram: np.ndarray, size: int | Literal["max", "median"]) -> int:
    """Return k for ULDP-GROUP-k.

    If ``size`` is a number, k is this number. If ``size`` is a word, k is the maximum or the median
    of the users' numbers of records. The median leaves out users without a record, and is rounded
    down.

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
