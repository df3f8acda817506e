"""Updates in whole numbers of cells: the norm never grows, and little is lost."""

import math

import numpy as np
import pytest
import torch

from flower_ext.privacy.cells import cell_of, in_cells, out_of_cells
from flower_ext.privacy.updates import NonFiniteUpdate, l2_norm


def update_of(norm, dimension=3_000, seed=1):
    drawn = np.random.default_rng(seed).standard_normal(dimension)
    drawn *= norm / np.linalg.norm(drawn)
    return {"a": drawn[:1_000].reshape(10, 100), "b": drawn[1_000:], "c": np.zeros(())}


def squared_norm(cells):
    return sum(int(x) ** 2 for array in cells.values() for x in array.ravel())


@pytest.mark.parametrize("stddev", [1e-12, 0.3, 1.0, 1.5, 2.0, 7e9])
def test_a_cell_is_a_power_of_two_and_a_65536th_of_the_noise_or_half_of_that(stddev):
    cell = cell_of(stddev)
    assert math.frexp(cell)[0] == 0.5
    assert 2**16 <= stddev / cell < 2**17


@pytest.mark.parametrize("norm", [0.0, 1e-9, 0.5, 1.0 - 1e-9, 1.0, 1.0 + 1e-9, 3.0, 1e30])
@pytest.mark.parametrize("cells_in_norm", [2**0, 2**3, 2**9, 2**16, 2**24, 2**30])
@pytest.mark.parametrize("seed", range(3))
def test_no_client_has_a_norm_above_the_clipping_norm_in_cells(norm, cells_in_norm, seed):
    cell = 2.0**-30
    whole = in_cells(update_of(norm, seed=seed), cells_in_norm * cell, cell)
    assert all(array.dtype == np.int64 for array in whole.values())
    assert squared_norm(whole) <= cells_in_norm**2


@pytest.mark.parametrize("clipping_norm", [0.3, 0.7, 1.0])
def test_rounding_moves_a_number_by_half_a_cell_and_clipping_by_a_few_cells_of_norm(clipping_norm):
    cell = cell_of(clipping_norm)
    update = update_of(0.2)
    moved = out_of_cells(in_cells(update, clipping_norm, cell), cell, update)
    for name, array in update.items():
        assert np.abs(moved[name] - array).max() <= cell / 2
    large = update_of(5.0)
    expected = {name: array * clipping_norm / 5 for name, array in large.items()}
    found = out_of_cells(in_cells(large, clipping_norm, cell), cell, large)
    difference = {name: found[name] - expected[name] for name in expected}
    assert l2_norm(difference) <= cell * (math.sqrt(3_001) / 2 + 10)


def test_arrays_of_torch_and_of_single_precision_give_the_same_numbers():
    update = {name: array.astype(np.float32) for name, array in update_of(2.0).items()}
    tensors = {name: torch.tensor(array) for name, array in update.items()}
    ours, theirs = (in_cells(one, 1.0, cell_of(1.0)) for one in (update, tensors))
    for name in update:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_what_no_norm_bounds_is_refused():
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(NonFiniteUpdate, match="'a'"):
            in_cells({"a": np.array([1.0, bad])}, 1.0, cell_of(1.0))
    with pytest.raises(TypeError, match="'a' has dtype int64"):
        in_cells({"a": np.array([1])}, 1.0, cell_of(1.0))
    for cell in (0.3, 2.0, 2.0**-31):
        with pytest.raises(ValueError, match="expected a power of two"):
            in_cells({"a": np.ones(2)}, 1.0, cell)


def test_a_sum_of_other_names_or_shapes_is_no_model():
    whole = in_cells(update_of(1.0), 1.0, cell_of(1.0))
    like = update_of(1.0)
    with pytest.raises(ValueError, match="names differ"):
        out_of_cells({"a": whole["a"]}, 1.0, like)
    with pytest.raises(ValueError, match="shape"):
        out_of_cells({**whole, "a": whole["a"].ravel()}, 1.0, like)
