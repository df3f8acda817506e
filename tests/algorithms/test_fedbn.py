"""FedBN equals a plain loop, and no running statistic leaves a client."""

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from flower_ext.algorithms import FedBN, FedPer, FedRep
from flower_ext.federation import FederatedStrategy, InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.privacy import FullParticipation, ReleasePlan
from flower_ext.training import UnshareableModel
from tests.support.personalised import (
    BY_EXAMPLES,
    CLIENTS,
    ROUNDS,
    SEED,
    SGD,
    Normed,
    OneByOne,
    assert_close,
    run,
    uneven_task,
)
from tests.support.reference.personalised import federated, jointly
from tests.support.travelling import Recorder

STATISTICS = {"bn1.running_mean", "bn1.running_var", "bn1.num_batches_tracked"}
AFFINE = {"bn1.weight", "bn1.bias"}
NOISED = ReleasePlan(
    sampling=FullParticipation(CLIENTS),
    clipping_norm=0.5,
    noise_multiplier=1.0,
    rounds=3,
    delta=0.01,
)


@pytest.mark.parametrize("grid", [InProcessGrid, OneByOne])
@pytest.mark.parametrize("personal", [("*bn*",), ("bn1", "scaled")])
def test_it_equals_the_plain_loop_and_so_do_its_running_statistics(grid, personal):
    task = uneven_task(Normed)
    shared, memories, strategy, _ = run(FedBN(personal=personal, local=SGD), task=task, grid=grid)
    expected, models, _ = federated(
        jointly,
        task,
        seed=SEED,
        clients=CLIENTS,
        rounds=ROUNDS,
        is_personal=lambda name: name.startswith("bn" if "*bn*" in personal else ("bn", "scaled")),
        local=SGD,
    )
    assert strategy.refusals == []
    assert_close(shared, expected)
    for client, memory in memories.items():
        assert set(memory) >= STATISTICS | AFFINE
        state = models[client].state_dict()
        assert_close(memory, {name: state[name] for name in memory})
    assert not torch.allclose(memories[0]["bn1.running_mean"], memories[1]["bn1.running_mean"])


@pytest.mark.parametrize("plan", [BY_EXAMPLES, NOISED])
def test_no_message_holds_a_normalisation_layer(plan):
    method = FedBN.for_model(Normed(), local=SGD)
    assert method.personal == ("bn1", "scaled")
    *_, strategy, grid = run(method, plan, task=uneven_task(Normed), grid=Recorder)
    assert strategy.refusals == []
    arrays = [
        (name, array.numpy())
        for message in (*grid.sent, *grid.received)
        if message.has_content()
        for record in message.content.array_records.values()
        for name, array in record.items()
    ]
    assert {name for name, _ in arrays} == {
        f"{layer}.{leaf}" for layer in ("extractor", "head") for leaf in ("weight", "bias")
    }
    kept = [
        array
        for context in grid.contexts.values()
        for record in context.state.array_records.values()
        for array in records.to_arrays(record).values()
        if array.ndim
    ]
    assert len(kept) == CLIENTS * 6
    for secret in kept:
        assert not any(
            a.shape == secret.shape and np.allclose(a, secret, atol=1e-6) for _, a in arrays
        )


def test_a_shared_layer_with_statistics_ends_the_run_before_its_first_round():
    with pytest.raises(UnshareableModel, match=r"bn1.running_mean.*GroupNorm in layer 'bn1'"):
        run(FedBN(personal=("scaled",), local=SGD), task=uneven_task(Normed))


@pytest.mark.parametrize("method", [FedBN, FedPer, FedRep])
def test_a_client_refuses_a_server_that_asks_for_running_statistics(method, monkeypatch):
    """The server of this test sends them, as a server with other code could."""
    task, initial = uneven_task(Normed), uneven_task(Normed).initial_params(SEED)
    monkeypatch.setattr(
        "flower_ext.federation.messages.model_checks.RUNNING_STATISTICS", frozenset()
    )
    strategy = FederatedStrategy(method(personal=("head",)), NOISED, seed=SEED, evaluate_every=0)
    grid = Recorder(method.client_app(task), num_clients=CLIENTS)
    start = ArrayRecord({n: p for n, p in initial.items() if n != "bn1.num_batches_tracked"})
    with pytest.raises(Exception, match=r"has 'bn1.running_mean', a running statistic"):
        strategy.start(grid, start, num_rounds=1)
    sent = [m.content.array_records for m in grid.received if m.has_content()]
    assert not any(records.UPDATE in arrays for arrays in sent)


def test_all_layers_of_normalisation_that_train_are_found_by_their_type():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4),  # without parameters
        nn.InstanceNorm2d(4, affine=True),
        nn.BatchNorm2d(4, affine=False),
        nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4)),
        nn.Linear(4, 2),
    )
    model[6][1].requires_grad_(False)
    assert FedBN.for_model(model).personal == ("1", "2", "4", "5", "6.0")
    with pytest.raises(ValueError, match="FedBN for a Linear: expected a model with trainable"):
        FedBN.for_model(nn.Linear(2, 2))
