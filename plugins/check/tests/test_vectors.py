"""Summaries of uploads and models."""

import numpy as np
import pytest

from flower_ext_check.vectors import SAMPLE, direction, summarize


def test_a_vector_knows_its_part_along_the_public_direction():
    arrays = [3 * direction(10)[:4].reshape(2, 2), 3 * direction(10)[4:], np.arange(5)]
    whole = summarize(arrays)
    assert whole is not None
    assert (whole.size, whole.along, whole.norm) == (10, pytest.approx(3), pytest.approx(3))
    assert summarize([np.arange(3)]) is None


@pytest.mark.parametrize("size", [1, SAMPLE, SAMPLE + 1, 2 * SAMPLE - 1, 3 * SAMPLE + 7])
def test_a_vector_keeps_at_most_a_sample_of_its_coordinates(size):
    whole = summarize([np.arange(size, dtype=float)])
    assert SAMPLE / 2 < whole.sample.size <= SAMPLE or whole.sample.size == size
    assert np.unique(np.diff(whole.sample)).size <= 1
    assert (whole.size, whole.sample[0]) == (size, 0)
