"""What sums cost beyond sampled Gaussians is an upper bound, and nothing where there is none."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize, stats

from flower_ext.privacy import FullParticipation, NeighboringRelation, PoissonSampling
from flower_ext.privacy.accounting import Release, gaussian_loss, privacy_loss_of
from flower_ext.privacy.residue import Residue, with_residue

ONE = NeighboringRelation.ADD_OR_REMOVE_ONE


def release(rate=1.0, **facts):
    sampling = FullParticipation(100) if rate == 1 else PoissonSampling(100, rate)
    return Release(**{"sampling": sampling, "noise_multiplier": 1.0, "relation": ONE, **facts})


def delta_between(one, other, epsilon):
    """The hockey-stick divergence of two discrete laws."""
    return float(np.maximum(one - math.exp(epsilon) * other, 0).sum())


def law(rate, shift):
    """A sum with a unit that is drawn or not, in steps of 1/100, and one without the unit."""
    edges = np.arange(-12, 14, 0.01)

    def masses(mean):
        return np.diff(stats.norm.cdf(edges - mean))

    with_unit = (1 - rate) * masses(shift) + rate * masses(1 + shift)
    return with_unit, masses(0.0)


@pytest.mark.parametrize("shift", [1e-9, 1e-4, 0.05])
@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_what_a_shift_of_undrawn_units_costs_is_counted(rate, shift):
    delta = 1e-5
    loss = privacy_loss_of({release(rate, shift=shift): 1}, delta=delta).epsilon
    one, other = law(rate, shift)
    for pair in ((one, other), (other, one)):
        assert delta_between(*pair, loss) <= delta
    least = optimize.brentq(lambda e: delta_between(one, other, e) - delta, 0, 20)
    assert least <= loss <= least + 5 * shift + 1e-2


def test_without_its_shift_a_release_would_promise_too_much():
    one, other = law(0.1, 0.3)
    assert delta_between(one, other, privacy_loss_of({release(0.1): 1}, delta=1e-5).epsilon) > 1e-5


def moved(distance, epsilon):
    """A Gaussian's law without ``distance`` of the mass that matters most, and its neighbour's."""
    edges = np.arange(-40, 42, 0.01)
    one, other = (np.diff(stats.norm.cdf(edges, mean, 3.0)) for mean in (1.0, 0.0))
    left, best = distance, np.flatnonzero(other > math.exp(epsilon) * one)[::-1]
    for at in best:
        taken = min(left, one[at])
        one[at] -= taken
        left -= taken
    assert left == 0
    one[-1] += distance
    return one, other


@pytest.mark.parametrize("distance", [1e-12, 1e-8, 3e-7])
def test_a_distance_costs_what_the_worst_laws_at_that_distance_show(distance):
    delta = 1e-5
    noised = release(noise_multiplier=3.0, distance=distance)
    loss = privacy_loss_of({noised: 1}, delta=delta).epsilon
    one, other = moved(distance, loss)
    assert delta_between(other, one, loss) <= delta
    assert delta_between(one, other, loss) <= delta


def test_a_distance_that_is_added_to_delta_without_the_factor_would_promise_too_much():
    delta, distance = 1e-5, 1e-6
    loss = gaussian_loss(3.0, releases=1, delta=delta - 2 * distance).epsilon
    one, other = moved(distance, loss)
    assert delta_between(other, one, loss) > delta


def test_a_residue_too_large_for_delta_promises_nothing():
    assert math.isinf(privacy_loss_of({release(distance=1e-3): 1}, delta=1e-5).epsilon)
    assert math.isinf(privacy_loss_of({release(distance=1e-12): 10**8}, delta=1e-5).epsilon)
    loud = release(noise_multiplier=0.01, distance=1e-16)
    assert math.isinf(privacy_loss_of({loud: 1}, delta=1e-5).epsilon)


def test_no_residue_changes_nothing_and_a_negligible_one_next_to_nothing():
    plain = privacy_loss_of({release(0.2): 100}, delta=1e-5)
    assert with_residue(lambda d: plain, Residue(), 1e-5) is plain
    small = release(0.2, shift=2.0**-28.6 / 5, distance=2.0**-60)
    assert plain.epsilon <= privacy_loss_of({small: 100}, delta=1e-5).epsilon
    assert privacy_loss_of({small: 100}, delta=1e-5).epsilon <= 1.001 * plain.epsilon


def test_shifts_of_rounds_add_as_squares_and_distances_as_they_are():
    rounds = privacy_loss_of({release(shift=0.01, distance=1e-9): 100}, delta=1e-5)
    expected = with_residue(
        lambda d: gaussian_loss(1.0, releases=100, delta=d),
        Residue(shift=0.1, distance=1e-7),
        1e-5,
    )
    assert math.isinf(rounds.epsilon) == math.isinf(expected.epsilon)
    few = privacy_loss_of({release(noise_multiplier=5, shift=0.01, distance=1e-13): 4}, delta=1e-5)
    composed = with_residue(
        lambda d: gaussian_loss(5.0, releases=4, delta=d),
        Residue(shift=0.02, distance=4e-13),
        1e-5,
    )
    assert few.epsilon == pytest.approx(composed.epsilon)


def test_a_ledger_keeps_the_residue_and_writes_none_where_there_is_none():
    full = release(0.2, shift=1e-9, distance=1e-15)
    assert Release.from_dict(full.to_dict()) == full
    bare = replace(full, shift=0.0, distance=0.0)
    assert set(bare.to_dict()) == {"sampling", "noise_multiplier", "relation"}
    assert Release.from_dict(bare.to_dict()) == bare
