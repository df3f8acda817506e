"""Bounds of one run stay below the true ε as often as promised, and come close to it."""

import itertools
import math
from bisect import bisect_left

import numpy as np
import pytest
from scipy import optimize, special

from flower_ext.privacy import gaussian_loss
from flower_ext_audit import (
    BoundTerms,
    gaussian_curve,
    in_one_run,
    in_one_run_by_curve,
    profile_curve,
)
from flower_ext_audit.one_run import _chance, refutes
from tests.support.failures import not_refuted
from tests.support.grids import grid

DELTA = 1e-5


def randomised_response(rng, canaries, epsilon):
    included = rng.random(canaries) < 0.5
    kept = rng.random(canaries) < 1 / (1 + math.exp(-epsilon))
    return np.where(included == kept, 1.0, 0.0) + 1e-3 * rng.random(canaries), included


@pytest.mark.parametrize("true", grid([0.0, 1.0], lambda true: true == 1.0))
def test_one_run_exceeds_the_true_epsilon_no_more_often_than_it_says(true):
    rng, repetitions, confidence = np.random.default_rng(), 200, 0.8
    above = 0
    for _ in range(repetitions):
        scores, included = randomised_response(rng, 200, true)
        bound = in_one_run(
            scores, included, BoundTerms(delta=0.0, confidence=confidence), guesses=100
        )
        above += bound.epsilon > true
    assert not_refuted(above, repetitions, 1 - confidence)


def test_one_run_reaches_most_of_the_epsilon_of_randomised_response():
    scores, included = randomised_response(np.random.default_rng(0), 10_000, 2.0)
    bound = in_one_run(scores, included, BoundTerms(delta=0.0, confidence=0.999), guesses=9_000)
    assert 1.7 < bound.epsilon <= 2.0


def gaussian_run(rng, shape, shift):
    """Return the scores and coins of Gaussian sums with an axis for each canary, (…, canaries)."""
    included = rng.random(shape) < 0.5
    return rng.normal(size=shape) + shift * included, included


def with_correct(correct, guesses, canaries):
    """Return scores and coins with so many correct guesses."""
    scores, included = np.arange(canaries), np.arange(canaries) >= canaries / 2
    included[: guesses - correct] = True  # all wrong guesses among the lowest scores
    return scores, included


