"""ULDP-AVG and ULDP-SGD: every user's own update is clipped, in every silo.

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

The Flower nodes are the silos: all of them take part in every round. The plan's units are users:
they are sampled, the same ones in every silo. A user's batches depend on that user's number and
records alone.

Under a plan with secure sums a silo rounds each user's weighted update to whole numbers of cells
(`privacy.cells.sum_rows_in_cells`) before it adds them up; the silos are the members of the sum.
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
"""Users whose trainings are set up at a time."""


@dataclass(frozen=True, kw_only=True)
class SiloJob(Job):
    """Trainings of a silo's users, each on their own examples, of which only the sum is wanted.

    With a ``cell`` each user's part of the sum is whole numbers of cells.
    """

    users: Mapping[int, Examples]
    weights: Mapping[int, float]
    seeds: Sequence[int]
    clipping_norm: float
    cell: float | None = None

    def of(self, user: int) -> Job:
        """One user's training, which knows nothing of the others."""
        return Job(
            params=self.params,
            examples=self.users[user],
            training=self.training,
            generator=torch.Generator().manual_seed(self.seeds[user]),
            terms=self.terms,
        )


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Lines 9–19 of Algorithm 3, but for the noise: Σ_u w_{s,u} clip(Δ_{s,u})."""
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
    """Trainings of ``users`` as the server asks for them."""
    num_users = int(work.settings[USERS])
    return SiloJob(
        params=work.received,
        examples=work.data.train,
        training=work.training["local"],
        generator=work.generator,
        terms=work.terms,
        users=users,
        weights=weights,
        # Drawn for all users, so that nobody's depends on who else is here.
        seeds=torch.randint(2**63 - 1, (num_users,), generator=work.generator).tolist(),
        clipping_norm=work.settings[CLIPPING_NORM],
        cell=work.settings.get(CELL),
    )


def sums_over_users(
    task: Task, jobs: Sequence[SiloJob], *, trained: Callable[[str], bool], memory_limit: int
) -> list[BoundedSum]:
    """Each silo's weighted sum of clipped updates; no more than one batch of models at a time."""
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
    """Return what `sums_over_users` does, each user's part in whole numbers of the jobs' cells."""
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
    """Train all users; silo, some of its users, and their updates before clipping, in rows.

    No user's update depends on the others (see `train_surely`): else one could move theirs as
    well. That of a user whose training raises or diverges is zero: an error in place of the silo's
    sum would take out all others.
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
    if raised:  # for who runs the silo; the server gets to see a sum as usual
        log.log(
            ERROR if len(raised) == len(everyone) else WARNING,
            "the training of %d of %d users here raises (%s): their updates count as zero",
            len(raised),
            len(everyone),
            ", ".join(sorted({type(error).__name__ for error in raised})),
        )
        log.debug("the training of a user raises", exc_info=raised[0])


def _finite(rows: Params) -> Params:
    """Zero for a user whose training diverged.

    To refuse the round instead would tell everybody of one user's records.
    """
    # A sum is finite only if all of it is, and faster to look at.
    sound = torch.stack([row.flatten(1).sum(dim=1) for row in rows.values()]).sum(dim=0).isfinite()
    if sound.all():
        return rows
    return {name: torch.where(along(sound, row) > 0, row, 0.0) for name, row in rows.items()}


def theory_learning_rate(*, num_silos: int, num_users: int, epochs: int) -> float:
    """η_g = |S| √(|U| Q), with which the paper's convergence bound is that of FedAvg."""
    return num_silos * math.sqrt(num_users * epochs)


