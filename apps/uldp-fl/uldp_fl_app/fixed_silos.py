"""Assign each record to a user, in data that come divided into silos, such as hospitals."""

from collections.abc import Sequence

import numpy as np

from flower_ext.checks import require_at_least_one, require_one_of
from flower_ext.errors import InvalidValue
from uldp_fl_app.allocation import USER_EXPONENT, Distribution


def allocate_within(
    distribution: Distribution,
    silo_sizes: Sequence[int],
    *,
    num_users: int,
    rng: np.random.Generator,
    at_least: int = 1,
    main_share: float = 0.8,
) -> list[np.ndarray]:
    """Draw the user that owns each record; return one array of users for each silo.

    * ``uniform``: all users are equally likely for every record.
    * ``zipf``: a record belongs to user u with probability ∝ (u + 1)^-USER_EXPONENT. The record
      lies in the user's main silo with probability ``main_share``, else in any other silo.
      No record goes to a silo that is full. Main silos are drawn in proportion to the room left,
      because with equal probabilities the small silos would soon fill up.

    Parameters
    ----------
    silo_sizes : sequence of int
        Number of records in each silo.
    at_least : int
        Least number of records of a user in a silo where the user has any. The records of a silo
        are handed out in blocks of that size. The last block also takes the remainder. Use 2 for a
        loss that compares records.

    Raises
    ------
    ValueError
        An argument is out of range, or a silo has fewer than ``at_least`` records.
    """
    require_at_least_one("num_users", num_users)
    require_at_least_one("at_least", at_least)
    if not 0 < main_share <= 1:
        raise InvalidValue(f"main_share={main_share!r}: expected a number in (0, 1]")
    if not silo_sizes or min(silo_sizes) < at_least:
        raise InvalidValue(
            f"silo_sizes={list(silo_sizes)!r}: expected at least one silo, and {at_least} records "
            "or more in each"
        )
    require_one_of("distribution", distribution, ["uniform", "zipf"])
    room = np.array([size // at_least for size in silo_sizes])
    if distribution == "uniform":
        blocks = [rng.choice(num_users, size=count) for count in room]
    else:
        weights = np.arange(1.0, num_users + 1) ** -USER_EXPONENT
        weights /= weights.sum()
        per_user = rng.multinomial(room.sum(), weights)
        blocks = _mainly_in_one(per_user, room, main_share, rng)
    owners = []
    for block_owners, size in zip(blocks, silo_sizes, strict=True):
        records = np.repeat(block_owners, at_least)
        left_over = np.full(size - len(records), block_owners[-1])
        owners.append(rng.permutation(np.concatenate([records, left_over])))
    return owners


def _mainly_in_one(
    per_user: np.ndarray, room: np.ndarray, main_share: float, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return the user that owns each block of records, one array for each silo.

    Users choose silos for their blocks one after another, in random order. A silo without room is
    not chosen.
    """
    room, silos = room.copy(), len(room)
    chosen: list[list[int]] = [[] for _ in range(silos)]
    for user in rng.permutation(len(per_user)):
        if per_user[user] == 0:
            continue
        main = rng.choice(silos, p=room / room.sum())
        wanted = np.full(silos, (1 - main_share) / max(1, silos - 1))
        wanted[main] = main_share
        for _ in range(per_user[user]):
            likely = np.where(room > 0, wanted, 0.0)
            if not likely.any():
                likely = (room > 0).astype(float)
            silo = rng.choice(silos, p=likely / likely.sum())
            chosen[silo].append(int(user))
            room[silo] -= 1
    return [np.array(users, dtype=np.int64) for users in chosen]
