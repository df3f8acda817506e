"""FedDyn: dynamic regularisation that aligns local minima with the global one.

Source: Acar, Zhao, Matas, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic
Regularization" (ICLR 2021), Algorithm 1.

====================  =====================================================
paper                 here
====================  =====================================================
θ, h                  the shared model (``arrays``), ``State.server["h"]``
∇L_k(θ_k)             the client's memory
α                     ``regularization``
m                     ``plan.sampling.population``
====================  =====================================================

The client and the server use θ_k as the client sent it, after clipping and noise. So h stays the
mean of the gradients in the clients' memories, unless the server itself clips or adds noise.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from flower_ext.checks import Positive
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    Arrays,
    ClientMethod,
    ClientWork,
    LocalResult,
    Memory,
    Method,
    Released,
    Sgd,
    State,
    Steps,
)
from flower_ext.privacy.run_summary import MethodTraits
from flower_ext.training import Linear, LocalTraining, Params, Proximal, Term

H = "h"


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Minimise L_k(θ) − ⟨∇L_k(θ_k), θ⟩ + (α/2) ‖θ − θ_server‖², where L_k is the client's loss.

    θ_server is the received model. Then update the gradient ∇L_k(θ_k) in the client's memory.
    """
    alpha, server = work.settings["regularization"], work.received
    gradient = work.memory or {name: torch.zeros_like(p) for name, p in server.items()}
    terms: list[Term] = [
        Linear(direction={name: -g for name, g in gradient.items()}),
        Proximal(weight=alpha, anchor=server),
    ]
    trained = yield work.train("local", server, terms=terms)

    def renewed(released: Params) -> Params:
        return {name: gradient[name] - alpha * released[name] for name in gradient}

    return LocalResult(model=trained, memory=renewed)


@dataclass(frozen=True, kw_only=True)
class FedDyn(Method):
    """Federated averaging with dynamic regularisation. All clients count alike in a cohort's mean.

    Parameters
    ----------
    regularization : float
        α > 0: weight of the dynamic regularizer.
    local : LocalTraining
        The approximate minimisation on each client.
    **options
        Fields of `Method`.
    """

    client = ClientMethod(name="feddyn", local_update=local_update, memory=Memory.MIRRORED)
    weighs_updates = True  # h is the plain mean of the gradients in the clients' memories

    regularization: Positive = 0.1
    local: LocalTraining = LocalTraining()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server != Sgd(learning_rate=self.server.learning_rate):
            raise InvalidValue(
                f"server={self.server!r}: expected Sgd without momentum, because the server "
                "corrects the plain mean of the models by its state h"
            )

    @property
    def traits(self) -> MethodTraits:
        """The method's traits, with the regularizer's weight α."""
        return replace(super().traits, added_proximal_weight=self.regularization)

    def init(self, model: Arrays, population: int) -> State:
        """Return the initial state, with h = 0."""
        h = {name: np.zeros_like(array) for name, array in model.items()}
        return super().init(model, population).updated(server={H: h})

    def step(self, model: Arrays, released: Released, state: State) -> tuple[Arrays, State]:
        """Update h ← h − (α/m) Σ (θ_k − θ); return θ ← mean θ_k − h/α."""
        alpha, mean = self.regularization, released.mean
        # h is a mean over all m clients, so a client that did not answer counts with θ_k − θ = 0.
        weight = alpha * released.fraction
        h = {name: array - weight * mean[name] for name, array in state.server[H].items()}
        moved, state = super().step(model, released, state)
        return {name: moved[name] - h[name] / alpha for name in model}, state.updated(server={H: h})
