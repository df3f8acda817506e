"""A Hosted method is a value: what happened to it in one strategy changes no other."""

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAdam, FedAvgM, FedYogi

from flower_ext.algorithms import Hosted
from flower_ext.federation import FederatedStrategy, InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.privacy import FullParticipation, NonPrivatePlan
from flower_ext.training import LocalTraining
from tests.support.worlds import initial, task

CLIENTS, ROUNDS = 3, 3
NODES = {"min_train_nodes": CLIENTS, "min_available_nodes": CLIENTS}
SERVERS = {
    "FedAdam": lambda: FedAdam(eta=0.05, **NODES),
    "FedYogi": lambda: FedYogi(eta=0.05, **NODES),
    "FedAvgM": lambda: FedAvgM(server_momentum=0.9, **NODES),
}


def strategy_of(method):
    plan = NonPrivatePlan(sampling=FullParticipation(CLIENTS), weighting="clients")
    return FederatedStrategy(method, plan, seed=1, evaluate_every=0)


def model_of(method):
    grid = InProcessGrid(Hosted.client_app(task()), CLIENTS)
    result = strategy_of(method).start(grid, initial(), num_rounds=ROUNDS)
    return records.to_arrays(result.arrays)


@pytest.mark.parametrize("name", SERVERS)
def test_a_method_that_ran_before_trains_the_same_model_again(name):
    method = Hosted(SERVERS[name](), local=LocalTraining(epochs=1, batch_size=10))
    first, second = model_of(method), model_of(method)
    for key, array in first.items():
        np.testing.assert_array_equal(second[key], array)
