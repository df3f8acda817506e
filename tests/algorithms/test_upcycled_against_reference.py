"""Seven methods, plain and upcycled, equal the plainest loops that compute the same."""

from functools import cache
from itertools import product

import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg, FedAvgM, FedProx, FedYogi

from flower_ext.algorithms import DPFedAvg, FedDyn, Hosted, PFedMe, Scaffold, Upcycled
from flower_ext.algorithms.upcycled import Decaying
from flower_ext.federation import ClientMemory, InProcessGrid, Sgd, Stragglers, client_app
from flower_ext.federation.messages import records
from flower_ext.privacy import FixedSizeSampling, NonPrivatePlan
from flower_ext.training import LocalTraining
from tests.support.grids import grid as grid_of
from tests.support.reference.comparing import close, flat
from tests.support.reference.upcycled import METHODS, federated, task
from tests.support.strategies import strategy_of

SEED, TRAINING_ROUNDS, CLIENTS, COHORT = 4, 4, 6, 4
SAMPLING = FixedSizeSampling(CLIENTS, COHORT)
STRAGGLERS = Stragglers(ratio=0.5)
SGD = LocalTraining(
    epochs=4, batch_size=8, learning_rate=0.1, momentum=0.5, learning_rate_decay=0.9
)
WITHOUT_MOMENTUM = LocalTraining(
    epochs=4, batch_size=8, learning_rate=0.03, learning_rate_decay=0.9
)
INNER = LocalTraining(steps=3, learning_rate=0.05)
COMMON = {
    "plan": NonPrivatePlan(sampling=SAMPLING),
    "stragglers": STRAGGLERS,
    "seed": SEED,
    "evaluate_every": 0,
}
NODES = {"min_train_nodes": COHORT, "min_available_nodes": COHORT}
YOGI = {"eta": 0.05, "beta_1": 0.8, "beta_2": 0.95, "tau": 1e-2}

OURS = {
    "fedavg": lambda: strategy_of(Hosted, FedAvg(**NODES), local=SGD, **COMMON),
    "fedavgm": lambda: strategy_of(
        Hosted, FedAvgM(server_learning_rate=0.8, server_momentum=0.6, **NODES), local=SGD, **COMMON
    ),
    "fedprox": lambda: strategy_of(Hosted, FedProx(proximal_mu=0.7, **NODES), local=SGD, **COMMON),
    "fedyogi": lambda: strategy_of(Hosted, FedYogi(**YOGI, **NODES), local=SGD, **COMMON),
    "scaffold": lambda: strategy_of(Scaffold, local=SGD, server=Sgd(learning_rate=0.9), **COMMON),
    "feddyn": lambda: strategy_of(FedDyn, local=SGD, regularization=0.6, **COMMON),
    "pfedme": lambda: strategy_of(
        PFedMe,
        local=WITHOUT_MOMENTUM,
        personal_training=INNER,
        attraction=5.0,
        server=Sgd(learning_rate=0.9),
        **COMMON,
    ),
}
NUMBERS = {
    "fedavg": {},
    "fedavgm": {"rate": 0.8, "momentum": 0.6},
    "fedprox": {"mu": 0.7},
    "fedyogi": YOGI,
    "scaffold": {"population": CLIENTS, "rate": 0.9},
    "feddyn": {"population": CLIENTS, "alpha": 0.6},
    "pfedme": {"attraction": 5.0, "inner_steps": 3, "inner_rate": 0.05, "beta": 0.9},
}


@cache
def ours(method, upcycled):
    """Return the package's final model, strategy and client memories."""
    base = OURS[method]()
    app = client_app(*(m.client for m in (DPFedAvg, Scaffold, FedDyn, PFedMe)), task=task())
    grid = InProcessGrid(app, num_clients=CLIENTS)
    strategy = Upcycled(base, Decaying(0.7)) if upcycled else base
    rounds = 2 * TRAINING_ROUNDS if upcycled else TRAINING_ROUNDS
    result = strategy.start(grid, ArrayRecord(task().initial_params(SEED)), num_rounds=rounds)
    assert base.refusals == []
    memory = {
        int(context.node_config["partition-id"]): flat(kept)
        for context in grid.contexts.values()
        if (kept := ClientMemory(context, base.method.client.name).load()) is not None
    }
    return flat(records.to_params(result.arrays)), base, memory


@cache
def theirs(method, upcycled):
    """Return what the plain loop of the reference gives."""
    return federated(
        method,
        seed=SEED,
        sampling=SAMPLING,
        stragglers=STRAGGLERS,
        rounds=2 * TRAINING_ROUNDS if upcycled else TRAINING_ROUNDS,
        local=WITHOUT_MOMENTUM if method == "pfedme" else SGD,
        coefficient=(lambda m: 0.7 / m**0.5) if upcycled else None,
        **NUMBERS[method],
    )


both = pytest.mark.parametrize("upcycled", [False, True], ids=["plain", "upcycled"])


@pytest.mark.parametrize(
    ("method", "upcycled"),
    grid_of(product(METHODS, [False, True]), lambda case: case[1] or case[0] == "fedavg"),
)
def test_every_method_equals_its_plain_loop(method, upcycled):
    model, _, _ = ours(method, upcycled)
    close(model, theirs(method, upcycled)[0])


@both
@pytest.mark.parametrize("method", ["scaffold", "feddyn", "pfedme"])
def test_what_clients_keep_equals_that_of_the_plain_loop(method, upcycled):
    _, _, memory = ours(method, upcycled)
    expected = theirs(method, upcycled)[2]
    assert set(memory) == set(expected)
    for client, kept in expected.items():
        close(memory[client], kept)


@both
def test_scaffolds_control_equals_that_of_the_plain_loop(upcycled):
    _, strategy, _ = ours("scaffold", upcycled)
    control = flat(records.to_params(records.to_record(strategy.run.state.everyone["control"])))
    close(control, theirs("scaffold", upcycled)[1]["c"])


@both
def test_feddyns_h_equals_that_of_the_plain_loop(upcycled):
    _, strategy, _ = ours("feddyn", upcycled)
    h = flat(records.to_params(records.to_record(strategy.run.state.server["h"])))
    close(h, theirs("feddyn", upcycled)[1]["h"])


def test_the_methods_differ_from_one_another_and_each_from_itself_upcycled():
    finals = {(m, up): ours(m, up)[0] for m in METHODS for up in (False, True)}
    names = list(finals)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert not torch.allclose(finals[one], finals[other], atol=1e-3), (one, other)
