"""DP-Ditto: a shared model by noised federated averaging, and a personal one that is drawn to it.

Source: Zhao, Cui, Li, Ni, Hossain, Sheng, Tao, Zhang, "Convergence-Privacy-Fairness Trade-Off in
Personalized Federated Learning", Algorithm 1; Ditto is due to Li, Hu, Beirami, Smith (2021).

====================  =====================================================
paper                 here
====================  =====================================================
ω                     the shared model (``arrays``)
u_n, η_G              the local model, ``local.learning_rate``
ϖ_n, η_L              the client's memory, ``personal_training.learning_rate``
λ                     ``global_weight``, in [0, 2]
N, C, σ_u, T          ``plan``: a `RecordLevelPlan`
====================  =====================================================

Personal objective (3a): f_n(ϖ) = (1 − λ/2) F_n(ϖ) + (λ/2) ‖ϖ − ω‖². What leaves the client is u_n
alone, clipped and noised by the frame; ϖ_n depends on no noise but that of ω. A client begins with
the first ω that it receives. With a `NonPrivatePlan` this is Ditto.

Besides noise on the upload the plan may ask for noise in each local step (``plan.steps``): then the
privacy of a record rests on its clipped gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flower_ext.algorithms.one_phase import own_model
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    ClientMethod,
    ClientWork,
    FederatedStrategy,
    LocalResult,
    Steps,
)
from flower_ext.planning.convergence import LARGEST_WEIGHT, check_global_weight
from flower_ext.privacy import PrivacyPlan
from flower_ext.training import LocalTraining, Params, Proximal

GLOBAL_WEIGHT = "global-weight"

local_model = own_model


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Lines 4–10: the local model from ω, then the personal one from where it was last."""
    trained = yield work.train("local", work.received)
    personal = yield from personal_model(work)
    return LocalResult(model=trained, memory=personal)


def personal_model(work: ClientWork) -> Steps[Params]:
    """Line 10: steps ϖ ← ϖ − η_L ((1 − λ/2) ∇F_n(ϖ) + λ (ϖ − ω))."""
    start, weight = work.memory or work.received, work.settings[GLOBAL_WEIGHT]
    if weight == LARGEST_WEIGHT:
        return drawn(start, work)
    # The same steps: η_L (1 − λ/2) times the gradient of F_n + λ/(2 − λ) ‖ϖ − ω‖².
    pull = Proximal(weight=weight / (1 - weight / 2), anchor=work.received)
    trained: Params = yield work.train("personal", start, terms=[pull])
    return trained


def drawn(start: Params, work: ClientWork) -> Params:
    """The steps at λ = 2, where the data have no part: each leaves 1 − 2η_L of the distance."""
    training = work.training["personal"]
    left = (1 - LARGEST_WEIGHT * training.learning_rate) ** training.num_steps(len(work.data.train))
    return {name: w + left * (start[name] - w) for name, w in work.received.items()}


class DPDitto(FederatedStrategy):
    """Ditto with noise on what clients upload, or without.

    In the mean all clients count alike; with ``NonPrivatePlan(weighting="examples")`` each by its
    number of examples, as where Ditto rests on FedAvg.

    Parameters
    ----------
    plan : PrivacyPlan
        A `RecordLevelPlan` is DP-Ditto, a `NonPrivatePlan` Ditto. A `ReleasePlan` protects whole
        clients instead.
    global_weight : float
        λ: at 0 personal models learn from their client alone, at 2 they only follow the shared one.
    local : LocalTraining
        Of the model that is uploaded; with ``plan.steps`` the steps that the plan speaks of.
    personal_training : LocalTraining
        Of the personal model: plain SGD.
    **options
        Those of `FederatedStrategy`.
    """

    client = ClientMethod(
        name="dp_ditto",
        local_update=local_update,
        local_model=local_model,
        memoryless=True,  # of what leaves it: the personal model has no part in the update
        upload_phase="local",
    )

    def __init__(
        self,
        *,
        plan: PrivacyPlan,
        global_weight: float = 0.1,
        local: LocalTraining | None = None,
        personal_training: LocalTraining | None = None,
        **options: Any,
    ) -> None:
        check_global_weight(global_weight)
        super().__init__(plan=plan, **options)
        self.global_weight = float(global_weight)
        self.local = local or LocalTraining()
        self.personal_training = personal_training or LocalTraining()
        for name in self.personal_training.beyond_sgd:
            raise InvalidValue(
                f"personal_training.{name} is set: Ditto's personal steps are plain SGD"
            )
        self.check_training()

    @property
    def training(self) -> Mapping[str, LocalTraining]:
        """The local model, then the personal one."""
        rate = self.personal_training.learning_rate * (1 - self.global_weight / 2)
        scaled = replace(self.personal_training, learning_rate=rate) if rate else None
        return {"local": self.local, "personal": scaled or self.personal_training}

    @property
    def settings(self) -> Mapping[str, float]:
        """λ."""
        return {GLOBAL_WEIGHT: self.global_weight}
