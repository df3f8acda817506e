"""Each protection bounds and noises an upload as specified, for arrays of any library."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from flower_ext.privacy import (
    NonFiniteUpdate,
    ObjectivePerturbation,
    OutputPerturbation,
    SecureNoise,
    SeededNoise,
)
from flower_ext.privacy.mechanisms.bounds import BoundedSum
from flower_ext.privacy.mechanisms.protections import (
    ClipAndNoise,
    ClipSteps,
    ProtectedByServer,
    ProtectedByTraining,
)
from flower_ext.privacy.mechanisms.updates import l2_norm
from tests.support.perturbed import noiseless

CLIPPING = (
    ClipAndNoise(clipping_norm=0.5, noise_stddev=0.25),
    OutputPerturbation(clipping_norm=0.5, noise_stddev=0.25),
    ClipSteps(clipping_norm=0.5, gradient_clipping_norm=1.0, noise_stddev=0.25),
)
NOTHING = (
    ObjectivePerturbation(rate=1.0, least_examples=2),
    ProtectedByServer(),
    ProtectedByTraining(),
)


class Silence:
    """Noise of zero, which records the requests for it."""

    is_secure = False

    def __init__(self):
        self.asked = []

    def add_gaussian(self, update, stddev, *, grid=None):
        self.asked.append(stddev)
        return dict(update)


def norm(arrays) -> float:
    return math.sqrt(sum(float((np.asarray(array) ** 2).sum()) for array in arrays.values()))


@pytest.mark.parametrize("like", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("protection", CLIPPING, ids=lambda one: type(one).__name__)
def test_no_upload_however_large_leaves_above_the_bound_before_noise(protection, like):
    upload = {"a": like(np.full((3, 4), 1e6)), "b": like(np.full(5, -1e9))}
    released = protection.released(upload, Silence())
    assert norm(released) <= 0.5
    assert norm(released) == pytest.approx(0.5)


@pytest.mark.parametrize("protection", CLIPPING[:2], ids=lambda one: type(one).__name__)
def test_the_noise_is_that_of_the_protection(protection):
    upload = {"a": np.zeros(40_000)}
    released = protection.released(upload, SeededNoise(1, "test"))["a"]
    assert released.std() == pytest.approx(0.25, rel=0.02)
    assert abs(released.mean()) < 5 * 0.25 / 200
    assert protection.noise_multiplier == 0.5


def test_steps_that_are_noised_are_not_noised_again():
    (silence := Silence()).add_gaussian({}, 1.0)
    CLIPPING[2].released({"a": np.ones(3)}, silence)
    assert silence.asked == [1.0]


@pytest.mark.parametrize("protection", NOTHING, ids=lambda one: type(one).__name__)
def test_a_protection_elsewhere_leaves_the_upload_and_has_no_comparable_noise(protection):
    upload = {"a": np.ones(3)}
    assert protection.released(upload, Silence()) is upload
    incomparable = isinstance(protection, ObjectivePerturbation)
    assert protection.noise_multiplier == (None if incomparable else 0)


OUTPUT = OutputPerturbation(clipping_norm=1.5, noise_stddev=0.2)
OBJECTIVE = ObjectivePerturbation(rate=3.0)


def test_a_model_outside_the_ball_leaves_as_its_projection_plus_noise():
    """One ball for all arrays together; the test would detect ±3 % of σ."""
    model = {"a": np.full(40_000, 3.0), "b": np.full((100, 100), -4.0), "c": np.array(7.0)}
    perturbation = OutputPerturbation(clipping_norm=2.0, noise_stddev=0.5)
    released = perturbation.released(model, SeededNoise(1))
    norm = math.sqrt(sum(float(np.sum(a**2)) for a in model.values()))
    noise = np.concatenate([(released[n] - model[n] * 2.0 / norm).ravel() for n in model])
    assert noise.std() == pytest.approx(0.5, rel=0.015)
    assert stats.kstest(noise / 0.5, "norm").pvalue > 1e-4
    assert stats.kstest(noise / 0.515, "norm").pvalue < 1e-2
    assert abs(np.corrcoef(released["a"][:10_000], released["b"].ravel())[0, 1]) < 0.05


def test_a_model_inside_the_ball_is_noised_but_not_moved():
    model = {"a": np.array([0.3, -0.4])}
    perturbation = OutputPerturbation(clipping_norm=0.6, noise_stddev=1e-9)
    np.testing.assert_allclose(
        perturbation.released(model, SecureNoise())["a"], model["a"], atol=1e-7
    )
    assert not np.array_equal(perturbation.released(model, SecureNoise())["a"], model["a"])


def test_float32_models_stay_float32_and_their_source_is_left_alone():
    model = {"a": torch.full((5,), 9.0)}
    released = OUTPUT.released(model, SecureNoise())
    assert released["a"].dtype == torch.float32
    assert torch.equal(model["a"], torch.full((5,), 9.0))


def test_models_that_cannot_be_bounded_are_refused():
    with pytest.raises(NonFiniteUpdate, match="'a'"):
        OUTPUT.released({"a": np.array([1.0, np.nan])}, SecureNoise())
    with pytest.raises(TypeError, match="'steps' has dtype"):
        OUTPUT.released({"a": np.ones(2), "steps": np.array([3])}, SecureNoise())


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_unfit_mechanisms_are_refused_by_field(value):
    with pytest.raises(ValueError, match="clipping_norm="):
        OutputPerturbation(clipping_norm=value, noise_stddev=1.0)
    with pytest.raises(ValueError, match="noise_stddev="):
        OutputPerturbation(clipping_norm=1.0, noise_stddev=value)
    with pytest.raises(ValueError, match="rate="):
        ObjectivePerturbation(rate=value)


def test_mechanisms_describe_themselves_with_their_numbers():
    assert "clipping norm 1.5" in str(OUTPUT)
    assert "noise stddev 0.2" in str(OUTPUT)
    assert "rate 3" in str(OBJECTIVE)


def test_the_direction_has_the_density_of_the_paper_over_all_arrays_together():
    """‖n‖ ~ Gamma(d, 1/α) with d all parameters, n/‖n‖ uniform; detects ±5 % of α."""
    like = {"a": np.zeros((2, 2), np.float32), "b": np.zeros(()), "c": np.zeros(1)}
    noise, rate, draws = SeededNoise(2), 2.5, 10_000
    perturbation = ObjectivePerturbation(rate=rate)
    drawn = []
    for _ in range(draws):
        direction = perturbation.direction(like, noise)
        drawn.append(np.concatenate([direction[name].ravel() for name in ("a", "b", "c")]))
    sample = np.array(drawn)
    assert sample.shape == (draws, 6)
    norms = np.linalg.norm(sample, axis=1)
    assert stats.kstest(norms, stats.gamma(6, scale=1 / rate).cdf).pvalue > 1e-4
    for wrong in (0.95, 1.05):
        assert stats.kstest(norms, stats.gamma(6, scale=wrong / rate).cdf).pvalue < 1e-6
    # A coordinate of a uniform direction in d dimensions: (1 + u)/2 ~ Beta((d−1)/2, (d−1)/2).
    unit = sample / norms[:, None]
    for coordinate in ((1 + unit) / 2).T:
        assert stats.kstest(coordinate, stats.beta(2.5, 2.5).cdf).pvalue > 1e-4
    np.testing.assert_allclose(unit.T @ unit / draws, np.eye(6) / 6, atol=0.01)
    assert abs(np.corrcoef(norms, unit[:, 0])[0, 1]) < 0.03


def test_the_direction_has_the_names_and_shapes_of_the_model_in_float64():
    like = {"w": torch.zeros(3, 2), "b": torch.zeros(3, dtype=torch.float16)}
    direction = OBJECTIVE.direction(like, SecureNoise())
    assert {name: part.shape for name, part in direction.items()} == {"w": (3, 2), "b": (3,)}
    assert {part.dtype for part in direction.values()} == {np.dtype(np.float64)}


def test_every_direction_is_fresh():
    like = {"w": np.zeros(3)}
    source = SecureNoise()
    drawn = {OBJECTIVE.direction(like, source)["w"].tobytes() for _ in range(20)}
    assert len(drawn) == 20


def test_a_direction_needs_floating_point_parameters():
    with pytest.raises(TypeError, match="'count' has dtype"):
        OBJECTIVE.direction({"count": np.zeros(3, np.int64)}, SecureNoise())


@pytest.mark.parametrize("dtype", [np.float16, np.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_model_is_released_in_its_precision_within_its_ball_before_noise(dtype):
    values = np.random.default_rng(3).normal(size=(4, 500))
    model = torch.tensor(values).to(dtype) if isinstance(dtype, torch.dtype) else dtype(values)
    assert l2_norm(noiseless({"w": model}, 0.7)) == pytest.approx(0.7, rel=1e-8)
    assert l2_norm(noiseless({"w": model}, 0.7)) <= 0.7
    released = OUTPUT.released({"w": model}, SecureNoise())["w"]
    assert released.dtype == model.dtype
    assert released.shape == model.shape


def test_a_model_whose_precision_cannot_hold_it_with_noise_is_refused():
    with pytest.raises(NonFiniteUpdate, match="float16"):
        OutputPerturbation(clipping_norm=1.0, noise_stddev=1e6).released(
            {"w": np.zeros(1000, np.float16)}, SecureNoise()
        )


def test_a_clipped_model_is_never_outside_its_ball():
    rng = np.random.default_rng(0)
    for tau in (1e-3, 1.0):
        model = {"a": rng.normal(size=50).astype(np.float32), "b": rng.normal(size=(3, 3))}
        quiet = OutputPerturbation(clipping_norm=tau, noise_stddev=1e-9 * tau)
        assert l2_norm(quiet.released(model, SecureNoise())) == pytest.approx(tau, rel=1e-6)


UNITS = ClipAndNoise(of_units=True, clipping_norm=1.0, noise_stddev=0.5)


@pytest.mark.parametrize(
    ("protection", "bound", "cell"),
    [
        *((protection, 0.1, None) for protection in (*CLIPPING, *NOTHING)),
        (UNITS, 1.1, None),
        (UNITS, math.nan, None),
        (UNITS, 1.0, 2.0**-16),
        (ClipAndNoise(of_units=True, clipping_norm=1.0, noise_stddev=0.5, cell=2.0**-8), 1.0, None),
    ],
)
def test_a_sum_whose_bound_is_not_the_plans_is_refused_unnoised(protection, bound, cell):
    total, silence = BoundedSum(value={"w": np.ones(2)}, bound=bound, count=2, cell=cell), Silence()
    with pytest.raises(ValueError, match="each unit's part of the update: the method sets"):
        protection.released_sum(total, silence)
    assert silence.asked == []


def test_an_upload_that_must_sum_over_units_is_never_clipped_whole():
    with pytest.raises(
        ValueError, match="each unit's part of the update: the method sets no bound"
    ):
        UNITS.released({"w": np.ones(2)}, Silence())
