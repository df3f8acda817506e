import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from flower_ext.algorithms import Scaffold
from flower_ext.data import ClientData, Examples
from flower_ext.federation import InProcessGrid, records
from flower_ext.privacy import (
    FixedSizeSampling,
    FullParticipation,
    NonPrivatePlan,
    OutputPerturbation,
    PerturbationPlan,
    ReleasePlan,
)
from flower_ext.training import LocalTraining, Task
from tests.algorithms.least_squares import LOCAL, optimum, play

CLIENTS = 4
EVERYONE = NonPrivatePlan(sampling=FullParticipation(CLIENTS))


def own_gradient(client):
    return torch.tensor([[1.0 + client, -2.0 * client]])


def linear_task():
    """Losses ⟨g_i, w⟩: each client's gradient is g_i wherever it looks."""

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
    strategy = Scaffold(plan=EVERYONE, local=local, evaluate_every=0)
    grid = InProcessGrid(Scaffold.client_app(linear_task()), num_clients=CLIENTS)
    strategy.start(grid, ArrayRecord(linear_task().initial_params(0)), num_rounds=3)
    for context in grid.contexts.values():
        client = int(context.node_config["partition-id"])
        (kept,) = context.state.array_records.values()
        torch.testing.assert_close(records.to_params(kept)["weight"], own_gradient(client))
    mean = torch.stack([own_gradient(client) for client in range(CLIENTS)]).mean(0)
    torch.testing.assert_close(torch.from_numpy(strategy.control["weight"]), mean)


@pytest.mark.parametrize(("clipping_norm", "farthest"), [(100.0, 0.05), (1.0, 10.0)])
@pytest.mark.parametrize("rounds", [25, 200])
def test_perturbed_models_leave_the_control_the_mean_of_the_clients(
    rounds, clipping_norm, farthest
):
    plan = PerturbationPlan(
        sampling=FullParticipation(CLIENTS),
        perturbation=OutputPerturbation(clipping_norm=clipping_norm, noise_stddev=0.02),
        delta=1e-4,
    )
    strategy = Scaffold(plan=plan, local=LOCAL, seed=1, seeded_noise=True, evaluate_every=0)
    weights, mean = play(strategy, rounds)
    np.testing.assert_allclose(strategy.control["weight"], mean, atol=1e-4)
    assert np.linalg.norm(weights - optimum()) < farthest


@pytest.mark.parametrize(
    ("local", "said"),
    [
        (LocalTraining(epochs=0), r"epochs=0: a control variate needs at least one step"),
        (LocalTraining(tolerance=1e-6, proximal_weight=0.1), "needs steps of SGD"),
    ],
)
def test_training_without_steps_is_refused(local, said):
    with pytest.raises(ValueError, match=said):
        Scaffold(plan=EVERYONE, local=local)


def test_a_plan_that_hides_single_updates_is_refused():
    plan = ReleasePlan(
        sampling=FixedSizeSampling(4, 2),
        clipping_norm=1.0,
        noise_multiplier=1.0,
        rounds=1,
        delta=0.1,
    )
    with pytest.raises(ValueError, match="needs each client's update"):
        Scaffold(plan=plan)
