"""The guard's ε is true of a hostile app, and each planted fault shows as an ε that is exceeded."""

import numpy as np
import pytest

from flower_ext.privacy import clip
from flower_ext.privacy.mechanisms.noise import NoiseSource
from flower_ext_audit import audit
from flower_ext_guard import release
from flower_ext_guard.hostile_app import guard_experiment
from tests.support.grids import grid

TRIALS, CONFIDENCE, OF_A_FAULT = 200, 1 - 1e-6, 0.999


def test_no_bound_exceeds_what_the_ledger_counts():
    result = audit(guard_experiment(), trials=TRIALS, confidence=CONFIDENCE)
    assert not result.broken, result.to_dict()
    (view,) = result.views
    assert view.best.terms.reported == pytest.approx(10.05, abs=0.1)
    assert view.best.epsilon > 1  # the two worlds are as far apart as the guard permits


def noise_missing(patch):
    patch.setattr(NoiseSource, "add_gaussian", lambda self, update, stddev: dict(update))


def noise_quartered(patch):
    real = NoiseSource.add_gaussian
    patch.setattr(
        NoiseSource, "add_gaussian", lambda self, update, stddev: real(self, update, stddev / 4)
    )


def clipping_missing(patch):
    """Plant a fault: the guard does not clip."""
    patch.setattr(
        release,
        "bounded_update",
        lambda request, answer, norm: {n: answer[n] - array for n, array in request.items()},
    )


def clipping_after_the_noise(patch):
    """Plant a fault: the guard clips after it adds the noise."""
    real = NoiseSource.add_gaussian
    clipping_missing(patch)
    patch.setattr(
        NoiseSource,
        "add_gaussian",
        lambda self, update, stddev: dict(clip(real(self, update, stddev), 1.0).value),
    )


def numbers_clipped_one_by_one(patch):
    """Plant a fault: the guard clips each number instead of the norm."""
    patch.setattr(
        release,
        "bounded_update",
        lambda request, answer, norm: {
            n: np.clip(answer[n] - array, -4 * norm, 4 * norm) for n, array in request.items()
        },
    )


@pytest.mark.parametrize(
    "plant",
    grid(
        [
            noise_missing,
            noise_quartered,
            clipping_missing,
            clipping_after_the_noise,
            numbers_clipped_one_by_one,
        ],
        lambda plant: plant in (noise_quartered, numbers_clipped_one_by_one),
    ),
)
def test_a_planted_fault_is_found(plant, monkeypatch):
    plant(monkeypatch)
    result = audit(guard_experiment(noise_multiplier=2.0), trials=TRIALS, confidence=OF_A_FAULT)
    assert result.broken, result.to_dict()
