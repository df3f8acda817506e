"""DP-Ditto and its baselines equal the plainest loops that compute the same."""

from functools import cache

import pytest
import torch
from flwr.app import ArrayRecord

from flower_ext.algorithms import Apple, DPDitto, FedALA, FedAMP, PFedMe
from flower_ext.federation import FederatedStrategy, InProcessGrid, client_app
from flower_ext.federation.messages import records
from flower_ext.privacy import ClippedSteps, FullParticipation, NonPrivatePlan, RecordLevelPlan
from flower_ext.training import LocalTraining, evaluate, untagged
from tests.support.grids import grid as grid_of
from tests.support.personalised import OneByOne
from tests.support.reference.comparing import close, flat
from tests.support.reference.dp_ditto import METHODS, federated
from tests.support.strategies import strategy_of
from tests.support.worlds import client_data, task

SEED, ROUNDS, CLIENTS = 4, 4, 5
SAMPLING = FullParticipation(CLIENTS)
CLIP, STDDEV = 2.0, 0.02
STEPS = ClippedSteps(
    learning_rate=0.1, gradient_clipping_norm=0.6, num_examples=30, local_steps=6, batch_size=10
)
PLANS = {
    "plain": NonPrivatePlan(sampling=SAMPLING),
    "noised": RecordLevelPlan(
        sampling=SAMPLING,
        clipping_norm=CLIP,
        noise_stddev=STDDEV,
        num_examples=30,
        rounds=ROUNDS,
        delta=0.01,
    ),
    "steps": RecordLevelPlan(
        sampling=SAMPLING,
        clipping_norm=CLIP,
        noise_stddev=STDDEV,
        num_examples=30,
        rounds=ROUNDS,
        delta=0.01,
        steps=STEPS,
    ),
}
PROTECTION = {
    "plain": {},
    "noised": {"clip": CLIP, "stddev": STDDEV},
    "steps": {"clip": CLIP, "stddev": 0.0},
}
SGD = LocalTraining(epochs=2, batch_size=10, learning_rate=0.1)
LOCAL = {"epochs": 2, "batch": 10, "rate": 0.1}
PERSONAL = LocalTraining(epochs=1, batch_size=8, learning_rate=0.2)

OURS = {
    "ditto": lambda **o: strategy_of(
        DPDitto, global_weight=0.6, local=SGD, personal_training=PERSONAL, **o
    ),
    "pfedme": lambda **o: strategy_of(
        PFedMe,
        attraction=3.0,
        local=SGD,
        personal_training=LocalTraining(steps=3, learning_rate=0.1),
        **o,
    ),
    "fedamp": lambda **o: strategy_of(FedAMP, attention_width=4.0, attraction=0.7, local=SGD, **o),
    "apple": lambda **o: strategy_of(
        Apple, relation_learning_rate=0.05, penalty=0.4, penalty_rounds=3, local=SGD, **o
    ),
    "fedala": lambda **o: strategy_of(
        FedALA, weight_learning_rate=2.0, sample_fraction=0.5, first_passes=3, local=SGD, **o
    ),
}
NUMBERS = {
    "ditto": {
        "local": LOCAL,
        "personal": {"epochs": 1, "batch": 8, "rate": 0.2},
        "weight": 0.6,
    },
    "pfedme": {"local": LOCAL, "attraction": 3.0, "inner_steps": 3, "inner_rate": 0.1},
    "fedamp": {"local": LOCAL, "attraction": 0.7, "width": 4.0, "step": 4.0 / CLIENTS},
    "apple": {"local": LOCAL, "rate": 0.05, "penalty": 0.4, "fade": 3},
    "fedala": {"local": LOCAL, "rate": 2.0, "share": 0.5, "first": 3},
}
KEPT = {"ditto": "", "pfedme": "", "fedamp": "", "apple": "personal", "fedala": "model"}
PAIRS = [(m, p) for m in METHODS for p in ("plain", "noised")] + [("ditto", "steps")]


def run(strategy, grid=InProcessGrid):
    methods = (DPDitto, PFedMe, FedAMP, Apple, FedALA)
    app = client_app(*(m.client for m in methods), task=task(), allow_seeded_noise=True)
    nodes = grid(app, num_clients=CLIENTS)
    result = strategy.start(nodes, ArrayRecord(task().initial_params(SEED)), num_rounds=ROUNDS)
    assert strategy.refusals == []
    memory = {
        int(context.node_config["partition-id"]): records.to_params(record)
        for context in nodes.contexts.values()
        for record in context.state.array_records.values()
    }
    return records.to_params(result.arrays), memory


@cache
def ours(method, plan, grid=InProcessGrid):
    common = {"plan": PLANS[plan], "seed": SEED, "seeded_noise": True, "evaluate_every": ROUNDS}
    strategy = OURS[method](training_loss=True, **common)
    return *run(strategy, grid), strategy


