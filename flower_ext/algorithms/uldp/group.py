"""ULDP-GROUP-k: DP-SGD in every silo, on at most k records per user over all silos together.

Source: Kato et al., Uldp-FL (PVLDB 2024), Algorithm 2; DP-SGD is due to Abadi et al. (2016).

====================  =====================================================
paper                 here
====================  =====================================================
S, k                  ``num_silos``, ``group_size``
B                     number of each user's records that a silo may use; the server draws it
                      once, and a silo uses the same records in every round
C, σ                  ``local.clipping_norm``, ``local.noise_multiplier``
γ, Q                  ``local.sampling_rate``, ``local.steps``
η_l, η_g              ``local.learning_rate``, ``server.learning_rate``
====================  =====================================================

The silos' models carry noise already, so the server averages them unchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from flower_ext.algorithms.uldp.silo_answers import answer_server, ask_silos
from flower_ext.algorithms.uldp.silo_method import SiloMethod
from flower_ext.algorithms.uldp.weights import NUM_USERS
from flower_ext.checks import Count
from flower_ext.data import Examples, limit_contributions
from flower_ext.data import group_size as size_of
from flower_ext.data.users import owned
from flower_ext.errors import InvalidValue, knowing_no_data
from flower_ext.federation import (
    Arrays,
    ClientMethod,
    ClientWork,
    Cohort,
    Connected,
    LocalResult,
    Memory,
    Population,
    State,
    Summation,
)
from flower_ext.federation.population import UsersInSilos
from flower_ext.privacy import (
    FullParticipation,
    GroupPlan,
    PrivacyPlan,
    secure_generator,
    seeded_generator,
)
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.training import DpSgdTraining, train_dp_sgd

RECORD_LIMITS, BY_USER = "record-limits", "by-user"
"""Name of the group with the number of records that a silo may use, and of its array."""
DP_SGD = "dp-sgd."
"""Prefix of the settings of a `DpSgdTraining`."""


def dp_sgd(settings: Mapping[str, Any]) -> DpSgdTraining:
    """Return the DP-SGD that the server's settings describe."""
    # Settings are flat, so a prefix marks the fields of the `DpSgdTraining`.
    named = {n.removeprefix(DP_SGD): v for n, v in settings.items() if n.startswith(DP_SGD)}
    return DpSgdTraining(**named)


def local_update(work: ClientWork) -> LocalResult:
    """Train by DP-SGD on the kept records (lines 9–11)."""
    with knowing_no_data():
        training = dp_sgd(work.settings)
    record_rng = secure_generator()
    if not work.noise.is_secure:  # in a simulation, batches must be reproducible as well
        seed = torch.randint(2**63 - 1, (1,), generator=work.generator)
        record_rng = seeded_generator(int(seed), "records")
    trained = train_dp_sgd(
        work.task, work.received, kept(work), training, sampling=record_rng, noise=work.noise
    )
    return LocalResult(model=trained)


def kept(work: ClientWork) -> Examples:
    """Return the silo's records, cut to the number of records per user that the server allows.

    The records are chosen at random, and they are the same in every round.
    """
    data = owned(work.data, int(work.settings[NUM_USERS]))
    limits = work.state[RECORD_LIMITS][BY_USER].numpy()
    return data.limited(limits, seeded_generator(work.seed, "kept records")).train


@dataclass(frozen=True, kw_only=True)
class UldpGroup(SiloMethod):
    """Record-level DP inside the silos, with group privacy for the records of a user.

    All silos have the same weight in the mean. Run the method under the plan that `plan` returns.

    The server draws how many records of each user a silo may use. For this draw, it reads in the
    clear how many records each user has in each silo. No guarantee covers these numbers.

    Parameters
    ----------
    num_silos, num_users : int
    group_size : int, "max" or "median"
        k: largest number of records that one user may have in all silos together. "max" and
        "median" stand for the largest and the median number of records of a user.
    local : DpSgdTraining
        Training of one round in one silo.
    **options
        Fields of `Method`.
    """

    client = ClientMethod(
        name="uldp_group",
        local_update=local_update,
        answer=answer_server,
        memory=Memory.NONE,
        dp_sgd=dp_sgd,
    )

    num_users: Count
    group_size: int | Literal["max", "median"]
    local: DpSgdTraining

    def __post_init__(self) -> None:
        super().__post_init__()
        size_of(np.ones((1, 1), dtype=np.int64), self.group_size)  # refuses an invalid size

    def plan(self, delta: float) -> GroupPlan:
        """Return the plan of a run; ``delta`` is the δ at which the plan reports ε."""
        return GroupPlan(
            sampling=FullParticipation(self.num_silos),
            one_round=self.local,
            delta=delta,
            users=self.num_users,
        )

    def check(self, plan: PrivacyPlan) -> None:
        """Accept only the plan that the method `plan` returns for this training."""
        if not isinstance(plan, GroupPlan) or plan != self.plan(plan.delta):
            raise InvalidValue(
                f"plan={type(plan).__name__}: expected the plan that UldpGroup.plan(delta) "
                "returns, because that plan computes ε for the DP-SGD in the method's ``local``"
            )

    def population(self, plan: PrivacyPlan, summation: Summation) -> Population:
        """Return the users, all of whom take part in every round."""
        return UsersInSilos(FullParticipation(self.num_users), self.num_silos)

    def settings(self, plan: PrivacyPlan) -> Mapping[str, float]:
        """Return what silos need: the number of users |U|, and the settings of DP-SGD."""
        return {NUM_USERS: self.num_users, **{DP_SGD + n: v for n, v in asdict(self.local).items()}}

    def disclosures(self, summation: Summation) -> Sequence[str]:
        """Return, for the run's report, what the silos' histograms reveal."""
        return ("how many records each user has in each silo: the silos tell the server",)

    def connect(self, connected: Connected, state: State) -> State:
        """Ask the silos for users' numbers of records; fix k and the limits for the whole run."""
        if RECORD_LIMITS in state.server:
            return state  # a resumed run keeps its limits
        counts = ask_silos(connected, self.num_users, histogram=True)
        k = size_of(counts, self.group_size)
        limits = limit_contributions(counts, k, connected.generator("limits"))
        chosen = {BY_USER: limits.astype(np.int32), "k": np.asarray(k)}
        return state.updated(server={RECORD_LIMITS: chosen})

    def begin_round(self, cohort: Cohort, model: Arrays, state: State) -> Cohort:
        """Return the cohort with a request to each silo: how many records of each user to use."""
        limits = state.server[RECORD_LIMITS][BY_USER]
        requests = {silo: {RECORD_LIMITS: {BY_USER: limits[silo]}} for silo in cohort.partitions}
        return replace(cohort, requests=requests)

    def complete_summary(self, run: RunSummary, state: State) -> RunSummary:
        """Return the run's summary with k as its ``group_size``.

        The size is None if ``group_size`` is "max" or "median" and the silos have not answered yet.
        """
        limits = state.server.get(RECORD_LIMITS)
        known = self.group_size if isinstance(self.group_size, int) else None
        return replace(run, group_size=known if limits is None else int(limits["k"]))
