"""Guarantees, metrics and messages of runs whose clients perturb their models."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import nn

from flower_ext.algorithms import DPFedAvg, Scaffold
from flower_ext.federation import FederatedStrategy, FederationNotReady, InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.privacy import (
    Budget,
    FixedSizeSampling,
    FullParticipation,
    NonPrivatePlan,
    PerturbationPlan,
    ReleasePlan,
)
from flower_ext.privacy.theorems.upcycled_theorem import (
    perturbation_guarantees,
    upcycled_theorem_6_3,
)
from flower_ext.runs import RunWriter
from flower_ext.training import LocalTraining, Task
from tests.support import worlds
from tests.support.protected_updates import (
    CLIENTS,
    EXACT,
    KNOWN,
    MU,
    OBJECTIVE,
    OUTPUT,
    initial,
    of_training,
    plan,
    private_plan,
    run,
    task,
)
from tests.support.run_summary import run_summary
from tests.support.strategies import strategy_of
from tests.support.travelling import Recorder, Tampering


@pytest.mark.parametrize("perturbation", [OUTPUT, OBJECTIVE])
def test_a_runs_guarantees_rest_on_its_uploads_sizes_and_training(perturbation):
    """With sampled cohorts there is no amplification: each client counts by its own requests."""
    sizes = {0: 12, 1: 30, 2: 7, 3: 9}
    app = DPFedAvg.client_app(task(sizes))
    sampled = plan(perturbation, sampling=FixedSizeSampling(4, 2))
    strategy, grid = run(sampled, app=app, clients=4, rounds=5, seed=3)
    clients = [m.metadata.dst_node_id - 1_000 for m in of_training(grid.sent)]
    counts = {client: clients.count(client) for client in set(clients)}
    assert sum(counts.values()) == 10
    assert len(set(counts.values())) > 1
    trained_objective = replace(
        KNOWN, proximal_weight=MU, distance_to_minimiser=1e-10 / MU, memoryless=True
    )
    expected = perturbation_guarantees(
        perturbation,
        trained_objective,
        run_summary(
            counts, num_examples=sizes, not_covered=["whether and when each client answered"]
        ),
        delta=1e-3,
    )
    assert [replace(one, units=None) for one in strategy.guarantees()] == expected
    assert strategy.guarantees()[0].units == sum(strategy.run.num_examples.values())
    assert math.isfinite(expected[1].epsilon)
    if perturbation is OBJECTIVE:
        assert expected[1].epsilon == max(
            upcycled_theorem_6_3(
                OBJECTIVE, trained_objective, num_examples=sizes[c], participations=counts[c]
            )
            for c in counts
        )


def test_the_numbers_of_a_round_say_what_was_spent():
    strategy, _ = run(plan(OUTPUT), rounds=2)
    published, provable = strategy.guarantees()
    assert strategy.run.progress.row["epsilon_published"] == published.epsilon
    assert strategy.run.progress.row["epsilon_provable"] == provable.epsilon


def test_training_by_sgd_is_not_taken_for_an_exact_minimiser():
    sgd = LocalTraining(epochs=1, proximal_weight=MU)
    _, provable = run(plan(OUTPUT), local=sgd)[0].guarantees()
    assert "sensitivity 2τ = 1.6" in provable.source
    published, provable = run(plan(OBJECTIVE), local=sgd)[0].guarantees()
    assert math.isfinite(published.epsilon)
    assert math.isinf(provable.epsilon)


def test_a_method_whose_clients_remember_is_not_taken_for_memoryless():
    sgd = LocalTraining(epochs=1, proximal_weight=MU)
    for method, remembers in ((Scaffold, True), (DPFedAvg, False)):
        grid = Recorder(method.client_app(task()), num_clients=CLIENTS)
        strategy = strategy_of(method, plan=plan(OBJECTIVE), local=sgd, evaluate_every=0)
        strategy.start(grid, initial(), num_rounds=1)
        assert strategy.refusals == []
        for guarantee in strategy.guarantees():
            assert ("clients keep no state" in guarantee.statement()) == remembers


def test_the_number_of_examples_is_sent_only_for_record_level_privacy():
    for the_plan, is_sent in ((plan(OUTPUT), True), (private_plan(), False)):
        strategy, grid = run(the_plan)
        for reply in of_training(grid.received):
            assert (records.METRICS in reply.content) == is_sent
        assert strategy.run.num_examples == (dict.fromkeys(range(CLIENTS), 12) if is_sent else {})


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.layer(x) * self.temperature


@pytest.mark.parametrize(
    "the_plan",
    [
        NonPrivatePlan(sampling=FullParticipation(3)),
        ReleasePlan(
            sampling=FullParticipation(3),
            clipping_norm=1.0,
            noise_multiplier=1.0,
            rounds=1,
            delta=0.1,
        ),
        PerturbationPlan(sampling=FullParticipation(3), perturbation=OUTPUT, delta=0.1),
    ],
    ids=["none", "release", "perturbation"],
)
def test_a_model_with_a_scalar_parameter_can_be_trained(the_plan):
    world = Task(model=Scaled, data=worlds.client_data, device="cpu")
    grid = InProcessGrid(DPFedAvg.client_app(world), num_clients=3)
    result = FederatedStrategy(DPFedAvg(local=LocalTraining(epochs=1)), the_plan).start(
        grid, ArrayRecord(world.initial_params(0)), num_rounds=1
    )
    assert result.arrays["temperature"].numpy().shape == ()


@pytest.mark.parametrize("lie", [0.5, *(pytest.param(n, marks=pytest.mark.full) for n in (0, -3))])
def test_one_client_that_sends_an_invalid_size_does_not_end_the_run(lie):
    grid = Tampering(DPFedAvg.client_app(task()), num_clients=CLIENTS)

    def tell(reply):
        reply.content["metrics"] = MetricRecord({"num-examples": lie})
        return [reply]

    grid.tamper = {1: tell}
    strategy = FederatedStrategy(DPFedAvg(local=EXACT), plan(), evaluate_every=0)
    strategy.start(grid, initial(), num_rounds=1)
    assert strategy.guarantees()


def test_a_size_that_changes_between_rounds_is_accounted_by_the_smallest():
    sizes = iter([5] * CLIENTS + [5000] * CLIENTS)
    grid = Tampering(DPFedAvg.client_app(task()), num_clients=CLIENTS)

    def tell(reply):
        reply.content["metrics"] = MetricRecord({"num-examples": next(sizes)})
        return [reply]

    grid.tamper = dict.fromkeys(range(CLIENTS), tell)
    strategy = FederatedStrategy(DPFedAvg(local=EXACT), plan(), evaluate_every=0)
    strategy.start(grid, initial(), num_rounds=2)
    assert set(strategy.run.num_examples.values()) == {5}


ENDLESS = Budget(epsilon=1e9, delta=1e-3)
"""A budget for which the server asks each client's number of examples before the first round."""


