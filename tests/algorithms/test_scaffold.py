"""SCAFFOLD's control variates, also with momentum, lost replies, resumed runs and perturbation."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from flower_ext.algorithms import FedDyn, Scaffold
from flower_ext.data import ClientData, Examples
from flower_ext.federation import ClientMemory, FederatedStrategy, InProcessGrid, RefusedReply
from flower_ext.federation.messages import records
from flower_ext.federation.messages.upload_reply import Update
from flower_ext.privacy import (
    FixedSizeSampling,
    FullParticipation,
    NonPrivatePlan,
    OutputPerturbation,
    PerturbationPlan,
    ReleasePlan,
)
from flower_ext.training import LocalTraining, Task
from tests.support.dying_runs import Died
from tests.support.grids import grid
from tests.support.least_squares import (
    LOCAL,
    LOST,
    LosingGrid,
    optimum,
    play,
    start,
    trained,
)
from tests.support.strategies import strategy_of

CLIENTS = 4
EVERYONE = NonPrivatePlan(sampling=FullParticipation(CLIENTS))


def own_gradient(client):
    return torch.tensor([[1.0 + client, -2.0 * client]])


def scaffold(**options):
    return strategy_of(
        Scaffold, **{"plan": EVERYONE, "local": LOCAL, "evaluate_every": 0, **options}
    )


def linear_task():
    """Return a task with losses ⟨g_i, w⟩, so that each client's gradient is g_i everywhere."""

    def data(client):
        examples = Examples(features=own_gradient(client).repeat(7, 1), targets=torch.zeros(7))
        return ClientData(train=examples, test=examples)

    return Task(
        model=lambda: nn.Linear(2, 1, bias=False),
        data=data,
        loss=lambda outputs, targets: outputs.mean(),
        metrics={},
        device="cpu",
    )


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_a_control_variate_is_the_clients_gradient_also_with_momentum(momentum):
    local = LocalTraining(epochs=3, batch_size=2, learning_rate=0.01, momentum=momentum)
    strategy = FederatedStrategy(Scaffold(local=local), EVERYONE, evaluate_every=0)
    grid = InProcessGrid(Scaffold.client_app(linear_task()), num_clients=CLIENTS)
    strategy.start(grid, ArrayRecord(linear_task().initial_params(0)), num_rounds=3)
    for context in grid.contexts.values():
        client = int(context.node_config["partition-id"])
        kept = ClientMemory(context, "scaffold").load()
        torch.testing.assert_close(kept["weight"], own_gradient(client))
    mean = torch.stack([own_gradient(client) for client in range(CLIENTS)]).mean(0)
    control = strategy.run.state.everyone["control"]["weight"]
    torch.testing.assert_close(torch.from_numpy(control), mean)


@pytest.mark.parametrize(
    ("lost", "kept_in"),
    grid(
        [*((lost, "folder") for lost in LOST), ("several", "state")],
        lambda case: case[1] == "folder" and case[0] in ("all", "the first"),
    ),
)
def test_lost_replies_leave_the_control_the_mean_of_the_clients(tmp_path, lost, kept_in):
    strategy = scaffold()
    folder = tmp_path if kept_in == "folder" else ""
    weights, mean = play(strategy, 25, lost=LOST[lost], folder=folder)
    np.testing.assert_allclose(strategy.run.state.everyone["control"]["weight"], mean, atol=1e-5)
    np.testing.assert_allclose(weights, optimum(), atol=1e-4)


def test_clients_learn_their_last_used_round_in_messages_shared_where_equal():
    strategy = scaffold()
    grid = LosingGrid(strategy, lost={2: {1}, 3: {1, 2}})
    strategy.start(grid, ArrayRecord(linear_task().initial_params(0)), num_rounds=5)
    facts = {
        number: [
            message.content.config_records[records.ROUND].get("remembered") for message in clients
        ]
        for number, clients in grid.asked.items()
    }
    assert facts == {
        1: [0, 0, 0, 0],
        2: [1, 1, 1, 1],
        3: [2, 1, 2, 2],
        4: [3, 1, 2, 3],
        5: [4, 4, 4, 4],
    }
    assert [len({id(m.content) for m in clients}) for clients in grid.asked.values()] == [
        1,
        1,
        2,
        3,
        1,
    ]


