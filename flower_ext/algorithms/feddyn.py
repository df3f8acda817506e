"""FedDyn: dynamic regularisation that aligns local minima with the global one.

Source: Acar, Zhao, Matas, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic
Regularization" (ICLR 2021), Algorithm 1.

====================  =====================================================
paper                 here
====================  =====================================================
θ, h                  the shared model (``arrays``), ``FedDyn.h``
∇L_k(θ_k)             the client's memory
α                     ``regularization``
m                     ``plan.sampling.population``
====================  =====================================================

Client and server both use θ_k as it left the client, after clipping and noise. So h stays the mean
of the gradients in the clients' memories, unless the server itself clips or adds noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from flower_ext.algorithms.one_phase import OnePhase, shared_model
from flower_ext.checks import require_positive
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    ClientMethod,
    ClientWork,
    LocalResult,
    Steps,
    records,
)
from flower_ext.privacy import PrivacyPlan
from flower_ext.training import Linear, LocalTraining, Params, Proximal, Term

REGULARIZATION = "regularization"


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Minimise L_k(θ) − ⟨∇L_k(θ_k), θ⟩ + (α/2) ‖θ − θ_server‖², then update the gradient."""
    alpha, server = work.settings[REGULARIZATION], work.received
    gradient = work.memory or {name: torch.zeros_like(p) for name, p in server.items()}
    terms: list[Term] = [
        Linear(direction={name: -g for name, g in gradient.items()}),
        Proximal(weight=alpha, anchor=server),
    ]
    trained = yield work.train("local", server, terms=terms)

    def renewed(released: Params) -> Params:
        return {name: gradient[name] - alpha * released[name] for name in gradient}

    return LocalResult(model=trained, memory=renewed)


class FedDyn(OnePhase):
    """Dynamic regularisation; the mean over a cohort weights every client equally.

    Parameters
    ----------
    plan : PrivacyPlan
    regularization : float
        α > 0: weight of the dynamic regularizer.
    local : LocalTraining
        The approximate minimisation on each client.
    **options
        Options of `FederatedStrategy`.
    """

    client = ClientMethod(
        name="feddyn", local_update=local_update, local_model=shared_model, mirrored=True
    )

    def __init__(
        self,
        *,
        plan: PrivacyPlan,
        regularization: float = 0.1,
        local: LocalTraining | None = None,
        **options: Any,
    ) -> None:
        require_positive("regularization", regularization)
        if plan.weighs_examples:
            raise InvalidValue(
                "weighting='examples' of the plan: expected 'clients', because h is the plain mean "
                "of the gradients in the clients' memories"
            )
        super().__init__(plan=plan, local=local, **options)
        self.regularization = self.added_proximal_weight = regularization
        self.h: records.Arrays = {}

    @property
    def settings(self) -> Mapping[str, float]:
        """Settings for clients: α."""
        return {REGULARIZATION: self.regularization}

    def next_model(
        self, base: records.Arrays, mean: records.Arrays, updates: Mapping[int, records.Update]
    ) -> records.Arrays:
        """Update h ← h − (α/m) Σ (θ_k − θ); return θ ← mean θ_k − h/α."""
        share = len(updates) / self.plan.sampling.population
        if self.plan.release is not None:  # else the model reveals how many answered
            share = self.plan.sampling.sampling_rate
        self.h = {
            name: self.h.get(name, np.zeros_like(base[name]))
            - self.regularization * share * mean[name]
            for name in base
        }
        moved = super().next_model(base, mean, updates)
        return {name: moved[name] - self.h[name] / self.regularization for name in base}

    def state(self) -> Mapping[str, records.Arrays]:
        """Return h, the server's correction, for a checkpoint."""
        return {"h": self.h}

    def restore(self, state: Mapping[str, records.Arrays]) -> None:
        """Restore h."""
        self.h = dict(state["h"])
