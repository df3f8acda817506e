"""The pilot run of DP-Ditto's planner is plain gradient descent."""

import numpy as np
import pytest
import torch
from torch import nn

from flower_ext.data import Examples
from flower_ext.training import Task
from tests.support.apps import DP_DITTO
from tests.support.worlds import client_data
from tests.support.worlds import task as network

pilot_run = DP_DITTO.module("pilot").pilot_run

CLIENTS, ROUNDS, RATE = 3, 6, 0.2


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Linear(2, 1, bias=False)

    def forward(self, x):
        return self.weights(x)[:, 0]


def half_square(outputs, targets):
    return 0.5 * (outputs - targets).square().mean()


def line():
    return Task(model=Line, data=lambda client: None, loss=half_square, device="cpu")


def regression(client):
    """Return clients with orthogonal columns of energies (curvatures) 1 and 1 + client."""
    rng = np.random.default_rng(client)
    basis = np.linalg.qr(rng.normal(size=(40, 2)))[0] * np.sqrt(40 * np.array([1.0, 1.0 + client]))
    targets = basis @ np.array([1.0, -client]) + 0.01 * rng.normal(size=40)
    return Examples(torch.from_numpy(basis).float(), torch.from_numpy(targets).float())


def test_the_pilot_descends_on_the_mean_and_the_personal_losses():
    clients = [regression(client) for client in range(CLIENTS)]
    start = line().initial_params(1)
    pilot = pilot_run(line(), start, clients, rounds=ROUNDS, learning_rate=RATE)

    def slope(w, data):
        x, y = data.features.double().numpy(), data.targets.double().numpy()
        return x.T @ (x @ w - y) / len(y)

    def loss(w):
        scores = (d.features.double() @ torch.from_numpy(w) for d in clients)
        return np.mean([half_square(s, d.targets) for s, d in zip(scores, clients, strict=True)])

    first = start["weights.weight"][0].double().numpy()
    w, personal_models = first.copy(), [first.copy() for _ in clients]
    steepest = max(np.linalg.norm(slope(w, data)) for data in clients)
    for _ in range(ROUNDS):
        w = w - RATE * np.mean([slope(w, data) for data in clients], axis=0)
        personal_models = [
            u - RATE * slope(u, data) for u, data in zip(personal_models, clients, strict=True)
        ]
        steepest = max(steepest, *(np.linalg.norm(slope(w, data)) for data in clients))
    assert pilot.initial_gap == pytest.approx(loss(first) - loss(w), rel=1e-6)
    assert pilot.gradient_bound == pytest.approx(steepest, rel=1e-6)
    assert pilot.model_spread == pytest.approx(
        max(np.linalg.norm(u - w) for u in personal_models), rel=1e-6
    )
    # Curvatures are 1 and, for the last client, 3 (to the precision of float32 features).
    assert 1 - 1e-5 <= pilot.strong_convexity <= pilot.smoothness <= CLIENTS * (1 + 1e-5)


def test_a_network_with_nonconvex_losses_is_refused_and_the_start_unchanged():
    task = network()
    start = task.initial_params(0)
    before = {name: p.clone() for name, p in start.items()}
    clients = [client_data(client).train for client in range(2)]
    with pytest.raises(ValueError, match="not strongly convex"):
        pilot_run(task, start, clients, rounds=60, learning_rate=0.5)
    torch.testing.assert_close(start, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 1}, "rounds=1 of the pilot: expected an integer >= 2"),
        ({"learning_rate": 0.0}, r"learning_rate=0\.0"),
        ({"clients": []}, "at least one client"),
        ({"rounds": 10**9}, "keeps all gradients"),
    ],
)
def test_unfit_pilots_are_refused_by_name(changes, message):
    facts = {"clients": [regression(0)], "rounds": ROUNDS, "learning_rate": RATE, **changes}
    clients = facts.pop("clients")
    with pytest.raises(ValueError, match=message):
        pilot_run(line(), line().initial_params(1), clients, **facts)
