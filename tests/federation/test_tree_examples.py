"""Federated runs on examples of several tensors equal those on packed examples."""

from itertools import product

import pytest
import torch
from flwr.app import ArrayRecord

from flower_ext.algorithms import DPFedAvg, PFedMe
from flower_ext.algorithms.uldp import UldpAvg
from flower_ext.data import ClientData, SiloData
from flower_ext.federation import FederatedStrategy, InProcessGrid
from flower_ext.privacy import FullParticipation, NonPrivatePlan, ReleasePlan
from flower_ext.training import LocalTraining, Task
from tests.support.grids import grid as grid_of
from tests.support.trees import FORMS, PACKED, packed

CLIENTS, USERS = 4, 6
LOCAL = LocalTraining(epochs=2, batch_size=8, learning_rate=0.5)


def of_clients(form):
    """Return a function that gives each client its data in a form."""

    def data(client):
        return ClientData(
            train=form(packed(20 + client, client)), test=form(packed(9, 50 + client))
        )

    return data


def of_silos(form):
    """Return a function that gives each silo its data in a form."""

    def data(silo):
        train = packed(30, silo)
        owners = torch.arange(len(train)) % USERS
        return SiloData(train=form(train), test=form(packed(9, 50 + silo)), owners=owners)

    return data


def plan(population):
    return ReleasePlan(
        sampling=FullParticipation(population),
        clipping_norm=0.5,
        noise_multiplier=1.0,
        rounds=2,
        delta=1e-3,
    )


METHODS = {
    "DP-FedAvg": (
        lambda: FederatedStrategy(DPFedAvg(local=LOCAL), plan(CLIENTS), seed=1, seeded_noise=True),
        of_clients,
    ),
    "pFedMe": (
        lambda: FederatedStrategy(
            PFedMe(), NonPrivatePlan(sampling=FullParticipation(CLIENTS)), seed=1
        ),
        of_clients,
    ),
    "ULDP-AVG": (
        lambda: FederatedStrategy(
            UldpAvg(num_silos=CLIENTS, local=LOCAL),
            plan(USERS),
            seed=1,
            seeded_noise=True,
        ),
        of_silos,
    ),
}


def run(make, data, like):
    task = Task(model=like.model, data=data, loss=like.loss, metrics=like.metrics, device="cpu")
    strategy = make()
    app = strategy.method.client_app(task, allow_seeded_noise=True)
    grid = InProcessGrid(app, num_clients=CLIENTS)
    result = strategy.start(grid, ArrayRecord(task.initial_params(0)), num_rounds=2)
    return result.arrays.to_torch_state_dict(), result.evaluate_metrics_clientapp[2]


@pytest.mark.parametrize(
    ("method", "which"),
    grid_of(product(METHODS, FORMS), [*zip(METHODS, FORMS, strict=True)].__contains__),
)
def test_a_run_on_trees_is_the_run_on_packed_examples(method, which):
    make, world = METHODS[method]
    task, form = FORMS[which]
    ours, scores = run(make, world(form), task)
    theirs, expected = run(make, world(lambda data: data), PACKED)
    for name, p in theirs.items():
        assert not torch.equal(p, PACKED.initial_params(0)[name])
        torch.testing.assert_close(ours[name], p, rtol=1e-4, atol=1e-5)
    assert dict(scores) == pytest.approx(dict(expected), rel=1e-4)
