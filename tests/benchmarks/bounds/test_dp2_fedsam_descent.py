"""Theorem 1 of DP²-FedSAM, held against descents that are known exactly."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.bounds.dp2_fedsam_descent import (
    PersonalDescent,
    dp2_fedsam_provable_bound,
    dp2_fedsam_published_bound,
)
from tests.support.grids import grid

USUAL = PersonalDescent(
    extractor_smoothness=0.8,
    head_smoothness=1.3,
    coupling=0.6,
    gradient_bound=2.0,
    extractor_rate=0.02,
    head_rate=0.03,
    extractor_steps=3,
    head_steps=2,
    initial_gap=1.5,
    dimension=7,
    num_clients=20,
    sampling_rate=0.5,
    extractor_stddev=0.4,
    head_stddev=0.2,
    radius=0.1,
    noise_multiplier=1.1,
    clipping_norm=0.3,
)


ROUNDS = 10**6
PLAIN = PersonalDescent(
    extractor_smoothness=1.0,
    head_smoothness=1.0,
    gradient_bound=1.0,
    extractor_rate=ROUNDS**-0.5,
    head_rate=2 * ROUNDS**-0.5,
    initial_gap=0.0,
    dimension=1,
    num_clients=1,
    clipping_norm=1e9,
)


def test_the_published_bound_is_the_last_inequality_of_appendix_a_3():
    """Written out as printed, with T = 10, mean ᾱ = 0.7 and mean α̃ = 0.2."""
    L, Lh, x2, G, e, h, tp, th = 0.8, 1.3, 0.36, 2.0, 0.02, 0.03, 3, 2
    r, N, d1, sp, sh, q, sigma, C, abar, atil = 0.5, 20, 7, 0.4, 0.2, 0.1, 1.1, 0.3, 0.7, 0.2
    printed = (
        1.5 / 10
        + (36 * e**4 * tp**2 * L**2 * abar + 3 * e**2 * tp * L) * G**2
        + (atil * e * tp * L**2 + L**2 * e**2 * tp * abar + 3 * L**3 * e**2 * tp) * q**2
        + (L**2 * e**2 * tp * abar * (72 * tp * e**2 + 18 * e**2 * tp**2) + 3 * L * e**2 * tp)
        * sp**2
        + 4 * x2 * h**2 * th**2 * Lh * sh**2 * (1 - r)
        + L * sigma**2 * C**2 * d1**2 / (r**2 * N**2)
        + h**2 * th**2 * Lh * sh**2 * r / 2
        + 4 * h**3 * Lh * th**2 * (th - 1) * sh**2 * r
        + abar * e * tp * h**2 * th**2 * sh**2 * x2 * L * Lh
    )
    bound = dp2_fedsam_published_bound(USUAL, rounds=10, mean_factor=abar, factor_spread=atil)
    assert bound * min(e * tp * L / 8, h * th * Lh / 16) == pytest.approx(printed, rel=1e-12)


class Quadratics:
    """F_i = ½a_i‖φ − u_i‖² + ½b_i‖h_i − w_i‖² + c_i⟨φ, h_i⟩ on N clients, c_i² < a_i b_i."""

    def __init__(self, rng, *, clients=4, dimension=2, coupling=0.5):
        self.a, self.b = np.exp(0.5 * rng.normal(size=(2, clients, 1)))
        self.c = coupling * rng.uniform(-1, 1, (clients, 1)) * np.sqrt(self.a * self.b)
        self.u, self.w = rng.normal(size=(2, clients, dimension))

    def value(self, phi, heads):
        parts = self.a * (phi - self.u) ** 2 + self.b * (heads - self.w) ** 2
        return float((parts / 2 + self.c * phi * heads).sum(axis=1).mean())

    def of_phi(self, phi, heads):
        """Return ∇_φ F_i of every client; ``phi`` is one model or one of each client."""
        return self.a * (phi - self.u) + self.c * heads

    def of_heads(self, phi, heads):
        return self.b * (heads - self.w) + self.c * phi

    def least(self):
        """Return F*, at which the heads are the best for φ."""
        curvature = (self.a - self.c**2 / self.b).mean()
        phi = (self.a * self.u - self.c * self.w).mean(axis=0) / curvature
        return self.value(phi, self.w - self.c / self.b * phi)

    def local_rounds(self, phi, heads, settings, noise_phi=None, noise_heads=None):
        """Return all clients' new heads, updates Δ_i, and ∇_φ F_i at each local model."""
        for step in range(settings.head_steps):
            noise = 0 if noise_heads is None else noise_heads[step]
            heads = heads - settings.head_rate * (self.of_heads(phi, heads) + noise)
        local, gradients = np.broadcast_to(phi, self.u.shape), []
        for step in range(settings.extractor_steps):
            gradient = self.of_phi(local, heads)
            gradients.append(gradient)
            if settings.radius:
                norms = np.linalg.norm(gradient, axis=1, keepdims=True)
                gradient = self.of_phi(local + settings.radius * gradient / norms, heads)
            noise = 0 if noise_phi is None else noise_phi[step]
            local = local - settings.extractor_rate * (gradient + noise)
        return heads, local - phi, np.array(gradients)

    def constants(self, settings, phi, heads, gradient_bound):
        L, Lh = float(self.a.max()), float(self.b.max())
        return replace(
            settings,
            extractor_smoothness=L,
            head_smoothness=Lh,
            coupling=float(np.abs(self.c).max()) / math.sqrt(L * Lh),
            gradient_bound=gradient_bound,
            initial_gap=self.value(phi, heads) - self.least(),
            dimension=self.u.shape[1],
            num_clients=len(self.u),
        )

    def left_side(self, phi, heads, r):
        whole = self.of_phi(phi, heads).mean(axis=0)
        of_heads = (self.of_heads(phi, heads) ** 2).sum(axis=1).mean()
        return float(whole @ whole / self.a.max() + r * of_heads / self.b.max())


