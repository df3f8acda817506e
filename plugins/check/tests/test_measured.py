"""Measured standard deviations, and the bounds that the check takes from them."""

import numpy as np
import pytest

from flower_ext_check.measured import spread


@pytest.mark.parametrize("size", [200, 100_000])
def test_a_measured_spread_holds_the_true_one_and_rejects_others(size):
    noise = np.random.default_rng(3).normal(0, 1, size)
    measured = spread(noise)
    assert measured.low < 1 < measured.high
    assert not spread(noise * 0.5).high >= 1
    assert not spread(noise * 1.7).low <= 1
