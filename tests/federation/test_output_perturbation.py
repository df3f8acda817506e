"""Output perturbation bounds each model and adds noise once."""

import math

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from scipy import stats

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import FederatedStrategy
from flower_ext.federation.messages import records
from flower_ext.privacy import (
    FullParticipation,
    OutputPerturbation,
    SeededNoise,
)
from flower_ext.privacy.mechanisms.noise import noise_grid
from flower_ext.training import LocalTraining
from tests.support.protected_updates import (
    CLIENTS,
    DIMENSION,
    EXACT,
    facts_of,
    initial,
    leaving,
    of_training,
    plan,
    run,
    task,
    trained,
    uploads,
)
from tests.support.travelling import Recorder


def test_output_perturbation_sends_a_clipped_model_plus_the_clients_noise():
    """The noise is the seeded stream of client and round, on the clipped trained model."""
    tight = OutputPerturbation(clipping_norm=0.4, noise_stddev=0.05)
    _, grid = run(plan(tight), seed=6, seeded_noise=True)
    sent, clipped = uploads(grid), 0
    assert sorted(sent) == list(range(CLIENTS))
    for client, released in sent.items():
        local = trained(client)
        inside = local * min(1.0, 0.4 / np.linalg.norm(local))
        clipped += np.linalg.norm(local) > 0.4
        stream = SeededNoise(6, "client-noise", client, 1)
        noise = stream.add_gaussian({"weight": np.zeros((1, DIMENSION))}, 0.05)["weight"].ravel()
        np.testing.assert_allclose(released, inside + noise, atol=noise_grid(0.05))
    assert clipped > 0


def test_the_whole_model_is_clipped_not_what_changed():
    """From a model far outside, every upload returns to the ball, so its update is large."""
    quiet = OutputPerturbation(clipping_norm=0.8, noise_stddev=1e-9)
    _, grid = run(plan(quiet), start=initial(50.0), local=LocalTraining(epochs=0))
    for released in uploads(grid).values():
        assert np.linalg.norm(released) == pytest.approx(0.8, rel=1e-6)
        np.testing.assert_allclose(released, 0.8 / math.sqrt(2), rtol=1e-6)


def test_output_noise_has_its_stddev_and_is_fresh_for_client_and_round():
    """200 clients, two rounds, secure noise: the test would detect ±20 % of σ."""
    clients, sigma = 200, 3.0
    _, grid = run(
        plan(
            OutputPerturbation(clipping_norm=1e-6, noise_stddev=sigma),
            sampling=FullParticipation(clients),
        ),
        clients=clients,
        rounds=2,
        local=LocalTraining(epochs=0),
    )
    # The received model plus the update equals the upload, within 1e-6 of the noise.
    noise = np.array(
        [
            question.content.array_records[records.MODEL]["weight"].numpy()
            + reply.content.array_records[records.UPDATE]["weight"].numpy()
            for question, reply in zip(
                of_training(grid.sent), of_training(grid.received), strict=True
            )
        ]
    ).reshape(2, -1)
    assert noise.shape[1] == clients * DIMENSION
    assert stats.kstest(noise.ravel() / sigma, "norm").pvalue > 1e-5
    assert noise.std() == pytest.approx(sigma, rel=0.15)
    released = noise.reshape(-1, DIMENSION)  # single numbers coincide on the grid by chance
    assert len(np.unique(released, axis=0)) == len(released)
    assert abs(np.corrcoef(noise)[0, 1]) < 0.3


def test_the_server_averages_what_the_clients_sent_and_adds_nothing():
    grid = Recorder(DPFedAvg.client_app(task()), num_clients=CLIENTS)
    strategy = FederatedStrategy(DPFedAvg(local=EXACT), plan(), evaluate_every=0)
    result = strategy.start(grid, initial(), num_rounds=1)
    mean = np.mean(list(uploads(grid).values()), axis=0)
    np.testing.assert_allclose(result.arrays["weight"].numpy().ravel(), mean, atol=1e-12)


def test_noise_of_zero_is_refused_by_the_plan_and_by_the_client():
    with pytest.raises(ValueError, match="noise_stddev="):
        OutputPerturbation(clipping_norm=1.0, noise_stddev=0.0)
    received = {"weight": torch.zeros(1, DIMENSION).double()}
    facts = facts_of(plan())
    for changes, message in (
        ({"noise-stddev": 0.0}, "noise_stddev=0.0"),
        ({"clipping-norm": -1.0}, "clipping_norm=-1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            leaving(received, received, ConfigRecord({**facts, **changes}))


def test_a_fact_that_is_no_number_is_refused_by_name():
    received = {"weight": torch.zeros(1, DIMENSION).double()}
    facts = facts_of(plan())
    with pytest.raises(ValueError, match="noise_stddev='much'.*expected a number"):
        leaving(received, received, ConfigRecord({**facts, "noise-stddev": "much"}))
