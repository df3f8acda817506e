"""Theorem 1 of Uldp-FL's Appendix E, held against descents whose expectation is known exactly."""

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.bounds.uldp_descent import (
    UldpDescent,
    clipping_bias,
    uldp_avg_bound,
    uldp_avg_rates,
)
from tests.support.grids import grid

USUAL = UldpDescent(
    num_silos=3,
    num_users=4,
    dimension=5,
    local_steps=2,
    smoothness=0.7,
    initial_gap=2.0,
    learning_rate=0.05,
    server_rate=1.5,
    gradient_bound=3.0,
    gradient_stddev=0.4,
    heterogeneity=0.6,
    noise_multiplier=1.1,
    clipping_norm=0.3,
    least_factor=0.5,
    largest_factor=0.9,
)


def test_the_published_bound_is_equation_5_term_by_term():
    S, U, d, Q, L, T = 3, 4, 5, 2, 0.7, 10
    el, eg, G, sl, sg, sigma, C, low, high = 0.05, 1.5, 3.0, 0.4, 0.6, 1.1, 0.3, 0.5, 0.9
    c = 1 / 2 - 15 * L**2 * Q**2 * el**2
    A1 = G**2 / (c * low * U * T)
    A2 = 3 * L * eg * el * Q * G**2 / (2 * c * low * U * T)
    printed = (
        1 / (c * T * eg * el * Q * S) * (2.0 / low)
        + 5 / (2 * c) * L**2 * Q * el**2 * (sl**2 + 6 * Q * sg**2)
        + 3 * high * L * eg * el * sl**2 / (2 * c * S**2 * U)
        + L * eg * sigma**2 * C**2 * d / (2 * c * low * el * Q * S * U**2)
        + A1 * (T * 0.2)
        + A2 * (T * 0.05)
    )
    bound = uldp_avg_bound(USUAL, rounds=T, bias=0.2, squared_bias=0.05, basis="published")
    assert bound == pytest.approx(printed, rel=1e-12)


class Quadratics:
    """f_su(x) = ½ Σ_j a_suj (x_j − m_suj)² of S silos and U users, trained by full batches."""

    def __init__(self, curvatures, targets):
        self.a, self.m = np.asarray(curvatures, float), np.asarray(targets, float)
        self.minimiser = (self.a * self.m).mean(axis=(0, 1)) / self.a.mean(axis=(0, 1))

    def value(self, x):
        return 0.5 * float((self.a * (x - self.m) ** 2).sum(axis=2).mean())

    def gradients(self, x):
        return self.a * (x - self.m)

    def run(self, x, weights, *, rounds, steps, rate, server, clip):
        """Return the problem's constants as the run met them, Σ‖∇f‖²/T and the two biases."""
        S, U, d = self.a.shape
        norms, biases, factors, spreads, steepest = [], [], [], [], 0.0
        gap = self.value(x) - self.value(self.minimiser)
        for _ in range(rounds):
            whole = self.gradients(x)
            mean = whole.mean(axis=(0, 1))
            norms.append(float(mean @ mean))
            spreads.append(np.linalg.norm(whole - mean, axis=2).max())
            y = np.broadcast_to(x, self.a.shape)
            for _ in range(steps):
                steepest = max(steepest, np.linalg.norm(self.gradients(y), axis=2).max())
                y = y - rate * self.gradients(y)
            moved = y - x
            factor = clip / np.maximum(clip, np.linalg.norm(moved, axis=2))
            factors.append(factor)
            biases.append(clipping_bias(weights, factor))
            x = x + server / (S * U) * ((weights * factor)[..., None] * moved).sum(axis=(0, 1))
        problem = UldpDescent(
            num_silos=S,
            num_users=U,
            dimension=d,
            local_steps=steps,
            smoothness=float(self.a.max()),
            initial_gap=gap,
            learning_rate=rate,
            server_rate=server,
            gradient_bound=float(steepest),
            heterogeneity=float(max(spreads)),
            clipping_norm=clip,
            least_factor=float(np.min(factors)),
            largest_factor=float(np.max(factors)),
        )
        bias, squared = np.mean(biases, axis=0)
        return problem, float(np.mean(norms)), {"bias": bias, "squared_bias": squared}