def settings_for(rng, problem, *, clipping_norm, **changes):
    """Return learning rates that the provable bound accepts."""
    steps = {"extractor_steps": int(rng.integers(1, 4)), "head_steps": int(rng.integers(1, 4))}
    pace = 10 ** rng.uniform(-3, 0)
    head = min(1 / 8, pace) * rng.uniform(0.05, 0.3)
    return PersonalDescent(
        extractor_smoothness=1.0,
        head_smoothness=1.0,
        gradient_bound=1.0,
        initial_gap=0.0,
        dimension=1,
        num_clients=1,
        extractor_rate=float(pace / steps["extractor_steps"] / problem.a.max()),
        head_rate=float(head / steps["head_steps"] / problem.b.max()),
        clipping_norm=clipping_norm,
        **steps,
        **changes,
    )


@pytest.mark.parametrize("sampled", [2, 4])
@pytest.mark.parametrize("seed", grid(range(25), lambda seed: seed < 8))
def test_the_provable_bound_holds_for_every_cohort_with_sam_and_clipping(seed, sampled):
    """Three rounds of all cohorts, so that means over cohorts are exact; or many with everyone."""
    rng = np.random.default_rng(seed)
    problem = Quadratics(rng)
    clip = float(rng.choice([1e-3, 0.05, 100.0]))
    settings = settings_for(
        rng,
        problem,
        radius=float(rng.choice([0.0, 0.3])),
        sampling_rate=sampled / 4,
        clipping_norm=clip,
    )
    cohorts = list(itertools.combinations(range(4), sampled))
    rounds = 3 if len(cohorts) > 1 else 300
    start = rng.normal(size=2), rng.normal(size=(4, 2))
    states, total, cut, steepest = [start], 0.0, [], 0.0
    for _ in range(rounds):
        following, left, lengths = [], [], []
        for phi, heads in states:
            left.append(problem.left_side(phi, heads, sampled / 4))
            new, updates, gradients = problem.local_rounds(phi, heads, settings)
            steepest = max(steepest, np.linalg.norm(gradients, axis=2).max())
            norms = np.linalg.norm(updates, axis=1, keepdims=True)
            lengths.append(np.maximum(norms - clip, 0) ** 2)
            clipped = updates * np.minimum(1, clip / norms)
            for cohort in map(list, cohorts):
                mixed = heads.copy()
                mixed[cohort] = new[cohort]
                following.append((phi + clipped[cohort].sum(axis=0) / sampled, mixed))
        total += np.mean(left) / rounds
        cut.append(np.mean(lengths))
        states = following
    constants = problem.constants(settings, *start, float(steepest))
    bound = dp2_fedsam_provable_bound(
        constants, rounds=rounds, clipped_length=math.sqrt(np.mean(cut))
    )
    assert total <= bound * (1 + 1e-9)