def fewest_refuting(bound, true, guesses, canaries, confidence):
    """Return the smallest number of correct guesses whose bound exceeds the true ε.

    The bound rises with that number, so bisection finds it.
    """
    terms = BoundTerms(delta=DELTA, confidence=confidence)

    def exceeds(correct):
        shown = bound(*with_correct(correct, guesses, canaries), terms, guesses=guesses)
        return shown.epsilon > true

    return bisect_left(range(guesses + 1), True, lo=guesses // 2, key=exceeds)


def share_at_least(rng, correct, guesses, canaries, shift, runs=20_000):
    """Return the number of runs of a Gaussian sum with so many correct guesses, and of all."""
    half = guesses // 2
    scores, included = gaussian_run(rng, (runs, canaries), shift)
    order = np.argpartition(scores, (half, canaries - half - 1), axis=1)
    ordered = np.take_along_axis(included, order, axis=1)
    right = (~ordered[:, :half]).sum(axis=1) + ordered[:, -half:].sum(axis=1)
    return int((right >= correct).sum()), runs


@pytest.mark.parametrize(
    ("shift", "guesses"),
    grid([(0.5, 10), (1.0, 6), (1.0, 40), (3.0, 40)], {(0.5, 10), (3.0, 40)}.__contains__),
)
def test_a_gaussian_curve_refutes_the_true_shift_no_more_than_stated(shift, guesses):
    rng, canaries, confidence = np.random.default_rng(), 40, 0.8
    true = gaussian_loss(1 / shift, releases=1, delta=DELTA).epsilon
    correct = fewest_refuting(in_one_run_by_curve, true, guesses, canaries, confidence)
    above, runs = share_at_least(rng, correct, guesses, canaries, shift)
    assert not_refuted(above, runs, 1 - confidence)


def test_dividing_by_guesses_instead_of_canaries_would_fail_that_very_check():
    """The surest guesses of many are right more often than guesses without a choice."""
    rng, canaries, guesses, shift, failure = np.random.default_rng(), 400, 40, 1.0, 0.2

    def least(chance):
        return special.ndtr(special.ndtri(chance) - shift)

    fewest = {
        number: min(
            c for c in range(guesses + 2) if refutes_all(c, guesses, number, least, failure)
        )
        for number in (guesses, canaries)
    }
    above, runs = share_at_least(rng, fewest[guesses], guesses, canaries, shift, runs=2000)
    assert not not_refuted(above, runs, failure)
    above, runs = share_at_least(rng, fewest[canaries], guesses, canaries, shift, runs=2000)
    assert not_refuted(above, runs, failure)


def refutes_all(correct, guesses, canaries, least, failure):
    return correct > guesses or refutes(correct, guesses, canaries, least, failure)


@pytest.mark.parametrize("shift", [0.1, 1.0, 3.0])
def test_one_canary_has_the_exact_chance_of_a_gaussian(shift):
    """The best guess of one coin is right with probability Φ(μ/2)."""

    def least(chance):
        return special.ndtr(special.ndtri(chance) - shift)

    exact = float(special.ndtr(shift / 2))
    assert not refutes(1, 1, 1, least, exact * (1 - 1e-6))
    assert refutes(1, 1, 1, least, exact * (1 + 1e-6))


def random_mechanism(rng, canaries, outputs):
    """Return the probabilities of a few outputs (2^m, outputs) by the canaries' coins."""
    spread = rng.choice([0.3, 1.0, 10.0])
    return rng.dirichlet(np.full(outputs, spread), size=2**canaries)


def exact_curve(table, canaries):
    """Return the convex hull of all neighbouring worlds' exact trade-off curves."""
    points = [(0.0, 0.0)]
    for world, coin in itertools.product(range(2**canaries), range(canaries)):
        one, other = table[world], table[world ^ (1 << coin)]
        order = np.argsort(other / one)  # Neyman and Pearson: the cheapest outputs first
        points += zip(np.cumsum(one[order]), np.cumsum(other[order]), strict=True)
    hull = []
    for x, y in sorted(points):
        while len(hull) > 1 and (hull[-1][0] - hull[-2][0]) * (y - hull[-2][1]) <= (
            hull[-1][1] - hull[-2][1]
        ) * (x - hull[-2][0]):
            hull.pop()
        hull.append((x, y))
    knots = np.array(hull)
    return lambda chance: float(np.interp(chance, knots[:, 0], knots[:, 1]))


def exact_chance(table, canaries, guesses, correct):
    """Return the largest probability of so many correct guesses, over all attacks."""
    coins = np.array(list(itertools.product([0, 1], repeat=canaries)))[:, ::-1]
    successes = [
        ((coins[:, chosen] == values).sum(1) >= correct) / len(coins)
        for chosen in map(list, itertools.combinations(range(canaries), guesses))
        for values in itertools.product([0, 1], repeat=guesses)
    ]
    return float((np.array(successes) @ table).max(0).sum())


@pytest.mark.parametrize(("canaries", "guesses"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)])
def test_the_chance_is_at_least_that_of_the_best_attack(canaries, guesses):
    rng, closest = np.random.default_rng(), 0.0
    for _ in range(40):
        table = random_mechanism(rng, canaries, outputs=int(rng.integers(2, 7)))
        least = exact_curve(table, canaries)
        for correct in range(1, guesses + 1):
            exact = exact_chance(table, canaries, guesses, correct)
            assert not refutes(correct, guesses, canaries, least, exact * (1 - 1e-9))
            closest = max(closest, exact * refutes(correct, guesses, canaries, least, 1.0))
    assert closest > 0  # some curve refutes some number of guesses


def test_that_enumeration_finds_a_curve_that_is_slightly_too_high():
    """With a single canary the chance is exact, so a curve that claims more privacy is refuted."""
    rng, refuted = np.random.default_rng(0), 0
    for _ in range(40):
        table = random_mechanism(rng, 1, outputs=4)
        least, exact = exact_curve(table, 1), exact_chance(table, 1, 1, 1)
        refuted += refutes(1, 1, 1, lambda y, least=least: min(1.0, 1.1 * least(y)), exact)
    assert refuted > 20


def worst_chance(canaries, guesses, correct, epsilon, delta):
    """Return the largest chance of so many correct guesses over all (ε, δ)-private mechanisms.

    Averaged over all turns of coins and all orders of canaries, the guesses of any attack on any
    such mechanism have the same number of correct ones, and stay (ε, δ)-private. So a linear
    program over the probabilities p_0, …, p_c' of this number is exact.
    """
    size, weight = guesses + 1, np.zeros((2 * guesses, guesses + 1))
    for right in range(1, size):  # probabilities that one canary is guessed and ...
        is_right, is_wrong = right / canaries, (guesses - right + 1) / canaries
        weight[right - 1, [right, right - 1]] = is_right, -math.exp(epsilon) * is_wrong
        weight[guesses + right - 1, [right, right - 1]] = -math.exp(epsilon) * is_right, is_wrong
    both = np.kron(np.eye(2), np.ones(guesses))
    excess = np.block([[weight, -np.eye(2 * guesses)], [np.zeros((2, size)), both]])
    reached = np.arange(size + 2 * guesses)
    result = optimize.linprog(
        np.where((correct <= reached) & (reached < size), -1.0, 0.0),
        A_ub=excess,
        b_ub=[0.0] * (2 * guesses) + [delta] * 2,
        A_eq=[[1.0] * size + [0.0] * (2 * guesses)],
        b_eq=[1.0],
        bounds=(0, 1),
    )
    return -result.fun


