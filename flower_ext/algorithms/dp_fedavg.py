"""DP-FedAvg and its variants: clients share one whole model under client-level DP.

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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    FedAvg,
    FedAvgM,
    FedProx,
    FedXgbBagging,
    FedXgbCyclic,
    QFedAvg,
)

from flower_ext.algorithms.one_phase import OnePhase
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    ClientMethod,
    ClientWork,
    LocalResult,
    Steps,
    records,
)
from flower_ext.privacy import Guarantee, PoissonSampling, PrivacyPlan
from flower_ext.privacy.mechanisms.run_facts import RunFacts
from flower_ext.privacy.theorems.dp2_fedsam import theorem2_of_plan
from flower_ext.training import LocalTraining, Params

log = getLogger("flwr")

_STEPS = "steps"
_BEYOND_MODELS: Mapping[type[FedAvg], str] = {
    QFedAvg: "each client's training loss, which no plan protects",
    FedXgbBagging: "trees",
    FedXgbCyclic: "trees",
}
"""Flower's strategies that need more than models, with what they need."""


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Train the received model (Algorithm 1, lines 5–10)."""
    trained = yield work.train("local", work.received)
    return LocalResult(model=trained)


def local_model(work: ClientWork) -> Steps[Params]:
    """Return the received model, after fine-tuning if the strategy asks for it."""
    if "fine_tuning" not in work.training:
        return work.received
    tuned: Params = yield work.train("fine_tuning", work.received)
    return tuned


class DPFedAvg(OnePhase):
    """Federated averaging with client-level DP.

    The mean weights all clients equally; with ``NonPrivatePlan(weighting="examples")``, it weights
    each client by its number of examples, as FedAvg does.

    Parameters
    ----------
    plan : PrivacyPlan
    local : LocalTraining
        Training of the whole model on a sampled client.
    fine_tuning : LocalTraining, optional
        Training of the received model before a client evaluates it (the -FT variants). The result
        never leaves the client, so it costs no privacy.
    **options
        Options of `FederatedStrategy`.
    """

    client = ClientMethod(
        name="dp_fedavg",
        local_update=local_update,
        local_model=local_model,
        memoryless=True,
        keeps_memory=False,
        upload_phase="local",
    )
    any_client_app = True

    def __init__(
        self,
        *,
        plan: PrivacyPlan,
        local: LocalTraining | None = None,
        fine_tuning: LocalTraining | None = None,
        **options: Any,
    ) -> None:
        super().__init__(plan=plan, local=local, **options)
        self.fine_tuning = fine_tuning

    def claims(self, run: RunFacts) -> list[Guarantee]:
        """Theorem 2, by which the paper calibrates all its methods, and what is provable."""
        return [*theorem2_of_plan(self.plan, run), *super().claims(run)]

    @property
    def evaluation_training(self) -> Mapping[str, LocalTraining]:
        """The fine-tuning before evaluation, if there is any."""
        return {} if self.fine_tuning is None else {"fine_tuning": self.fine_tuning}


class DPFedAvgFT(DPFedAvg):
    """DP-FedAvg whose clients fine-tune the received model, by default with ``local``."""

    def __init__(
        self,
        *,
        local: LocalTraining | None = None,
        fine_tuning: LocalTraining | None = None,
        **options: Any,
    ) -> None:
        local = local or LocalTraining()
        super().__init__(local=local, fine_tuning=fine_tuning or local, **options)


class DPFedSAM(DPFedAvg):
    """DP-FedAvg with sharpness-aware local training."""

    def __init__(self, *, local: LocalTraining | None = None, **options: Any) -> None:
        local = local or LocalTraining(sam_radius=0.1)
        if local.sam_radius == 0:
            raise InvalidValue(
                "local.sam_radius=0: expected a radius > 0; use DPFedAvg to train without SAM"
            )
        super().__init__(local=local, **options)


class DPFedSAMFT(DPFedSAM):
    """DP-FedSAM whose clients fine-tune the received model by SGD."""

    def __init__(
        self,
        *,
        local: LocalTraining | None = None,
        fine_tuning: LocalTraining | None = None,
        **options: Any,
    ) -> None:
        local = local or LocalTraining(sam_radius=0.1)
        tuning = fine_tuning or replace(local, sam_radius=0.0)
        super().__init__(local=local, fine_tuning=tuning, **options)


class Hosted(DPFedAvg):
    """The server step of a Flower strategy, with this package's cohorts, checks and records.

    The Flower strategy is FedAvg or a subclass that sends only the model and the configuration:
    FedAvgM, FedProx, FedAdam, FedYogi, FedMedian and others. Replies that fail a check of this
    package never reach it. The Flower strategy receives round numbers that count its own steps from
    1, because FedAdam's bias correction needs that. A round that is discarded, or abandoned and
    repeated, has no number.

    Parameters
    ----------
    server : FedAvg
        Strategy that turns the accepted models, weighted by their numbers of examples, into the
        next model. The plan chooses the cohort, and all clients evaluate: the strategy's
        ``fraction_train``, ``fraction_evaluate`` and functions that aggregate metrics have no
        effect.
    plan : PrivacyPlan
        Any plan but a `ReleasePlan`, without Poisson sampling, because Flower's strategies wait
        for a cohort of a fixed size.
    **options
        Options of `DPFedAvg`, except ``server_learning_rate``, because the server has its own.
        FedProx's ``proximal_mu`` becomes ``local.proximal_weight``.

    Raises
    ------
    InvalidValue
        The server needs more than models and numbers of examples, as QFedAvg does, the cohorts are
        smaller than its ``min_train_nodes`` or ``min_available_nodes``, or an option would have no
        effect beside the server's own.
    """

    needs_each_update = True

    def __init__(self, server: FedAvg, *, plan: PrivacyPlan, **options: Any) -> None:
        for kind, missing in _BEYOND_MODELS.items():
            if isinstance(server, kind):
                raise InvalidValue(
                    f"server={type(server).__name__}: expected a strategy that needs no more than "
                    f"models and numbers of examples, such as FedAvg, FedAdam or FedMedian; "
                    f"{kind.__name__} needs {missing}, so run it in an app of its own"
                )
        if isinstance(plan.sampling, PoissonSampling):
            raise InvalidValue(
                "sampling of the plan: expected cohorts of a fixed size, for which Flower's "
                "strategies wait"
            )
        needed = max(server.min_train_nodes, server.min_available_nodes)
        if plan.sampling.expected_cohort_size < needed:
            raise InvalidValue(
                f"cohorts of {plan.sampling.expected_cohort_size:g} are smaller than the "
                f"{needed} nodes that {type(server).__name__} waits for: lower its "
                "min_train_nodes and min_available_nodes"
            )
        super().__init__(plan=plan, **options)
        self.require_unit_rate(f"{type(server).__name__} takes the server's step")
        if isinstance(server, FedProx):
            if self.local.proximal_weight not in (0.0, server.proximal_mu):
                raise InvalidValue(
                    f"local.proximal_weight={self.local.proximal_weight!r}: expected FedProx's "
                    f"proximal_mu={server.proximal_mu!r}, or 0.0 to take it over"
                )
            self.local = replace(self.local, proximal_weight=server.proximal_mu)
        self.server = server
        self._steps = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return this package's messages with what the server adds to their configuration."""
        if isinstance(self.server, FedAvgM):  # reads ``arrays`` in its first round only
            self.server.current_arrays = None
        cohort = _Cohort(range(int(self.plan.sampling.expected_cohort_size)))
        config = ConfigRecord({**config})
        self.server.configure_train(self._steps + 1, arrays, config, cast(Grid, cohort))
        return super().configure_train(server_round, arrays, config, grid)

    def next_model(
        self, base: records.Arrays, mean: records.Arrays, updates: Mapping[int, records.Update]
    ) -> records.Arrays:
        """Return the model that the server computes from the accepted models."""
        replies = []
        for partition, update in updates.items():
            model = {name: base[name] + update.arrays[name] for name in base}
            weight = {self.server.weighted_by_key: update.metrics[self.server.weighted_by_key]}
            content = RecordDict(
                {
                    self.server.arrayrecord_key: records.to_record(model),
                    "metrics": records.metrics_record(weight),
                }
            )
            replies.append(Message(content, dst_node_id=partition, message_type="train"))
        arrays, _ = self.server.aggregate_train(self._steps + 1, replies)
        if arrays is None:
            return base
        self._steps += 1
        return records.to_arrays(arrays)

    @property
    def server_step(self) -> str:
        """Name of the Flower strategy's step."""
        return f"the server's step of {type(self.server).__name__}"

    def state(self) -> Mapping[str, records.Arrays]:
        """Return the number of steps, and the server's moments and momenta.

        Any attribute of the server that is a dict or a list of arrays counts as such state.
        """
        state: dict[str, records.Arrays] = {_STEPS: {"taken": np.array([self._steps])}}
        for name, value in vars(self.server).items():
            kind = type(value).__name__
            members = dict(enumerate(value)) if isinstance(value, list) else value
            if not isinstance(members, dict) or not members:
                continue
            if all(isinstance(array, np.ndarray) for array in members.values()):
                state[f"{kind}.{name}"] = {str(key): array for key, array in members.items()}
        return state

    def restore(self, state: Mapping[str, records.Arrays]) -> None:
        """Restore the number of steps and the server's moments and momenta."""
        for group, members in state.items():
            if group == _STEPS:
                self._steps = int(members["taken"][0])
                continue
            kind, _, name = group.partition(".")
            value = list(members.values()) if kind == "list" else dict(members)
            setattr(self.server, name, value)

    def summary(self) -> None:
        """Log the server and the plan."""
        log.info("%s · %s", type(self.server).__name__, self.plan.describe())

    def read_update(self, reply: Message) -> records.Update:
        """Read a client's update and check the metric by which the server weights it."""
        update = super().read_update(reply)
        if not update.metrics.get(self.server.weighted_by_key, 0) > 0:
            raise records.RefusedReply(
                f"metric {self.server.weighted_by_key!r} is missing or not above 0"
            )
        return update


@dataclass(frozen=True)
class _Cohort:
    """The part of a Grid that a Flower strategy uses before it configures a round.

    The nodes stand for a cohort that is not drawn yet: the strategy's own messages are not sent.
    """

    nodes: Sequence[int]

    def get_node_ids(self) -> Sequence[int]:
        return self.nodes
