"""Frozen parts stay on the nodes, and the server refuses a node with another base by name."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from flower_ext.algorithms import DP2FedSAM, DPFedAvg
from flower_ext.federation import FederatedStrategy, FederationNotReady, InProcessGrid
from flower_ext.privacy import FullParticipation, ReleasePlan
from flower_ext.training import LocalTraining, Task
from tests.support.other_ray import use_ray
from tests.support.worlds import CLASSES, FEATURES, client_data

CLIENTS = 4
SGD = LocalTraining(epochs=1, batch_size=10, learning_rate=0.5)


class Pretrained(nn.Module):
    """A frozen base, an adapter that trains, and a head."""

    def __init__(self, *, moved: float = 0.0) -> None:
        super().__init__()
        self.base = nn.Linear(FEATURES, 8).requires_grad_(False)
        self.adapter = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)
        self.base.weight.data[0, 0] += moved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.adapter(torch.relu(self.base(x)))))


def other() -> nn.Module:
    return Pretrained(moved=1e-6)


def task(model=Pretrained) -> Task:
    return Task(model=model, data=client_data, device="cpu")


def plan(clipping_norm: float = 0.5) -> ReleasePlan:
    return ReleasePlan(
        sampling=FullParticipation(CLIENTS),
        clipping_norm=clipping_norm,
        noise_multiplier=1e-3,
        rounds=2,
        delta=0.1,
    )


def run(strategy, its_task: Task, kind=InProcessGrid):
    grid = kind(strategy.method.client_app(its_task), num_clients=CLIENTS)
    return strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=2)


def test_only_trained_parts_are_sent_and_their_norm_is_clipped():
    strategy = FederatedStrategy(
        DPFedAvg(local=SGD), plan(), seed=1, evaluate_every=1, frozen=task().fingerprint
    )
    result = run(strategy, task())
    state = result.arrays.to_torch_state_dict()
    assert set(state) == {"adapter.weight", "adapter.bias", "head.weight", "head.bias"}
    start = task().initial_params(0)
    moved = np.sqrt(sum(float((state[n] - p).double().square().sum()) for n, p in start.items()))
    # Two rounds of mean updates, each clipped to 0.5 over the trained parts only.
    assert 0.05 < moved <= 1.0


def test_a_personal_head_and_a_shared_adapter_train_above_the_base():
    strategy = FederatedStrategy(
        DP2FedSAM(head=SGD, extractor=SGD, personal=("head",)),
        plan(),
        seed=1,
        frozen=task().fingerprint,
    )
    result = run(strategy, task())
    assert set(result.arrays.to_torch_state_dict()) == {"adapter.weight", "adapter.bias"}
    assert strategy.run.client_metrics


def test_a_node_with_another_base_is_refused_before_the_first_round():
    strategy = FederatedStrategy(DPFedAvg(local=SGD), plan(), seed=1, frozen=task().fingerprint)
    message = rf"{task(other).fingerprint}.*expected '{task().fingerprint}'.*same base model"
    with pytest.raises(FederationNotReady, match=message):
        run(strategy, task(other))
    assert strategy.participations.rounds == 0


class LastDiffers(InProcessGrid):
    """A grid of SuperNodes, the last of which has another base model."""

    simulates_nodes = False

    def _answer_in_process(self, messages):
        last = max(self.contexts)
        others = InProcessGrid(DPFedAvg.client_app(task(other)), num_clients=CLIENTS)
        return [
            reply
            for message in messages
            for reply in (
                others._answer_in_process([message])
                if message.metadata.dst_node_id == last
                else super(LastDiffers, self)._answer_in_process([message])
            )
        ]


def test_every_node_of_a_deployment_confirms_its_base(monkeypatch):
    use_ray(monkeypatch)  # the ServerApp's own use makes no simulation
    strategy = FederatedStrategy(DPFedAvg(local=SGD), plan(), seed=1, frozen=task().fingerprint)
    with pytest.raises(FederationNotReady, match=rf"partitions \[{CLIENTS - 1}\].*same base model"):
        run(strategy, task(), LastDiffers)


def test_a_server_that_names_no_base_asks_for_none():
    run(FederatedStrategy(DPFedAvg(local=SGD), plan(), seed=1), task(other))


def test_a_server_that_trains_what_nodes_freeze_is_refused():
    everything = ["base", "adapter", "head"]
    unfrozen = Task(model=Pretrained, data=client_data, device="cpu", trainable=everything)
    strategy = FederatedStrategy(DPFedAvg(local=SGD), plan(), seed=1)
    grid = InProcessGrid(DPFedAvg.client_app(task()), num_clients=CLIENTS)
    with pytest.raises(FederationNotReady, match=r"has \['base.bias', 'base.weight'\]"):
        strategy.start(grid, ArrayRecord(unfrozen.initial_params(0)), num_rounds=1)