class UldpAvg(OnePhase):
    """Federated averaging over silos with user-level DP.

    Users count alike, whatever their records; ``weighting`` divides a user among the silos.

    Parameters
    ----------
    plan : ReleasePlan
        Of users: ``unit=PrivacyUnit.USER``, noise by the clients (the silos), and all users or
        Poisson sampling.
    num_silos : int
        All of them are asked in every round. Where one does not answer, the plan's
        ``dropout_policy`` says what happens.
    weighting : {"equal", "by-records"} or WeightSource
        w_{s,u} = 1/|S|, or n_{s,u}/N_u, for which silos tell the server their histograms.
    local : LocalTraining
        Of the whole model on one user's records.
    **options
        Those of `FederatedStrategy`.
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
        """By silo: True where users train one by one, since company might change them."""
        self._users_records: Sequence[ArrayRecord] = []

    @property
    def accounted(self) -> ReleasePlan:
        """The given plan, whose units are users; secure sums are of the silos' uploads."""
        return among_silos(self.plan, self.num_silos)

    @property
    def settings(self) -> Mapping[str, float]:
        """|U| and C; and how wide a cell is, where sums are secure."""
        plan = self.plan
        own = {USERS: plan.sampling.population, CLIPPING_NORM: plan.clipping_norm}
        return own if plan.secure_aggregation is None else {**own, CELL: plan.cell}

    def prepare(self, grid: Grid) -> None:
        """Ask the silos whether they can take part, and for histograms where weights need them."""
        self.apart = ask_company(self, grid)
        counts = ask_silos(
            self, grid, self.plan.sampling.population, histogram=self.weights.needs_histogram
        )
        self.weights.prepare(counts, self.num_silos)
        if self.plan.secure_aggregation is not None:
            self._say_how_fine()

    def _say_how_fine(self) -> None:
        """Warn where cells are so wide that most numbers of a user's part are rounded to zero."""
        numbers = sum(array.size for array in self.sent.values())
        cells = self.plan.clipping_norm / self.plan.cell / self.num_silos
        if (usual := cells / math.sqrt(numbers)) < 1:
            log.warning(
                "secure sums: a number of a user's clipped update is usually %.2g cells in a silo, "
                "and rounded to whole cells: most of it is lost; lower the noise multiplier, or "
                "send fewer numbers",
                usual,
            )

    def begin_round(self, number: int, cohort: Cohort, grid: Grid) -> Cohort:
        """Weigh the users of the round, whom line 5 of Algorithm 4 draws.

        A silo's sum has as many clipping norms as its users have weight.
        """
        self._users_records = self.weigh(number, cohort.units)
        self.progress.row["users"] = len(cohort.units)
        norms = {}
        for silo, record in enumerate(self._users_records):
            weights = record[WEIGHTS].numpy()
            norms[silo] = float(weights.sum()) * (1 if weights.size > 1 else len(cohort.units))
        return replace(cohort, norms=norms)

    def weigh(self, number: int, users: Sequence[int]) -> Sequence[ArrayRecord]:
        """What tells each silo the weights of training round ``number``."""
        weights = self.weights.of_users(users)
        check_weights(weights, self.num_silos, users, self.weights.weighting)
        return users_records(weights, users, self.plan.sampling.population)

    def client_state(self, partition: int) -> Mapping[str, ArrayRecord]:
        """The round's users, and their weights in this silo."""
        return {USERS: self._users_records[partition]}

    def next_model(
        self, base: records.Arrays, mean: records.Arrays, updates: Mapping[int, records.Update]
    ) -> records.Arrays:
        """Return x + η_g Σ_s Δ_s / (q|U||S|); the plan has already divided by q|U|."""
        over_silos = {name: array / self.num_silos for name, array in mean.items()}
        return super().next_model(base, over_silos, updates)

    def claims(self, run: RunFacts) -> list[Guarantee]:
        """Theorem 5; what is provable against each adversary, with this run's sampled users."""
        in_sums = run.participations.in_sums
        in_uploads = float(max(run.participations.uploads.values(), default=0))
        if self.plan.secure_aggregation is None:
            # Uploads that could not be used were seen; sums that lacked noise count for more.
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
        """What hides from the server who was drawn; empty where it knows."""
        return ""


class UldpSgd(UldpAvg):
    """ULDP-AVG whose users send one gradient over all their records in place of an update.

    The gradient is clipped as it is, without a local learning rate, and the server moves against
    it: ``server_learning_rate`` is the rate of the descent.

    Parameters
    ----------
    **options
        Those of `UldpAvg`, but ``local``.
    """

    def __init__(self, **options: Any) -> None:
        if "local" in options:
            raise InvalidValue("local: ULDP-SGD has no local training; UldpAvg has")
        # One step at rate 1 on everything ends where the gradient, turned around, leads.
        gradient = LocalTraining(steps=1, batch_size=2**31 - 1, learning_rate=1.0)
        super().__init__(local=gradient, **options)