class Moments:
    """Second moments of rounds that are affine in the state and in Gaussian noise."""

    def __init__(self, problem, settings, sampled, stddevs):
        self.shape = problem.u.shape
        clients, d = self.shape
        self.problem, self.settings, self.sampled = problem, settings, sampled
        steps = (settings.extractor_steps, settings.head_steps)
        sizes = [d, *(count * clients * d for count in steps)]
        self.cuts = np.cumsum(sizes)[:-1]
        self.variances = np.concatenate(
            [np.full(size, s**2) for size, s in zip(sizes, stddevs, strict=True)]
        )
        self.cohorts = [list(c) for c in itertools.combinations(range(clients), sampled)]

    def affine(self, function):
        """Return the matrices of ``function(state, noise)``: of (state, 1), and of the noise."""
        size, noises = self.shape[1] * (self.shape[0] + 1), len(self.variances)
        at = function(np.zeros(size), np.zeros(noises))
        by_state = np.stack([function(e, np.zeros(noises)) - at for e in np.eye(size)], axis=1)
        by_noise = np.stack([function(np.zeros(size), e) - at for e in np.eye(noises)], axis=1)
        return np.hstack([by_state, at[:, None]]), by_noise

    def split(self, state, noise):
        clients, d = self.shape
        on_sum, of_phi, of_heads = np.split(noise, self.cuts)
        shape = (-1, clients, d)
        return (
            state[:d],
            state[d:].reshape(clients, d),
            on_sum,
            of_phi.reshape(shape),
            (of_heads.reshape(shape)),
        )

    def round_of(self, cohort):
        def following(state, noise):
            phi, heads, on_sum, of_phi, of_heads = self.split(state, noise)
            new, updates, _ = self.problem.local_rounds(phi, heads, self.settings, of_phi, of_heads)
            mixed = heads.copy()
            mixed[cohort] = new[cohort]
            phi = phi + updates[cohort].sum(axis=0) / self.sampled + on_sum
            return np.concatenate([phi, mixed.ravel()])

        return following

    def local_gradients(self, state, noise):
        phi, heads, _, of_phi, of_heads = self.split(state, noise)
        return self.problem.local_rounds(phi, heads, self.settings, of_phi, of_heads)[2].ravel()

    def left_side(self, state, noise):
        """Return a vector whose squared norm is the left side of Eq. 21."""
        phi, heads, *_ = self.split(state, noise)
        p, r = self.problem, self.sampled / self.shape[0]
        whole = p.of_phi(phi, heads).mean(axis=0) / math.sqrt(p.a.max())
        of_heads = p.of_heads(phi, heads) * math.sqrt(r / len(heads) / p.b.max())
        return np.concatenate([whole, of_heads.ravel()])

    def run(self, start, rounds):
        """Return E of the left side, and the largest root mean square of a local gradient."""
        one = np.append(start, 1.0)
        second = np.outer(one, one)
        maps = [self.affine(self.round_of(cohort)) for cohort in self.cohorts]
        left, gradients = self.affine(self.left_side), self.affine(self.local_gradients)
        total, steepest = 0.0, 0.0
        for _ in range(rounds):
            total += float(np.trace(left[0] @ second @ left[0].T)) / rounds
            squares = np.einsum("ij,jk,ik->i", gradients[0], second, gradients[0])
            squares += (gradients[1] ** 2 * self.variances).sum(axis=1)
            steepest = max(steepest, squares.reshape(-1, self.shape[1]).sum(axis=1).max())
            following = np.zeros_like(second)
            for matrix, by_noise in maps:
                matrix = np.vstack([matrix, one[None] * 0 + np.eye(len(one))[-1]])
                following += matrix @ second @ matrix.T / len(maps)
                size = len(by_noise)
                following[:size, :size] += (by_noise * self.variances) @ by_noise.T / len(maps)
            second = following
        return total, math.sqrt(steepest)


