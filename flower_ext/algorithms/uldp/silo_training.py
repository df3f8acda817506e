"""Train a silo's users: train each user alone, clip the update, and add it to the silo's total.

The kind of total depends on the plan. By default, it is a sum in float64. With secure sums, it is a
sum of whole numbers, which count cells of a grid. With a weighted sum, it is a `HiddenSum`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging import ERROR, WARNING, getLogger

import torch

from flower_ext.data import Examples
from flower_ext.federation import ClientWork, Training
from flower_ext.federation.sums.summation import UsersTotal
from flower_ext.privacy.mechanisms.bounds import BoundedSum
from flower_ext.privacy.mechanisms.protections import ClipAndNoise
from flower_ext.training import Job, Params, Task, attempt_groups, train_groups
from flower_ext.training.batched.stack import per_model
from flower_ext.training.params import flat_rows

log = getLogger("flwr")

_PREPARED = 2048
"""Number of users whose trainings are prepared at a time, so that memory stays bounded."""


class WeightedTotal:
    """The weighted sum of users' clipped updates, in float64 or in whole numbers of grid cells.

    ``params`` have the names and shapes of an update. ``protection`` clips each user's update.
    ``weights`` holds w_{s,u} for each user u of the population.
    """

    def __init__(self, params: Params, protection: ClipAndNoise, weights: Sequence[float]) -> None:
        self._protection, self._weights = protection, weights
        nobody = {name: torch.zeros_like(part)[None] for name, part in params.items()}
        self._empty, self._count = protection.sum_units(nobody, [0.0]), 0
        self._sums = dict(self._empty.value)

    def includes(self, user: int) -> bool:
        """Return True if the user's weight is above zero; other users need no training."""
        return self._weights[user] > 0

    def add(self, users: Sequence[int], rows: Params) -> None:
        """Clip each row of ``rows``, multiply it by its user's weight, and add it to the sum."""
        added = self._protection.sum_units(rows, [self._weights[user] for user in users])
        for name, part in added.value.items():
            self._sums[name] += part
        self._count += len(users)

    @property
    def value(self) -> BoundedSum:
        """The sum so far."""
        return replace(self._empty, value=self._sums, count=self._count)


@dataclass(kw_only=True)
class SiloJob(Job):
    """Trainings of all users of one silo. Each user trains on its own examples only."""

    users: Mapping[int, Examples]
    seeds: Sequence[int]
    total: UsersTotal

    def of(self, user: int) -> Job:
        """Return one user's training. It does not depend on the other users."""
        return Job(
            params=self.params,
            examples=self.users[user],
            training=self.training,
            generator=torch.Generator().manual_seed(self.seeds[user]),
            terms=self.terms,
        )


def users_training(
    work: ClientWork, users: Mapping[int, Examples], total: UsersTotal, num_users: int
) -> Training:
    """Return the training of a silo: it trains each of ``users`` and adds to ``total``."""
    job = SiloJob(
        params=work.received,
        examples=work.data.train,
        training=work.training["local"],
        generator=work.generator,
        terms=work.terms,
        users=users,
        # Draw seeds for all users, so that no seed depends on which users are in this silo.
        seeds=torch.randint(2**63 - 1, (num_users,), generator=work.generator).tolist(),
        total=total,
    )
    return Training(task=work.task, job=job, trained=lambda name: True, solve=add_users)


def add_users(
    task: Task, jobs: Sequence[SiloJob], *, trained: Callable[[str], bool], memory_limit: int
) -> list[None]:
    """Train all users of several silos, and add each update to the total of its silo.

    This is the ``solve`` of a `Training`. It holds the updates of one batch at a time.
    """
    for silo, users, rows in users_updates(task, jobs, trained=trained, memory_limit=memory_limit):
        jobs[silo].total.add(users, rows)
    return [None] * len(jobs)


def users_updates(
    task: Task, jobs: Sequence[SiloJob], *, trained: Callable[[str], bool], memory_limit: int
) -> Iterator[tuple[int, list[int], Params]]:
    """Train all users; yield the index of a job, some of its users, and their unclipped updates.

    The updates of n users are arrays of shape (n, …).

    A user's update does not depend on which other users train beside it (see `attempt_groups`).
    If a user's training raises an error or diverges, this user's update is zero. If the silo sent
    an error instead, one user could remove all users of the silo from the sum.
    """
    solve = partial(
        train_groups, task, trained=trained, memory_limit=memory_limit, batch_invariant=True
    )
    raised: list[Exception] = []
    everyone = [(silo, user) for silo, job in enumerate(jobs) for user in job.users]
    # Users with about as many records train side by side, so their batches need little padding.
    everyone.sort(key=lambda pair: (-len(jobs[pair[0]].users[pair[1]]), pair[0]))
    for start in range(0, len(everyone), _PREPARED):
        chosen = everyone[start : start + _PREPARED]
        trainings = [jobs[silo].of(user) for silo, user in chosen]
        for group, rows in attempt_groups(solve, trainings):
            if isinstance(rows, Exception):
                raised.append(rows)
                silo, user = chosen[group[0]]
                zeros = {n: p.new_zeros((1, *p.shape)) for n, p in jobs[silo].params.items()}
                yield silo, [user], zeros
            else:
                yield from _updates_by_silo(jobs, [chosen[index] for index in group], rows)
    if raised:  # tell the silo's operator only; the server receives a sum as usual
        log.log(
            ERROR if len(raised) == len(everyone) else WARNING,
            "training failed for %d of %d users in this silo (%s), so their updates count as zero: "
            "check their data",
            len(raised),
            len(everyone),
            ", ".join(sorted({type(error).__name__ for error in raised})),
        )
        log.debug("the training of a user failed", exc_info=raised[0])


def _updates_by_silo(
    jobs: Sequence[SiloJob], trained: Sequence[tuple[int, int]], rows: Params
) -> Iterator[tuple[int, list[int], Params]]:
    """Turn the models in ``rows`` into updates; yield those of each silo, as `users_updates` does.

    ``trained`` holds the silo and the user of each row. The function changes ``rows``.
    """
    by_silo: defaultdict[int, list[int]] = defaultdict(list)
    for row, (silo, _) in enumerate(trained):
        by_silo[silo].append(row)
    for silo, members in by_silo.items():
        models = rows if len(by_silo) == 1 else {n: p[members] for n, p in rows.items()}
        updates = {
            name: models[name].sub_(received)
            if name in models
            else received.new_zeros((len(members), *received.shape))  # a buffer
            for name, received in jobs[silo].params.items()
        }
        yield silo, [trained[row][1] for row in members], _finite(updates)


def _finite(rows: Params) -> Params:
    """Replace each row that holds a NaN or an infinite number by zeros.

    Such a row comes from a user whose training diverged. If the silo refused the round instead, it
    would reveal something about this user's records.
    """
    # A NaN or an infinite number makes the sum of its row NaN or infinite, and sums are fast.
    sound = torch.stack([flat_rows(row).sum(dim=1) for row in rows.values()]).sum(dim=0).isfinite()
    if sound.all():
        return rows
    return {name: torch.where(per_model(sound, row) > 0, row, 0.0) for name, row in rows.items()}
