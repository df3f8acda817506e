"""DP-Ditto: a shared model by noised federated averaging, and personal models pulled towards it.

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

The personal objective (3a) is f_n(ϖ) = (1 − λ/2) F_n(ϖ) + (λ/2) ‖ϖ − ω‖², where F_n is the
client's loss. Only u_n leaves the client, after `flower_ext.federation` has clipped it and added
noise. The only noise in ϖ_n comes from ω. A client's ϖ_n begins as the first ω that it receives.
With a `NonPrivatePlan` the method is Ditto.

If ``plan.steps`` is set, each local step clips every record's gradient and adds noise, and the
upload gets no further noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flower_ext.federation import (
    ClientMethod,
    ClientWork,
    LocalResult,
    Memory,
    Method,
    Steps,
    personal_model,
)
from flower_ext.privacy.theorems.dp_ditto_theorem import LARGEST_WEIGHT, check_global_weight
from flower_ext.training import LocalTraining, Params, Proximal


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Train the local model from ω, and the personal model from its last state (lines 4–10)."""
    trained = yield work.train("local", work.received)
    personal = yield from train_personal_model(work)
    return LocalResult(model=trained, memory=personal)


def train_personal_model(work: ClientWork) -> Steps[Params]:
    """Take the steps ϖ ← ϖ − η_L ((1 − λ/2) ∇F_n(ϖ) + λ (ϖ − ω)) of line 10."""
    start, weight = work.memory or work.received, work.settings["global_weight"]
    if weight == LARGEST_WEIGHT:  # no step depends on data, and each multiplies ϖ − ω by 1 − 2η_L
        training = work.training["personal"]
        steps = training.num_steps(len(work.data.train))
        left = (1 - LARGEST_WEIGHT * training.learning_rate) ** steps
        return {name: w + left * (start[name] - w) for name, w in work.received.items()}
    # These steps equal SGD at the rate η_L (1 − λ/2) on the loss F_n + λ/(2 − λ) ‖ϖ − ω‖².
    pull = Proximal(weight=weight / (1 - weight / 2), anchor=work.received)
    trained: Params = yield work.train("personal", start, terms=[pull])
    return trained


@dataclass(frozen=True, kw_only=True)
class DPDitto(Method):
    """Ditto, with or without noise on the clients' uploads.

    With a `RecordLevelPlan` the method is DP-Ditto, with a `NonPrivatePlan` Ditto. A `ReleasePlan`
    protects whole clients instead of records.

    Parameters
    ----------
    global_weight : float
        λ in [0, 2]. At 0, a personal model learns from its client's data only; at 2, it only
        follows the shared model.
    local : LocalTraining
        Training of the uploaded model. If ``plan.steps`` is set, this training must match it.
    personal_training : LocalTraining
        Training of the personal model, by plain SGD.
    **options
        Fields of `Method`.
    """

    client = ClientMethod(
        name="dp_ditto",
        local_update=local_update,
        local_model=personal_model,
        memory=Memory.BESIDE_UPDATES,  # the personal model
        upload_phase="local",
    )
    plain_name = "Ditto"

    global_weight: float = 0.1
    local: LocalTraining = LocalTraining()
    personal_training: LocalTraining = LocalTraining()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_global_weight(self.global_weight)
        self.personal_training.require_plain_sgd(
            "personal_training", "Ditto's personal steps are plain SGD"
        )

    @property
    def training(self) -> Mapping[str, LocalTraining]:
        """The phases of local training: the local model, then the personal model."""
        # At λ = 2 this rate is 0. `LocalTraining` refuses 0, and no training needs this rate.
        rate = self.personal_training.learning_rate * (1 - self.global_weight / 2)
        scaled = replace(self.personal_training, learning_rate=rate) if rate else None
        return {"local": self.local, "personal": scaled or self.personal_training}
