"""A server's memory does not grow with the cohort: it adds each upload to a sum and drops it."""

import weakref

import numpy as np
import pytest
from flwr.app import ArrayRecord

from flower_ext.algorithms import DP2FedSAM, DPFedAvg, FedAMP, Scaffold
from flower_ext.federation import FederatedStrategy, InProcessGrid, VirtualGrid, client_app
from flower_ext.federation.engines import virtual
from flower_ext.federation.messages import records
from flower_ext.privacy import FixedSizeSampling, NonPrivatePlan, ReleasePlan
from flower_ext.training import LocalTraining
from tests.support.worlds import initial, task

CLIENTS = 8
SAMPLING = FixedSizeSampling(CLIENTS, CLIENTS)
SGD = LocalTraining(epochs=1, batch_size=8, learning_rate=0.05)
MODEL_BYTES = sum(len(array.data) for array in initial().values())


def released(placement: str) -> ReleasePlan:
    """Return a plan whose noise is added in one place."""
    return ReleasePlan(
        sampling=SAMPLING,
        clipping_norm=0.5,
        noise_multiplier=0.3,
        rounds=2,
        delta=1e-3,
        noise_placement=placement,
    )


SUMS = {
    "server noise": lambda: FederatedStrategy(
        DPFedAvg(local=SGD), released("server"), seed=1, seeded_noise=True, evaluate_every=0
    ),
    "client noise": lambda: FederatedStrategy(
        DPFedAvg(local=SGD), released("client"), seed=1, seeded_noise=True, evaluate_every=0
    ),
    "personal head": lambda: FederatedStrategy(
        DP2FedSAM(head=SGD, extractor=SGD, personal=["head"]),
        released("client"),
        seed=1,
        seeded_noise=True,
        evaluate_every=0,
    ),
    "by examples": lambda: FederatedStrategy(
        DPFedAvg(local=SGD),
        NonPrivatePlan(sampling=SAMPLING, weighting="examples"),
        seed=1,
        evaluate_every=0,
    ),
}


class Watching(InProcessGrid):
    """A grid that counts, whenever clients run, the round's replies that are still in memory."""

    def start(self) -> None:
        self.alive: list[int] = []
        self.seen: list[weakref.ref] = []

    def _answer_in_process(self, messages):
        self.alive.append(sum(one() is not None for one in self.seen))
        replies = super()._answer_in_process(messages)
        self.seen += map(weakref.ref, replies)
        return replies


def played(strategy, memory_limit):
    """Run a strategy within a limit of memory; return the last model and the grid."""
    app = client_app(strategy.method.client, task=task(), allow_seeded_noise=True)
    grid = Watching(app, num_clients=CLIENTS, memory_limit=memory_limit)
    grid.start()
    result = strategy.start(grid, initial(), num_rounds=2)
    assert strategy.refusals == []
    return records.to_arrays(result.arrays), grid


@pytest.mark.parametrize("strategy", SUMS.values(), ids=SUMS)
def test_part_of_a_cohort_runs_once_the_previous_part_is_forgotten(strategy):
    whole, _ = played(strategy(), 2**30)
    parted, grid = played(strategy(), 2 * 4 * MODEL_BYTES)
    assert max(grid.alive) <= 1  # the reply that is being added
    assert len(grid.alive) > CLIENTS / 2
    for name, array in whole.items():
        np.testing.assert_allclose(parted[name], array, atol=1e-6)


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: FederatedStrategy(FedAMP(local=SGD), NonPrivatePlan(sampling=SAMPLING), seed=1),
        lambda: FederatedStrategy(Scaffold(local=SGD), NonPrivatePlan(sampling=SAMPLING), seed=1),
    ],
)
def test_a_method_that_needs_each_update_gets_it_in_any_parts(strategy):
    whole, _ = played(strategy(), 2**30)
    parted, _ = played(strategy(), MODEL_BYTES)
    for name, array in whole.items():
        np.testing.assert_allclose(parted[name], array, atol=1e-6)


def test_a_method_that_reads_undeclared_updates_learns_what_to_declare():
    class Careless(DPFedAvg):
        def step(self, model, released, state):
            first = released.updates[0].arrays
            return {name: model[name] + first[name] for name in model}, state

    strategy = FederatedStrategy(Careless(local=SGD), NonPrivatePlan(sampling=SAMPLING))
    with pytest.raises(ValueError, match="needs_each_update = True"):
        played(strategy, 2**30)


def test_clients_of_a_node_are_asked_in_parts_where_models_are_large(monkeypatch):
    def models():
        strategy = SUMS["client noise"]()
        app = client_app(strategy.method.client, task=task(), allow_seeded_noise=True)
        grid = Watching(app, num_clients=2)
        grid.start()
        fat = VirtualGrid(grid, CLIENTS // 2)
        model = strategy.start(fat, ArrayRecord(task().initial_params(1)), num_rounds=2).arrays
        return records.to_arrays(model), grid

    whole, grid = models()
    at_once = len(grid.alive)
    monkeypatch.setattr(virtual, "MEMORY_LIMIT", 3 * 4 * MODEL_BYTES)
    parted, grid = models()
    assert len(grid.alive) == at_once + 2  # one more per round, for each node's fourth client
    for name, array in whole.items():
        np.testing.assert_allclose(parted[name], array, atol=1e-6)
