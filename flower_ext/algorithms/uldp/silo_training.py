"""The trainings of a silo's users: each user is trained and clipped alone, and only sums remain.

Sums in the clear and weighted sums share them. Under a plan with secure sums, a silo rounds each
user's weighted update to whole numbers of cells
(`privacy.mechanisms.quantization.sum_rows_in_cells`) before it adds them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import ERROR, WARNING, getLogger

import numpy as np
import torch

from flower_ext.algorithms.uldp.weights import USERS
from flower_ext.data import Examples
from flower_ext.federation import ClientWork
from flower_ext.privacy.mechanisms.bounds import BoundedSum, sum_clipped_rows
from flower_ext.privacy.mechanisms.quantization import CellSum, sum_rows_in_cells
from flower_ext.training import Job, Params, Task, train_surely
from flower_ext.training.batched.descent import along
from flower_ext.training.params import flat_rows

log = getLogger("flwr")

CLIPPING_NORM, CELL = "clipping-norm", "cell"
_PREPARED = 2048
"""Number of users whose trainings are set up at a time."""


@dataclass(kw_only=True)
class SiloJob(Job):
    """Trainings of a silo's users, each on that user's examples; only their sum is needed.

    With a ``cell``, each user's part of the sum consists of whole numbers of cells.
    """

    users: Mapping[int, Examples]
    weights: Mapping[int, float]
    seeds: Sequence[int]
    clipping_norm: float
    cell: float | None = None

    def of(self, user: int) -> Job:
        """Return one user's training, which is independent of the other users."""
        return Job(
            params=self.params,
            examples=self.users[user],
            training=self.training,
            generator=torch.Generator().manual_seed(self.seeds[user]),
            terms=self.terms,
        )


def silo_job(
    work: ClientWork, users: Mapping[int, Examples], weights: Mapping[int, float]
) -> SiloJob:
    """Return the trainings of ``users`` that the server asks for."""
    num_users = int(work.settings[USERS])
    return SiloJob(
        params=work.received,
        examples=work.data.train,
        training=work.training["local"],
        generator=work.generator,
        terms=work.terms,
        users=users,
        weights=weights,
        # Draw seeds for all users, so that no seed depends on which users are in this silo.
        seeds=torch.randint(2**63 - 1, (num_users,), generator=work.generator).tolist(),
        clipping_norm=work.settings[CLIPPING_NORM],
        cell=work.settings.get(CELL),
    )


def sums_over_users(
    task: Task, jobs: Sequence[SiloJob], *, trained: Callable[[str], bool], memory_limit: int
) -> list[BoundedSum]:
    """Return each silo's weighted sum of clipped updates; hold one batch of models at a time."""
    sums = [
        {name: torch.zeros_like(p, dtype=torch.float64) for name, p in job.params.items()}
        for job in jobs
    ]
    for silo, users, rows in users_updates(task, jobs, trained=trained, memory_limit=memory_limit):
        job = jobs[silo]
        weights = [job.weights[user] for user in users]
        for name, part in sum_clipped_rows(rows, job.clipping_norm, weights).value.items():
            sums[silo][name] += part
    return [
        BoundedSum(value=value, bound=job.clipping_norm, count=len(job.users))
        for value, job in zip(sums, jobs, strict=True)
    ]


def cells_over_users(
    task: Task, jobs: Sequence[SiloJob], *, trained: Callable[[str], bool], memory_limit: int
) -> list[CellSum]:
    """Return sums as `sums_over_users`, with each user's part in whole numbers of cells."""
    sums = []
    for job in jobs:
        assert job.cell is not None
        none = {name: np.zeros(tuple(p.shape), np.int64) for name, p in job.params.items()}
        sums.append(CellSum(value=none, bound=job.clipping_norm, cell=job.cell, count=0))
    for silo, users, rows in users_updates(task, jobs, trained=trained, memory_limit=memory_limit):
        job, summed = jobs[silo], sums[silo]
        weights = [job.weights[user] for user in users]
        sums[silo] = summed + sum_rows_in_cells(rows, job.clipping_norm, summed.cell, weights)
    return sums


def users_updates(
    task: Task, jobs: Sequence[SiloJob], *, trained: Callable[[str], bool], memory_limit: int
) -> Iterator[tuple[int, list[int], Params]]:
    """Train all users; yield a silo, some of its users, and their unclipped updates in rows.

    No user's update depends on the other users (see `train_surely`), because one user could
    otherwise move their updates as well. If a user's training raises or diverges, the update is
    zero. An error in place of the silo's sum would remove all users of the silo.
    """
    raised: list[Exception] = []
    everyone = [(silo, user) for silo, job in enumerate(jobs) for user in job.users]
    everyone.sort(key=lambda who: (-len(jobs[who[0]].users[who[1]]), who[0]))
    for start in range(0, len(everyone), _PREPARED):
        chosen = everyone[start : start + _PREPARED]
        trainings = [partial(jobs[silo].of, user) for silo, user in chosen]
        for group, rows in train_surely(
            task, trainings, trained=trained, memory_limit=memory_limit
        ):
            if isinstance(rows, Exception):
                raised.append(rows)
                silo, user = chosen[group[0]]
                yield (
                    silo,
                    [user],
                    {n: p.new_zeros((1, *p.shape)) for n, p in jobs[silo].params.items()},
                )
                continue
            by_silo: defaultdict[int, list[int]] = defaultdict(list)
            for row, index in enumerate(group):
                by_silo[chosen[index][0]].append(row)
            for silo, members in by_silo.items():
                own_rows = rows if len(by_silo) == 1 else {n: p[members] for n, p in rows.items()}
                updates = {
                    name: own_rows[name].sub_(received)
                    if name in own_rows
                    else received.new_zeros((len(members), *received.shape))  # a buffer
                    for name, received in jobs[silo].params.items()
                }
                yield silo, [chosen[group[row]][1] for row in members], _finite(updates)
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


def _finite(rows: Params) -> Params:
    """Replace the update of a user whose training diverged by zero.

    Refusing the round instead would reveal something about one user's records.
    """
    # A sum is finite only if all numbers in it are, and checking it is faster.
    sound = torch.stack([flat_rows(row).sum(dim=1) for row in rows.values()]).sum(dim=0).isfinite()
    if sound.all():
        return rows
    return {name: torch.where(along(sound, row) > 0, row, 0.0) for name, row in rows.items()}