@pytest.mark.parametrize("kept_in", ["state", "folder"])
@pytest.mark.parametrize("method", [Scaffold, FedDyn])
def test_a_client_that_lost_needed_memory_says_so_and_skips_the_round(tmp_path, method, kept_in):
    folder = tmp_path if kept_in == "folder" else ""
    strategy, other = (
        strategy_of(method, plan=EVERYONE, local=LOCAL, evaluate_every=0) for _ in range(2)
    )
    weights = trained(strategy, 5, LosingGrid(strategy, forgets={3: {1}}, folder=folder))
    lost = "memory that it stored in training round 2"
    assert all(lost in refusal for refusal in strategy.refusals)
    assert len(strategy.refusals) == 3
    silent = LosingGrid(other, lost={3: {1}, 4: {1}, 5: {1}})
    np.testing.assert_allclose(weights, trained(other, 5, silent), rtol=1e-5)


def test_lost_replies_change_nothing_even_if_clients_return_much_later():
    plan = NonPrivatePlan(sampling=FixedSizeSampling(CLIENTS, 2))
    strategy = scaffold(plan=plan, seed=1)
    _, mean = play(strategy, 40, lost=dict.fromkeys(range(2, 12, 3), range(CLIENTS)))
    np.testing.assert_allclose(strategy.run.state.everyone["control"]["weight"], mean, atol=1e-5)


@pytest.mark.parametrize("dies_in", grid([1, 3], lambda dies_in: dies_in == 3))
def test_a_resumed_run_knows_what_its_clients_remember(tmp_path, dies_in):
    for _ in range(4):
        with pytest.raises(Died):
            start(scaffold, 25, tmp_path, dies_in)
    strategy, weights, mean = start(scaffold, 25, tmp_path)
    np.testing.assert_allclose(strategy.run.state.everyone["control"]["weight"], mean, atol=1e-5)
    np.testing.assert_allclose(weights, optimum(), atol=1e-4)


@pytest.mark.parametrize(("clipping_norm", "farthest"), [(100.0, 0.05), (1.0, 10.0)])
@pytest.mark.parametrize("rounds", grid([25, 100], lambda rounds: rounds == 25))
def test_perturbed_models_leave_the_control_the_mean_of_the_clients(
    rounds, clipping_norm, farthest
):
    plan = PerturbationPlan(
        sampling=FullParticipation(CLIENTS),
        perturbation=OutputPerturbation(clipping_norm=clipping_norm, noise_stddev=0.02),
        delta=1e-4,
    )
    strategy = scaffold(plan=plan, seed=1, seeded_noise=True)
    weights, mean = play(strategy, rounds)
    np.testing.assert_allclose(strategy.run.state.everyone["control"]["weight"], mean, atol=1e-4)
    assert np.linalg.norm(weights - optimum()) < farthest


@pytest.mark.parametrize(
    ("local", "message"),
    [
        (LocalTraining(epochs=0), "epochs=0 with steps=None: expected at least one epoch or step"),
        (LocalTraining(tolerance=1e-6, proximal_weight=0.1), "from steps of SGD"),
    ],
)
def test_training_without_steps_is_refused(local, message):
    with pytest.raises(ValueError, match=message):
        FederatedStrategy(Scaffold(local=local), EVERYONE)


@pytest.mark.parametrize("metrics", [{}, {"local-steps": 0.0}])
def test_an_update_without_steps_is_refused_as_without_records(metrics):
    with pytest.raises(
        RefusedReply, match="'local-steps': expected at least 1, and so at least one record"
    ):
        Scaffold(local=LOCAL).check_update(Update({}, metrics))


def test_a_client_without_records_keeps_its_control_variate_and_counts_as_missing():
    loop_task = linear_task()
    empty = Examples(features=torch.zeros(0, 2), targets=torch.zeros(0))

    def data(client):
        full = loop_task.data(client)
        return replace(full, train=empty) if client == 0 else full

    strategy = scaffold()
    app = Scaffold.client_app(replace(loop_task, data=data))
    grid = InProcessGrid(app, num_clients=CLIENTS)
    strategy.start(grid, ArrayRecord(loop_task.initial_params(0)), num_rounds=2)
    assert len(strategy.refusals) == 2
    assert all("num-examples=0.0: expected at least 1" in refusal for refusal in strategy.refusals)
    kept = {int(c.node_config["partition-id"]): c for c in grid.contexts.values()}[0]
    assert ClientMemory(kept, "scaffold").load()["weight"].tolist() == [[0.0, 0.0]]
    mean = torch.stack([own_gradient(client) for client in range(1, CLIENTS)]).sum(0) / CLIENTS
    control = strategy.run.state.everyone["control"]["weight"]
    torch.testing.assert_close(torch.from_numpy(control), mean)


def test_a_plan_that_hides_single_updates_is_refused():
    plan = ReleasePlan(
        sampling=FixedSizeSampling(4, 2),
        clipping_norm=1.0,
        noise_multiplier=1.0,
        rounds=1,
        delta=0.1,
    )
    with pytest.raises(ValueError, match="needs each client's update"):
        FederatedStrategy(Scaffold(), plan)
