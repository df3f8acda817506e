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

Under a plan with secure sums, the silos are the members of the sum. `silo_training` has the
trainings of a silo's users.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from flower_ext.algorithms.one_phase import OnePhase, shared_model
from flower_ext.algorithms.uldp.silo_training import (
    CELL,
    CLIPPING_NORM,
    cells_over_users,
    silo_job,
    sums_over_users,
)
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
from flower_ext.privacy.mechanisms.bounds import BoundedSum
from flower_ext.privacy.mechanisms.quantization import CellSum
from flower_ext.privacy.mechanisms.run_facts import RunFacts
from flower_ext.privacy.theorems.silos import SECURE_SUM, among_silos, batching_assumption
from flower_ext.privacy.theorems.uldp import (
    UserRun,
    Weighting,
    check_user_plan,
    uldp_avg_guarantees,
)
from flower_ext.training import LocalTraining

log = getLogger("flwr")


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
        facts = UserRun(
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
            batching=batching_assumption(self.apart),
        )
        return uldp_avg_guarantees(self.accounted, facts)

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
