"""The data of silos, whose examples belong to users, and limits on the records of users."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from flower_ext.checks import is_integer, require_at_least_one
from flower_ext.data import trees
from flower_ext.data.examples import ClientData, Examples
from flower_ext.errors import InvalidValue

MOST_USERS = 2**24
"""Largest number of users for which a silo allocates memory, whatever number the server sends."""


@dataclass(frozen=True, kw_only=True)
class SiloData(ClientData):
    """The data of one silo: a client whose training examples belong to users.

    Parameters
    ----------
    owners : Tensor
        Number of the user to whom each training example belongs: integers >= 0 (n,). A user has the
        same number in all silos.
    """

    owners: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.owners, Tensor):
            raise InvalidValue(
                f"owners={self.owners!r}: expected a tensor with the user of each training example"
            )
        kind = self.owners.dtype
        if kind.is_floating_point or kind.is_complex or kind is torch.bool:
            raise InvalidValue(f"owners of type {kind}: expected integers")
        if self.owners.shape != (len(self.train),):
            raise InvalidValue(
                f"owners of shape {tuple(self.owners.shape)}: expected ({len(self.train)},), one "
                "user per training example"
            )
        if len(self.owners) and int(self.owners.min()) < 0:
            raise InvalidValue(f"owners: expected users >= 0, found {int(self.owners.min())}")

    def without(self, users: Collection[int]) -> SiloData:
        """Return the data without the training examples of some users."""
        if not users:
            return self
        withdrawn = torch.tensor([*users], device=self.owners.device)
        kept = ~torch.isin(self.owners.long(), withdrawn)
        train = self.train.subset(kept.nonzero().ravel().tolist())
        return replace(self, train=train, owners=self.owners[kept])

    def by_user(self) -> dict[int, Examples]:
        """Return the training examples of each user, by the user's number in ascending order.

        A user's examples keep their order, and are views of one sorted copy of all examples.
        """
        # A stable sort keeps the order of each user's examples.
        order = torch.argsort(self.owners, stable=True)
        users, counts = torch.unique_consecutive(self.owners[order], return_counts=True)
        parts = (
            trees.split(trees.rows(part, order), counts.tolist())
            for part in (self.train.features, self.train.targets)
        )
        return {
            user: Examples(features, targets)
            for user, features, targets in zip(users.tolist(), *parts, strict=True)
        }

    def limited(self, limits: np.ndarray, rng: np.random.Generator) -> SiloData:
        """Return the data with at most ``limits[u]`` training examples of each user u.

        If a user has more, the ones to keep are chosen at random, all with the same probability.

        Raises
        ------
        ValueError
            A user of this silo has no limit.
        """
        owners = self.owners.cpu().numpy()
        if len(owners) and owners.max() >= len(limits):
            raise InvalidValue(
                f"limits for users 0 … {len(limits) - 1}, but the silo has user {owners.max()}: "
                "expected a limit for each of its users"
            )
        rows = np.flatnonzero(choose(owners, np.asarray(limits), rng))
        kept = torch.from_numpy(owners[rows])
        return SiloData(train=self.train.subset(rows), owners=kept, test=self.test)


def owned(data: ClientData, num_users: int) -> SiloData:
    """Return ``data``; refuse it unless each training example has an owner below ``num_users``."""
    if not 1 <= num_users <= MOST_USERS:
        raise InvalidValue.tellable(f"num_users={num_users}: expected 1 … {MOST_USERS}")
    if not isinstance(data, SiloData):
        raise InvalidValue.tellable(
            "data of the Task: expected SiloData, because its field owners has the user of each "
            "training example"
        )
    if len(data.owners) and int(data.owners.max()) >= num_users:
        raise InvalidValue(
            f"owners: found user {int(data.owners.max())}, expected users 0 … {num_users - 1}, "
            f"because the plan's population is {num_users}; renumber the users, or raise population"
        )
    return data


def limit_contributions(
    histogram: np.ndarray, records_per_user: int, rng: np.random.Generator
) -> np.ndarray:
    """Return the number of records that each user keeps in each silo.

    A user with N_u records keeps min(N_u, ``records_per_user``) of them in all silos together, so
    no record is left out needlessly. All records of a user are equally likely to be kept. The
    choice reads the exact numbers of records of all silos at once, and no guarantee covers this
    access.

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
        ``records_per_user`` is below 1.
    """
    require_at_least_one("records_per_user", records_per_user)
    silos, users = histogram.shape
    silo, owner = (
        np.repeat(index.ravel(), histogram.ravel()) for index in np.indices((silos, users))
    )
    kept = choose(owner, np.full(users, records_per_user), rng)
    limits: np.ndarray = np.zeros((silos, users), dtype=np.int64)
    # Count a pair of silo and user as often as it occurs; ``+= 1`` would count it only once.
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
    # Each user keeps the records with the smallest lots. A record's lot depends on ``key``, on its
    # user and on its rank among this user's records. If each lot were a draw from ``rng``, the
    # number of other users' records would change the lots.
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
    """Return k, the most records of one user on which ULDP-GROUP-k trains.

    If ``size`` is a number, k is this number. If ``size`` is "max" or "median", k is the maximum or
    the median of the users' numbers of records in all silos together. The median leaves out users
    without a record, and is rounded down. ``histogram`` has the number of each user's records in
    each silo.

    Raises
    ------
    ValueError
        ``size`` is below 1 or an unknown text, or there is no record.
    """
    if is_integer(size) and size >= 1:
        return int(size)
    if size not in ("max", "median"):
        raise InvalidValue(f"group_size={size!r}: expected an integer >= 1, 'max' or 'median'")
    totals = histogram.sum(axis=0)
    totals = totals[totals > 0]
    if len(totals) == 0:
        raise InvalidValue("histogram: expected at least one record")
    return int(totals.max() if size == "max" else np.median(totals))