WORST = grid(
    itertools.product([0.5, 2.0], [1e-5, 0.01], [(10, 10), (40, 10), (100, 40)]),
    lambda case: case[:2] == (2.0, 0.01),
)


@pytest.mark.parametrize(("epsilon", "delta", "sizes"), WORST)
def test_no_mechanism_reaches_the_chance_of_either_bound(epsilon, delta, sizes):
    """The chance by a curve is exact where all guesses are correct."""
    canaries, guesses = sizes
    curve = profile_curve([epsilon], [delta])
    for correct in range(guesses // 2, guesses + 1, guesses // 10):
        worst = worst_chance(canaries, guesses, correct, epsilon, delta)
        if worst < 1e-3:  # the program's tolerance is 1e-7
            break
        assert not refutes(correct, guesses, canaries, curve, worst * (1 - 1e-4))
        # For a chance near 1, Theorem 5.2 can be 1 % too small, which no bound needs.
        assert worst > 0.5 or worst < _chance(correct, guesses, canaries, epsilon, delta) + 1e-6
        if correct == guesses:
            assert refutes(correct, guesses, canaries, curve, worst * (1 + 1e-4))


@pytest.mark.parametrize(
    ("shift", "canaries", "guesses"), [(0.5, 1000, 100), (1.0, 1000, 200), (2.0, 2000, 200)]
)
def test_the_gaussian_curve_is_tighter_on_the_same_guesses(shift, canaries, guesses):
    scores, included = gaussian_run(np.random.default_rng(0), canaries, shift)
    terms = BoundTerms(delta=DELTA, confidence=0.95)
    any_mechanism, gaussian = (
        bound(scores, included, terms, guesses=guesses).epsilon
        for bound in (in_one_run, in_one_run_by_curve)
    )
    true = gaussian_loss(1 / shift, releases=1, delta=DELTA).epsilon
    assert 1.3 * any_mechanism < gaussian < true


def test_a_gaussian_profile_gives_nearly_the_gaussian_curve_and_none_above_it():
    shift = 1.0
    epsilons = np.linspace(0, 12, 400)
    deltas = special.ndtr(shift / 2 - epsilons / shift) - np.exp(epsilons) * special.ndtr(
        -shift / 2 - epsilons / shift
    )
    least = profile_curve(epsilons, deltas)
    for chance in (1e-4, 0.01, 0.3, 0.7, 0.99, 1 - 1e-4):
        exact = special.ndtr(special.ndtri(chance) - shift)
        assert 0.99 * exact - 1e-6 < least(chance) <= exact + 1e-12


def test_a_family_of_pure_curves_bounds_randomised_response():
    """The family bounds the ε of any mechanism with this ε alone."""
    scores, included = randomised_response(np.random.default_rng(0), 2000, 2.0)
    terms = BoundTerms(delta=DELTA, confidence=0.99)

    def family(epsilon, delta):
        return profile_curve([epsilon], [0.0])

    bound = in_one_run_by_curve(scores, included, terms, guesses=1000, family=family)
    assert 1.4 < bound.epsilon <= 2.0


def test_the_curve_of_an_epsilon_has_this_epsilon():
    least = gaussian_curve(3.0, DELTA)
    chances = special.ndtr(np.linspace(-8, 8, 2001))
    shown = max(chance - math.exp(3.0) * least(chance) for chance in chances)
    assert shown == pytest.approx(DELTA, rel=1e-3)


def test_a_larger_delta_lowers_what_one_run_shows():
    scores, included = randomised_response(np.random.default_rng(0), 1000, 2.0)
    small, large = (
        in_one_run(scores, included, BoundTerms(delta=delta, confidence=0.95), guesses=500).epsilon
        for delta in (1e-9, 1e-3)
    )
    assert large < small


@pytest.mark.parametrize("bound", [in_one_run, in_one_run_by_curve])
@pytest.mark.parametrize("guesses", [0, 3, 12])
def test_unfit_numbers_of_guesses_are_named(bound, guesses):
    terms = BoundTerms(delta=DELTA, confidence=0.9)
    with pytest.raises(ValueError, match="guesses"):
        bound(np.arange(10), [True] * 10, terms, guesses=guesses)


def test_a_curve_needs_a_delta():
    terms = BoundTerms(delta=0.0, confidence=0.9)
    with pytest.raises(ValueError, match="delta"):
        in_one_run_by_curve(np.arange(10), [True] * 10, terms, guesses=4)
