"""SCAFFOLD: control variates against the drift of clients (option II).

Source: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning" (ICML 2020), Algorithm 1.

====================  =====================================================
paper                 here
====================  =====================================================
x, c                  the shared model (``arrays``), ``Scaffold.control``
y_i, c_i              the trained model, the client's memory
K, η_l                ``local``: its `effective_steps`, its learning rate
η_g                   ``server_learning_rate``
====================  =====================================================

A client uploads y_i − x and K_i. From them the server computes Δc_i = −c − (y_i − x) / (K_i η_l),
so Δc_i is not sent and reveals nothing beyond the perturbed y_i. The client updates c_i from the
same perturbed y_i, so c stays the mean of all c_i. With momentum, which the paper does not use, K
counts how often gradients act, because only then is c_i a mean of gradients, as option II requires.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from flower_ext.algorithms.one_phase import OnePhase, shared_model
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    ClientMethod,
    ClientWork,
    LocalResult,
    Steps,
    records,
)
from flower_ext.federation.population import Cohort
from flower_ext.privacy import PrivacyPlan
from flower_ext.training import Linear, LocalTraining, Params, difference
from flower_ext.training.local import SGD

STEPS = "local-steps"
CONTROL = "control"
_BEFORE = "control-before"


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Train under the correction c − c_i, then update c_i (lines 6–13, option II)."""
    control = work.state[CONTROL]
    own = work.memory or {name: torch.zeros_like(c) for name, c in control.items()}
    correction = Linear(direction=difference(control, own))
    trained = yield work.train("local", work.received, terms=[correction])
    local = work.training["local"]
    steps = local.effective_steps(len(work.data.train))

    def renewed(released: Params) -> Params:
        if steps == 0:
            return dict(own)
        return {
            name: own[name] - control[name] - released[name] / (steps * local.learning_rate)
            for name in own
        }

    return LocalResult(model=trained, memory=renewed, metrics={STEPS: steps})


class Scaffold(OnePhase):
    """Stochastic controlled averaging; the mean over a cohort weights every client equally.

    Parameters
    ----------
    plan : PrivacyPlan
        Any plan but a `ReleasePlan`, because the server needs each client's update.
    local : LocalTraining
        Plain or momentum SGD with at least one epoch or step.
    **options
        Options of `FederatedStrategy`.
    """

    client = ClientMethod(
        name="scaffold", local_update=local_update, local_model=shared_model, mirrored=True
    )

    needs_each_update = True

    def __init__(
        self, *, plan: PrivacyPlan, local: LocalTraining | None = None, **options: Any
    ) -> None:
        super().__init__(plan=plan, local=local, **options)
        if self.local.epochs == 0 and not self.local.steps:
            raise InvalidValue(
                "local.epochs=0: expected at least one epoch or step, from which SCAFFOLD computes "
                "a control variate"
            )
        if self.local.tolerance:
            raise InvalidValue(
                "local.tolerance above 0: expected 0, because SCAFFOLD computes control variates "
                "from steps of SGD"
            )
        if self.local.optimizer != SGD:
            raise InvalidValue(
                f"local.optimizer={self.local.optimizer!r}: expected {SGD!r}, because SCAFFOLD "
                "computes control variates from steps of SGD"
            )
        self.control: records.Arrays = {}
        self._control_before: records.Arrays = {}
        self._learning_rate = self.local.learning_rate

    def begin_round(self, number: int, cohort: Cohort, grid: Grid) -> Cohort:
        """Store the round's learning rate, from which `next_model` computes the controls."""
        self._learning_rate = self.local.in_round(number).learning_rate
        return cohort

    def server_state(self) -> Mapping[str, ArrayRecord]:
        """Return c, which is zero before the first round."""
        if not self.control:
            self.control = {name: np.zeros_like(array) for name, array in self.sent.items()}
        return {CONTROL: records.to_record(self.control)}

    def next_model(
        self, base: records.Arrays, mean: records.Arrays, updates: Mapping[int, records.Update]
    ) -> records.Arrays:
        """Move x along the mean of y_i − x, and c by (1/N) Σ Δc_i (lines 16–17)."""
        c, population = self.control, self.plan.sampling.population
        changes = [
            {
                name: -c[name] - update.arrays[name] / (update.metrics[STEPS] * self._learning_rate)
                for name in c
            }
            for update in updates.values()
        ]
        self._control_before = c
        self.control = {
            name: (c[name] + sum(change[name] for change in changes) / population).astype(
                c[name].dtype
            )
            for name in c
        }
        return super().next_model(base, mean, updates)

    def extrapolate(self, coefficient: float) -> None:
        """Extrapolate the server's control variate c in an even round of Upcycled-FL.

        The authors of Upcycled-FL do so in their experiments.
        """
        before, c = self._control_before, self.control
        self.control = {
            name: (c[name] + coefficient * (c[name] - before[name])).astype(c[name].dtype)
            for name in c
        }

    def state(self) -> Mapping[str, records.Arrays]:
        """Return c, and c before the last round."""
        return {CONTROL: self.control, _BEFORE: self._control_before}

    def restore(self, state: Mapping[str, records.Arrays]) -> None:
        """Restore both."""
        self.control, self._control_before = dict(state[CONTROL]), dict(state[_BEFORE])

    def read_update(self, reply: Message) -> records.Update:
        """Read a client's update and check its number of local steps."""
        update = super().read_update(reply)
        if not update.metrics.get(STEPS, 0) >= 1:
            raise records.RefusedReply(f"metric {STEPS!r} is missing or below 1")
        return update
