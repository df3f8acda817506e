"""FedAMP: the server mixes for each client a cloud model of its own, from models like its own.

Source: Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on
Non-IID Data" (AAAI 2021), Algorithm 1 with the attention A(x) = 1 − e^{−x/σ}.

====================  =====================================================
paper                 here
====================  =====================================================
w_i, u_i              the client's memory, the model that it receives
ξ_ij                  ``attention``: α A'(‖w_i − w_j‖²) for j ≠ i, and 1 − Σ_j ξ_ij for i itself
σ                     ``attention_width``
α_k                   ``attention_step``, by default σ/N: no ξ_ii is then below 0
λ/α_k                 ``attraction``
====================  =====================================================

Client i descends F_i(w) + (λ/2α_k) ‖w − u_i‖² from its own last w_i. Under a `RecordLevelPlan` what
it uploads is w_i clipped and noised, and the server knows, compares and mixes nothing else; w_i
itself stays on the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from flower_ext.algorithms.one_phase import OnePhase, own_model
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
from flower_ext.training import LocalTraining, Proximal

ATTRACTION = "attraction"


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Train the own model, drawn to the cloud model that was received."""
    start = work.memory or work.received
    pull = Proximal(weight=work.settings[ATTRACTION], anchor=work.received)
    trained = yield work.train("local", start, terms=[pull])
    return LocalResult(model=trained, memory=trained)


def attention(models: NDArray[np.float64], *, step: float, width: float) -> NDArray[np.float64]:
    """ξ of all pairs of ``models`` (clients × weights); every row adds up to 1."""
    squares = np.square(models).sum(axis=1)
    distances = np.maximum(squares[:, None] + squares[None, :] - 2 * models @ models.T, 0.0)
    weights = step / width * np.exp(-distances / width)
    np.fill_diagonal(weights, 0.0)
    np.fill_diagonal(weights, 1.0 - weights.sum(axis=1))
    return np.asarray(weights)


class FedAMP(OnePhase):
    """Attentive message passing; the reported shared model is the mean of the clients' uploads.

    Attention says what clients count for each other; in that mean all count alike.

    Parameters
    ----------
    plan : PrivacyPlan
        Not a `ReleasePlan`: the server needs each client's model.
    attention_width : float
        σ: how far apart models may be to take from one another.
    attention_step : float, optional
        α.
    attraction : float
        λ/α: how strongly a client's model is drawn to its cloud model.
    local : LocalTraining
    **options
        Those of `FederatedStrategy`, but ``server_learning_rate``.
    """

    client = ClientMethod(name="fedamp", local_update=local_update, local_model=own_model)
    one_model = False
    needs_each_update = True

    def __init__(
        self,
        *,
        plan: PrivacyPlan,
        attention_width: float = 1.0,
        attention_step: float | None = None,
        attraction: float = 1.0,
        local: LocalTraining | None = None,
        **options: Any,
    ) -> None:
        for name, value in (("attention_width", attention_width), ("attraction", attraction)):
            require_positive(name, value)
        population = plan.sampling.population
        step = attention_width / population if attention_step is None else attention_step
        most = attention_width / max(1, population - 1)
        if not 0 < step <= most:
            raise InvalidValue(
                f"attention_step={step!r}: expected a number in (0, attention_width / "
                f"(clients - 1)] = (0, {most:.4g}], or weights of own models may be negative"
            )
        super().__init__(plan=plan, local=local, **options)
        self.require_unit_rate("FedAMP's server takes models as they come")
        self.attention_width, self.attention_step = attention_width, step
        self.attraction = attraction
        self.models: dict[int, records.Arrays] = {}
        self.clouds: dict[int, records.Arrays] = {}

    @property
    def settings(self) -> Mapping[str, float]:
        """λ/α."""
        return {ATTRACTION: self.attraction}

    def client_state(self, partition: int) -> Mapping[str, ArrayRecord]:
        """u_i; the shared model for a client whose model is not known yet."""
        if partition not in self.clouds:
            return {}
        return {records.MODEL: records.to_record(self.clouds[partition])}

    def next_model(
        self, base: records.Arrays, mean: records.Arrays, updates: Mapping[int, records.Update]
    ) -> records.Arrays:
        """Take the models in, and mix the cloud models of the next round."""
        for partition, update in updates.items():
            sent = self.clouds.get(partition, base)
            self.models[partition] = {name: sent[name] + update.arrays[name] for name in base}
        return self._mix()

    def state(self) -> Mapping[str, records.Arrays]:
        """The models; cloud models follow from them."""
        return {str(partition): model for partition, model in self.models.items()}

    def restore(self, state: Mapping[str, records.Arrays]) -> None:
        """Take the models back, and mix the cloud models of the next round."""
        self.models = {int(partition): model for partition, model in state.items()}
        if self.models:
            self._mix()

    def _mix(self) -> records.Arrays:
        """Set the cloud models; returns the mean of all models."""
        clients = sorted(self.models)
        like = self.models[clients[0]]
        flat = np.stack([_flat(self.models[client]) for client in clients])
        weights = attention(flat, step=self.attention_step, width=self.attention_width)
        mixed = dict(zip(clients, weights @ flat, strict=True))
        self.clouds = {client: _shaped(vector, like) for client, vector in mixed.items()}
        return _shaped(flat.mean(axis=0), like)


def _flat(arrays: records.Arrays) -> NDArray[np.float64]:
    return np.concatenate([arrays[name].ravel() for name in arrays]).astype(np.float64)


def _shaped(vector: NDArray[np.float64], like: records.Arrays) -> records.Arrays:
    cuts = np.cumsum([array.size for array in like.values()])[:-1]
    pieces = np.split(vector, cuts)
    return {
        name: piece.reshape(array.shape).astype(array.dtype)
        for (name, array), piece in zip(like.items(), pieces, strict=True)
    }
