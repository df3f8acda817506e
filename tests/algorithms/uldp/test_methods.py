"""Uldp-FL: each method equals its plain loop; one user moves a sum by at most the clipping norm."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict

from flower_ext.algorithms import DPFedAvg
from flower_ext.algorithms.uldp import (
    UldpGroup,
    UldpNaive,
)
from flower_ext.algorithms.uldp.averaging import UldpAvg, UldpSgd
from flower_ext.data import group_size
from flower_ext.federation import FederatedStrategy, InProcessGrid, Sgd
from flower_ext.federation.client.node import NodePolicy
from flower_ext.federation.client.requests import ClientRequest
from flower_ext.federation.messages import records
from flower_ext.federation.messages.round_entries import RoundEntries
from flower_ext.federation.server.run_guarantees import spent_by
from flower_ext.privacy import (
    FullParticipation,
    NonPrivatePlan,
    PoissonSampling,
    PrivacyUnit,
)
from flower_ext.privacy.mechanisms.protections import ProtectedByTraining
from tests.support.grids import grid
from tests.support.reference import uldp as reference
from tests.support.reference.comparing import close
from tests.support.silos import (
    COMMON,
    LOCAL,
    ROUNDS,
    SEED,
    SILOS,
    USERS,
    histogram,
    plan,
    silo,
    silos,
    task,
)
from tests.support.strategies import strategy_of
from tests.support.uldp_runs import DP_SGD, grouped, run

ALL, SOME = FullParticipation(USERS), PoissonSampling(USERS, 0.4)


@pytest.mark.parametrize(
    ("method", "weighting", "sampling"),
    grid(
        product([UldpAvg, UldpSgd], ["equal", "by-records"], [ALL, SOME]),
        {(UldpAvg, "by-records", SOME), (UldpSgd, "equal", ALL)}.__contains__,
    ),
)
def test_averaging_equals_the_plain_loop(method, weighting, sampling):
    local = {"local": LOCAL} if method is UldpAvg else {}
    strategy = strategy_of(method, plan=plan(sampling), weighting=weighting, **local, **COMMON)
    ours = run(strategy)
    assert strategy.refusals == []
    theirs = reference.averaging(
        silos(),
        task().initial_params(SEED),
        plan(sampling),
        seed=SEED,
        rounds=ROUNDS,
        weighting=weighting,
        local=local.get("local"),
        server_rate=5.0,
    )
    close(ours, theirs)
    assert not torch.allclose(ours["head.weight"], task().initial_params(SEED)["head.weight"])


def test_naive_equals_the_plain_loop_also_with_an_empty_silo():
    data = [*silos(2), silo(2, records_=0)]
    strategy = strategy_of(UldpNaive, plan=plan(), local=LOCAL, **COMMON)
    ours = run(strategy, data)
    assert strategy.refusals == []
    start = task().initial_params(SEED)
    rest = {"seed": SEED, "rounds": ROUNDS, "local": LOCAL, "server_rate": 5.0}
    close(ours, reference.naive(data, start, plan(), **rest))


@pytest.mark.parametrize("size", grid([2, "median", "max"], lambda size: size != "max"))
def test_group_equals_the_plain_loop_on_records_that_never_change(size):
    strategy = grouped(size)
    ours = run(strategy)
    assert strategy.refusals == []
    held = histogram(silos(), USERS)
    drawn = strategy.run.state.server["record-limits"]
    limits, k = drawn["by-user"], int(drawn["k"])
    assert k == group_size(held, size)
    np.testing.assert_array_equal(limits.sum(axis=0), np.minimum(held.sum(axis=0), k))
    start = task().initial_params(SEED)
    rest = {"seed": SEED, "rounds": ROUNDS, "server_rate": 5.0}
    theirs = reference.group(silos(), start, limits, DP_SGD, **rest)
    # Clipping leaves a margin of 1e-5, which the server's rate multiplies by five.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-5)


def group_uploads(strategy, *, least=0.0, **asked_instead):
    """Return all silos' answers in the first round to a server that asks for other settings.

    The silos' owners require the noise multiplier ``least``.
    """
    grid = InProcessGrid(UldpGroup.client_app(task(), allow_seeded_noise=True), num_clients=SILOS)
    for context in grid.contexts.values():
        context.node_config["least-noise-multiplier"] = least
    start = ArrayRecord(task().initial_params(SEED))
    strategy.run.progress.begin()
    questions = strategy.configure_train(1, start, ConfigRecord(), grid)
    for question in questions:
        question.content["settings"].update({f"dp-sgd.{n}": v for n, v in asked_instead.items()})
    return list(grid.send_and_receive(questions))


@pytest.mark.parametrize(
    ("least", "asked", "takes_part"),
    [
        (1.0, {}, True),
        (1.001, {}, False),
        (0.5, {"noise_multiplier": 0.6}, True),
        (0.5, {"noise_multiplier": 0.4}, False),
        (0.5, {"noise_multiplier": math.nan}, False),
        (0.5, {"noise_multiplier": "much"}, False),
        (math.nan, {}, False),
    ],
)
def test_a_silos_owner_sets_the_least_noise_of_its_dp_sgd(least, asked, takes_part):
    local = replace(DP_SGD, noise_multiplier=1.0)
    answers = group_uploads(grouped(2, local=local), least=least, **asked)
    assert [answer.has_error() for answer in answers] == [not takes_part] * SILOS


def test_a_claim_of_noised_training_is_refused_by_methods_without_it():
    node = Context(1, 1, {"least-noise-multiplier": 0.1}, RecordDict(), {})
    claim = ClientRequest(
        round=RoundEntries(number=1, seed=0, protection=ProtectedByTraining()),
        settings={"dp-sgd.noise_multiplier": 5.0},
    )
    with pytest.raises(PermissionError, match="noise multiplier of 0 on this client"):
        NodePolicy(node, allow_seeded_noise=False).admit(claim, DPFedAvg.client)


def test_which_records_a_step_takes_is_a_secret_unless_noise_is_seeded():
    """Amplification needs the secret, so the run's seed, which the server has, must not tell."""
    quiet = replace(DP_SGD, noise_multiplier=1e-9)

    def sent(seeded):
        answers = group_uploads(grouped("max", local=quiet, seeded_noise=seeded))
        updates = [records.to_arrays(answer.content["update"]) for answer in answers]
        return np.concatenate([a.ravel() for update in updates for a in update.values()])

    np.testing.assert_array_equal(sent(True), sent(True))
    assert np.abs(sent(False) - sent(False)).max() > 1e-3
    assert np.abs(sent(False) - sent(True)).max() > 1e-3


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_silo_refuses_steps_without_noise_whatever_the_server_asks_for(value):
    for answer in group_uploads(grouped(2), noise_multiplier=value):
        assert "noise_multiplier=" in answer.error.reason


