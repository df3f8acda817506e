"""APFL equals a plain loop, and uploads what DP-FedAvg uploads, whatever the personal model is."""

from itertools import product

import numpy as np
import pytest
import torch

from flower_ext.algorithms import APFL, DPFedAvg
from flower_ext.algorithms.apfl import WEIGHT
from flower_ext.federation import InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.privacy import (
    ClippedSteps,
    FullParticipation,
    NonPrivatePlan,
    RecordLevelPlan,
    ReleasePlan,
)
from flower_ext.training import LocalTraining, evaluate
from tests.support.grids import grid
from tests.support.personalised import (
    CLIENTS,
    ROUNDS,
    SEED,
    SGD,
    OneByOne,
    assert_close,
    run,
    uneven_data,
    uneven_task,
)
from tests.support.reference.personalised import federated, mixture
from tests.support.travelling import Recorder
from tests.support.worlds import task

ALL = FullParticipation(CLIENTS)
RECORDS = {"sampling": ALL, "clipping_norm": 2.0, "num_examples": 30, "rounds": 3, "delta": 0.01}
STEPS = ClippedSteps(
    learning_rate=0.2, gradient_clipping_norm=0.5, num_examples=30, local_steps=8, batch_size=8
)
PLANS = {
    "no privacy": NonPrivatePlan(sampling=ALL),
    "clients": ReleasePlan(
        sampling=ALL, clipping_norm=0.5, noise_multiplier=1.0, rounds=3, delta=0.01
    ),
    "records": RecordLevelPlan(noise_stddev=0.1, **RECORDS),
    "records, noise in steps": RecordLevelPlan(noise_stddev=0.01, steps=STEPS, **RECORDS),
}


@pytest.mark.parametrize(
    ("alpha", "rate", "grid"),
    grid(
        [
            (*weights, engine)
            for weights in ((0.3, 0.0), (0.5, 0.2), (1.0, 0.0))
            for engine in (InProcessGrid, OneByOne)
        ],
        {(0.3, 0.0, OneByOne), (0.5, 0.2, InProcessGrid), (1.0, 0.0, InProcessGrid)}.__contains__,
    ),
)
def test_it_equals_the_plain_loop_and_evaluates_the_mixture(grid, alpha, rate):
    method = APFL(personal_weight=alpha, weight_learning_rate=rate, local=SGD)
    shared, memories, strategy, _ = run(method, grid=grid)
    expected, _, theirs = federated(
        mixture,
        uneven_task(),
        seed=SEED,
        clients=CLIENTS,
        rounds=ROUNDS,
        local=SGD,
        alpha=alpha,
        alpha_rate=rate,
    )
    assert strategy.refusals == []
    assert_close(shared, expected)
    for client, memory in memories.items():
        weight = float(memory.pop(WEIGHT))
        assert weight == pytest.approx(theirs[client]["alpha"], abs=1e-6)
        assert (weight == alpha) is (rate == 0)
        assert_close(memory, theirs[client]["v"])
        used = {name: weight * v + (1 - weight) * shared[name] for name, v in memory.items()}
        score = evaluate(uneven_task(), used, uneven_data(client).test)["loss"]
        assert strategy.run.client_metrics[client]["loss"] == pytest.approx(score, abs=1e-6)


def test_an_adaptive_weight_is_clamped():
    method = APFL(personal_weight=0.9, weight_learning_rate=1e4, local=SGD)
    weights = [float(memory[WEIGHT]) for memory in run(method)[1].values()]
    assert set(weights) <= {0.0, 0.9, 1.0}
    assert set(weights) & {0.0, 1.0}


@pytest.mark.parametrize("plan", PLANS)
def test_its_shared_model_is_that_of_dp_fedavg_bit_for_bit(plan):
    method = APFL(weight_learning_rate=0.5, local=SGD)
    ours, *_, strategy, _ = run(method, PLANS[plan], task=task())
    theirs, *_ = run(DPFedAvg(local=SGD), PLANS[plan], task=task())
    assert strategy.refusals == []
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def diverged(v, w, alpha):
    return {name: p * float("nan") for name, p in v.items()}


def failed(v, w, alpha):
    raise RuntimeError("a record")


@pytest.mark.parametrize(
    ("plan", "spoil"),
    grid(
        product(["clients", "records", "records, noise in steps"], [diverged, failed]),
        lambda case: case[0] == "clients" or case[1] is diverged,
    ),
)
def test_a_personal_model_that_fails_stays_unchanged_and_moves_no_upload(plan, spoil, monkeypatch):

    def uploads():
        options = {"task": task(), "grid": Recorder, "evaluate_every": 0}
        _, memories, strategy, grid = run(APFL(local=SGD), PLANS[plan], **options)
        assert strategy.refusals == []
        return memories, [
            array.numpy()
            for message in grid.received
            if message.has_content() and records.UPDATE in message.content.array_records
            for array in message.content.array_records[records.UPDATE].values()
        ]

    _, usual = uploads()
    monkeypatch.setattr("flower_ext.algorithms.apfl.mixture", spoil)
    memories, spoiled = uploads()
    assert len(usual) == len(spoiled) == 4 * ROUNDS * CLIENTS
    assert all(np.array_equal(one, other) for one, other in zip(usual, spoiled, strict=True))
    start = task().initial_params(SEED)
    for memory in memories.values():
        personal = {name: memory[name] for name in start}
        torch.testing.assert_close(personal, start, rtol=0, atol=0)


def test_messages_contain_no_personal_model_and_no_weight_of_it():
    method = APFL(weight_learning_rate=0.05, local=SGD)
    _, memories, _, grid = run(method, grid=Recorder)
    contents = [m.content for m in (*grid.sent, *grid.received) if m.has_content()]
    sent = [array for content in contents for array in content.array_records.values()]
    arrays = [array.numpy() for record in sent for array in record.values()]
    texts = [
        repr(dict(record))
        for content in contents
        for record in (*content.config_records.values(), *content.metric_records.values())
    ]
    assert not any(WEIGHT in record for record in sent)
    for memory in memories.values():
        weight = float(memory.pop(WEIGHT))
        assert weight not in (0.0, 0.5, 1.0)
        assert not any(str(weight)[:9] in text for text in texts)
        for secret in map(torch.Tensor.numpy, memory.values()):
            alike = [array for array in arrays if array.shape == secret.shape]
            assert alike
            assert not any(np.allclose(array, secret, atol=1e-6) for array in alike)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"personal_weight": 1.5}, r"personal_weight=1.5: expected a number in \[0, 1\]"),
        ({"personal_weight": float("nan")}, "personal_weight=nan"),
        ({"weight_learning_rate": -1.0}, "weight_learning_rate=-1.0"),
        ({"local": LocalTraining(momentum=0.5)}, "local.momentum=0.5: leave it out"),
        ({"local": LocalTraining(sam_radius=0.5)}, "local.sam_radius=0.5: leave it out"),
    ],
)
def test_values_out_of_range_and_other_steps_than_sgd_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        APFL(**options)
