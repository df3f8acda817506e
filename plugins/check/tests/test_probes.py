"""Measurements of spread reject wrong values, and vectors are split along a public direction."""

import numpy as np
import pytest

from flower_ext_check.measured import spread
from flower_ext_check.vectors import direction, vector


@pytest.mark.parametrize("size", [200, 100_000])
def test_a_measured_spread_holds_the_true_one_and_rejects_others(size):
    noise = np.random.default_rng(3).normal(0, 1, size)
    measured = spread(noise)
    assert measured.low < 1 < measured.high
    assert not spread(noise * 0.5).high >= 1
    assert not spread(noise * 1.7).low <= 1


def test_a_vector_knows_its_part_along_the_public_direction():
    arrays = [3 * direction(10)[:4].reshape(2, 2), 3 * direction(10)[4:], np.arange(5)]
    whole = vector(arrays)
    assert whole is not None
    assert (whole.size, whole.along, whole.norm) == (10, pytest.approx(3), pytest.approx(3))
    assert vector([np.arange(3)]) is None
