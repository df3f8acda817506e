"""ULDP-GROUP-k: DP-SGD in every silo, on at most k records per user over all silos together.

Source: Kato et al., Uldp-FL (PVLDB 2024), Algorithm 2; DP-SGD is due to Abadi et al. (2016).

====================  =====================================================
paper                 here
====================  =====================================================
S, k                  ``num_silos``, ``group_size``
B                     limits by silo and user, drawn once by the server; which records a silo
                      keeps is the same in every round
C, σ                  ``local.clipping_norm``, ``local.noise_multiplier``
γ, Q                  ``local.sampling_rate``, ``local.steps``
η_l, η_g              ``local.learning_rate``, ``server_learning_rate``
====================  =====================================================

The silos' models carry noise already, so the server averages them unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from flower_ext.algorithms.one_phase import shared_model
from flower_ext.algorithms.uldp.weights import USERS, answer, ask_silos, owned
from flower_ext.checks import require_at_least_one
from flower_ext.data import Examples, limit_contributions
from flower_ext.data import group_size as size_of
from flower_ext.errors import InvalidValue, knowing_no_data
from flower_ext.federation import (
    ClientMethod,
    ClientWork,
    FederatedStrategy,
    LocalResult,
    records,
)
from flower_ext.privacy import (
    DpSgd,
    FullParticipation,
    GroupPlan,
    secure_generator,
    seeded_generator,
)
from flower_ext.privacy.mechanisms.run_facts import RunFacts
from flower_ext.training import (
    DpSgdTraining,
    LocalTraining,
    train_dp_sgd,
)

LIMITS = "limits"
DP_SGD = "dp-sgd."
"""Prefix of the settings of a `DpSgdTraining`."""


def local_update(work: ClientWork) -> LocalResult:
    """Train by DP-SGD on the kept records (lines 9–11)."""
    settings: dict[str, Any] = {
        name.removeprefix(DP_SGD): value
        for name, value in work.settings.items()
        if name.startswith(DP_SGD)
    }
    with knowing_no_data():
        training = DpSgdTraining(**settings)
        if training.noise_multiplier == 0:
            raise InvalidValue(
                "noise_multiplier=0.0 in the server's message: expected a number > 0"
            )
    drawn = secure_generator()
    if not work.noise.is_secure:  # a simulation, whose batches must be reproducible too
        seed = torch.randint(2**63 - 1, (1,), generator=work.generator)
        drawn = seeded_generator(int(seed), "records")
    trained = train_dp_sgd(
        work.task, work.received, kept(work), training, sampling=drawn, noise=work.noise
    )
    return LocalResult(model=trained)


def kept(work: ClientWork) -> Examples:
    """Return the records that the silo may use under its limit for each user.

    They are the same in every round.
    """
    data, limits = owned(work.data, int(work.settings[USERS])), work.state[LIMITS][LIMITS].numpy()
    return data.limited(limits, seeded_generator(work.seed, "kept records")).train


class UldpGroup(FederatedStrategy):
    """Record-level DP inside the silos, with group privacy for the records of a user.

    All silos have the same weight in the mean.

    To draw the limits, the server needs every silo's histogram in the clear. No guarantee covers
    that.

    Parameters
    ----------
    num_silos, num_users : int
    group_size : int, "max" or "median"
        k, or the largest or the median number of records of a user.
    local : DpSgdTraining
        Training of one round in one silo.
    delta : float
        δ at which the run reports ε.
    **options
        Options of `FederatedStrategy`, without a ledger, which cannot hold the steps of DP-SGD.
    """

    plan: GroupPlan
    client = ClientMethod(
        name="uldp_group",
        local_update=local_update,
        local_model=shared_model,
        memoryless=True,
        answer=answer,
        keeps_memory=False,
    )

    def __init__(
        self,
        *,
        num_silos: int,
        num_users: int,
        group_size: int | Literal["max", "median"],
        local: DpSgdTraining,
        delta: float,
        **options: Any,
    ) -> None:
        require_at_least_one("num_users", num_users)
        if options.pop("secure_aggregation", None) is not None:
            raise InvalidValue(
                "secure_aggregation: expected None, as ULDP-GROUP adds noise in every step of a "
                "silo's DP-SGD, so that its ε holds even against a server that sees each upload"
            )
        if options.get("ledger") is not None:
            raise InvalidValue("ledger: expected None, as it cannot hold the steps of DP-SGD")
        size_of(np.ones((1, 1), dtype=np.int64), group_size)  # refuses an invalid size
        one_round = DpSgd(
            noise_multiplier=local.noise_multiplier,
            sampling_rate=local.sampling_rate,
            steps=local.steps,
        )
        plan = GroupPlan(sampling=FullParticipation(num_silos), one_round=one_round, delta=delta)
        super().__init__(plan=plan, **options)
        self.shown = ("how many records each user has in each silo: the silos tell the server",)
        self.num_users = num_users
        self.group_size = group_size
        self.local = local
        self._limits = np.empty((0, 0), dtype=np.int32)

    @property
    def training(self) -> Mapping[str, LocalTraining]:
        """Empty, because DP-SGD is the only training."""
        return {}

    @property
    def num_units(self) -> int:
        """Number of users."""
        return self.num_users

    @property
    def settings(self) -> Mapping[str, float]:
        """|U| and the settings of DP-SGD."""
        return {USERS: self.num_users, **{DP_SGD + n: v for n, v in asdict(self.local).items()}}

    def prepare(self, grid: Grid) -> None:
        """Ask the silos for their histograms; fix k and the limits for the whole run."""
        counts = ask_silos(self, grid, self.num_users, histogram=True)
        assert counts is not None
        self.group_size = size_of(counts, self.group_size)
        limits = limit_contributions(counts, self.group_size, self._generator("limits"))
        self._limits = limits.astype(np.int32)

    def client_state(self, partition: int) -> Mapping[str, ArrayRecord]:
        """Return the number of records of each user that the silo may use."""
        return {LIMITS: records.to_record({LIMITS: self._limits[partition]})}

    def state(self) -> Mapping[str, records.Arrays]:
        """Return each silo's limit for each user, and the group size k of these limits."""
        return {LIMITS: {LIMITS: self._limits, "k": np.asarray(self.group_size)}}

    def restore(self, state: Mapping[str, records.Arrays]) -> None:
        """Take the limits that were drawn first, which hold for the whole run."""
        self._limits, self.group_size = state[LIMITS][LIMITS], int(state[LIMITS]["k"])

    @property
    def run_facts(self) -> RunFacts:
        """Facts of the run, with k once it is known."""
        k = self.group_size
        return replace(super().run_facts, group_size=k if isinstance(k, int) else None)
