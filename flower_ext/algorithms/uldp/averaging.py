"""ULDP-AVG and ULDP-SGD: every silo clips the update of every single user.

Source: Kato, Xiong, Takagi, Cao, Yoshikawa, "Uldp-FL: Federated Learning with Across-Silo
User-Level Differential Privacy" (PVLDB 2024), Algorithms 3 and 4.

====================  =====================================================
paper                 here
====================  =====================================================
x                     the shared model (``arrays``)
S, U, q               ``num_silos``; ``plan.sampling``: ``population``, ``sampling_rate``
C, σ                  ``plan.clipping_norm``, ``plan.noise_multiplier``
w_{s,u}               ``weighting``; see `weights`
Q, η_l                ``local.epochs`` (or ``steps``), ``local.learning_rate``
η_g                   ``server_learning_rate``; the paper's theory takes `theory_learning_rate`
====================  =====================================================

The Flower nodes are the silos, and all of them take part in every round. The plan's units are
users; the same users are sampled in every silo. A user's batches depend only on that user's number
and records.

Under a plan with secure sums, the silos are the members of the sum. A silo rounds each user's
weighted update to whole numbers of cells (`privacy.cells.sum_rows_in_cells`) before it adds them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging import ERROR, WARNING, getLogger
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from flower_ext.algorithms.one_phase import OnePhase, shared_model
from flower_ext.algorithms.uldp.weights import (
    USERS,
    WEIGHTS,
    WeightSource,
    answer,
    ask_company,
    ask_silos,
    check_weights,
    owned,
    read_weights,
    users_records,
    weight_source,
)
from flower_ext.data import Examples
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    ClientMethod,
    ClientWork,
    LocalResult,
    Steps,
    Training,
    records,
)
from flower_ext.federation.population import Cohort, UsersInSilos
from flower_ext.privacy import Guarantee, ReleasePlan
from flower_ext.privacy.bounds import BoundedSum, sum_clipped_rows
from flower_ext.privacy.cells import CellSum, sum_rows_in_cells
from flower_ext.privacy.run_facts import RunFacts
from flower_ext.privacy.theorems.silos import (
    SECURE_SUM,
    among_silos,
    company_assumption,
)
from flower_ext.privacy.theorems.uldp import Weighting, check_user_plan, uldp_avg_guarantees
from flower_ext.training import Job, LocalTraining, Params, Task, train_surely
from flower_ext.training.batched.descent import along

log = getLogger("flwr")

CLIPPING_NORM, CELL = "clipping-norm", "cell"
_PREPARED = 2048
"""Number of users whose trainings are set up at a time."""


@dataclass(frozen=True, kw_only=True)
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


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Return Σ_u w_{s,u} clip(Δ_{s,u}): lines 9–19 of Algorithm 3 without the noise."""
    num_users = int(work.settings[USERS])
    data, weights = owned(work.data, num_users), read_weights(work)
    users = {user: own for user, own in data.by_user().items() if weights[user] > 0}
    job = silo_job(work, users, dict(enumerate(weights.tolist())))
    solve = sums_over_users if job.cell is None else cells_over_users
    summed: BoundedSum | CellSum = yield Training(
        task=work.task, job=job, trained=lambda name: True, solve=solve
    )
    return LocalResult(update=summed)


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
        own = [partial(jobs[silo].of, user) for silo, user in chosen]
        for group, rows in train_surely(task, own, trained=trained, memory_limit=memory_limit):
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
    sound = torch.stack([row.flatten(1).sum(dim=1) for row in rows.values()]).sum(dim=0).isfinite()
    if sound.all():
        return rows
    return {name: torch.where(along(sound, row) > 0, row, 0.0) for name, row in rows.items()}


def theory_learning_rate(*, num_silos: int, num_users: int, epochs: int) -> float:
    """Return η_g = |S| √(|U| Q), for which the paper's convergence bound matches FedAvg's."""
    return num_silos * math.sqrt(num_users * epochs)


