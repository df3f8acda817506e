"""A linear problem for audits: its updates are known in advance.

The model and its loss are linear, so every record pulls the model by a fixed amount, whatever the
model is, and an update is the sum of these pulls. The canary pulls with a force far above every
bound, along one weight and the bias. An audit thus detects an implementation that clips each array
separately. All other records pull the other way, or not at all. The loss, and with it every pull,
changes its sign in every round. Noise that is used twice keeps its sign: it cancels in the
adversary's score, while the canary's pulls add up, so an audit finds reused noise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from flower_ext.data import ClientData, Examples, SiloData
from flower_ext.federation import FederatedStrategy, client_level_dp_mod
from flower_ext.privacy import AdversaryView
from flower_ext.training import LocalTraining, Task
from flower_ext_audit.experiment import Experiment, Score, World, projected

SIZE = 100
"""Number of weights of the model, beside its bias."""
HUGE = 1e3
"""Force of a canary, far above every bound."""
LARGE = 20.0
"""Force above every bound but below the server's limit for noised uploads."""
BEYOND = 5.0
"""Force above every bound, yet so small that the server does not discard a secure sum of a few
members as too large."""
ONE_STEP = LocalTraining(steps=1, batch_size=64, learning_rate=1.0)


@dataclass(eq=False)  # compared by identity, because caches have `loss` as a key
class Turns:
    """A loss that changes its sign in every round, on a schedule that the adversary knows."""

    sign: float = 1.0

    def begin(self, number: int) -> None:
        """Begin training round ``number``, from 1."""
        self.sign = 1.0 if number % 2 else -1.0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the negative mean of output · target, times the sign of this round."""
        return -self.sign * (outputs.squeeze(-1) * targets).mean()


def pulls(*forces: float, size: int = SIZE) -> Examples:
    """Return one record for each force; it pulls the first weight and the bias with that force."""
    return Examples(torch.eye(1, size).repeat(len(forces), 1), torch.tensor(forces))


def axes(size: int) -> dict[str, np.ndarray]:
    """Return the direction in which a record pulls the model: along the first weight and the bias.

    A model with a single weight has no bias.
    """
    bias = {"bias": np.ones(1)} if size > 1 else {}
    return {"weight": np.eye(1, size), **bias}


@dataclass(frozen=True, kw_only=True)
class LinearMechanism:
    """A mechanism that trains the linear problem of this module, ready to be audited."""

    name: str
    plan: Callable[[float, int], Any]
    """Makes the object that adds the noise: a plan, or the settings of DP-SGD. Its arguments are a
    factor on the usual noise, and the number of rounds."""
    strategy: Callable[[Any], FederatedStrategy]
    """Makes a new strategy from the result of ``plan``."""
    without: Sequence[ClientData]
    """Each partition's data without the canary; ``present`` holds the data with the canary."""
    present: Sequence[ClientData]
    views: Sequence[AdversaryView] = tuple(AdversaryView)
    partitions: Sequence[int] | None = None
    whole: bool = False
    gaussian: bool | None = None
    size: int = SIZE
    """Number of weights of the model; a model with a single weight has no bias."""
    app: Callable[[Task], ClientApp] | None = None
    """Makes the ClientApp; by default the strategy's own."""
    metrics: Mapping[str, Callable[[Tensor, Tensor], float]] = field(default_factory=dict)
    score: Score | None = None
    """The adversary's score; by default, `projected` on the direction in which the canary pulls."""
    rounds: int = 1
    """Smallest number of rounds of an experiment with this mechanism."""

    def experiment(self, *, noise: float = 1.0, rounds: int = 1) -> Experiment:
        """Return the experiment that audits this mechanism with ``noise`` times its usual noise."""
        rounds = max(rounds, self.rounds)
        plan, turns = self.plan(noise, rounds), Turns()
        strategy = partial(self.strategy, plan)
        client_app = self.app or strategy().method.client_app

        def world(data: Sequence[ClientData]) -> World:
            task = Task(
                model=lambda: nn.Linear(self.size, 1, bias=self.size > 1),
                data=lambda partition: data[partition],
                loss=turns.loss,
                metrics=self.metrics,
                device="cpu",
            )
            return World(strategy=strategy, client_app=client_app(task), num_clients=len(data))

        score = self.score or projected(
            axes(self.size),
            signs=[1.0 - 2.0 * (number % 2) for number in range(rounds)],
            partitions=self.partitions,
            whole=self.whole,
        )
        initial = {n: Array(np.zeros_like(a, np.float32)) for n, a in axes(self.size).items()}
        return Experiment(
            name=self.name,
            without=world(self.without),
            present=world(self.present),
            initial=ArrayRecord(initial),
            score=score,
            rounds=rounds,
            views=self.views,
            gaussian=self.gaussian,
            on_round=turns.begin,
        )


def client_data(*forces: float, size: int = SIZE) -> ClientData:
    """Return a client's data, with one record of `pulls` for each of ``forces``."""
    records = pulls(*forces, size=size)
    return ClientData(train=records, test=records)


def silo_data(owners: Sequence[int], forces: Sequence[float]) -> SiloData:
    """Return a silo's data: one record of `pulls` for each of ``forces``, with its owner."""
    records = pulls(*forces)
    return SiloData(train=records, test=records, owners=torch.tensor(owners))


def plain_app(task: Task) -> ClientApp:
    """Return a ClientApp that takes one step in plain PyTorch, under this package's Flower mod."""
    app = ClientApp(mods=[client_level_dp_mod()])

    @app.train()
    def _(message: Message, context: Context) -> Message:
        records = task.data(int(context.node_config["partition-id"])).train
        assert isinstance(records.features, Tensor)
        model = task.model()
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        weights = dict(model.named_parameters())
        loss = task.loss(model(records.features), records.targets)
        slopes = zip(weights, torch.autograd.grad(loss, [*weights.values()]), strict=True)
        stepped = {name: weights[name].detach() - slope for name, slope in slopes}
        content = RecordDict({"metrics": MetricRecord({"num-examples": len(records)})})
        content["arrays"] = ArrayRecord(stepped)
        return Message(content, reply_to=message)

    return app
