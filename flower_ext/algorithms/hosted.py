"""Use a Flower strategy to compute each new model; this package does the rest of the round.

This package draws the cohorts, and checks the replies before the strategy sees them.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, FedAvgM, FedProx, FedXgbBagging, FedXgbCyclic, QFedAvg

from flower_ext.algorithms.dp_fedavg import DPFedAvg
from flower_ext.errors import InvalidValue
from flower_ext.federation import RefusedReply, Released, State, require_usual_server
from flower_ext.federation.messages import records
from flower_ext.federation.messages.upload_reply import Update
from flower_ext.privacy import PoissonSampling, PrivacyPlan

_STEPS = "steps"
_BEYOND_MODELS: Mapping[type[FedAvg], str] = {
    QFedAvg: "each client's training loss, which no plan protects",
    FedXgbBagging: "trees",
    FedXgbCyclic: "trees",
}
"""Flower's strategies that need more than models, and what each of them needs."""


@dataclass(frozen=True, kw_only=True)
class Hosted(DPFedAvg):
    """Federated averaging with the server step of a Flower strategy.

    The Flower strategy is FedAvg or a subclass that sends only the model and the configuration:
    FedAvgM, FedProx, FedAdam, FedYogi, FedMedian and others. The strategy never sees a reply that
    fails a check of this package. It sees the round numbers 1, 2, 3, …, because FedAdam's bias
    correction needs consecutive numbers. A round that yields no new model gets no number.

    Two kinds of plans do not fit: a `ReleasePlan`, because the strategy needs each client's model,
    and a plan with Poisson sampling, because the strategy waits for a cohort of a fixed size.

    Parameters
    ----------
    strategy : FedAvg
        Strategy that turns the accepted models, weighted by their numbers of examples, into the
        next model. The plan chooses the cohort, and all clients evaluate, so the strategy's
        ``fraction_train``, ``fraction_evaluate`` and functions that aggregate metrics have no
        effect.
    **options
        Fields of `DPFedAvg`, except ``server``, because the strategy takes the server's step.
        FedProx's ``proximal_mu`` becomes ``local.proximal_weight``.

    Raises
    ------
    InvalidValue
        ``strategy`` needs more than models and numbers of examples, as QFedAvg does. Or the cohorts
        are smaller than its ``min_train_nodes`` or ``min_available_nodes``. Or an option would have
        no effect, because ``strategy`` decides it.
    """

    weighs_updates = True
    needs_each_update = True
    needs_metrics = True

    strategy: FedAvg = field(kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind, missing in _BEYOND_MODELS.items():
            if isinstance(self.strategy, kind):
                raise InvalidValue(
                    f"strategy={type(self.strategy).__name__}: expected a strategy that needs "
                    "only models and numbers of examples, such as FedAvg, FedAdam or FedMedian; "
                    f"{kind.__name__} needs {missing}, so run it in an app of its own"
                )
        require_usual_server(self, f"{type(self.strategy).__name__} takes the server's step")
        if isinstance(self.strategy, FedProx):
            weight = self.strategy.proximal_mu
            if self.local.proximal_weight not in (0.0, weight):
                raise InvalidValue(
                    f"local.proximal_weight={self.local.proximal_weight!r}: expected FedProx's "
                    f"proximal_mu={weight!r}; leave proximal_weight at 0.0, which means "
                    "proximal_mu, or set both to the same number"
                )
            object.__setattr__(self, "local", replace(self.local, proximal_weight=weight))

    def check(self, plan: PrivacyPlan) -> None:
        """Refuse cohorts that have a random size, or that are too small for the Flower strategy."""
        if isinstance(plan.sampling, PoissonSampling):
            raise InvalidValue(
                "the plan's sampling is PoissonSampling: expected FixedSizeSampling or "
                "FullParticipation, because Flower's strategies wait for a fixed number of replies"
            )
        size, needed = plan.sampling.expected_cohort_size, self._least_replies
        if size < needed:
            name = type(self.strategy).__name__
            raise InvalidValue(
                f"cohorts of {size:g} are smaller than the {needed} nodes that {name} waits for: "
                "lower its min_train_nodes and min_available_nodes"
            )

    @property
    def _least_replies(self) -> int:
        return max(self.strategy.min_train_nodes, self.strategy.min_available_nodes)

    @property
    def name(self) -> str:
        """Names of the class and of the Flower strategy, such as Hosted-FedAdam."""
        return f"{super().name}-{type(self.strategy).__name__}"

    def init(self, model: records.Arrays, population: int) -> State:
        """Return a count of 0 steps, and the initial moments of the Flower strategy."""
        return self._state(self.strategy, steps=0)

    def configure(
        self, config: ConfigRecord, model: records.Arrays, state: State, plan: PrivacyPlan
    ) -> ConfigRecord:
        """Return the configuration, with the entries that the Flower strategy adds.

        The Flower strategy begins the round with the optimizer's moments from ``state``.
        """
        config = ConfigRecord({**config})
        self._configured(config, model, state, int(plan.sampling.expected_cohort_size))
        return config

    def _configured(
        self, config: ConfigRecord, model: records.Arrays, state: State, cohort: int
    ) -> FedAvg:
        """Return a copy of the Flower strategy, after this copy began a round with ``state``.

        The copy writes its entries into ``config``. ``cohort`` is the number of nodes that it sees.
        """
        # Work on a copy, so that a discarded round leaves the user's strategy unchanged.
        server = deepcopy(self.strategy)
        for group, members in state.server.items():
            if group != _STEPS:
                kind, _, name = group.partition(".")
                setattr(server, name, list(members.values()) if kind == "list" else dict(members))
        if isinstance(server, FedAvgM):  # None makes it read the new model
            server.current_arrays = None
        # This package has not drawn the cohort yet. Show the strategy the right number of invented
        # nodes. Nobody sends them the messages that the strategy makes.
        grid = cast(Grid, SimpleNamespace(get_node_ids=lambda: range(cohort)))
        server.configure_train(_steps(state) + 1, records.to_record(model), config, grid)
        return server

    def check_update(self, update: Update) -> None:
        """Refuse an update unless its weight, the metric ``weighted_by_key``, is above 0."""
        if not update.metrics.get(self.strategy.weighted_by_key, 0) > 0:
            raise RefusedReply(
                f"metric {self.strategy.weighted_by_key!r}: expected a number above 0"
            )

    def step(
        self, model: records.Arrays, released: Released, state: State
    ) -> tuple[records.Arrays, State]:
        """Return the model that the Flower strategy computes from the accepted models."""
        replies = [self._reply(model, *each) for each in released.updates.items()]
        # A round may lose clients, but the strategy begins no round with fewer nodes than it needs.
        cohort = max(self._least_replies, len(replies))
        server = self._configured(ConfigRecord(), model, state, cohort)
        arrays, _ = server.aggregate_train(_steps(state) + 1, replies)
        if arrays is None:
            return model, state
        return records.to_arrays(arrays), self._state(server, steps=_steps(state) + 1)

    def _reply(self, base: records.Arrays, partition: int, update: Update) -> Message:
        """Return the reply that a ClientApp would send for an accepted update."""
        model = {name: base[name] + update.arrays[name] for name in base}
        key = self.strategy.weighted_by_key
        metrics = records.metrics_record({key: update.metrics[key]})
        content = RecordDict({self.strategy.arrayrecord_key: records.to_record(model)})
        content["metrics"] = metrics
        return Message(content, dst_node_id=partition, message_type="train")

    def _state(self, server: FedAvg, *, steps: int) -> State:
        """Return the number of steps, and the Flower strategy's moments and momenta.

        Every attribute of the strategy that is a dict or a list of arrays is part of the result.
        """
        groups: dict[str, records.Arrays] = {_STEPS: {"taken": np.array([steps])}}
        # Flower has no interface for a strategy's state: each strategy keeps moments in attributes
        # with names of its own. Going by their type also covers subclasses that users write.
        for name, value in vars(server).items():
            members: Any = dict(enumerate(value)) if isinstance(value, list) else value
            if not isinstance(members, dict) or not members:
                continue
            if all(isinstance(array, np.ndarray) for array in members.values()):
                kind = type(value).__name__  # for `_configured`, because a State has no lists
                groups[f"{kind}.{name}"] = {str(key): array for key, array in members.items()}
        return State(server=groups)


def _steps(state: State) -> int:
    return int(state.server[_STEPS]["taken"][0])