@pytest.mark.parametrize("sampled", [1, 2, 3])
@pytest.mark.parametrize(
    ("sigma", "of_phi", "of_heads"), [(2.0, 0.0, 0.0), (0.0, 0.5, 0.0), (0.1, 0.1, 2.0)]
)
@pytest.mark.parametrize("rounds", [1, 200])
def test_the_provable_bound_holds_in_expectation_with_all_noises(
    sampled, sigma, of_phi, of_heads, rounds
):
    rng = np.random.default_rng(sampled)
    problem = Quadratics(rng, clients=3, coupling=0.4)
    d, clip = 2, 50.0  # nothing is clipped
    settings = settings_for(
        rng,
        problem,
        sampling_rate=sampled / 3,
        clipping_norm=clip,
        noise_multiplier=sigma / clip,
        extractor_stddev=of_phi * math.sqrt(d),
        head_stddev=of_heads * math.sqrt(d),
    )
    start = rng.normal(size=2 * (3 + 1))
    total, steepest = Moments(problem, settings, sampled, (sigma / sampled, of_phi, of_heads)).run(
        start, rounds
    )
    phi, heads = start[:2], start[2:].reshape(3, 2)
    assert total <= dp2_fedsam_provable_bound(
        problem.constants(settings, phi, heads, steepest), rounds=rounds
    )


def test_the_noise_of_a_round_has_variance_times_d_not_d_squared():
    """The proof of Lemma 9 takes E‖Σ z‖²/(rN)² for σ²C²d₁²/(rN)²."""
    rng = np.random.default_rng(0)
    draws = rng.normal(0, 1.1 * 0.3 / math.sqrt(10), size=(20_000, 10, 7)).sum(axis=1) / 10
    measured = float((draws**2).sum(axis=1).mean())
    assert measured == pytest.approx(7 * USUAL.noise_variance, rel=0.05)  # 12 standard errors


def test_the_noise_term_is_sixteen_times_what_noise_costs_a_quadratic():
    """φ ← (1 − η) φ + z in d = 100 dimensions, whose stationary variance is exact."""
    rate, d, rounds = 0.01, 100, 10**6
    noisy = replace(
        PLAIN,
        extractor_rate=rate,
        head_rate=0.1,
        dimension=d,
        gradient_bound=1e-9,
        noise_multiplier=1.0,
        clipping_norm=1.0,
    )
    mean = d / (1 - (1 - rate) ** 2)
    assert mean < dp2_fedsam_provable_bound(noisy, rounds=rounds) < 17 * mean


