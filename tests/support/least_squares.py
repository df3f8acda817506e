"""Least squares on clients that disagree, over a network that loses replies.

The optimum is known. Clients drift away from it unless their memory corrects them.
"""

from pathlib import Path
from shutil import rmtree

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import nn

from flower_ext.data import ClientData, Examples
from flower_ext.federation import ClientMemory, InProcessGrid, recorded_run
from flower_ext.federation.messages import records
from flower_ext.training import LocalTraining, Task
from tests.support.dying_runs import Died

CLIENTS = 4
LOCAL = LocalTraining(epochs=5, batch_size=8, learning_rate=0.05)
LOST = {
    "none": {},
    "the first": {1: {2}},
    "one": {3: {1}},
    "several": {2: {0}, 3: {1, 3}},
    "four in a row": {2: {0}, 3: {0}, 4: {0}, 5: {0, 1}},
    "all": {1: range(CLIENTS), 4: range(CLIENTS), 5: range(CLIENTS)},
}
"""Partitions whose replies are lost, by round."""
_RNG = np.random.default_rng(0)
FEATURES = [
    np.linalg.qr(_RNG.normal(size=(8, 2)))[0] @ np.diag([3.0 + i, 5.0 - i]) for i in range(CLIENTS)
]
OWN = [_RNG.normal(size=2) * 2 + client for client in range(CLIENTS)]


def task() -> Task:
    """Return the task with the loss ½ (⟨w, x⟩ − ⟨w_i, x⟩)², averaged over a client's records x."""

    def data(client):
        features = torch.tensor(FEATURES[client], dtype=torch.float32)
        targets = features @ torch.tensor(OWN[client], dtype=torch.float32)
        examples = Examples(features=features, targets=targets)
        return ClientData(train=examples, test=examples)

    return Task(
        model=lambda: nn.Linear(2, 1, bias=False),
        data=data,
        loss=lambda outputs, targets: 0.5 * ((outputs.squeeze(-1) - targets) ** 2).mean(),
        metrics={},
        device="cpu",
    )


def optimum() -> np.ndarray:
    """Return the minimiser of the mean of all losses."""
    curvatures = [features.T @ features for features in FEATURES]
    return np.linalg.solve(
        sum(curvatures), sum(h @ weight for h, weight in zip(curvatures, OWN, strict=True))
    )


class LosingGrid(InProcessGrid):
    """A grid that loses replies to training, ``lost`` by round; in ``dies_in`` the server dies.

    ``forgets`` are the partitions that have lost their memory when a round begins.
    """

    def __init__(self, strategy, *, lost=None, forgets=None, dies_in=None, folder=""):
        app = strategy.method.client_app(task(), allow_seeded_noise=True)
        super().__init__(app, CLIENTS, {"state-folder": str(folder)} if folder else {})
        self.lost, self.dies_in, self.asked = lost or {}, dies_in, {}
        self.forgets = {str(number): partitions for number, partitions in (forgets or {}).items()}
        self.folder = folder

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        for partition in self.forgets.get(messages[0].metadata.group_id, ()):
            self._forget(partition)
        replies = list(super().send_and_receive(messages, timeout=timeout))
        if not messages[0].metadata.message_type.startswith("train"):
            return replies
        server_round = int(messages[0].metadata.group_id)
        self.asked[server_round] = messages
        if server_round == self.dies_in:
            raise Died
        lost = self.lost.get(server_round, ())
        return [r for r in replies if self._partition(r) not in lost]

    def _forget(self, partition):
        for context in self.contexts.values():
            if context.node_config["partition-id"] == partition:
                context.state.clear()
        for kept in Path(self.folder).glob(f"*/*-{partition}") if self.folder else ():
            rmtree(kept)

    def _partition(self, reply):
        return self.contexts[reply.metadata.src_node_id].node_config["partition-id"]


def play(strategy, rounds, **network):
    """Return the weights and the mean of the clients' memories after ``rounds``."""
    grid = LosingGrid(strategy, **network)
    return trained(strategy, rounds, grid), remembered(strategy, grid)


def trained(strategy, rounds, grid):
    """Return the weights after ``rounds``."""
    result = strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=rounds)
    return records.to_arrays(result.arrays)["weight"].ravel()


def start(build, rounds, folder, dies_in=None):
    """Do as `play`, in a run directory that may be resumed; ``build`` returns the strategy."""
    config = {"run-directory": str(folder / "run"), "resume": True}
    with recorded_run(config, "toy") as run:
        strategy = build(directory=run)
        return strategy, *play(strategy, rounds, folder=folder / "state", dies_in=dies_in)


def remembered(strategy, grid):
    """Return the mean of the clients' memories."""
    name, run = strategy.method.client.name, strategy.run.checkpoints.run_id
    kept = [ClientMemory(context, name, run).load() for context in grid.contexts.values()]
    return np.mean([params["weight"].numpy() for params in kept], axis=0)
