"""Summaries of uploads and models."""

import numpy as np
import pytest

from flower_ext_check.vectors import direction, vector


def test_a_vector_knows_its_part_along_the_public_direction():
    arrays = [3 * direction(10)[:4].reshape(2, 2), 3 * direction(10)[4:], np.arange(5)]
    whole = vector(arrays)
    assert whole is not None
    assert (whole.size, whole.along, whole.norm) == (10, pytest.approx(3), pytest.approx(3))
    assert vector([np.arange(3)]) is None
