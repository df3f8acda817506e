"""DP-FedAvg and its relatives: one whole model is shared; client-level DP.

Source: Zhang, Guo, Gong, DP²-FedSAM, Algorithm 1 and the baselines of Tables II and III;
DP-FedAvg is due to McMahan et al. (2018), DP-FedSAM to Shi et al. (2023).

====================  =====================================================
paper                 here
====================  =====================================================
θ                     the shared model (``arrays``)
N, r                  ``plan.sampling``: ``population``, ``sampling_rate``
C, σ                  ``plan.clipping_norm``, ``plan.noise_multiplier``
τ, η                  ``local.epochs`` (or ``steps``), ``local.learning_rate``
q                     ``local.sam_radius`` (SAM; 0 is SGD)
====================  =====================================================

With a `NonPrivatePlan` the same classes are FedAvg and FedSAM without DP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flower_ext.federation import (
    ClientMethod,
    ClientWork,
    FederatedStrategy,
    LocalResult,
)
from flower_ext.privacy import Guarantee, NonPrivatePlan, ReleasePlan, theorem2_of_plan
from flower_ext.training import LocalTraining, Params, difference


def local_update(work: ClientWork) -> LocalResult:
    """Lines 5–10 of Algorithm 1: train the received model, return what changed."""
    trained = work.train("local", work.received, lambda name: True)
    return LocalResult(update=difference(trained, work.received))


def local_model(work: ClientWork) -> Params:
    """The downloaded model, fine-tuned first where the strategy asks for it."""
    if "fine_tuning" not in work.training:
        return work.received
    return work.train("fine_tuning", work.received, lambda name: True)


class DPFedAvg(FederatedStrategy):
    """Federated averaging with client-level DP.

    Parameters
    ----------
    plan : ReleasePlan | NonPrivatePlan
    local : LocalTraining
        Training of the whole model on a sampled client.
    fine_tuning : LocalTraining, optional
        Training of the downloaded model before it is evaluated (the -FT variants): local, never
        sent, at no cost in privacy.
    **options
        Those of `FederatedStrategy`.
    """

    client = ClientMethod(name="dp_fedavg", local_update=local_update, local_model=local_model)
    any_client_app = True

    def __init__(
        self,
        *,
        plan: ReleasePlan | NonPrivatePlan,
        local: LocalTraining | None = None,
        fine_tuning: LocalTraining | None = None,
        **options: Any,
    ) -> None:
        super().__init__(plan=plan, **options)
        self.local = local or LocalTraining()
        self.fine_tuning = fine_tuning

    def published_claim(self) -> Guarantee | None:
        """Theorem 2 of DP²-FedSAM, by which the paper calibrates all its methods."""
        if not isinstance(self.plan, ReleasePlan):
            return None
        return theorem2_of_plan(self.plan, self.participations.rounds)

    @property
    def training(self) -> Mapping[str, LocalTraining]:
        """The whole model, in one phase."""
        return {"local": self.local}

    @property
    def evaluation_training(self) -> Mapping[str, LocalTraining]:
        """Fine-tuning, where asked for."""
        return {} if self.fine_tuning is None else {"fine_tuning": self.fine_tuning}


class DPFedAvgFT(DPFedAvg):
    """DP-FedAvg whose clients fine-tune the downloaded model, by default as they train."""

    def __init__(
        self,
        *,
        plan: ReleasePlan | NonPrivatePlan,
        local: LocalTraining | None = None,
        fine_tuning: LocalTraining | None = None,
        **options: Any,
    ) -> None:
        local = local or LocalTraining()
        super().__init__(plan=plan, local=local, fine_tuning=fine_tuning or local, **options)


class DPFedSAM(DPFedAvg):
    """DP-FedAvg with sharpness-aware local training."""

    def __init__(
        self,
        *,
        plan: ReleasePlan | NonPrivatePlan,
        local: LocalTraining | None = None,
        fine_tuning: LocalTraining | None = None,
        **options: Any,
    ) -> None:
        local = local or LocalTraining(sam_radius=0.1)
        if local.sam_radius == 0:
            raise ValueError("local.sam_radius=0: DPFedSAM needs a radius > 0 (DPFedAvg has none)")
        super().__init__(plan=plan, local=local, fine_tuning=fine_tuning, **options)


class DPFedSAMFT(DPFedSAM):
    """DP-FedSAM whose clients fine-tune the downloaded model by SGD."""

    def __init__(
        self,
        *,
        plan: ReleasePlan | NonPrivatePlan,
        local: LocalTraining | None = None,
        fine_tuning: LocalTraining | None = None,
        **options: Any,
    ) -> None:
        local = local or LocalTraining(sam_radius=0.1)
        tuning = fine_tuning or replace(local, sam_radius=0.0)
        super().__init__(plan=plan, local=local, fine_tuning=tuning, **options)
