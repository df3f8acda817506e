"""Private weighting with failing silos, for tests of faults."""

from itertools import cycle, product

import pytest

from tests.support.grids import grid as grid_of
from tests.support.private_silos import INSTALLED, name_of


def in_turn(name, values):
    """Parametrize a test by each value with one protocol, and in the grid with all protocols."""
    daily = [*zip(cycle(INSTALLED), values, strict=False)]
    return pytest.mark.parametrize(
        ("protocol", name),
        grid_of(product(INSTALLED, values), daily.__contains__),
        ids=lambda value: name_of(value) if value in INSTALLED else None,
    )
