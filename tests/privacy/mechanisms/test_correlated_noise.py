"""Matrices, the most that one client moves them, and the noise that they make."""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest

from flower_ext.errors import InvalidValue
from flower_ext.privacy import CorrelatedNoise, SecureNoise
from flower_ext.privacy.mechanisms.correlated_noise import PreparedNoise, StrategyMatrix

MATRICES = {
    "independent": StrategyMatrix(),
    "two bands": StrategyMatrix(bands=(0.6,)),
    "flat": StrategyMatrix(bands=(1.0, 1.0, 1.0)),
    "six bands": StrategyMatrix(bands=(0.5, 0.4, 0.3, 0.3, 0.1)),
    "buffers": StrategyMatrix(weights=(0.2, 0.4), decays=(0.3, 0.9)),
    "both": StrategyMatrix(bands=(0.4, 0.3), weights=(0.1,), decays=(0.8,)),
}
each_matrix = pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)


def dense(matrix, rounds):
    """Return the matrix with all its entries."""
    column = matrix.coefficients(rounds)
    return np.array(
        [[column[i - j] if i >= j else 0.0 for j in range(rounds)] for i in range(rounds)]
    )


def patterns(rounds, apart, most):
    """Return all sets of up to ``most`` rounds that are ``apart``."""
    for count in range(1, most + 1):
        for chosen in combinations(range(rounds), count):
            if all(b - a >= apart for a, b in pairwise(chosen)):
                yield list(chosen)


@each_matrix
@pytest.mark.parametrize("apart", [1, 2, 3, 5])
@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_no_pattern_of_participations_moves_more_than_the_regular_one(matrix, apart, most):
    """By trying all: also where the last ones run past the end, or bands are more than b."""
    whole = dense(matrix, 8)
    for rounds in range(1, 9):
        moves = matrix.row_moves(rounds, rounds_apart=apart, participations=most)
        worst = max(
            np.linalg.norm(whole[:rounds, chosen].sum(axis=1))
            for chosen in patterns(rounds, apart, most)
        )
        assert worst == pytest.approx(np.linalg.norm(moves), rel=1e-12)
    total = matrix.sensitivity(rounds_apart=apart, participations=most)
    assert np.linalg.norm(moves) <= total
    long = matrix.row_moves(2000, rounds_apart=apart, participations=most)
    assert total == pytest.approx(np.linalg.norm(long), rel=1e-11)


@each_matrix
def test_updates_that_differ_move_it_less_than_equal_ones(matrix):
    rng = np.random.default_rng(3)
    whole, apart = dense(matrix, 9), 2
    most = matrix.sensitivity(rounds_apart=apart, participations=5)
    for chosen in patterns(9, apart, 5):
        updates = rng.standard_normal((len(chosen), 4))
        updates /= np.linalg.norm(updates, axis=1, keepdims=True)
        assert np.linalg.norm(whole[:, chosen] @ updates) <= most


@each_matrix
def test_restarted_noise_reveals_no_more_than_continued_noise(matrix):
    """A lost state costs accuracy alone, if no round is repeated: coefficients only vanish."""
    limits = {"rounds_apart": 2, "participations": 5}
    planned = np.linalg.norm(matrix.row_moves(9, **limits))
    for restart in range(1, 9):
        anew = dense(matrix, 9)
        anew[restart:, :restart] = 0.0
        for chosen in patterns(9, 2, 5):
            assert np.linalg.norm(anew[:, chosen].sum(axis=1)) <= planned * (1 + 1e-12)


def test_bands_of_at_most_b_move_by_the_root_of_the_participations():
    column = np.array([1.0, 0.5, 0.25])
    matrix = StrategyMatrix(bands=(0.5, 0.25))
    for apart in (3, 4, 50):
        moved = matrix.sensitivity(rounds_apart=apart, participations=7)
        assert moved == pytest.approx(math.sqrt(7) * np.linalg.norm(column))


def test_a_rising_or_negative_coefficient_would_break_the_bound_and_is_refused():
    for fields in (
        {"bands": (0.5, 0.6)},
        {"bands": (1.1,)},
        {"bands": (0.5, -0.1)},
        {"weights": (-0.1,), "decays": (0.5,)},
        {"weights": (0.7, 0.4), "decays": (0.5, 0.5)},
        {"bands": (0.6,), "weights": (0.5,), "decays": (0.5,)},
        {"weights": (0.5,), "decays": (1.0,)},
        {"weights": (0.5,)},
    ):
        with pytest.raises(InvalidValue, match="expected"):
            StrategyMatrix(**fields)


def vectors(matrix):
    """Return the number of model-sized vectors that a server keeps between rounds."""
    return 1 + max(0, len(matrix.bands) - 1) + len(matrix.decays)


@each_matrix
def test_the_noise_of_all_rounds_times_the_matrix_is_fresh_noise(matrix):
    rng, past, noises, fresh = np.random.default_rng(4), None, [], []
    for _ in range(12):
        drawn = {"a": rng.standard_normal((2, 3)), "b": rng.standard_normal(4)}
        past = matrix.next(drawn, past)
        fresh.append(np.concatenate([drawn["a"].ravel(), drawn["b"]]))
        noises.append(np.concatenate([past.latest["a"].ravel(), past.latest["b"]]))
        assert 1 + len(past.earlier) + len(past.buffers) <= vectors(matrix)
    assert np.allclose(dense(matrix, 12) @ noises, fresh, rtol=0, atol=1e-12)
    assert matrix.inverse(12) == pytest.approx(np.linalg.inv(dense(matrix, 12))[:, 0])
    sums = np.tril(np.ones((12, 12))) @ np.linalg.inv(dense(matrix, 12))
    assert matrix.model_error(12) == pytest.approx(np.linalg.norm(sums) / math.sqrt(12))


