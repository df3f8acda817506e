"""FedAMP: the server mixes a cloud model for each client, mostly from models similar to its own.

Source: Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on
Non-IID Data" (AAAI 2021), Algorithm 1 with the attention A(x) = 1 − e^{−x/σ}.

====================  =====================================================
paper                 here
====================  =====================================================
w_i, u_i              the client's memory, the model that it receives
ξ_ij                  ``attention``: α A'(‖w_i − w_j‖²) for j ≠ i, and 1 − Σ_j ξ_ij for i itself
σ                     ``attention_width``
α_k                   ``attention_step``, by default σ/N, which keeps every ξ_ii at 0 or above
λ/α_k                 ``attraction``
====================  =====================================================

Client i descends F_i(w) + (λ/2α_k) ‖w − u_i‖² from its own last w_i. Under a `RecordLevelPlan` the
client clips and noises w_i before it uploads it. The server compares and mixes only these uploads;
w_i itself stays on the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from logging import getLogger
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

log = getLogger("flwr")

ATTRACTION = "attraction"
_LEAST_SHARE = 0.01
"""Share of other clients in the cloud model that has most of them, below which the server warns."""


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Train the client's own model, with a proximal term towards the received cloud model."""
    start = work.memory or work.received
    pull = Proximal(weight=work.settings[ATTRACTION], anchor=work.received)
    trained = yield work.train("local", start, terms=[pull])
    return LocalResult(model=trained, memory=trained)


def attention(models: NDArray[np.float64], *, step: float, width: float) -> NDArray[np.float64]:
    """Return ξ for all pairs of ``models``; every row sums to 1.

    Parameters
    ----------
    models : NDArray[np.float64]
        One flattened model in each row (clients × parameters).
    step, width : float
        α_k and σ.
    """
    weights = step / width * np.exp(-_squared_distances(models) / width)
    np.fill_diagonal(weights, 0.0)
    np.fill_diagonal(weights, 1.0 - weights.sum(axis=1))
    return np.asarray(weights)


def _squared_distances(models: NDArray[np.float64]) -> NDArray[np.float64]:
    squares = np.square(models).sum(axis=1)
    distances = squares[:, None] + squares[None, :] - 2 * models @ models.T
    return np.asarray(np.maximum(distances, 0.0))


class FedAMP(OnePhase):
    """Attentive message passing between clients with similar models.

    Attention sets the weights in the cloud models. The reported shared model is the plain mean of
    the clients' uploads. Attention fades as models move apart; the server warns, once, if every
    client's cloud model is made of less than 1 % of other clients' models.

    Parameters
    ----------
    plan : PrivacyPlan
        Any plan but a `ReleasePlan`, because the server needs each client's model.
    attention_width : float
        σ: scale of the squared distance over which attention between two models decays.
    attention_step : float, optional
        α: step of the mix; by default ``attention_width / population``.
    attraction : float
        λ/α: strength of the pull of a client's model towards its cloud model.
    local : LocalTraining
    **options
        Options of `FederatedStrategy`, except ``server_learning_rate``.
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
                f"(clients - 1)] = (0, {most:.4g}], because a larger step may give a client's own "
                "model a negative weight"
            )
        super().__init__(plan=plan, local=local, **options)
        self.require_unit_rate("FedAMP's server stores each model as it arrives")
        self.attention_width, self.attention_step = attention_width, step
        self.attraction = attraction
        self.models: dict[int, records.Arrays] = {}
        self.clouds: dict[int, records.Arrays] = {}
        self._warned = False

    @property
    def settings(self) -> Mapping[str, float]:
        """Settings for clients: λ/α."""
        return {ATTRACTION: self.attraction}

    def client_state(self, partition: int) -> Mapping[str, ArrayRecord]:
        """Return u_i as the client's model; nothing for a client that never uploaded one."""
        if partition not in self.clouds:
            return {}
        return {records.MODEL: records.to_record(self.clouds[partition])}

    def next_model(
        self, base: records.Arrays, mean: records.Arrays, updates: Mapping[int, records.Update]
    ) -> records.Arrays:
        """Store the models, mix the next cloud models, and return the mean of all models."""
        for partition, update in updates.items():
            sent = self.clouds.get(partition, base)
            self.models[partition] = {name: sent[name] + update.arrays[name] for name in base}
        return self._mix()

    def state(self) -> Mapping[str, records.Arrays]:
        """Return the models by client; `restore` computes the cloud models from them."""
        return {str(partition): model for partition, model in self.models.items()}

    def restore(self, state: Mapping[str, records.Arrays]) -> None:
        """Restore the models, and mix the cloud models of the next round."""
        self.models = {int(partition): model for partition, model in state.items()}
        if self.models:
            self._mix()

    def _mix(self) -> records.Arrays:
        """Set the cloud models; return the mean of all models."""
        clients = sorted(self.models)
        like = self.models[clients[0]]
        flat = np.stack([_flat(self.models[client]) for client in clients])
        weights = attention(flat, step=self.attention_step, width=self.attention_width)
        self._warn_of_fading(flat, weights)
        mixed = dict(zip(clients, weights @ flat, strict=True))
        self.clouds = {client: _shaped(vector, like) for client, vector in mixed.items()}
        return _shaped(flat.mean(axis=0), like)

    def _warn_of_fading(self, models: NDArray[np.float64], weights: NDArray[np.float64]) -> None:
        """Log, once, that every client's cloud model is almost its own model."""
        most = 1.0 - float(np.diag(weights).min())
        if self._warned or len(models) < 2 or not most < _LEAST_SHARE:
            return
        self._warned = True
        pairs = np.triu_indices(len(models), k=1)
        median = float(np.median(_squared_distances(models)[pairs]))
        log.warning(
            "attention_width=%.4g, attention_step=%.4g: other clients make up at most %.1e of any "
            "client's cloud model, so clients train almost alone. Take a larger attention_width, "
            "such as the median squared distance of two models, now %.4g, and an attention_step "
            "near attention_width / clients",
            self.attention_width,
            self.attention_step,
            most,
            median,
        )


def _flat(arrays: records.Arrays) -> NDArray[np.float64]:
    return np.concatenate([arrays[name].ravel() for name in arrays]).astype(np.float64)


def _shaped(vector: NDArray[np.float64], like: records.Arrays) -> records.Arrays:
    cuts = np.cumsum([array.size for array in like.values()])[:-1]
    pieces = np.split(vector, cuts)
    return {
        name: piece.reshape(array.shape).astype(array.dtype)
        for (name, array), piece in zip(like.items(), pieces, strict=True)
    }
