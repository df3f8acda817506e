"""pFedMe: personal models by Moreau envelopes around a shared one.

Source: T Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes" (NeurIPS
2020), Algorithm 1.

====================  =====================================================
paper                 here
====================  =====================================================
w, θ_i                the shared model (``arrays``), the client's memory
R, |D|, η             ``local``: epochs (or steps), batch_size, learning_rate
K, η_p                ``personal_training``: steps on each mini-batch, learning_rate
λ                     ``attraction``
β                     ``server_learning_rate``
====================  =====================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flower_ext.federation import (
    ClientMethod,
    ClientWork,
    FederatedStrategy,
    LocalResult,
)
from flower_ext.privacy import Plan
from flower_ext.training import (
    LocalTraining,
    Params,
    Proximal,
    batches,
    clone,
    difference,
    gradient,
    local_problem,
)

ATTRACTION = "attraction"


def local_update(work: ClientWork) -> LocalResult:
    """Lines 5–9: for each mini-batch K steps on θ_i around w_i, then w_i towards θ_i.

    θ_i starts at the received model and goes on from one mini-batch to the next.
    """
    local, personal = work.training["local"], work.training["personal"]
    attraction = work.settings[ATTRACTION]
    problem = local_problem(work.task, work.received, terms=work.terms)
    w, theta = clone(problem.start), clone(problem.start)
    for x, y in batches(work.data.train.to(problem.device), local, work.generator):
        envelope = Proximal(weight=attraction, anchor=w)
        for _ in range(personal.steps or 1):

            def loss(
                point: Params, x: Tensor = x, y: Tensor = y, envelope: Proximal = envelope
            ) -> Tensor:
                return problem.loss_at(point, x, y) + envelope(point)

            slope = gradient(loss, theta)
            theta = {name: theta[name] - personal.learning_rate * slope[name] for name in theta}
        pull = local.learning_rate * attraction
        w = {name: w[name] - pull * (w[name] - theta[name]) for name in w}
    moved, memory = (problem.whole(part, like=work.received) for part in (w, theta))
    return LocalResult(update=difference(moved, work.received), memory=memory)


def local_model(work: ClientWork) -> Params:
    """The personal model; the shared one for a client that never took part."""
    return work.memory or work.received


class PFedMe(FederatedStrategy):
    """Personal models that never leave the client; the shared model is their anchor.

    Parameters
    ----------
    plan : Plan
    attraction : float
        λ > 0: how strongly personal models are drawn to the shared one.
    local : LocalTraining
        Of the shared model's local copy, without momentum.
    personal_training : LocalTraining
        Of the personal model on one mini-batch: ``steps`` K and ``learning_rate`` η_p.
    **options
        Those of `FederatedStrategy`; ``server_learning_rate`` is β.
    """

    client = ClientMethod(name="pfedme", local_update=local_update, local_model=local_model)

    def __init__(
        self,
        *,
        plan: Plan,
        attraction: float = 15.0,
        local: LocalTraining | None = None,
        personal_training: LocalTraining | None = None,
        **options: Any,
    ) -> None:
        if not 0 < attraction < float("inf"):
            raise ValueError(f"attraction={attraction!r}: expected a finite number > 0")
        super().__init__(plan=plan, **options)
        self.attraction = attraction
        self.local = local or LocalTraining(learning_rate=0.01)
        self.personal_training = personal_training or LocalTraining(steps=5, learning_rate=0.05)
        for name in ("momentum", "sam_radius", "proximal_weight", "tolerance"):
            if getattr(self.local, name) or getattr(self.personal_training, name):
                raise ValueError(f"{name} above 0: pFedMe's updates have none")
        if not self.personal_training.steps:
            raise ValueError("personal_training.steps: expected K >= 1 steps on each mini-batch")

    @property
    def training(self) -> Mapping[str, LocalTraining]:
        """The shared model's local copy, and the personal model inside it."""
        return {"local": self.local, "personal": self.personal_training}

    @property
    def settings(self) -> Mapping[str, float]:
        """λ."""
        return {ATTRACTION: self.attraction}
