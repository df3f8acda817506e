"""Theorem 1 compared with its recursions, and with runs of DP-Ditto whose constants are known."""

import math

import numpy as np
import pytest

from tests.support.ditto_bounds import BASES, bound, equal_rates, problem, random_bound
from tests.support.linear_federation import LinearFederation


def iterated(b, T):
    """Return the two recursions (10) and (13), iterated round by round."""
    gap, distance = b.initial_gap, b.initial_distance
    for _ in range(T):
        distance = b.personal_rate * distance + b.residual + b.coupling * gap
        gap = b.global_rate * gap + b.gap_per_planned_round * T
    return distance


# The closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("seed", range(20))
def test_the_bound_is_both_recursions_iterated(seed, basis):
    b = random_bound(np.random.default_rng(seed), basis)
    for T in (0, 1, 2, 7, 60):
        assert float(b.after(T)) == pytest.approx(iterated(b, T), rel=1e-11)


@pytest.mark.parametrize("apart", [0.0, 1e-15, 1e-12, 1e-9, 1e-6, -1e-9, 1e-3])
def test_the_bound_is_exact_where_both_rates_meet(apart):
    b = equal_rates(global_rate=0.9 + apart)
    for T in (0, 1, 5, 200):
        assert float(b.after(T)) == pytest.approx(iterated(b, T), rel=1e-10)


@pytest.mark.parametrize("rates", [(1.0, 0.9), (1.1, 0.9), (0.0, 0.9), (0.5, 0.0)])
def test_the_bound_follows_the_recursion_where_it_does_not_contract(rates):
    b = equal_rates(personal_rate=rates[0], global_rate=rates[1])
    for T in (0, 1, 5, 40):
        assert float(b.after(T)) == pytest.approx(iterated(b, T), rel=1e-10)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("variance", [0.0, 1e-5])
def test_a_diverging_bound_ends_at_infinity_and_never_has_the_best_rounds(variance):
    changes = {"personal_learning_rate": 0.1, "strong_convexity": 0.05, "smoothness": 1.0}
    b = bound(weight=0.1, variance=variance, basis="published", **changes)
    values = b.after(np.arange(20_001))
    assert b.personal_rate > 1
    assert not np.isnan(values).any()
    assert (np.diff(values[np.isfinite(values)]) > 0).all()
    assert values[-1] == math.inf
    assert b.best_rounds(20_000) == 0


@pytest.mark.parametrize("basis", BASES)
def test_no_negative_rate_bounds_a_square(basis):
    b = bound(personal_learning_rate=30.0, basis=basis)
    assert b.personal_rate < 0
    assert not all(condition.holds for condition in b.conditions)
    assert b.after([0, 1, 2, 9]).tolist() == [4.0, math.inf, math.inf, math.inf]
    assert b.best_rounds(100) == 0


def test_the_longest_useful_step_in_a_round_bowl_has_rate_zero():
    for mu in np.arange(1, 200) / 7:
        b = bound(
            strong_convexity=mu, smoothness=mu, learning_rate=1 / mu, personal_learning_rate=0.01
        )
        assert b.converges
        assert b.global_rate == pytest.approx(0, abs=1e-15)


def test_the_printed_constants_are_those_of_lemmas_1_and_2():
    weight, mu, L, eta = 0.5, 1.0, 2.0, 0.05
    b = bound(weight=weight, variance=1e-4, basis="published")
    G = ((1 - weight / 2) * 1.0 + weight * (1.0 / mu + 0.5)) ** 2
    assert b.personal_rate == pytest.approx(1 - eta * ((1 - weight / 2) * mu + weight) + eta)
    assert b.global_rate == pytest.approx(1 - 2 * mu * eta + mu * L * eta**2)
    assert b.residual == pytest.approx((1 + weight**2) * eta**2 * G)
    assert b.coupling == pytest.approx((4 * eta**2 * weight**2 + 2 * eta * weight**2) / mu)
    # φ_L = σ_z² d L/(2 T N²) with σ_z² = N σ_u².
    assert b.gap_per_planned_round == pytest.approx(20 * 1e-4 * 10 * L / (2 * 20**2))


# The lemmas themselves ----------------------------------------------------------------------------


def one_step(rng, basis, *, long=False):
    """Return both sides of Lemma 1 for one random quadratic client, w* = u_n* = 0."""
    d, weight = 3, rng.choice([0.01, 0.3, 1.0, 1.9])
    mu, L = 0.5, 8.0
    curvatures = rng.uniform(mu, L, size=d)
    m, ell = (1 - weight / 2) * mu + weight, (1 - weight / 2) * L + weight
    eta = (2.0 if long else rng.uniform(0.05, 1.0)) * 2 / (m + ell)
    v, w = rng.normal(size=d) * rng.choice([0.1, 1, 10], size=2)[:, None]
    gradient = (1 - weight / 2) * curvatures * v + weight * (v - w)
    gap = 0.5 * float(curvatures @ w**2)
    b = bound(
        weight=weight,
        basis=basis,
        strong_convexity=mu,
        smoothness=L,
        learning_rate=0.01,
        personal_learning_rate=eta,
        gradient_bound=float(np.linalg.norm(curvatures * v)),
        model_spread=0.0,
    )
    promised = b.personal_rate * float(v @ v) + b.residual + b.coupling * gap
    return float(np.sum((v - eta * gradient) ** 2)), promised, b