@pytest.mark.parametrize("perturbation", [OUTPUT, OBJECTIVE])
def test_a_client_without_examples_ends_no_run_that_has_a_budget(perturbation):
    sizes = {0: 12, 1: 0, 2: 9}
    app = DPFedAvg.client_app(task(sizes))
    strategy, _ = run(plan(perturbation), app=app, rounds=2, budget=ENDLESS)
    assert strategy.run.num_examples == {0: 12, 2: 9}
    if perturbation is OUTPUT:
        assert strategy.stopped is None
        assert strategy.participations.rounds == 2
    else:  # Theorem 6.3 gives no ε for a client of unknown size
        assert "ε = inf" in strategy.stopped


@pytest.mark.parametrize("size", [np.array([12, 12]), np.array(-1), np.array(2.5), None])
def test_a_malformed_size_is_named_with_its_client(size):
    class Odd(InProcessGrid):
        def send_and_receive(self, messages, *, timeout=None):
            replies = list(super().send_and_receive(messages, timeout=timeout))
            for reply in replies:
                if reply.metadata.message_type.startswith("query.dp") and self.is_odd(reply):
                    answer = {} if size is None else {"num-examples": size}
                    reply.content[records.ANSWER] = records.to_record(answer)
            return replies

        def is_odd(self, reply):
            return reply.metadata.src_node_id == 1_001

    grid = Odd(DPFedAvg.client_app(task()), num_clients=CLIENTS)
    strategy = FederatedStrategy(DPFedAvg(local=EXACT), plan(), evaluate_every=0, budget=ENDLESS)
    with pytest.raises(FederationNotReady, match=r"partitions \[1\] cannot take part: .*num-ex"):
        strategy.start(grid, initial(), num_rounds=1)


def test_a_size_that_grows_before_a_resumed_run_lowers_no_epsilon(tmp_path):
    def epsilon(directory, rounds, size):
        app = DPFedAvg.client_app(task(dict.fromkeys(range(CLIENTS), size)))
        strategy, _ = run(plan(), app=app, rounds=rounds, budget=ENDLESS, directory=directory)
        directory.close()
        return strategy.guarantees()[1].epsilon

    once = epsilon(RunWriter.create(tmp_path / "run", {}), 1, 60)
    assert epsilon(RunWriter.resume(tmp_path / "run"), 2, 6_000) > once
