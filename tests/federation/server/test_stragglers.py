"""Simulated devices that complete only some of their local epochs."""

import math

import numpy as np
import pytest

from flower_ext.algorithms import DPFedAvg
from flower_ext.errors import InvalidValue
from flower_ext.federation import FederatedStrategy, Stragglers
from flower_ext.federation.server.stragglers import shortened
from flower_ext.privacy import FullParticipation, NonPrivatePlan
from flower_ext.training import LocalTraining
from tests.support.plans import release_plan

COHORT = [3, 1, 4, 15, 9, 2, 6]


def draw(ratio, cohort=COHORT, seed=0, population=20):
    return Stragglers(ratio=ratio).draw(cohort, population, np.random.default_rng(seed))


@pytest.mark.parametrize("ratio", [0.3, 0.9])
def test_whether_and_how_far_a_client_straggles_depends_on_no_other_client(ratio):
    for seed in range(20):
        slow = draw(ratio, list(range(20)), seed)
        assert draw(ratio, list(range(20)), seed, population=50) == slow
        for cohort in ([7], COHORT, COHORT[::-1], list(range(1, 20))):
            assert draw(ratio, cohort, seed) == {i: slow[i] for i in cohort if i in slow}


def test_none_straggles_at_ratio_zero_and_all_do_at_one():
    for seed in range(10):
        assert draw(0.0, seed=seed) == {}
        assert set(draw(1.0, seed=seed)) == set(COHORT)


def test_an_empty_cohort_has_no_stragglers():
    assert draw(1.0, []) == {}


def test_a_draw_repeats_for_a_seed_and_differs_for_another():
    assert draw(0.5, seed=1) == draw(0.5, seed=1)
    assert draw(0.5, seed=1) != draw(0.5, seed=2)


def test_each_client_straggles_independently_and_stops_anywhere_before_the_end():
    rng = np.random.default_rng(0)
    draws = [Stragglers(ratio=0.3).draw(list(range(10)), 10, rng) for _ in range(2000)]
    counts = np.bincount([client for slow in draws for client in slow], minlength=10)
    # 2000 draws of probability 0.3: five standard deviations are 102.
    assert abs(counts - 600).max() < 102
    # With independent clients, the number per round has variance 10 · 0.3 · 0.7.
    assert np.var([len(slow) for slow in draws]) == pytest.approx(2.1, rel=0.2)
    shares = np.array([share for slow in draws for share in slow.values()])
    assert shares.min() >= 0
    assert shares.max() < 1
    assert np.histogram(shares, bins=4, range=(0, 1))[0] == pytest.approx(1500, abs=170)


@pytest.mark.parametrize("epochs", [2, 3, 10])
def test_a_straggler_completes_one_to_all_but_one_epochs_each_as_likely(epochs):
    training = LocalTraining(epochs=epochs, learning_rate=0.3, momentum=0.5)
    shares = (np.arange(1000 * (epochs - 1)) + 0.5) / (1000 * (epochs - 1))
    done = [shortened(training, float(share)) for share in shares]
    counts = np.bincount([t.epochs for t in done], minlength=epochs + 1)
    assert counts.tolist() == [0] + [1000] * (epochs - 1) + [0]
    assert {t.learning_rate for t in done} == {0.3}
    assert {t.momentum for t in done} == {0.5}


def test_the_ends_of_the_range_are_one_epoch_and_all_but_one():
    training = LocalTraining(epochs=10)
    assert shortened(training, 0.0).epochs == 1
    assert shortened(training, math.nextafter(1.0, 0.0)).epochs == 9


@pytest.mark.parametrize("epochs", [0, 1])
def test_non_stragglers_and_clients_with_one_epoch_complete_everything(epochs):
    assert shortened(LocalTraining(epochs=10), None) == LocalTraining(epochs=10)
    training = LocalTraining(epochs=epochs)
    assert shortened(training, 0.0) == training


@pytest.mark.parametrize("ratio", [-0.1, 1.1, math.nan])
def test_a_ratio_that_is_no_share_is_refused(ratio):
    with pytest.raises(ValueError, match=f"ratio={ratio!r}: expected a number in \\[0, 1\\]"):
        Stragglers(ratio=ratio)


@pytest.mark.parametrize("counted", [{"steps": 5}, {"tolerance": 1e-6, "proximal_weight": 0.1}])
def test_training_that_no_straggler_could_stop_early_is_refused(counted):
    with pytest.raises(ValueError, match="give epochs .* or stragglers=None"):
        Stragglers(ratio=0.5).check([LocalTraining(**counted)], protects=True)
    both = [LocalTraining(epochs=5), LocalTraining(**counted)]
    Stragglers(ratio=0.5).check(both, protects=True)


@pytest.mark.parametrize(
    ("ratio", "size", "slow"), [(0.9, 9, 8), (0.3, 9, 3), (1, 7, 7), (0, 7, 0)]
)
def test_an_exact_share_of_each_cohort_straggles_and_each_client_as_often(ratio, size, slow):
    rng = np.random.default_rng(1)
    stragglers = Stragglers(ratio=ratio, exact=True)
    draws = [stragglers.draw(list(range(size)), 20, rng) for _ in range(1000)]
    assert {len(each) for each in draws} == {slow}
    counts = np.bincount([client for each in draws for client in each], minlength=size)
    # A share of 1000 draws: five standard deviations are at most 80.
    assert abs(counts[:size] - 1000 * slow / size).max() <= 80


def test_an_exact_share_is_refused_under_privacy():
    stragglers = Stragglers(ratio=0.5, exact=True)
    stragglers.check([LocalTraining(epochs=5)], protects=False)
    with pytest.raises(InvalidValue, match="stragglers.exact=True: expected False"):
        stragglers.check([LocalTraining(epochs=5)], protects=True)


@pytest.mark.parametrize(
    ("plan", "local", "exact", "error"),
    [
        (NonPrivatePlan(sampling=FullParticipation(2)), {"steps": 1}, False, "give epochs"),
        (release_plan(2), {"epochs": 5}, True, "stragglers.exact=True"),
    ],
)
def test_stragglers_that_do_not_fit_are_refused_before_any_round(plan, local, exact, error):
    stragglers = Stragglers(ratio=0.5, exact=exact)
    with pytest.raises(InvalidValue, match=error):
        FederatedStrategy(DPFedAvg(local=LocalTraining(**local)), plan, stragglers=stragglers)
