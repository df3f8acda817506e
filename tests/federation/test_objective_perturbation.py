"""Objective perturbation adds one noise to each local problem."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import (
    FederatedStrategy,
)
from flower_ext.privacy import (
    FullParticipation,
    SeededNoise,
)
from flower_ext.privacy.guarantee import PreconditionFailed
from flower_ext.training import LocalTraining
from tests.support.protected_updates import (
    CLIENTS,
    DIMENSION,
    EXACT,
    KNOWN,
    MU,
    OBJECTIVE,
    OUTPUT,
    client_data,
    initial,
    of_training,
    plan,
    run,
    task,
    trained,
    uploads,
)
from tests.support.travelling import Recorder


def slope_at(client: int, released: np.ndarray, start: float, mu: float = MU) -> np.ndarray:
    """Return the gradient of the client's mean loss and proximal term, written out."""
    data = client_data(client).train
    x, y = data.features.numpy(), data.targets.double().numpy()
    share = -y / (1 + np.exp(y * (x @ released)))
    return x.T @ share / len(y) + mu * (released - start)


def test_under_objective_perturbation_the_slope_at_an_upload_is_minus_its_noise():
    _, grid = run(plan(OBJECTIVE), seed=6, seeded_noise=True)
    sent = uploads(grid)
    assert sorted(sent) == list(range(CLIENTS))
    for client, released in sent.items():
        like = {"weight": np.zeros((1, DIMENSION))}
        stream = SeededNoise(6, "client-noise", client, 1)
        noise = OBJECTIVE.direction(like, stream)["weight"].ravel()
        np.testing.assert_allclose(slope_at(client, released, 0.5), -noise, atol=1e-9)
        assert np.linalg.norm(released - trained(client)) > 0.01


@pytest.mark.full
def test_the_objective_noise_of_many_clients_has_the_norm_of_the_paper():
    """80 clients: ‖n‖ ~ Gamma(d, 1/α), computed from the gradient at each upload."""
    clients = 80
    _, grid = run(
        plan(OBJECTIVE, sampling=FullParticipation(clients)),
        clients=clients,
        seed=6,
        seeded_noise=True,
    )
    norms = [
        float(np.linalg.norm(slope_at(client, released, 0.5)))
        for client, released in uploads(grid).items()
    ]
    assert len(norms) == clients
    assert stats.kstest(norms, stats.gamma(DIMENSION, scale=1 / 2.0).cdf).pvalue > 1e-5
    for wrong in (0.4, 2.5):
        assert stats.kstest(norms, stats.gamma(DIMENSION, scale=wrong / 2.0).cdf).pvalue < 1e-5


@pytest.mark.parametrize(("size", "refused"), [(5, 0), (4, 1), (1, 1)])
def test_a_client_with_too_few_examples_for_its_noise_sends_nothing(size, refused):
    """The client needs 2u₂/μ = 5 examples."""
    app = DPFedAvg.client_app(task({1: size}))
    strategy, grid = run(plan(OBJECTIVE), app=app)
    assert len(strategy.refusals) == refused
    if refused:
        (refusal,) = strategy.refusals
        assert "trains on too few examples" in refusal
        assert "at least 5, which is 2u₂/μ (Upcycled-FL, Theorem 6.3), where u₂ bounds" in refusal
        (failed,) = [reply for reply in of_training(grid.received) if reply.has_error()]
        assert not failed.has_content()
    assert strategy.run.progress.row["answered"] == CLIENTS - refused


def test_output_perturbation_asks_for_no_number_of_examples():
    strategy, _ = run(plan(OUTPUT), app=DPFedAvg.client_app(task({1: 1})))
    assert strategy.refusals == []


@pytest.mark.parametrize(
    ("changes", "local", "message"),
    [
        ({"generalised_linear": False}, EXACT, "generalised linear model"),
        ({"feature_norm_bound": 2.0}, EXACT, "features have norm at most 1"),
        ({}, LocalTraining(epochs=1), "the proximal weight is above 0"),
    ],
)
def test_a_problem_outside_theorem_6_3_ends_the_run_before_sending(changes, local, message):
    grid = Recorder(DPFedAvg.client_app(task()), num_clients=CLIENTS)
    the_plan = plan(OBJECTIVE, objective=replace(KNOWN, **changes))
    with pytest.raises(PreconditionFailed, match=message):
        FederatedStrategy(DPFedAvg(local=local), the_plan).start(grid, initial())
    assert of_training(grid.sent) == []