@pytest.mark.parametrize("seed", grid(range(40), lambda seed: seed < 10))
def test_the_provable_bound_holds_for_clipped_and_weighted_descents(seed):
    rng = np.random.default_rng(seed)
    S, U, d = (int(n) for n in rng.integers(1, 5, 3))
    spread = rng.choice([0.0, 0.3, 1.0])
    problem = Quadratics(
        np.exp(spread * rng.normal(size=(S, U, d))), spread * rng.normal(size=(S, U, d))
    )
    weights = rng.dirichlet(np.ones(S), size=U).T if rng.random() < 0.5 else np.full((S, U), 1 / S)
    steps = int(rng.integers(1, 4))
    L = problem.a.max()
    rate = rng.uniform(0.01, 0.99) / (math.sqrt(30) * steps * L)
    server = rng.uniform(0.1, 1) * S / (3 * steps * L * rate)
    for rounds in (1, 10, 200):
        constants, mean, biases = problem.run(
            rng.normal(size=d),
            weights,
            rounds=rounds,
            steps=steps,
            rate=rate,
            server=server,
            clip=float(rng.choice([0.01, 0.3, 1e6])) * rate,
        )
        assert mean <= uldp_avg_bound(constants, rounds=rounds, **biases) * (1 + 1e-9)


def noisy_descent(*, rounds, steps, rate, server, noise, clip, stddev, S=2, U=3, d=4, a=1.0):
    """Return E of Σ‖∇f‖²/T for f_su = ½a‖x − m_su‖², un-clipped, and the problem.

    Every step is linear, so that mean and variance of x_t are exact. ``stddev`` is that of each
    coordinate of a stochastic gradient.
    """
    targets = np.random.default_rng(3).normal(size=(S, U, d))
    keep = (1 - rate * a) ** steps
    x, variance, norms = targets.mean(axis=(0, 1)) + 1.0, 0.0, []
    centre = targets.mean(axis=(0, 1))
    start = 0.5 * a * float(((x - centre) ** 2).sum())
    # Noise of one local training: Σ_q (1 − ηa)^{Q−1−q} η n_q.
    local = sum(((1 - rate * a) ** q * rate * stddev) ** 2 for q in range(steps))
    for _ in range(rounds):
        norms.append(a**2 * (float(((x - centre) ** 2).sum()) + d * variance))
        shrink = 1 - server / S * (1 - keep)  # weights 1/S, summed over S·U and divided by S·U
        x = centre + shrink * (x - centre)
        variance = shrink**2 * variance + (server / (S * U)) ** 2 * (
            (noise * clip) ** 2 + S * U * local / S**2
        )
    problem = UldpDescent(
        num_silos=S,
        num_users=U,
        dimension=d,
        local_steps=steps,
        smoothness=a,
        initial_gap=start,
        learning_rate=rate,
        server_rate=server,
        gradient_stddev=stddev * math.sqrt(d),
        heterogeneity=a * float(np.linalg.norm(targets - centre, axis=2).max()),
        noise_multiplier=noise,
        clipping_norm=clip,
    )
    return float(np.mean(norms)), problem


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("rounds", [1, 30, 3000])
@pytest.mark.parametrize(("noise", "stddev"), [(0.0, 0.5), (5.0, 0.0), (0.5, 2.0)])
def test_the_provable_bound_holds_in_expectation_with_noise(steps, rounds, noise, stddev):
    for rate in (0.01 / steps, 0.15 / steps):
        most = 2 / (6 * steps * rate)
        for server in (most, most / 30):
            mean, problem = noisy_descent(
                rounds=rounds,
                steps=steps,
                rate=rate,
                server=server,
                noise=noise,
                clip=0.1,
                stddev=stddev,
            )
            assert mean <= uldp_avg_bound(problem, rounds=rounds)


def test_the_printed_bound_promises_too_much_where_there_are_two_silos():
    """The first term has |S| on the wrong side: a plain descent with small steps exceeds it."""
    run = {"rounds": 1000, "steps": 1, "rate": 1e-3, "server": 5.0, "noise": 0.0, "clip": 1.0}
    mean, problem = noisy_descent(**run, stddev=0.0, S=4)
    problem = replace(problem, heterogeneity=0.0)  # one step drifts nowhere
    assert mean > 2 * uldp_avg_bound(problem, rounds=1000, basis="published")
    assert mean < uldp_avg_bound(problem, rounds=1000)