class UldpAvg(OnePhase):
    """Federated averaging over silos with user-level DP.

    All users count alike, whatever their number of records. ``weighting`` divides a user's weight
    among the silos.

    Parameters
    ----------
    plan : ReleasePlan
        A plan of users: ``unit=PrivacyUnit.USER``, noise by the clients (the silos), and all users
        or Poisson sampling.
    num_silos : int
        Number of silos. The server asks all of them in every round. The plan's ``dropout_policy``
        decides what happens if one does not answer.
    weighting : {"equal", "by-records"} or WeightSource
        w_{s,u} = 1/|S|, or n_{s,u}/N_u, for which silos send the server their histograms.
    local : LocalTraining
        Training of the whole model on one user's records.
    **options
        Options of `FederatedStrategy`.
    """

    plan: ReleasePlan
    units_are_clients = False
    bounds_units = True
    secure_sum = SECURE_SUM
    """Name of the protection that hides single uploads from the server, for guarantees."""
    client = ClientMethod(
        name="uldp_avg",
        local_update=local_update,
        local_model=shared_model,
        memoryless=True,
        answer=answer,
        keeps_memory=False,
    )

    def __init__(
        self,
        *,
        plan: ReleasePlan,
        num_silos: int,
        weighting: Weighting | WeightSource = "equal",
        local: LocalTraining | None = None,
        **options: Any,
    ) -> None:
        self.weights = weight_source(weighting)
        check_user_plan(plan, num_silos, self.weights.weighting)
        self.num_silos = num_silos
        options.setdefault("population", UsersInSilos(plan.sampling, num_silos))
        super().__init__(plan=plan, local=local, **options)
        self.shown = self.weights.shown
        self.apart: Mapping[int, bool] = {}
        """By silo: True if users train one by one, because a batch might change their results."""
        self._users_records: Sequence[ArrayRecord] = []

    @property
    def accounted(self) -> ReleasePlan:
        """The given plan, whose units are users. Its secure sums add the silos' uploads."""
        return among_silos(self.plan, self.num_silos)

    @property
    def settings(self) -> Mapping[str, float]:
        """|U| and C, and the width of a cell if sums are secure."""
        plan = self.plan
        own = {USERS: plan.sampling.population, CLIPPING_NORM: plan.clipping_norm}
        return own if plan.secure_aggregation is None else {**own, CELL: plan.cell}

    def prepare(self, grid: Grid) -> None:
        """Check that all silos can take part, and ask for histograms if the weights need them."""
        self.apart = ask_company(self, grid)
        counts = ask_silos(
            self, grid, self.plan.sampling.population, histogram=self.weights.needs_histogram
        )
        self.weights.prepare(counts, self.num_silos)
        if self.plan.secure_aggregation is not None:
            self._say_how_fine()

    def _say_how_fine(self) -> None:
        """Warn if cells are so wide that most numbers of a user's part are rounded to zero."""
        numbers = sum(array.size for array in self.sent.values())
        cells = self.plan.clipping_norm / self.plan.cell / self.num_silos
        if (usual := cells / math.sqrt(numbers)) < 1:
            log.warning(
                "secure sums: a number of a user's clipped update is usually %.2g cells in a silo, "
                "so rounding to whole cells loses most of it: lower the noise multiplier, or send "
                "fewer numbers",
                usual,
            )

    def begin_round(self, number: int, cohort: Cohort, grid: Grid) -> Cohort:
        """Weigh the users of the round, which line 5 of Algorithm 4 draws.

        The norm of a silo's sum is at most the clipping norm times the total weight of its users.
        """
        self._users_records = self.weigh(number, cohort.units)
        self.progress.row["users"] = len(cohort.units)
        norms = {}
        for silo, record in enumerate(self._users_records):
            weights = record[WEIGHTS].numpy()
            norms[silo] = float(weights.sum()) * (1 if weights.size > 1 else len(cohort.units))
        return replace(cohort, norms=norms)

    def weigh(self, number: int, users: Sequence[int]) -> Sequence[ArrayRecord]:
        """Return the record for each silo with the weights of training round ``number``."""
        weights = self.weights.of_users(users)
        check_weights(weights, self.num_silos, users, self.weights.weighting)
        return users_records(weights, users, self.plan.sampling.population)

    def client_state(self, partition: int) -> Mapping[str, ArrayRecord]:
        """Return the round's users, and their weights in this silo."""
        return {USERS: self._users_records[partition]}

    def next_model(
        self, base: records.Arrays, mean: records.Arrays, updates: Mapping[int, records.Update]
    ) -> records.Arrays:
        """Return x + η_g Σ_s Δ_s / (q|U||S|); the plan has already divided by q|U|."""
        over_silos = {name: array / self.num_silos for name, array in mean.items()}
        return super().next_model(base, over_silos, updates)

    def claims(self, run: RunFacts) -> list[Guarantee]:
        """Return Theorem 5, and what is provable against each adversary for this run's samples."""
        in_sums = run.participations.in_sums
        in_uploads = float(max(run.participations.uploads.values(), default=0))
        if self.plan.secure_aggregation is None:
            # The adversary saw refused uploads too, and sums with too little noise count more.
            in_sums = in_uploads = max(in_sums, in_uploads)
        return uldp_avg_guarantees(
            self.accounted,
            num_silos=self.num_silos,
            rounds=run.participations.rounds,
            weighting=self.weights.weighting,
            participations=in_sums,
            in_uploads=in_uploads,
            secure_noise=run.secure_noise,
            secure_sampling=run.secure_cohorts or bool(self.hidden_draw),
            secure_sum=self.secure_sum,
            hidden_draw=self.hidden_draw,
            not_covered=run.not_covered,
            company=company_assumption(self.apart),
        )

    @property
    def hidden_draw(self) -> str:
        """Assumption that hides the drawn users from the server; empty if the server draws."""
        return ""


class UldpSgd(UldpAvg):
    """ULDP-AVG with one gradient over all of a user's records in place of an update.

    Silos clip the gradient itself, without a local learning rate. The server moves against it, so
    ``server_learning_rate`` is the rate of the descent.

    Parameters
    ----------
    **options
        Options of `UldpAvg`, without ``local``.
    """

    def __init__(self, **options: Any) -> None:
        if "local" in options:
            raise InvalidValue(
                "local: expected none, as ULDP-SGD has no local training; use UldpAvg"
            )
        # One step at rate 1 on all records yields the negative gradient as the update.
        gradient = LocalTraining(steps=1, batch_size=2**31 - 1, learning_rate=1.0)
        super().__init__(local=gradient, **options)
