"""Runs of methods that keep a personal part, on clients of unequal sizes."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import nn

from flower_ext.data import ClientData, Examples
from flower_ext.federation import FederatedStrategy, InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.privacy import FullParticipation, NonPrivatePlan
from flower_ext.training import LocalTraining, Task
from tests.support.worlds import CLASSES, FEATURES, Net, client_data

SEED, ROUNDS, CLIENTS = 4, 3, 4
SGD = LocalTraining(epochs=2, batch_size=8, learning_rate=0.2)
BY_EXAMPLES = NonPrivatePlan(sampling=FullParticipation(CLIENTS), weighting="examples")


class Normed(nn.Module):
    """A network with batch normalisation and layer normalisation.

    It has double precision, because batch normalisation of a few rows amplifies rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.extractor = nn.Linear(FEATURES, 8)
        self.bn1 = nn.BatchNorm1d(8)
        self.scaled = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.bn1(self.extractor(x)))
        logits: torch.Tensor = self.head(self.scaled(hidden))
        return logits


def uneven_data(client: int, dtype: torch.dtype = torch.float32) -> ClientData:
    """Return data of one client, of which each has another number of training examples."""
    data = client_data(client)
    train, test = (Examples(e.features.to(dtype), e.targets) for e in (data.train, data.test))
    return ClientData(train=train.subset(np.arange(30 - 4 * client)), test=test)


def uneven_task(model: type[nn.Module] = Net) -> Task:
    """Return the problem of unequal clients."""
    dtype = next(model().parameters()).dtype
    return Task(model=model, data=partial(uneven_data, dtype=dtype), device="cpu")


class OneByOne(InProcessGrid):
    """A grid whose clients answer one by one, as on separate nodes."""

    def _answer_in_process(self, messages):
        return [super(OneByOne, self)._answer_in_process([message])[0] for message in messages]


def run(method, plan=BY_EXAMPLES, *, task=None, grid=InProcessGrid, rounds=ROUNDS, **options):
    """Run a method; return the shared model, clients' memories, the strategy and the grid."""
    task = task or uneven_task()
    options = {"seed": SEED, "seeded_noise": True, "evaluate_every": rounds, **options}
    strategy = FederatedStrategy(method, plan, **options)
    nodes = grid(method.client_app(task, allow_seeded_noise=True), num_clients=CLIENTS)
    result = strategy.start(nodes, ArrayRecord(task.initial_params(SEED)), num_rounds=rounds)
    memories = {
        int(context.node_config["partition-id"]): records.to_params(record)
        for context in nodes.contexts.values()
        for record in context.state.array_records.values()
    }
    return records.to_params(result.arrays), memories, strategy, nodes


def assert_close(ours, theirs):
    """Assert that two models of the same names agree to 1e-6."""
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=1e-6, atol=1e-6)
