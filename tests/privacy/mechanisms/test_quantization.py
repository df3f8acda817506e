"""Updates in whole numbers of cells: their norm never grows, and little is lost by rounding."""

import math

import numpy as np
import pytest
import torch

from flower_ext.privacy.mechanisms import quantization
from flower_ext.privacy.mechanisms.quantization import (
    CellSum,
    cell_of,
    in_cells,
    sum_rows_in_cells,
)
from flower_ext.privacy.mechanisms.updates import NonFiniteUpdate, l2_norm


def update_of(norm, dimension=3_000, seed=1):
    drawn = np.random.default_rng(seed).standard_normal(dimension)
    drawn *= norm / np.linalg.norm(drawn)
    return {"a": drawn[:1_000].reshape(10, 100), "b": drawn[1_000:], "c": np.zeros(())}


def squared_norm(whole):
    return sum(int(x) ** 2 for array in whole.values() for x in array.ravel())


@pytest.mark.parametrize("stddev", [1e-12, 0.3, 1.0, 1.5, 2.0, 7e9])
def test_a_cell_is_a_power_of_two_near_a_65536th_of_noise(stddev):
    cell = cell_of(stddev)
    assert math.frexp(cell)[0] == 0.5
    assert 2**16 <= stddev / cell < 2**17


@pytest.mark.parametrize("norm", [0.0, 1e-9, 0.5, 1.0 - 1e-9, 1.0, 1.0 + 1e-9, 3.0, 1e30])
@pytest.mark.parametrize("cells_in_norm", [2**0, 2**3, 2**9, 2**16, 2**24, 2**30])
@pytest.mark.parametrize("seed", range(3))
def test_no_client_has_a_norm_above_the_clipping_norm_in_cells(norm, cells_in_norm, seed):
    cell = 2.0**-30
    whole = in_cells(update_of(norm, seed=seed), cells_in_norm * cell, cell).value
    assert all(array.dtype == np.int64 for array in whole.values())
    assert squared_norm(whole) <= cells_in_norm**2


@pytest.mark.parametrize("clipping_norm", [0.3, 0.7, 1.0])
def test_rounding_moves_numbers_by_half_a_cell_and_clipping_norms_by_few(clipping_norm):
    cell = cell_of(clipping_norm)
    update = update_of(0.2)
    moved = in_cells(update, clipping_norm, cell).in_numbers()
    for name, array in update.items():
        assert np.abs(moved[name] - array).max() <= cell / 2
    large = update_of(5.0)
    expected = {name: array * clipping_norm / 5 for name, array in large.items()}
    rounded = in_cells(large, clipping_norm, cell).in_numbers()
    difference = {name: rounded[name] - expected[name] for name in expected}
    assert l2_norm(difference) <= cell * (math.sqrt(3_001) / 2 + 10)


def test_arrays_of_torch_and_of_single_precision_give_the_same_numbers():
    update = {name: array.astype(np.float32) for name, array in update_of(2.0).items()}
    tensors = {name: torch.tensor(array) for name, array in update.items()}
    ours, theirs = (in_cells(one, 1.0, cell_of(1.0)).value for one in (update, tensors))
    for name in update:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_updates_without_a_bounded_norm_are_refused():
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(NonFiniteUpdate, match="'a'"):
            in_cells({"a": np.array([1.0, bad])}, 1.0, cell_of(1.0))
    with pytest.raises(TypeError, match="'a' has dtype int64"):
        in_cells({"a": np.array([1])}, 1.0, cell_of(1.0))
    with pytest.raises(ValueError, match="expected a power of two"):
        in_cells({"a": np.ones(2)}, 1.0, 0.3)
    for cell in (2.0, 2.0**-31):
        with pytest.raises(ValueError, match=r"the clipping norm is 1 to 2\*\*30 cells long"):
            in_cells({"a": np.ones(2)}, 1.0, cell)


def test_a_sum_takes_no_update_of_other_names_or_shapes():
    whole = in_cells(update_of(1.0), 1.0, cell_of(1.0)).value
    summed = CellSum(update_of(1.0), cell_of(1.0))
    with pytest.raises(ValueError, match="names differ"):
        summed.add({"a": whole["a"]})
    with pytest.raises(ValueError, match="shape"):
        summed.add({**whole, "a": whole["a"].ravel()})


def rows_of(norms, dimension=700, seed=2):
    drawn = np.random.default_rng(seed).standard_normal((len(norms), dimension))
    drawn *= (np.asarray(norms) / np.linalg.norm(drawn, axis=1))[:, None]
    return {"a": drawn[:, :600].reshape(-1, 20, 30), "b": drawn[:, 600:]}


