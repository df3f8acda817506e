"""Each protection bounds and noises an upload as specified, for arrays of any library."""

import math

import numpy as np
import pytest
import torch

from flower_ext.privacy import SeededNoise
from flower_ext.privacy.mechanisms.protections import (
    ClipModel,
    ClipSteps,
    ClipUpdate,
    PerturbObjective,
    ProtectedByServer,
    ProtectedByTraining,
)

CLIPPING = (
    ClipUpdate(clipping_norm=0.5, noise_stddev=0.25),
    ClipModel(clipping_norm=0.5, noise_stddev=0.25),
    ClipSteps(clipping_norm=0.5, gradient_clipping_norm=1.0, noise_stddev=0.25),
)
NOTHING = (
    PerturbObjective(rate=1.0, least_examples=2),
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
def test_what_protects_elsewhere_leaves_the_upload_alone_and_counts_as_no_noise(protection):
    upload = {"a": np.ones(3)}
    assert protection.released(upload, Silence()) is upload
    assert protection.noise_multiplier == 0
