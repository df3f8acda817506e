"""A client refuses requests that an honest server does not send."""

import math

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from flower_ext.algorithms import DP2FedSAM, DPDitto, DPFedAvg
from flower_ext.data.users import MOST_USERS, owned
from flower_ext.errors import InvalidValue
from flower_ext.federation import FederatedStrategy, InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.federation.sums.weighted import LOST, OpenWeightedSum
from flower_ext.privacy import (
    FullParticipation,
    NonPrivatePlan,
)
from tests.support import silos as uldp
from tests.support.hostile import CLIENTS, FAST, plan
from tests.support.replies import reply
from tests.support.worlds import initial, task


def answer_to(facts: dict, *, strategy=None, node_config=None, **changes):
    """Return a client's reply to changed facts of the server; ``None`` removes a fact."""
    strategy = strategy or FederatedStrategy(DPFedAvg(local=FAST), plan())
    grid = InProcessGrid(strategy.method.client_app(task()), CLIENTS)
    for context in grid.contexts.values():
        context.node_config |= node_config or {}
    question = strategy.configure_train(1, initial(), ConfigRecord(), grid)[0]
    told_facts = question.content.config_records[records.ROUND]
    for name, value in facts.items():
        if value is None:
            del told_facts[name]
        else:
            told_facts[name] = value
    (answer,) = grid.send_and_receive([question])
    return answer


@pytest.mark.parametrize(
    "facts",
    [
        {"noise-stddev": 0.0},
        {"noise-stddev": math.nan},
        {"noise-stddev": 1e-300},  # would vanish in the update
        {"clipping-norm": -1.0},
        {"clipping-norm": math.inf},
        {"noise-stddev": None},
        {"clipping-norm": None},  # bounds nothing, so the update would leave unchanged
        {"protection": None},
        {"protection": "another"},
        {"protection": "OutputPerturbation"},  # this plan has updates on a grid
        # Claims that every step was noised, although no step was asked to be.
        {"protection": "ClipSteps", "gradient-clipping-norm": 1.0},
        {"protection": "ProtectedByServer"},
        {"protection": "ObjectivePerturbation", "rate": 1.0},
        {"seeded-noise": True},
        {"seeded-noise": None},
        {"seeded-noise": "no"},
        {"number": 0},
        {"seed": -1},
        {"remembered": -1},
        {"remembered": 1.5},
        {"remembered": True},
        {"run": 7},
        {"noise": 1.0},
    ],
)
def test_half_a_protection_is_none_and_nothing_leaves(facts):
    assert answer_to(facts).has_error()
    assert not answer_to({}).has_error()


@pytest.mark.parametrize(
    ("changes", "least", "takes_part"),
    [
        ({}, 0.4, True),  # σ/√cohort = 1/2
        ({}, 0.6, False),
        ({"noise_placement": "server"}, 0.1, False),
        ({"noise_placement": "server"}, 0, True),
    ],
)
def test_the_owner_of_a_node_sets_the_least_noise(changes, least, takes_part):
    strategy = FederatedStrategy(DPFedAvg(local=FAST), plan(**changes))
    answer = answer_to({}, strategy=strategy, node_config={"least-noise-multiplier": least})
    assert answer.has_error() is not takes_part
    if not takes_part:
        assert "least-noise-multiplier" in answer.error.reason


def test_an_absurd_cohort_leaves_a_share_of_noise_that_the_owner_refuses():
    tiny = plan().mechanism().client_noise_stddev(10**12)
    config = {"least-noise-multiplier": 0.01}
    assert answer_to({"noise-stddev": tiny}, node_config=config).has_error()


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_model_that_trains_to_nonsense_is_not_remembered(value):
    strategy = FederatedStrategy(
        DPDitto(local=FAST, personal_training=FAST),
        NonPrivatePlan(sampling=FullParticipation(CLIENTS)),
    )
    grid = InProcessGrid(DPDitto.client_app(task()), CLIENTS)
    grid.send_and_receive(strategy.configure_train(1, initial(), ConfigRecord(), grid))
    before = {node: dict(context.state) for node, context in grid.contexts.items()}
    assert all(before.values())
    wrong = {name: torch.full_like(p, value) for name, p in task().initial_params(0).items()}
    requests = strategy.configure_train(2, initial(), ConfigRecord(), grid)
    for question in requests:
        question.content[records.MODEL] = ArrayRecord(wrong)
    assert all(answer.has_error() for answer in grid.send_and_receive(requests))
    for node, context in grid.contexts.items():
        assert all(context.state[key] is kept for key, kept in before[node].items())


def test_a_server_that_begins_to_share_the_head_does_not_get_it():
    grid = InProcessGrid(DP2FedSAM.client_app(task()), CLIENTS)
    honest = FederatedStrategy(DP2FedSAM(head=FAST, extractor=FAST), plan())
    grid.send_and_receive(honest.configure_train(1, initial(), ConfigRecord(), grid))
    curious = FederatedStrategy(DP2FedSAM(personal=("nothing",), head=FAST, extractor=FAST), plan())
    requests = curious.configure_train(2, initial(), ConfigRecord(), grid)
    assert "head.weight" in requests[0].content.array_records[records.MODEL]
    replies = list(grid.send_and_receive(requests))
    assert all(
        "lack the personal parameters of earlier rounds" in reply.error.reason for reply in replies
    )


def test_silos_allocate_nothing_for_impossible_numbers_of_users():
    with pytest.raises(ValueError, match=f"1 … {MOST_USERS}"):
        owned(uldp.silo(0), MOST_USERS + 1)


@pytest.mark.parametrize("data", [np.zeros(3, np.uint8), np.ones(1, np.uint8), np.zeros(1)])
def test_lost_keys_are_reported_in_one_form_only(data):
    content = RecordDict({"update": records.to_record({LOST: data})})
    opened = object.__new__(OpenWeightedSum)
    with pytest.raises(InvalidValue, match="lost"):
        opened.read(reply(content))