@each_matrix
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95])
def test_the_error_of_models_is_that_of_a_server_with_momentum(matrix, momentum):
    noise = np.linalg.inv(dense(matrix, 12))
    buffer, model, square = np.zeros(12), np.zeros(12), 0.0
    for row in noise:
        buffer = momentum * buffer + row
        model = model + (1 - momentum) * buffer
        square += model @ model / 12
    assert matrix.model_error(12, momentum=momentum) == pytest.approx(math.sqrt(square))


@pytest.mark.parametrize(
    ("noise", "rounds", "apart", "gain"),
    [
        (CorrelatedNoise(bands=10), 100, 10, 2.41),
        (CorrelatedNoise(bands=16), 500, 50, 3.36),
        (CorrelatedNoise(bands=50), 500, 50, 4.59),
        (CorrelatedNoise(bands=16), 2000, 100, 3.70),
        (CorrelatedNoise(), 100, 10, 2.26),
        (CorrelatedNoise(buffers=1), 500, 50, 4.31),
        (CorrelatedNoise(), 500, 50, 4.34),
        (CorrelatedNoise(bands=1), 500, 50, 1.0),
        (CorrelatedNoise(momentum=0.9), 200, 50, 5.0),
        (CorrelatedNoise(momentum=0.9, bands=50), 200, 50, 5.0),
        (CorrelatedNoise(momentum=0.9), 500, 50, 5.6),
    ],
)
def test_the_best_matrix_has_so_much_less_error_than_independent_noise(noise, rounds, apart, gain):
    limits = {"rounds_apart": apart, "participations": rounds // apart}
    best = noise.matrix(rounds, **limits)
    independent = StrategyMatrix()

    def error(matrix):
        models = matrix.model_error(rounds, momentum=noise.momentum)
        return models * matrix.sensitivity(**limits)

    assert error(independent) / error(best) >= gain
    kept = max(1, noise.bands - 1) if noise.bands else 1 + noise.buffers
    assert vectors(best) == kept
    # No small change of a coefficient is better.
    rng = np.random.default_rng(5)
    for _ in range(20):
        size = np.exp(1e-3 * rng.standard_normal(len(best.bands) + len(best.weights)))
        bands = np.minimum.accumulate(size[: len(best.bands)] * best.bands)
        weights = size[len(best.bands) :] * best.weights
        weights /= max(1.0, weights.sum() * (1 + 1e-12))  # rounding must not raise it above 1
        other = StrategyMatrix(bands=tuple(bands), weights=tuple(weights), decays=best.decays)
        assert error(other) >= error(best) * (1 - 1e-6)


def test_the_matrix_for_momentum_is_better_with_it_and_worse_without():
    limits = {"rounds_apart": 50, "participations": 4}
    plain, other = (CorrelatedNoise(momentum=m).matrix(200, **limits) for m in (0.0, 0.9))

    def error(matrix, momentum):
        return matrix.model_error(200, momentum=momentum) * matrix.sensitivity(**limits)

    assert error(other, 0.9) < 0.9 * error(plain, 0.9)
    assert error(plain, 0.0) < 0.9 * error(other, 0.0)


def test_numbers_drawn_before_are_added_once_on_the_public_grid_by_name():
    drawn = {"b": np.full(70_000, 2.0), "a": np.array([[1.0, -1.0]])}
    source, grid = PreparedNoise(drawn, is_secure=True), 2.0**-20
    value = {"a": np.array([[0.1, 0.2]]), "b": np.zeros(70_000)}
    noised = source.add_gaussian(value, 0.5, grid=grid)
    assert noised["a"] == pytest.approx(np.array([[0.6, -0.3]]), abs=grid)
    assert np.all(noised["b"] == 1.0)
    assert np.all(noised["a"] / grid == np.round(noised["a"] / grid))
    with pytest.raises(InvalidValue, match="not used yet"):
        source.add_gaussian(value, 0.5, grid=grid)
    with pytest.raises(InvalidValue, match="not used yet"):
        PreparedNoise(drawn, is_secure=True).add_gaussian({"a": value["a"]}, 0.5, grid=grid)


def test_noise_of_many_rounds_has_the_covariance_of_the_inverse():
    """By a χ² of fresh noise that is made again of it; it fails once in 1e9."""
    from scipy import stats

    matrix, past, like = MATRICES["both"], None, {"a": np.zeros(4000)}
    noises = []
    for _ in range(6):
        past = matrix.next(SecureNoise().gaussian(like, 1.0), past)
        noises.append(past.latest["a"])
    fresh = dense(matrix, 6) @ noises
    square = float((fresh**2).sum())
    assert stats.chi2.ppf(1e-9, fresh.size) < square < stats.chi2.isf(1e-9, fresh.size)
    apart = fresh @ fresh.T / math.sqrt(4000) - np.diag((fresh**2).sum(axis=1)) / math.sqrt(4000)
    assert np.abs(apart).max() < 8