def test_the_noise_term_is_nearly_reached():
    run = {"rounds": 20_000, "steps": 1, "rate": 1e-3, "server": 5.0, "noise": 30.0, "clip": 1.0}
    mean, problem = noisy_descent(**run, stddev=0.0)
    bound = uldp_avg_bound(replace(problem, heterogeneity=0.0), rounds=20_000)
    assert 0.3 * bound < mean < bound


def at_remark_2(rounds, **changes):
    """Return the bound at the learning rates of Remark 2."""
    size = {"num_silos": 3, "num_users": 4, "local_steps": 2, "smoothness": 0.7}
    server, local = uldp_avg_rates(**size, rounds=rounds)
    known = {"learning_rate": local, "server_rate": server, "least_factor": 1.0} | changes
    problem = replace(USUAL, largest_factor=1.0, **known)
    return uldp_avg_bound(problem, rounds=rounds)


def test_the_rates_of_remark_2_give_its_order_from_36_suq_on():
    size = 3 * 4 * 2
    assert at_remark_2(36 * size, noise_multiplier=0.0) > 0
    with pytest.raises(ValueError, match="server_rate="):
        at_remark_2(36 * size - 1, noise_multiplier=0.0)
    scaled = [at_remark_2(T, noise_multiplier=0.0) * math.sqrt(size * T) for T in (10**5, 10**9)]
    assert scaled[1] == pytest.approx(scaled[0], rel=0.3)


def test_at_the_rates_of_remark_2_noise_grows_with_root_rounds():
    def noise(T, **changes):
        return at_remark_2(T, **changes) - at_remark_2(T, **{**changes, "noise_multiplier": 0.0})

    early, late = 10**5, 10**7
    assert noise(late) == pytest.approx(10 * noise(early), rel=1e-3)
    shrinking = [noise(T, clipping_norm=1 / math.sqrt(T)) for T in (early, late)]
    assert shrinking[1] == pytest.approx(shrinking[0] / 10, rel=1e-3)
    fixed_epsilon = [
        noise(T, clipping_norm=1 / math.sqrt(T), noise_multiplier=math.sqrt(T) / 100)
        for T in (early, late)
    ]
    assert fixed_epsilon[1] == pytest.approx(10 * fixed_epsilon[0], rel=1e-3)


def test_without_clipping_equal_weights_have_no_bias_and_weights_by_records_have():
    """Remark 4 asks for a small bias; the weights of the paper's next section raise it."""
    records = np.array([[9, 1], [1, 3]])
    by_records = records / records.sum(axis=0)
    assert clipping_bias(np.full((2, 2), 1 / 2), np.ones((2, 2))) == (0.0, 0.0)
    assert clipping_bias(by_records, np.ones((2, 2)))[0] == pytest.approx(2 * 0.4 + 2 * 0.25)


def test_weights_against_the_clipping_lower_the_bias():
    factors = np.array([[1.0, 1.0], [0.25, 0.25]])
    balanced = (1 / factors) / (1 / factors).sum(axis=0)
    assert clipping_bias(balanced, factors)[0] == pytest.approx(0.0, abs=1e-12)
    assert clipping_bias(np.full((2, 2), 1 / 2), factors)[0] > 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.14}, "learning_rate=0.14: expected a number below"),
        ({"server_rate": 50.0}, "server_rate=50.0: expected at most"),
        ({"gradient_bound": math.inf}, "gradient_bound=inf: expected a finite G"),
        ({"num_silos": 0}, "num_silos=0"),
        ({"least_factor": 0.0}, "least_factor=0.0"),
        ({"heterogeneity": -1.0}, "heterogeneity=-1.0"),
    ],
)
def test_unfit_constants_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        uldp_avg_bound(replace(USUAL, **changes), rounds=5, bias=0.1)


@pytest.mark.parametrize(
    ("weights", "factors", "message"),
    [
        ([[0.5], [0.4]], [[1.0], [1.0]], "add up to 1"),
        ([[0.5], [0.5]], [[1.0], [0.0]], r"\(0, 1\]"),
        ([[1.0]], [[1.0], [1.0]], "one shape"),
    ],
)
def test_unfit_weights_are_refused(weights, factors, message):
    with pytest.raises(ValueError, match=message):
        clipping_bias(weights, factors)
