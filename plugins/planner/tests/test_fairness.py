"""Theorems 2 and 3 compared with Monte Carlo simulation of the model that they assume."""

import math

import numpy as np
import pytest

from flower_ext_planner.fairness import LinearFairness
from tests.support.grids import grid
from tests.support.linear_federation import LinearFederation

BASES = ("published", "provable")
WORLD = {
    "num_clients": 6,
    "num_examples": 8,
    "dimension": 4,
    "feature_energy": 5.0,
    "label_variance": 1.3,
    "model_variance": 0.7,
}
GIVEN = {name: v for name, v in WORLD.items() if name not in ("num_clients", "dimension")}
GRID = np.linspace(0, 2, 401)


def world(seed=0, **changes) -> LinearFederation:
    return LinearFederation.draw(np.random.default_rng(seed), **{**WORLD, **changes})


def fairness_of(models, **problem) -> LinearFairness:
    """Return the fairness of clients' estimates û_n, one row a client, by their own moments."""
    clients, dimension = models.shape
    squares = np.square(clients * (models - models.mean(axis=0))).sum(axis=1)
    moments = float(squares.mean()), float(squares.var())
    return with_moments(moments, num_clients=clients, dimension=dimension, **problem)


def with_moments(moments, **problem) -> LinearFairness:
    """Return the fairness of clients with these G₁ and G₂ − G₁² in place of the expected ones."""
    return type("Measured", (LinearFairness,), {"moments": moments})(**problem)


def fairness(seed=0) -> LinearFairness:
    return fairness_of(world(seed).local_models, **GIVEN)


def spread_of_losses(w, f, weight, stddev, draws, rng):
    """Return Var over clients of ‖u_n* − v_n‖² given û: u_n* from its posterior, fresh noise."""
    local, shape = w.local_models, w.true_models.shape
    share, stddev_of_truth = f.shrinkage, math.sqrt(f.posterior_variance)
    shared = math.sqrt(f.shared_variance) * rng.normal(size=(draws, 1, shape[1]))
    truth = (1 - share) * local + share * local.mean(axis=0) + shared
    truth = truth + stddev_of_truth * rng.normal(size=(draws, *shape))
    personal = w.personal_models(weight, stddev * rng.normal(size=(draws, *shape)))
    return np.square(truth - personal).sum(axis=-1).var(axis=1)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0, 1.7, 2.0])
@pytest.mark.parametrize("stddev", [0.0, 1.5])
def test_the_provable_r_is_the_posterior_mean_within_four_standard_errors(weight, stddev):
    w, f = world(), fairness()
    seen = spread_of_losses(w, f, weight, stddev, 40_000, np.random.default_rng(1))
    error = seen.std() / math.sqrt(len(seen))
    computed = float(f.unfairness(weight, upload_variance=stddev**2))
    assert error < 0.02 * computed
    assert abs(seen.mean() - computed) < 4 * error


def test_the_printed_r_is_off_by_far_more():
    w, f = world(), fairness()
    seen = spread_of_losses(w, f, 0.0, 0.0, 40_000, np.random.default_rng(1)).mean()
    assert float(f.unfairness(0.0, upload_variance=0.0, basis="published")) > 3 * seen


@pytest.mark.full
def test_the_posterior_and_the_expected_problem_match_simulated_worlds():
    rng, draws, stddev = np.random.default_rng(2), 4000, 1.0
    weights = (0.0, 0.5, 1.5)
    seen, computed = np.empty((draws, 3)), np.empty((draws, 3))
    for row in range(draws):
        w = LinearFederation.draw(rng, **{**WORLD, "num_examples": 4})
        f = fairness_of(w.local_models, **{**GIVEN, "num_examples": 4})
        noise = stddev * rng.normal(size=w.true_models.shape)
        for column, weight in enumerate(weights):
            apart = w.true_models - w.personal_models(weight, noise)
            seen[row, column] = np.square(apart).sum(axis=1).var()
        computed[row] = f.unfairness(weights, upload_variance=stddev**2)
    expected = LinearFairness(**{**WORLD, "num_examples": 4})
    error = seen.std(axis=0) / math.sqrt(draws)
    assert (np.abs(seen.mean(axis=0) - computed.mean(axis=0)) < 4 * error).all()
    assert (
        np.abs(seen.mean(axis=0) - expected.unfairness(weights, upload_variance=stddev**2))
        < 4 * error
    ).all()


