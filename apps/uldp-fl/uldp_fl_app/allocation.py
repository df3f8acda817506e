"""Allocations of a pool's records to users and silos: Uldp-FL, Section 5.1.

Users and silos are numbers from 0. This module draws a user and a silo for every record, as the
paper's text says, so some users may own nothing, and no user is special. The authors' code differs:
with ``uniform``, it deals records out evenly. With ``zipf`` and fixed silos, it first gives one
record to every user. Records of labels without a user go to user 0.
"""

from typing import Literal, NamedTuple

import numpy as np
import torch

from flower_ext.checks import require_at_least_one, require_one_of
from flower_ext.data import ClientData, SiloData
from flower_ext.errors import InvalidValue

Distribution = Literal["uniform", "zipf"]

USER_EXPONENT = 0.5
SILO_EXPONENT = 2.0


class Allocation(NamedTuple):
    """For each silo, rows of the pool and the owner of each row, as int64 arrays."""

    rows: list[np.ndarray]
    owners: list[np.ndarray]


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
    """Return the owner of each record. User u gets about ``sizes[u]`` records.

    No user gets records of more than ``labels_per_user`` labels.
    """
    labels, counts = np.unique(targets, return_counts=True)
    if not 1 <= labels_per_user <= len(labels):
        raise InvalidValue(
            f"labels_per_user={labels_per_user!r}: expected 1 … {len(labels)}, the number of labels"
        )
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
        # Labels without an owner come first, then the least taken labels, give or take one user.
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


def deal_silos(
    pool: ClientData, allocation: Allocation, rng: np.random.Generator
) -> list[SiloData]:
    """Return silos with their allocated training examples and equal shares of the test examples."""
    tests = np.array_split(rng.permutation(len(pool.test)), len(allocation.rows))
    return [
        SiloData(
            train=pool.train.subset(rows),
            test=pool.test.subset(np.sort(test)),
            owners=torch.from_numpy(owners),
        )
        for rows, owners, test in zip(allocation.rows, allocation.owners, tests, strict=True)
    ]