def steady(problem, settings, phi, rounds):
    """Return ‖∇F‖² where one round of everyone changes nothing, and both bounds."""
    heads = problem.w
    new, updates, gradients = problem.local_rounds(phi, heads, settings)
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    factors = np.minimum(1, settings.clipping_norm / norms)
    assert np.abs((updates * factors).sum(axis=0)).max() < 1e-15
    assert np.array_equal(new, heads)
    constants = problem.constants(
        settings, phi, heads, float(np.linalg.norm(gradients, axis=2).max())
    )
    constants = replace(constants, extractor_smoothness=1.0, head_smoothness=1.0, coupling=0.0)
    mean = float(factors.mean())
    known = {"mean_factor": mean, "factor_spread": float(np.abs(factors - mean).mean())}
    cut = np.maximum(norms - settings.clipping_norm, 0) ** 2
    square = problem.left_side(phi, heads, 1.0)
    return (
        (mean * square, dp2_fedsam_published_bound(constants, rounds=rounds, **known)),
        (
            square,
            dp2_fedsam_provable_bound(
                constants, rounds=rounds, clipped_length=math.sqrt(cut.mean())
            ),
        ),
    )


def one_dimension(curvatures, targets):
    problem = Quadratics(np.random.default_rng(0), clients=len(targets), dimension=1, coupling=0)
    problem.a, problem.u = np.array(curvatures)[:, None], np.array(targets)[:, None]
    problem.b = np.ones_like(problem.b)
    return problem


def test_clipped_descent_misses_the_stationary_point_of_the_printed_bound():
    """Targets 0, 0 and 3, clipped to 0.1 η: rest is near the median, ∇F = −0.95; q = σ = 0."""
    problem = one_dimension([1.0, 1.0, 1.0], [0.0, 0.0, 3.0])
    settings = replace(PLAIN, clipping_norm=0.1 * PLAIN.extractor_rate)
    published, provable = steady(problem, settings, np.array([0.05]), ROUNDS)
    assert published[0] > 2 * published[1]
    assert provable[0] == pytest.approx(0.95**2)
    assert provable[0] < provable[1]


def test_the_error_of_sam_does_not_vanish_without_clipping_as_printed():
    """F₁ = φ²/2 and F₂ nearly φ: SAM rests at φ = q − 1, where ‖∇F‖² = q²/4."""
    flat, q = 1e-9, 0.9
    problem = one_dimension([1.0, flat], [0.0, -1 / flat])
    phi = (q - 1 - flat * q) / (1 + flat)
    published, provable = steady(problem, replace(PLAIN, radius=q), np.array([phi]), ROUNDS)
    assert published[0] > 2 * published[1]
    assert provable[0] == pytest.approx(q**2 / 4, rel=1e-6)
    assert provable[0] < provable[1]


def test_the_published_noise_term_diverges_at_theorem_2s_noise():
    def noise(T, sigma):
        rates = {"extractor_rate": 0.05 / math.sqrt(T), "head_rate": 0.1 / math.sqrt(T)}
        on = replace(USUAL, **rates, noise_multiplier=sigma)
        return dp2_fedsam_published_bound(on, rounds=T) - dp2_fedsam_published_bound(
            replace(on, noise_multiplier=0.0), rounds=T
        )

    early, late = 10**4, 10**6
    assert noise(late, 1.0) == pytest.approx(10 * noise(early, 1.0), rel=1e-6)
    at_theorem_2 = [noise(T, math.sqrt(T) / 100) for T in (early, late)]
    assert at_theorem_2[1] == pytest.approx(1000 * at_theorem_2[0], rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_rate": 0.05}, r"head_rate=0.05: expected .*0.13"),
        ({"coupling": 3.0}, r"head_rate=0.03: expected .* <= r/8"),
        ({"clipping_norm": 0.0}, "clipping_norm=0.0"),
        ({"sampling_rate": 0.0}, "sampling_rate=0.0"),
        ({"radius": -0.1}, "radius=-0.1"),
        ({"dimension": 0}, "dimension=0"),
    ],
)
def test_unfit_constants_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        dp2_fedsam_provable_bound(replace(USUAL, **changes), rounds=5)
