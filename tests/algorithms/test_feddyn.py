"""FedDyn: the correction uses exactly a round's uploads, and clients store the same."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from flower_ext.algorithms import FedDyn
from flower_ext.federation import FederatedStrategy
from flower_ext.federation.server.round import TrainingRound
from flower_ext.privacy import (
    FixedSizeSampling,
    FullParticipation,
    NonPrivatePlan,
    OutputPerturbation,
    PerturbationPlan,
    PoissonSampling,
    ReleasePlan,
    SecureSum,
)
from flower_ext.privacy.mechanisms.round_mechanism import Aggregate
from tests.support.dying_runs import Died
from tests.support.grids import grid
from tests.support.least_squares import CLIENTS, LOCAL, LOST, optimum, play, start
from tests.support.strategies import strategy_of

EVERYONE = FullParticipation(CLIENTS)

BASE, MEAN = {"w": np.zeros(3)}, {"w": np.ones(3)}


def moved(plan, answered):
    """Return the model after a round of that mean which so many clients answered."""
    run = FederatedStrategy(FedDyn(), plan).run
    run.model = BASE
    mean = Aggregate(value=MEAN, answered=answered, topped_up_stddev=0.0)
    training = TrainingRound(run, 1)
    training._round = SimpleNamespace(metrics={client: {} for client in range(answered)})
    return training._step(mean)


@pytest.mark.parametrize(
    ("sampling", "share"),
    [
        (PoissonSampling(100, 0.1), 0.1),
        (FixedSizeSampling(100, 20), 0.2),
        (FullParticipation(100), 1.0),
    ],
)
def test_how_many_answered_does_not_show_in_a_private_model(sampling, share):
    plan = ReleasePlan(
        sampling=sampling, clipping_norm=1.0, noise_multiplier=1.0, rounds=3, delta=1e-3
    )
    server_noise = replace(plan, noise_placement="server")
    for one in (plan, server_noise):
        for answered in (0, 5, 15):
            np.testing.assert_allclose(moved(one, answered)["w"], 1 + share)


def test_without_privacy_the_share_of_clients_that_answered_counts():
    plan = NonPrivatePlan(sampling=PoissonSampling(100, 0.1))
    np.testing.assert_allclose(moved(plan, 15)["w"], 1.15)


@pytest.mark.parametrize(
    ("lost", "kept_in"),
    grid(
        [*((lost, "folder") for lost in LOST), ("several", "state")],
        lambda case: case[1] == "folder" and case[0] in ("all", "four in a row"),
    ),
)
def test_lost_replies_leave_h_the_mean_of_what_clients_remember(tmp_path, lost, kept_in):
    strategy = feddyn()
    folder = tmp_path if kept_in == "folder" else ""
    weights, mean = play(strategy, 40, lost=LOST[lost], folder=folder)
    np.testing.assert_allclose(strategy.run.state.server["h"]["weight"], mean, atol=1e-5)
    np.testing.assert_allclose(weights, optimum(), atol=1e-4)


def test_a_discarded_round_leaves_nothing_on_either_side():
    plan = ReleasePlan(
        sampling=EVERYONE,
        clipping_norm=1.0,
        noise_multiplier=1e-3,
        rounds=10,
        delta=1e-3,
        noise_placement=SecureSum(colluding=0.0, dropouts=0.0),
    )
    strategy = feddyn(plan=plan, seed=1, seeded_noise=True)
    _, mean = play(strategy, 10, lost={3: {1}, 4: {1}, 6: {0}})
    np.testing.assert_allclose(strategy.run.state.server["h"]["weight"], mean, atol=1e-5)
    assert set(strategy.run.remembered.values()) == {10}


@pytest.mark.parametrize("dies_in", grid([1, 3], lambda dies_in: dies_in == 3))
def test_a_resumed_run_knows_what_its_clients_remember(tmp_path, dies_in):
    for _ in range(4):
        with pytest.raises(Died):
            start(feddyn, 40, tmp_path, dies_in)
    strategy, weights, mean = start(feddyn, 40, tmp_path)
    np.testing.assert_allclose(strategy.run.state.server["h"]["weight"], mean, atol=1e-5)
    np.testing.assert_allclose(weights, optimum(), atol=1e-4)


@pytest.mark.parametrize("rounds", grid([25, 100], lambda rounds: rounds == 25))
def test_perturbed_models_leave_h_the_mean_of_what_clients_remember(rounds):
    perturbation = OutputPerturbation(clipping_norm=100.0, noise_stddev=0.02)
    plan = PerturbationPlan(sampling=EVERYONE, perturbation=perturbation, delta=1e-4)
    strategy = feddyn(plan=plan, seed=1, seeded_noise=True)
    weights, mean = play(strategy, rounds)
    np.testing.assert_allclose(strategy.run.state.server["h"]["weight"], mean, atol=1e-4)
    assert np.linalg.norm(weights - optimum()) < 0.05


def test_clipped_and_noised_updates_leave_h_the_mean_of_what_clients_remember():
    plan = ReleasePlan(
        sampling=EVERYONE, clipping_norm=0.1, noise_multiplier=1.0, rounds=20, delta=1e-3
    )
    strategy = feddyn(plan=plan, seed=1, seeded_noise=True)
    _, mean = play(strategy, 20)
    np.testing.assert_allclose(strategy.run.state.server["h"]["weight"], mean, atol=1e-5)


def feddyn(**options):
    whole = {"plan": NonPrivatePlan(sampling=EVERYONE), "regularization": 1.0, **options}
    return strategy_of(FedDyn, local=LOCAL, evaluate_every=0, **whole)
