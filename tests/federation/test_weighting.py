"""Without privacy, examples may weight clients; under protection, all clients weigh the same."""

import numpy as np
import pytest
from flwr.app import ArrayRecord

from flower_ext import algorithms
from flower_ext.algorithms import Apple, DP2FedSAM, DPDitto, DPFedAvg, FedAMP, FedDyn, Scaffold
from flower_ext.data import ClientData
from flower_ext.errors import InvalidValue
from flower_ext.federation import FederatedStrategy
from flower_ext.federation.messages import records
from flower_ext.privacy import (
    FullParticipation,
    NonPrivatePlan,
    PerturbationPlan,
    RecordLevelPlan,
    ReleasePlan,
)
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.plans.release_mechanism import ReleaseMechanism
from flower_ext.training import LocalTraining, Task
from tests.support.strategies import strategy_of
from tests.support.travelling import Recorder, Tampering
from tests.support.worlds import Net, client_data

SIZES = (3, 10, 29)
ALL = FullParticipation(len(SIZES))
BY_EXAMPLES = NonPrivatePlan(sampling=ALL, weighting="examples")
SGD = LocalTraining(epochs=1, batch_size=5, learning_rate=0.3)


def unequal(client: int) -> ClientData:
    data = client_data(client)
    return ClientData(train=data.train.subset(np.arange(SIZES[client])), test=data.test)


TASK = Task(model=Net, data=unequal, device="cpu")


def run(strategy, grid=Recorder):
    run_grid = grid(strategy.method.client_app(TASK), num_clients=len(SIZES))
    initial = TASK.initial_params(0)
    result = strategy.start(run_grid, ArrayRecord(initial), num_rounds=1)
    return run_grid, initial, result.arrays.to_torch_state_dict()


METHODS = [
    FederatedStrategy(DPFedAvg(local=SGD), BY_EXAMPLES, seed=1),
    FederatedStrategy(DP2FedSAM(extractor=SGD, head=SGD), BY_EXAMPLES, seed=1),
    FederatedStrategy(DPDitto(local=SGD), BY_EXAMPLES, seed=1),
    FederatedStrategy(Scaffold(local=SGD), BY_EXAMPLES, seed=1),
]


@pytest.mark.parametrize("strategy", METHODS, ids=lambda strategy: strategy.method.name)
def test_the_model_moves_by_the_mean_of_updates_weighted_by_examples(strategy):
    grid, initial, model = run(strategy)
    replies = [r for r in grid.received if r.metadata.message_type.startswith("train")]
    updates = {
        r.metadata.src_node_id - 1_000: records.to_arrays(r.content[records.UPDATE])
        for r in replies
    }
    assert len(updates) == len(SIZES)
    for name, value in model.items():
        client_updates = [updates[client][name].astype(np.float64) for client in range(len(SIZES))]
        step = np.average(client_updates, axis=0, weights=SIZES)
        np.testing.assert_allclose(value, initial[name].numpy() + step, rtol=1e-5, atol=1e-7)
        assert not np.allclose(step, np.mean(client_updates, axis=0), rtol=1e-2)


def test_clients_count_alike_unless_examples_are_asked_for():
    assert not NonPrivatePlan(sampling=ALL).weighs_examples
    assert NonPrivatePlan(sampling=ALL) == NonPrivatePlan(sampling=ALL, weighting="clients")
    assert "weighted by examples" in BY_EXAMPLES.describe()
    assert "weighted" not in NonPrivatePlan(sampling=ALL).describe()


def test_a_reply_without_its_number_of_examples_is_refused():
    def silent(reply):
        del reply.content[records.METRICS]
        return [reply]

    class Silent(Tampering):
        tamper = {1: silent}

    strategy = FederatedStrategy(DPFedAvg(local=SGD), BY_EXAMPLES, seed=1)
    run(strategy, Silent)
    assert len(strategy.refusals) == 1
    assert "num-examples" in strategy.refusals[0]


@pytest.mark.parametrize(
    ("plan", "mechanism"),
    [
        (ReleasePlan, ReleaseMechanism),
        (RecordLevelPlan, RecordLevelPlan),
        (PerturbationPlan, PerturbationPlan),
    ],
)
def test_no_plan_that_protects_takes_the_weights(plan, mechanism):
    with pytest.raises(TypeError, match="weighting"):
        plan(sampling=ALL, weighting="examples")
    assert mechanism.weighs_examples is RoundMechanism.weighs_examples


def test_another_word_is_refused():
    with pytest.raises(InvalidValue, match="weighting='records': expected clients or examples"):
        NonPrivatePlan(sampling=ALL, weighting="records")


@pytest.mark.parametrize("method", [FedDyn, FedAMP, Apple])
def test_a_method_with_a_custom_rule_refuses_the_weights(method):
    with pytest.raises(InvalidValue, match="weighting='examples'.* expected 'clients'"):
        strategy_of(method, plan=BY_EXAMPLES, local=SGD)


@pytest.mark.parametrize("method", algorithms.__all__)
def test_every_method_says_how_clients_count(method):
    words = (
        "count alike",
        "count in the mean as they do",
        "have the same weight",
        "weigh the same",
        "plain mean",
        "weighted by",
        "weights clients in the mean",
        "weights every client equally",
    )
    known = [c.__doc__ or "" for c in getattr(algorithms, method).__mro__]
    assert any(word in " ".join(doc.split()) for doc in known for word in words), method