def test_group_promises_what_its_steps_cost():
    strategy = grouped(3)
    run(strategy)
    published, provable = strategy.guarantees()
    assert (published.basis, provable.basis) == ("published", "provable")
    assert all(g.unit is PrivacyUnit.USER for g in (published, provable))
    assert any("records each user has" in text for text in provable.not_covered)
    spent = spent_by(strategy.run)
    assert spent["epsilon_provable"] == provable.epsilon > 0
    assert spent["epsilon_published"] == published.epsilon > 0
    longer = grouped(3)
    run(longer, rounds=ROUNDS + 1)
    assert longer.guarantees()[1].epsilon > provable.epsilon


def test_the_default_without_privacy_is_fedavg_between_the_silos():
    strategy = FederatedStrategy(
        DPFedAvg(local=LOCAL, server=Sgd(learning_rate=1.5)),
        NonPrivatePlan(sampling=FullParticipation(SILOS)),
        seed=SEED,
    )
    ours = run(strategy)
    world = task().initial_params(SEED)
    for t in range(1, ROUNDS + 1):
        deltas = [
            reference.trained(
                world, one.train, LOCAL.in_round(t), reference.batch_order(SEED, s, t)
            )
            for s, one in enumerate(silos())
        ]
        world = {n: p + 1.5 * sum(d[n] for d in deltas) / SILOS for n, p in world.items()}
    close(ours, world)