def parts_of(rows, norm, cell, weights):
    """Each row's part of the sum, found by leaving all others out."""
    return [
        sum_rows_in_cells({n: a[k : k + 1] for n, a in rows.items()}, norm, cell, [weight]).value
        for k, weight in enumerate(weights)
    ]


NORMS = [0.0, 1e-300, 1e-9, 0.2, 1.0 - 1e-9, 1.0, 1.0 + 1e-9, 3.0, 1e30, 1e200]


@pytest.mark.parametrize("cells_in_norm", [2**0, 2**3, 2**9, 2**16, 2**24, 2**30])
@pytest.mark.parametrize("weight", [0.0, 1e-9, 0.1, 1 / 3, 1.0])
def test_no_row_has_a_norm_above_its_weight_times_the_clipping_norm(cells_in_norm, weight):
    cell = 2.0**-30
    rows = rows_of(NORMS)
    for part in parts_of(rows, cells_in_norm * cell, cell, [weight] * len(NORMS)):
        assert all(array.dtype == np.int64 for array in part.values())
        assert squared_norm(part) <= (weight * cells_in_norm) ** 2


@pytest.mark.parametrize("silos", [1, 3, 7, 10, 49])
def test_weights_that_add_up_to_one_move_the_sum_within_the_norm(silos):
    """Where all parts point the same way, and weights are rounded upwards."""
    norm, cell = 0.7, 2.0**-20
    weights = [min(1.0, 1 / silos * (1 + 1e-13))] * silos
    one = rows_of([5.0])
    rows = {name: np.repeat(array, silos, axis=0) for name, array in one.items()}
    moved = sum_rows_in_cells(rows, norm, cell, weights).value
    assert squared_norm(moved) <= (norm / cell) ** 2
    assert squared_norm(moved) >= (norm / cell - 30 * silos) ** 2  # and it is reached


@pytest.mark.parametrize("library", [np.asarray, torch.tensor])
@pytest.mark.parametrize("together", [2**18, 1_000, 1])
def test_a_sum_equals_that_of_its_rows_bit_for_bit(library, together, monkeypatch):
    monkeypatch.setattr(quantization, "_TOGETHER", together)
    rng = np.random.default_rng(5)
    weights = rng.random(len(NORMS))
    rows = rows_of(NORMS)
    parts = parts_of(rows, 1.0, cell_of(1.0), weights)
    for order in (range(len(NORMS)), rng.permutation(len(NORMS)), [3, 3, 1]):
        ordered_rows = {name: library(array[list(order)]) for name, array in rows.items()}
        total = sum_rows_in_cells(ordered_rows, 1.0, cell_of(1.0), weights[list(order)])
        assert total.count == len(order)
        for name, array in total.value.items():
            np.testing.assert_array_equal(array, sum(parts[k][name] for k in order))


def test_rounding_moves_rows_by_half_a_cell_and_clipping_norms_by_few():
    cell = cell_of(1.0)
    rows = {n: a.astype(np.float32) for n, a in rows_of([0.2, 5.0]).items()}
    weights = [0.25, 0.5]
    small, large = parts_of(rows, 1.0, cell, weights)
    for name, array in rows.items():
        assert np.abs(small[name] * cell - 0.25 * array[0]).max() <= cell * (0.5 + 1e-6)
    expected = {name: 0.5 * array[1].astype(np.float64) / 5 for name, array in rows.items()}
    difference = {name: large[name] * cell - expected[name] for name in expected}
    assert l2_norm(difference) <= cell * (math.sqrt(700) / 2 + 10)


def test_rows_that_no_norm_bounds_and_weights_that_are_none_are_refused():
    for bad in (math.nan, math.inf):
        with pytest.raises(NonFiniteUpdate):
            sum_rows_in_cells({"a": np.array([[1.0, bad]])}, 1.0, cell_of(1.0), [1.0])
    for weights in ([1.0, 1.0], [1.1], [-0.1], [math.nan]):
        with pytest.raises(ValueError, match=r"expected 1 numbers in \[0, 1\]"):
            sum_rows_in_cells({"a": np.ones((1, 2))}, 1.0, cell_of(1.0), weights)
    with pytest.raises(ValueError, match="expected a power of two"):
        sum_rows_in_cells({"a": np.ones((1, 2))}, 1.0, 0.3, [1.0])