@cache
def theirs(method, plan):
    """Return what the plain loop of the reference gives."""
    numbers = dict(NUMBERS[method])
    if plan == "steps":
        numbers["steps"] = {"clip": STEPS.gradient_clipping_norm, "stddev": STDDEV}
    return federated(
        method, seed=SEED, clients=CLIENTS, rounds=ROUNDS, **PROTECTION[plan], **numbers
    )


def personal(method, memory):
    return untagged(memory, KEPT[method]) if KEPT[method] else memory


DAILY = {
    *(("pfedme", "plain"), ("fedala", "plain"), ("fedamp", "noised"), ("apple", "noised")),
    ("ditto", "steps"),
}
every = pytest.mark.parametrize(("method", "plan"), grid_of(PAIRS, DAILY.__contains__))


@every
def test_every_method_equals_its_plain_loop(method, plan):
    close(flat(ours(method, plan)[0]), theirs(method, plan)[0])


@every
def test_personal_models_equal_those_of_the_plain_loop(method, plan):
    memory, expected = ours(method, plan)[1], theirs(method, plan)[1]
    assert set(memory) == set(range(CLIENTS))
    for client, kept in memory.items():
        close(flat(personal(method, kept)), expected[client]["v"])


@pytest.mark.parametrize("plan", ["plain", "noised"])
def test_apples_relations_and_fedalas_weights_equal_those_of_the_plain_loop(plan):
    for client in range(CLIENTS):
        kept = ours("apple", plan)[1][client]
        close(kept["relation"].float(), theirs("apple", plan)[1][client]["p"])
        assert kept["relation"].std() > 1e-3
        weights = untagged(ours("fedala", plan)[1][client], "weights")
        assert set(weights) == {"head.weight", "head.bias"}
        learned = torch.cat([weights[name].flatten() for name in ("head.weight", "head.bias")])
        close(learned, theirs("fedala", plan)[1][client]["weights"])
        assert 0 <= learned.min() < learned.max() <= 1


@every
def test_a_cohort_at_once_equals_clients_one_by_one(method, plan):
    together, alone = ours(method, plan), ours(method, plan, OneByOne)
    close(flat(together[0]), flat(alone[0]))
    for client, kept in together[1].items():
        for name, value in kept.items():
            close(value, alone[1][client][name])


@every
def test_the_personal_model_is_what_is_evaluated_and_its_training_loss_reported(method, plan):
    _, memory, strategy = ours(method, plan)
    for client, kept in memory.items():
        client_examples, data = personal(method, kept), client_data(client)
        scores = strategy.run.client_metrics[client]
        assert scores["loss"] == pytest.approx(
            evaluate(task(), client_examples, data.test)["loss"], abs=1e-5
        )
        on_training = evaluate(task(), client_examples, data.train)["loss"]
        assert scores["training_loss"] == pytest.approx(on_training, abs=1e-5)


def test_the_methods_differ_from_one_another_and_each_from_itself_with_noise():
    finals = {pair: flat(ours(*pair)[0]) for pair in PAIRS}
    pairs = list(finals)
    for i, one in enumerate(pairs):
        for other in pairs[i + 1 :]:
            if {one, other} != {("ditto", "plain"), ("fedala", "plain")}:
                assert not torch.allclose(finals[one], finals[other], atol=1e-3), (one, other)


def ditto(weight, rate=0.2):
    training = LocalTraining(epochs=1, batch_size=8, learning_rate=rate)
    strategy = FederatedStrategy(
        DPDitto(global_weight=weight, local=SGD, personal_training=training),
        PLANS["plain"],
        seed=SEED,
        evaluate_every=0,
    )
    return run(strategy)


@pytest.mark.parametrize("weight", [0.0, 1.999999, 2.0])
def test_both_ends_of_the_global_weight_equal_the_plain_loop(weight):
    numbers = {**NUMBERS["ditto"], "weight": weight}
    shared, memory = federated("ditto", seed=SEED, clients=CLIENTS, rounds=ROUNDS, **numbers)
    model, kept = ditto(weight)
    close(flat(model), shared)
    for client in range(CLIENTS):
        close(flat(kept[client]), memory[client]["v"])


def test_weight_2_makes_personal_models_equal_and_weight_0_keeps_noise_out():
    _, kept = ditto(2.0)
    for client in range(1, CLIENTS):
        close(flat(kept[client]), flat(kept[0]))
    _, alone = ditto(0.0)
    noised = FederatedStrategy(
        DPDitto(global_weight=0.0, local=SGD, personal_training=PERSONAL),
        PLANS["noised"],
        seed=SEED,
        seeded_noise=True,
        evaluate_every=0,
    )
    _, kept = run(noised)
    for client in range(CLIENTS):
        close(flat(kept[client]), flat(alone[client]))
