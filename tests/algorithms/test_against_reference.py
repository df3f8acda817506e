"""The methods of DP²-FedSAM equal the plainest loops that compute the same."""

import pytest
import torch
from flwr.app import ArrayRecord

from flower_ext.algorithms import (
    Centaur,
    DP2FedSAM,
    DPFedAvg,
    DPFedSAM,
)
from flower_ext.federation import FederatedStrategy, InProcessGrid, Sgd
from flower_ext.federation.messages import records
from flower_ext.privacy import FixedSizeSampling, ReleasePlan
from flower_ext.training import LocalTraining, evaluate
from tests.support.reference.comparing import close
from tests.support.reference.dp2_fedsam import federated
from tests.support.reference.steps import batch_order, descend
from tests.support.strategies import strategy_of
from tests.support.worlds import Net, client_data, task

SEED, ROUNDS, CLIENTS = 4, 3, 5
PLAN = ReleasePlan(
    sampling=FixedSizeSampling(CLIENTS, 3),
    clipping_norm=0.3,
    noise_multiplier=0.4,
    rounds=ROUNDS,
    delta=0.1,
)
SGD = LocalTraining(
    epochs=2, batch_size=8, learning_rate=0.2, momentum=0.5, learning_rate_decay=0.9
)
SAM = LocalTraining(
    epochs=2, batch_size=8, learning_rate=0.2, momentum=0.5, learning_rate_decay=0.9, sam_radius=0.2
)
HEAD = LocalTraining(epochs=1, batch_size=10, learning_rate=0.3, learning_rate_decay=0.9)
COMMON = {
    "plan": PLAN,
    "seed": SEED,
    "seeded_noise": True,
    "server": Sgd(learning_rate=0.8),
    "evaluate_every": ROUNDS,
}


def run(strategy):
    grid = InProcessGrid(
        strategy.method.client_app(task(), allow_seeded_noise=True), num_clients=CLIENTS
    )
    start = ArrayRecord(task().initial_params(SEED))
    result = strategy.start(grid, start, num_rounds=ROUNDS)
    assert strategy.refusals == []
    return records.to_params(result.arrays), grid


@pytest.mark.parametrize(
    ("method", "training", "tuning"),
    [(DPFedAvg, SGD, None), (DPFedAvg, SGD, SGD), (DPFedSAM, SAM, None), (DPFedSAM, SAM, SGD)],
)
def test_whole_model_methods_equal_the_plain_loop(method, training, tuning):
    ours, _ = run(strategy_of(method, local=training, fine_tuning=tuning, **COMMON))
    theirs, _ = federated(
        PLAN, seed=SEED, rounds=ROUNDS, phases=[("", training)], shared="", server_rate=0.8
    )
    close(ours, theirs)


@pytest.mark.parametrize(("method", "radius"), [(DP2FedSAM, 0.2), (Centaur, 0.0)])
def test_personal_head_methods_equal_the_plain_loop_and_so_do_their_heads(method, radius):
    extractor = SAM if radius else SGD
    ours, grid = run(strategy_of(method, head=HEAD, extractor=extractor, **COMMON))
    theirs, heads = federated(
        PLAN,
        seed=SEED,
        rounds=ROUNDS,
        phases=[("head", HEAD), ("extractor", extractor)],
        shared="extractor",
        server_rate=0.8,
    )
    close(ours, theirs)
    kept = {
        int(context.node_config["partition-id"]): records.to_params(record)
        for context in grid.contexts.values()
        for record in context.state.array_records.values()
    }
    assert set(kept) == set(heads)
    for client, head in heads.items():
        close(kept[client], head)


def test_the_methods_differ_from_one_another():
    finals = [
        run(strategy_of(DPFedAvg, local=SGD, **COMMON))[0],
        run(strategy_of(DPFedSAM, local=SAM, **COMMON))[0],
        run(strategy_of(Centaur, head=HEAD, extractor=SGD, **COMMON))[0],
        run(strategy_of(DP2FedSAM, head=HEAD, extractor=SAM, **COMMON))[0],
    ]
    weights = [final["extractor.weight"] for final in finals]
    for i, one in enumerate(weights):
        assert all(not torch.allclose(one, other, atol=1e-4) for other in weights[i + 1 :])


def test_fine_tuned_evaluation_trains_the_downloaded_model_first_and_forgets_it():
    strategy = strategy_of(DPFedAvg, local=SGD, fine_tuning=SGD, **COMMON)
    final, grid = run(strategy)
    for client in range(CLIENTS):
        model = Net()
        model.load_state_dict(final)
        descend(
            model,
            "",
            client_data(client).train,
            epochs=SGD.epochs,
            batch=SGD.batch_size,
            rate=SGD.in_round(ROUNDS).learning_rate,
            momentum=SGD.momentum,
            radius=0.0,
            generator=batch_order(SEED, client, ROUNDS, "evaluate"),
        )
        expected = evaluate(task(), model.state_dict(), client_data(client).test)
        assert strategy.run.client_metrics[client]["loss"] == pytest.approx(
            expected["loss"], abs=1e-5
        )
    assert all(not context.state.array_records for context in grid.contexts.values())


@pytest.mark.parametrize("adapt", [False, True])
def test_personal_evaluation_uses_the_clients_head_adapted_only_on_request(adapt):
    strategy = strategy_of(
        DP2FedSAM, head=HEAD, extractor=SAM, adapt_before_evaluation=adapt, **COMMON
    )
    final, grid = run(strategy)
    context = next(c for c in grid.contexts.values() if c.state.array_records)
    client = int(context.node_config["partition-id"])
    (record,) = context.state.array_records.values()
    model = Net()
    model.load_state_dict({**final, **records.to_params(record)})
    if adapt:
        descend(
            model,
            "head",
            client_data(client).train,
            epochs=HEAD.epochs,
            batch=HEAD.batch_size,
            rate=HEAD.in_round(ROUNDS).learning_rate,
            momentum=0.0,
            radius=0.0,
            generator=batch_order(SEED, client, ROUNDS, "evaluate"),
        )
    expected = evaluate(task(), model.state_dict(), client_data(client).test)
    assert strategy.run.client_metrics[client]["loss"] == pytest.approx(expected["loss"], abs=1e-5)


def test_a_sam_method_without_a_radius_is_refused():
    with pytest.raises(ValueError, match="radius > 0"):
        FederatedStrategy(DPFedSAM(local=LocalTraining(sam_radius=0.0)), PLAN)


def test_a_method_with_sgd_on_the_extractor_refuses_a_radius():
    with pytest.raises(ValueError, match=r"extractor.sam_radius=0.2: expected 0.*use DP2FedSAM"):
        Centaur(head=HEAD, extractor=SAM)


def test_a_personal_method_without_a_personal_part_is_refused():
    with pytest.raises(ValueError, match="names of DP2FedSAM's personal modules"):
        FederatedStrategy(DP2FedSAM(personal=()), PLAN)
