"""A linear problem for audits, whose updates are known for every model.

The model and its loss are linear, so an update is a sum of features for every model. The canary's
features are far above every bound, along one axis. All other features pull the other way, or not at
all. The loss changes its sign in every round, but noise that is used twice does not, so an audit
finds reused noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from flower_ext.auditing.experiment import Experiment, Score, World, projected
from flower_ext.data import ClientData, Examples, SiloData
from flower_ext.federation import FederatedStrategy, client_level_dp_mod
from flower_ext.privacy import AdversaryView
from flower_ext.training import LocalTraining, Task

SIZE = 100
"""Number of parameters of the model."""
HUGE = 1e3
"""Magnitude of a canary's features, far above every bound."""
LARGE = 30.0
"""Magnitude above every bound but below the server's limit for noised uploads."""
BEYOND = 8.0
"""Magnitude above every bound, by which a secure sum of a few members is no spoiled one."""
ONE_STEP = LocalTraining(steps=1, batch_size=64, learning_rate=1.0)


@dataclass(eq=False)  # equal to itself alone, because caches have `loss` as a key
class Turns:
    """A public schedule: the loss changes its sign in every round."""

    sign: float = 1.0

    def begin(self, number: int) -> None:
        """Begin training round ``number``, from 1."""
        self.sign = 1.0 if number % 2 else -1.0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean output with the round's sign."""
        return -self.sign * (outputs.squeeze(-1) * targets).mean()


def pulls(*features: float, size: int = SIZE) -> Examples:
    """Return records along the first axis, one per number."""
    x = torch.zeros(len(features), size)
    x[:, 0] = torch.tensor(features)
    return Examples(x, torch.ones(len(features)))


@dataclass(frozen=True, kw_only=True)
class LinearMechanism:
    """A mechanism on the linear problem, which becomes an experiment for any noise.

    Parameters
    ----------
    name : str
    plan : Callable[[float, int], Any]
        Makes the object that adds the noise, a plan or DP-SGD's training, from a multiple of its
        usual noise and the number of rounds.
    strategy : Callable[[Any], FederatedStrategy]
        Makes a new strategy under that plan.
    without, present : Sequence[ClientData]
        Each partition's data, without the canary and with it.
    views, gaussian, score
        As in `Experiment`; by default the score is `projected` on the canary's axis.
    partitions, whole
        As in `projected`.
    size : int
        Number of parameters of the model.
    app : Callable[[Task], ClientApp], optional
        Makes the ClientApp; by default the strategy's own.
    metrics : Mapping
        Metrics of the evaluations.
    """

    name: str
    plan: Callable[[float, int], Any]
    strategy: Callable[[Any], FederatedStrategy]
    without: Sequence[ClientData]
    present: Sequence[ClientData]
    views: Sequence[AdversaryView] = tuple(AdversaryView)
    partitions: Sequence[int] | None = None
    whole: bool = False
    gaussian: bool | None = None
    size: int = SIZE
    app: Callable[[Task], ClientApp] | None = None
    metrics: Mapping[str, Callable[[Tensor, Tensor], float]] = field(default_factory=dict)
    score: Score | None = None

    def experiment(self, *, noise: float = 1.0, rounds: int = 1) -> Experiment:
        """Return two worlds of the strategy, with ``noise`` times the usual noise."""
        plan, turns = self.plan(noise, rounds), Turns()
        strategy = partial(self.strategy, plan)
        client_app = self.app or strategy().method.client_app

        def world(data: Sequence[ClientData]) -> World:
            task = Task(
                model=lambda: nn.Linear(self.size, 1, bias=False),
                data=lambda partition: data[partition],
                loss=turns.loss,
                metrics=self.metrics,
                device="cpu",
            )
            return World(strategy=strategy, client_app=client_app(task), num_clients=len(data))

        score = self.score or projected(
            {"weight": np.eye(1, self.size)},
            signs=[1.0 - 2.0 * (number % 2) for number in range(rounds)],
            partitions=self.partitions,
            whole=self.whole,
        )
        return Experiment(
            name=self.name,
            without=world(self.without),
            present=world(self.present),
            initial=ArrayRecord({"weight": torch.zeros(1, self.size)}),
            score=score,
            rounds=rounds,
            views=self.views,
            gaussian=self.gaussian,
            on_round=turns.begin,
        )


def client_data(*features: float, size: int = SIZE) -> ClientData:
    """Return a client's data, with one record per number (see `pulls`)."""
    records = pulls(*features, size=size)
    return ClientData(train=records, test=records)


def silo_data(owners: Sequence[int], features: Sequence[float]) -> SiloData:
    """Return a silo's data, with one record per number and its owner (see `pulls`)."""
    records = pulls(*features)
    return SiloData(train=records, test=records, owners=torch.tensor(owners))


def plain_app(task: Task) -> ClientApp:
    """Return a ClientApp from elsewhere behind this package's mod: one step of plain torch."""
    app = ClientApp(mods=[client_level_dp_mod()])

    @app.train()
    def _(message: Message, context: Context) -> Message:
        records = task.data(int(context.node_config["partition-id"])).train
        assert isinstance(records.features, Tensor)
        received = message.content.array_records["arrays"]["weight"].numpy()
        weight = torch.from_numpy(received).requires_grad_()
        loss = task.loss(records.features @ weight.T, records.targets)
        (gradient,) = torch.autograd.grad(loss, [weight])
        content = RecordDict({"metrics": MetricRecord({"num-examples": len(records)})})
        content["arrays"] = ArrayRecord({"weight": Array(received - gradient.numpy())})
        return Message(content, reply_to=message)

    return app
