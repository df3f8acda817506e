"""Lower bounds stay below the true ε as often as promised, and come close to it."""

import math
from itertools import product

import numpy as np
import pytest

from flower_ext.privacy import gaussian_loss
from flower_ext_audit import BoundTerms, by_rates, if_gaussian
from tests.support.failures import not_refuted
from tests.support.grids import grid

DELTA = 1e-5
two_worlds = pytest.mark.parametrize("bound", [by_rates, if_gaussian])


def epsilon(mu):
    return gaussian_loss(1 / mu, releases=1, delta=DELTA).epsilon


def sampled(rng, mu, trials):
    return rng.normal(size=trials), rng.normal(mu, size=trials)


@pytest.mark.parametrize(
    ("mu", "bound"),
    grid(
        product([0.0, 0.5, 2.0], [by_rates, if_gaussian]),
        {(0.0, if_gaussian), (2.0, by_rates)}.__contains__,
    ),
)
def test_a_bound_exceeds_the_true_epsilon_no_more_often_than_it_says(bound, mu):
    rng, repetitions, confidence = np.random.default_rng(), 400, 0.8
    true = epsilon(mu) if mu else 0.0
    above = sum(
        bound(*sampled(rng, mu, 200), BoundTerms(delta=DELTA, confidence=confidence)).epsilon > true
        for _ in range(repetitions)
    )
    assert not_refuted(above, repetitions, 1 - confidence)


def test_choosing_the_threshold_on_the_same_trials_would_fail_that_very_check(monkeypatch):
    """Without held-out trials 36 % of the bounds are wrong, so the check above can fail."""
    rng, repetitions, confidence = np.random.default_rng(), 1000, 0.8

    def same(without, present, *_):
        return (without, present), (without, present)

    monkeypatch.setattr("flower_ext_audit.lower_bounds._held_out", same)
    above = sum(
        by_rates(*sampled(rng, 0.0, 200), BoundTerms(delta=0.0, confidence=confidence)).epsilon > 0
        for _ in range(repetitions)
    )
    assert not not_refuted(above, repetitions, 1 - confidence)


def test_a_gaussian_bound_reaches_most_of_the_true_epsilon():
    rng = np.random.default_rng(0)
    bound = if_gaussian(*sampled(rng, 2.0, 20_000), BoundTerms(delta=DELTA, confidence=0.999))
    assert 0.9 * epsilon(2.0) < bound.epsilon <= epsilon(2.0)


def test_rates_reach_most_of_the_epsilon_of_randomised_response():
    """One threshold decides everything: the worlds differ by a factor e^ε in one event."""
    rng, true = np.random.default_rng(0), 2.0
    truth = 1 / (1 + math.exp(-true))
    scores = [(rng.random(20_000) < p).astype(float) for p in (1 - truth, truth)]
    bound = by_rates(*scores, BoundTerms(delta=0.0, confidence=0.999))
    assert 0.9 * true < bound.epsilon <= true


def test_the_opposite_test_finds_an_event_of_only_the_world_without():
    """P0 has an event of probability 0.2 that P1 lacks; P1 has no event that P0 lacks."""
    rng = np.random.default_rng(0)
    without = np.where(rng.random(4000) < 0.2, -1.0, 0.0)
    bound = by_rates(without, np.zeros(4000), BoundTerms(delta=DELTA, confidence=0.999))
    assert bound.epsilon > 3


def test_a_quarter_of_the_noise_is_found():
    rng, reported = np.random.default_rng(0), epsilon(0.5)
    terms = BoundTerms(delta=DELTA, confidence=0.999, num_bounds=10, reported=reported)
    bounds = [bound(*sampled(rng, 4 * 0.5, 2000), terms) for bound in (by_rates, if_gaussian)]
    assert any(bound.exceeds for bound in bounds)
    assert [bound.ratio for bound in bounds] == [bound.epsilon / reported for bound in bounds]
    assert not any(b(*sampled(rng, 0.5, 2000), terms).exceeds for b in (by_rates, if_gaussian))


@two_worlds
def test_bounds_that_hold_together_are_lower(bound):
    """On average: each group chooses a threshold of its own, and one choice may be lucky."""
    rng = np.random.default_rng()
    alone, grouped = (BoundTerms(delta=DELTA, confidence=0.95, num_bounds=n) for n in (1, 100))
    lost = []
    for _ in range(50):
        worlds = sampled(rng, 2.0, 1000)
        lost.append(bound(*worlds, alone).epsilon - bound(*worlds, grouped).epsilon)
    assert np.mean(lost) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": 1.0}, "delta"),
        ({"confidence": 1.0}, "confidence"),
        ({"num_bounds": 0}, "num_bounds"),
        ({"without": [0.0] * 7}, "without"),
        ({"present": [math.nan] * 8}, "present"),
    ],
)
@two_worlds
def test_unfit_arguments_are_named(bound, change, message):
    arguments = {"without": [0.0] * 8, "present": [1.0] * 8, "delta": DELTA, "confidence": 0.9}
    arguments |= change
    worlds = arguments.pop("without"), arguments.pop("present")
    with pytest.raises(ValueError, match=message):
        bound(*worlds, BoundTerms(**arguments))