def test_lemma_3_gives_the_minimiser_of_the_personal_objective():
    w, rng = world(), np.random.default_rng(3)
    noise = rng.normal(size=w.true_models.shape)
    shared = (w.local_models + noise).mean(axis=0)
    for weight in (0.2, 1.0, 1.9):
        v = w.personal_models(weight, noise)
        gradient = (1 - weight / 2) * w.gradients(v) + weight * (v - shared)
        np.testing.assert_allclose(gradient, 0, atol=1e-12)
        a = fairness().interpolation(weight)
        np.testing.assert_allclose(v, (1 - a) * w.local_models + a * shared, atol=1e-12)


def test_lemma_3_gives_the_posterior_of_the_true_models():
    # Regressing u_n* on û over worlds with a wide prior on w* has the weights of Eqn 30.
    f, rng, draws = fairness(), np.random.default_rng(4), 200_000
    N, s2, z2 = WORLD["num_clients"], WORLD["label_variance"], WORLD["model_variance"]
    rho = WORLD["feature_energy"]
    truth = math.sqrt(z2) * rng.normal(size=(draws, N)) + 100 * rng.normal(size=(draws, 1))
    local = truth + math.sqrt(s2 / rho) * rng.normal(size=(draws, N))
    weights, residual, *_ = np.linalg.lstsq(local, truth[:, 0], rcond=None)
    variance = 1 / ((N - 1) / (s2 / rho + N * z2) + rho / s2)
    assert weights[0] == pytest.approx(variance * rho / s2, abs=0.01)
    np.testing.assert_allclose(weights[1:], variance * rho / (s2 + N * z2 * rho), atol=0.01)
    assert residual[0] / draws == pytest.approx(variance, rel=0.02)
    assert f.posterior_variance + f.shared_variance == pytest.approx(variance, rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_published_r_and_its_cubic_are_equations_31_and_32(seed):
    f, noise = fairness(seed), 0.8
    N, d, rho, b = 6, 4, 5.0, 8
    s2, z2 = 1.3, 0.7
    S1, S2 = s2 / (N * (s2 + rho * z2)), 1 / N
    sw = 1 / ((N - 1) / (s2 / rho + N * z2) + rho / s2)
    sz = N * noise
    local = world(seed).local_models
    alpha = (N - 1) * local - (local.sum(axis=0) - local)
    G1 = np.square(alpha).sum(axis=1).mean()
    G2 = (np.square(alpha).sum(axis=1) ** 2).mean()
    for weight in (0.0, 0.4, 1.3, 2.0):
        x = b * weight / ((2 - weight) * rho + b * weight)
        sB, a1 = sw + x**2 * sz / N**2, S1 - S2 * x
        R = 2 * d * sB + 4 * sB * a1**2 * G1 + a1**4 * (G2 - G1**2)
        computed = f.unfairness(weight, upload_variance=noise, basis="published")
        assert float(computed) == pytest.approx(R, rel=1e-10)
        left = (
            4 * d * sz / N**2 * x
            + 8 * G1 * sz / N**2 * a1**2 * x
            - 8 * S2 * G1 * sB * a1
            - 4 * S2 * (G2 - G1**2) * a1**3
        )
        cubic = f.quartic(upload_variance=noise, basis="published").deriv()
        assert cubic(x) == pytest.approx(left, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("seed", range(5))
def test_the_best_weight_is_the_numerical_minimum_of_r(seed, basis):
    f = fairness(seed)
    for variance in (0.0, 0.1, 1.0, 10.0, 1e4):
        best = f.best_global_weight(upload_variance=variance, basis=basis)
        values = f.unfairness(GRID, upload_variance=variance, basis=basis)
        least = float(f.unfairness(best, upload_variance=variance, basis=basis))
        assert least <= values.min() * (1 + 1e-12)
        assert abs(best - GRID[np.argmin(values)]) <= 0.0051


@pytest.mark.parametrize("basis", BASES)
def test_without_noise_the_fairest_model_is_the_best_guess_of_the_truth(basis):
    f = fairness()
    best = f.best_global_weight(upload_variance=0.0, basis=basis)
    assert f.interpolation(best) == pytest.approx(f.shrinkage, rel=1e-3)


@pytest.mark.parametrize("basis", grid(BASES, lambda basis: basis == "provable"))
def test_corollary_1_more_noise_lowers_the_best_weight_despite_many_minima(basis):
    in_one_dimension = {**WORLD, "dimension": 1}
    several = 0
    for G1 in np.exp(np.linspace(-2, 8, 11)):
        for ratio in (0.0, 0.1, 3.0):
            f = with_moments((G1, ratio * G1**2), **in_one_dimension)
            best = []
            for variance in np.exp(np.linspace(-8, 8, 15)):
                best.append(f.best_global_weight(upload_variance=variance, basis=basis))
                values = f.unfairness(GRID, upload_variance=variance, basis=basis)
                several += int(np.sum(np.diff(np.sign(np.diff(values))) > 0)) > 1
            assert (np.diff(best) <= 1e-9).all()
    assert several > 0


@pytest.mark.parametrize("basis", BASES)
def test_below_the_clipping_norm_of_theorem_3_r_is_convex(basis):
    rng = np.random.default_rng(5)
    N, d, x, covered = 6, 4, np.linspace(0, 1, 101), 0
    for _ in range(100):
        C = math.exp(rng.uniform(-3, 2))
        models = rng.normal(size=(N, d))
        models *= C / np.linalg.norm(models, axis=1, keepdims=True)
        f = fairness_of(models, **GIVEN)
        if not f.uniqueness(clipping_norm=C, basis=basis).holds:
            continue
        covered += 1
        for variance in (0.01, 1.0, 1e4):
            quartic = f.quartic(upload_variance=variance, basis=basis)
            assert (quartic.deriv(2)(x) > 0).all()
    assert covered > 20


def scaled(factor) -> LinearFairness:
    """Return the same federation with its models measured in another unit."""
    return fairness_of(
        factor * world().local_models,
        **{
            **GIVEN,
            "label_variance": factor**2 * WORLD["label_variance"],
            "model_variance": factor**2 * WORLD["model_variance"],
        },
    )


def test_the_provable_weight_ignores_the_models_unit_unlike_the_printed_weight():
    def best(factor, basis):
        return scaled(factor).best_global_weight(upload_variance=factor**2, basis=basis)

    assert best(10.0, "provable") == pytest.approx(best(1.0, "provable"), rel=1e-6)
    assert best(10.0, "published") > 1.3 * best(1.0, "published")


def test_by_definition_1_with_training_loss_the_fairest_weight_is_zero():
    w, rng = world(), np.random.default_rng(6)
    noise = 0.5 * rng.normal(size=(2000, *w.true_models.shape))
    spread = []
    for weight in (0.0, 0.1, 0.5, 1.0):
        models = w.personal_models(weight, noise)
        losses = np.array([w.losses(one) for one in models])
        # The residual of the least squares is the same for every λ.
        spread.append((losses - w.losses(w.local_models)).var(axis=1).mean())
    assert spread == sorted(spread)
    assert spread[0] == pytest.approx(0, abs=1e-20)


def test_interpolation_and_weight_are_inverse_and_cover_their_ranges():
    f = fairness()
    for weight in GRID[::40]:
        assert f.global_weight(f.interpolation(weight)) == pytest.approx(weight, abs=1e-12)
    assert (f.interpolation(0.0), f.interpolation(2.0)) == (0.0, 1.0)


def test_one_client_or_equal_clients_have_nothing_to_be_unfair_about():
    alone = LinearFairness(**{**WORLD, "num_clients": 1})
    np.testing.assert_allclose(alone.unfairness(GRID, upload_variance=2.0), 0, atol=1e-12)
    equal = fairness_of(np.ones((6, 4)), **GIVEN)
    assert equal.best_global_weight(upload_variance=1.0) == 0.0


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("num_clients", 0),
        ("num_examples", 0),
        ("dimension", 0),
        ("feature_energy", 0.0),
        ("label_variance", -1.0),
        ("model_variance", math.nan),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name_and_value(field, bad):
    with pytest.raises(ValueError, match=f"{field}={bad!r}: expected"):
        LinearFairness(**{**WORLD, field: bad})


def test_what_cannot_be_asked_is_refused():
    f = fairness()
    with pytest.raises(ValueError, match=r"global_weight=2.5: expected λ"):
        f.unfairness([0.0, 2.5], upload_variance=1.0)
    with pytest.raises(ValueError, match="upload_variance=-1.0"):
        f.best_global_weight(upload_variance=-1.0)
    with pytest.raises(ValueError, match="basis='mine'"):
        f.quartic(upload_variance=1.0, basis="mine")
    with pytest.raises(ValueError, match="interpolation=1.1"):
        f.global_weight(1.1)
    with pytest.raises(ValueError, match="clipping_norm=0"):
        f.uniqueness(clipping_norm=0)
    with pytest.raises(ValueError, match="num_examples=3: expected at least 4"):
        world(num_examples=3)
