"""SCAFFOLD: control variates against the drift of clients (option II).

Source: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning" (ICML 2020), Algorithm 1.

====================  =====================================================
paper                 here
====================  =====================================================
x, c                  the shared model (``arrays``), ``State.everyone["control"]``
y_i, c_i              the trained model, the client's memory
K, η_l                ``local``: its `effective_steps`, its learning rate
η_g                   ``server.learning_rate``
====================  =====================================================

A client uploads y_i − x, where y_i is the model after the plan's clipping and noise, and its number
of steps K_i. From these the server computes Δc_i = −c − (y_i − x) / (K_i η_l), so Δc_i reveals
nothing beyond the upload. The client updates c_i from the same y_i, so c stays the mean of all c_i.
Option II requires that c_i is a mean of gradients. With momentum, which the paper does not use, a
gradient moves the model in later steps, too; K_i then sums all factors of gradients in y_i − x.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    Arrays,
    ClientMethod,
    ClientWork,
    LocalResult,
    Memory,
    Method,
    RefusedReply,
    Released,
    State,
    Steps,
    Update,
)
from flower_ext.training import Linear, LocalTraining, Params, difference

STEPS, CONTROL = "local-steps", "control"


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Train with c − c_i added to every gradient, then update c_i (lines 6–13, option II)."""
    control = work.state[CONTROL]
    client_control = work.memory or {name: torch.zeros_like(c) for name, c in control.items()}
    correction = Linear(direction=difference(control, client_control))
    trained = yield work.train("local", work.received, terms=[correction])
    steps = metrics(work.training, work.num_examples)[STEPS]

    def renewed(released: Params) -> Params:
        if steps == 0:  # a client without records has no gradient
            return client_control
        length = steps * work.training["local"].learning_rate
        return {n: c_i - control[n] - released[n] / length for n, c_i in client_control.items()}

    return LocalResult(model=trained, memory=renewed)


def metrics(training: Mapping[str, LocalTraining], num_examples: int) -> Mapping[str, float]:
    """Return the number of steps K_i, from which the server computes Δc_i."""
    return {STEPS: training["local"].effective_steps(num_examples)}


@dataclass(frozen=True, kw_only=True)
class Scaffold(Method):
    """Stochastic controlled averaging.

    The plan decides how clients are weighted in the mean that moves the model x. In the control
    variate c, all clients count alike. Any plan but a `ReleasePlan` fits, because the server needs
    each client's update.

    Parameters
    ----------
    local : LocalTraining
        Plain or momentum SGD with at least one epoch or step.
    **options
        Fields of `Method`.
    """

    client = ClientMethod(
        name="scaffold", local_update=local_update, memory=Memory.MIRRORED, metrics=metrics
    )
    needs_each_update = needs_metrics = True

    local: LocalTraining = LocalTraining()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local.num_steps(1) == 0:
            raise InvalidValue(
                f"local.epochs={self.local.epochs!r} with steps={self.local.steps!r}: expected "
                "at least one epoch or step, from which SCAFFOLD computes a control variate"
            )
        self.local.require_plain_sgd(
            "local",
            "SCAFFOLD computes control variates from steps of SGD",
            besides=("momentum", "sam_radius", "proximal_weight"),
        )

    def init(self, model: Arrays, population: int) -> State:
        """Return the initial state, with c = 0."""
        control = {name: np.zeros_like(x) for name, x in model.items()}
        return super().init(model, population).updated(everyone={CONTROL: control})

    def check_update(self, update: Update) -> None:
        """Refuse an update without local steps, such as one of a client without records."""
        if not update.metrics.get(STEPS, 0) >= 1:
            raise RefusedReply(f"metric {STEPS!r}: expected at least 1, and so at least one record")

    def step(self, model: Arrays, released: Released, state: State) -> tuple[Arrays, State]:
        """Move x along the mean of y_i − x, and move c by (1/N) Σ Δc_i (lines 16–17)."""
        updates = released.updates.values()
        # The rate of this round, because a schedule may change it between rounds.
        learning_rate = self.local.in_round(released.round).learning_rate
        control = {}
        for name, c in state.everyone[CONTROL].items():
            # The sum over the answering clients of −Δc_i.
            gaps = sum(c + u.arrays[name] / (u.metrics[STEPS] * learning_rate) for u in updates)
            control[name] = np.asarray(c - gaps / released.population).astype(c.dtype)
        moved, state = super().step(model, released, state)
        return moved, state.updated(everyone={CONTROL: control})