@pytest.mark.parametrize("basis", BASES)
def test_both_forms_of_lemma_1_hold_for_short_personal_steps(basis):
    rng = np.random.default_rng(1)
    for _ in range(2000):
        reached, promised, b = one_step(rng, basis)
        assert reached <= promised * (1 + 1e-9)
        assert b.conditions[-1].holds


def test_lemma_1_as_printed_fails_for_long_steps_as_its_condition_says():
    # One quadratic client of curvature 10 at v = 1, w* = 0: λ nearly 0 and η_L = 1.
    mu, eta, weight, v = 10.0, 1.0, 0.01, 1.0
    m = (1 - weight / 2) * mu + weight
    worst = 0.0
    for w in -np.geomspace(1, 1e5, 200):
        b = bound(
            weight=weight,
            basis="published",
            strong_convexity=mu,
            smoothness=mu,
            personal_learning_rate=eta,
            gradient_bound=mu * v,
            model_spread=0.0,
        )
        reached = (v - eta * (m * v - weight * w)) ** 2
        promised = b.personal_rate * v**2 + b.residual + b.coupling * 0.5 * mu * w**2
        worst = max(worst, reached / promised)
        assert not b.conditions[-1].holds
    assert worst > 1.2


def test_the_provable_bound_contracts_without_a_gradient_bound_or_a_spread():
    for weight in (0.0, 0.1, 1.0, 2.0):
        b = bound(weight=weight, gradient_bound=math.inf, model_spread=math.inf)
        assert b.converges
        assert b.personal_rate <= bound(weight=weight, basis="published").personal_rate
    assert not bound(weight=0.1, strong_convexity=0.5, basis="published").converges
    conditions = bound(weight=0.1, strong_convexity=0.5, basis="published").conditions
    assert [c.holds for c in conditions] == [False, True]


@pytest.mark.parametrize("weight", [0.1, 0.5, 1.5, 2.0])
@pytest.mark.parametrize("variance", [0.0, 1e-3])
def test_theorem_1_bounds_runs_of_dp_ditto_in_the_linear_world(weight, variance):
    rng, N, d = np.random.default_rng(2), 8, 4
    world = LinearFederation.draw(
        rng,
        num_clients=N,
        num_examples=10,
        dimension=d,
        feature_energy=8.0,
        label_variance=0.5,
        model_variance=0.3,
    )
    start, eta, draws = np.full(d, 2.0), 0.1, 400
    best = world.personal_models(weight, np.zeros((N, d)))
    local, shared = world.local_models, world.local_models.mean(axis=0)  # Eqn 26
    personal_start = np.broadcast_to(start, (N, d))
    for T in (1, 10, 40):
        w = np.broadcast_to(start, (draws, 1, d))
        v = np.broadcast_to(personal_start, (draws, N, d))
        for _ in range(T):
            push = (1 - weight / 2) * world.curvature * (v - local) + weight * (v - w)
            u = w - eta * world.curvature * (w - local)
            noise = rng.normal(scale=math.sqrt(variance * T), size=(draws, N, d))
            v, w = v - eta * push, (u + noise).mean(axis=1, keepdims=True)
        reached = np.square(v - best).sum(axis=-1).mean(axis=0)
        for n in range(N):
            b = bound(
                weight=weight,
                variance=variance,
                strong_convexity=world.curvature,
                smoothness=world.curvature,
                learning_rate=eta,
                personal_learning_rate=eta,
                num_clients=N,
                dimension=d,
                initial_gap=float(world.losses(start).mean() - world.losses(shared).mean()),
                initial_distance=float(np.square(start - best[n]).sum()),
            )
            assert reached[n] <= float(b.after(T)) * (1 + 1e-9)


# The search ---------------------------------------------------------------------------------------


def test_more_noise_asks_for_fewer_rounds_and_none_for_all():
    best = [bound(variance=s).best_rounds(5000) for s in (0.0, 1e-6, 1e-4, 1e-2, 1.0)]
    assert best == sorted(best, reverse=True)
    assert bound(weight=0.0, variance=1.0).best_rounds(777) == 777  # purely local: no noise reaches
    assert bound(variance=1e9).best_rounds(5000) <= 1


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-0.1, 2.1, math.nan])
def test_a_weight_outside_0_to_2_is_refused(bad):
    with pytest.raises(ValueError, match=f"global_weight={bad!r}: expected λ"):
        bound(weight=bad)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *[(f, b) for f in ("strong_convexity", "smoothness", "learning_rate") for b in (0, -1)],
        ("personal_learning_rate", math.nan),
        ("initial_gap", -1.0),
        ("initial_distance", math.inf),
        ("gradient_bound", -1.0),
        ("dimension", 0),
        ("num_clients", 0),
        ("smoothness", 0.5),
        ("learning_rate", 1.0),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name_and_value(field, bad):
    with pytest.raises(ValueError, match=f"{field}={bad!r}: expected"):
        problem(**{field: bad})


def test_what_a_bound_cannot_do_is_refused():
    with pytest.raises(ValueError, match="variance_per_round=-1"):
        bound(variance=-1)
    with pytest.raises(ValueError, match="basis='mine': expected published or provable"):
        bound(basis="mine")
    with pytest.raises(ValueError, match="gradient_bound=inf: expected a finite number"):
        bound(basis="published", gradient_bound=math.inf)
    with pytest.raises(ValueError, match="max_rounds=0: expected an integer >= 1"):
        bound().best_rounds(0)
    with pytest.raises(ValueError, match="rounds=-1"):
        bound().after(-1)
