"""Products of matrices, exponentials and activations, as loops over numbers that Numba compiles."""

import math
from typing import Any

import numpy as np
from numba import njit

from flower_ext_kernels.layer_table import RELU, SIGMOID, TANH
from flower_ext_kernels.tiles import LANES, TILE_HEIGHT, TILE_WIDTH, multiply_tile

ONE, ZERO = np.float32(1), np.float32(0)
INT_ZERO: Any = np.int64(0)
INT_ONE: Any = np.int64(1)
"""0 and 1 with a type. For a literal without type, Numba would compile `add_product` again."""

# With NumPy's rules, a division by zero gives infinity or NaN, and no code has to raise an error.
jit = njit(error_model="numpy")
# Allows sums in any order, as vector registers need; NaN and infinity keep their meaning.
jit_any_order = njit(error_model="numpy", fastmath={"reassoc", "contract", "nsz"})

_HALF = np.float32(0.5)
_LEAST = np.float32(-87)  # below about −87.3, e^x is smaller than the smallest normal number
_PER_LN2 = np.float32(1 / math.log(2))
_LN2_HIGH = np.float32(0.693359375)  # so few digits that its products with n are exact
_LN2_LOW = np.float32(math.log(2) - 0.693359375)
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1 / math.factorial(n)) for n in range(2, 8))


@jit
def copy(values: np.ndarray, out: np.ndarray) -> None:
    """Write ``values`` to the beginning of ``out``."""
    for i in range(len(values)):  # several times as fast as an assignment
        out[i] = values[i]


@jit
def fill(out: np.ndarray, value: np.float32) -> None:
    """Set every number of ``out`` to ``value``."""
    for i in range(len(out)):
        out[i] = value


@jit
def add_product(
    out: np.ndarray,
    left: np.ndarray,
    right: np.ndarray,
    shape: tuple[int, int, int, int],
    strides: tuple[int, int, int, int, int, int],
    factor: np.float32,
) -> None:
    """Add a product to ``out`` as `multiply_tile` does, for any number of rows and columns."""
    rows, columns, inner, outer = shape
    out_row, left_row = strides[0], strides[1]
    height = even_part_size(rows, TILE_HEIGHT)
    width = LANES * even_part_size(-(-columns // LANES), TILE_WIDTH)
    for column in range(0, columns, width):
        for row in range(0, rows, height):
            multiply_tile(
                out[row * out_row + column :],
                left[row * left_row :],
                right[column:],
                (min(height, rows - row), min(width, columns - column), inner, outer),
                strides,
                factor,
            )


@jit
def even_part_size(count: int, most: int) -> int:
    """Return the size of parts when ``count`` is divided evenly into parts of at most ``most``."""
    # Seven rows make tiles of four and three rows. A tile with a single row would load as many
    # vectors of the other matrix as a full one.
    parts = -(-count // most)
    return -(-count // parts)


@jit
def exponential(values: np.ndarray) -> None:
    """Apply e^x in place for x ≤ 0, within one unit in the last place. x < −87 counts as −87.

    Let n be the integer nearest to x / ln 2, and r = x − n ln 2. Then e^x = 2ⁿ e^r, and e^r comes
    from its Taylor series. This needs no branch, so a processor computes several at once.
    """
    bits = values.view(np.int32)
    for i in range(len(values)):
        x = _LEAST if values[i] < _LEAST else values[i]  # NaN stays
        n = np.floor(x * _PER_LN2 + _HALF)
        r = x - n * _LN2_HIGH - n * _LN2_LOW
        series = _C4 + r * (_C5 + r * (_C6 + r * _C7))
        values[i] = ONE + r * (ONE + r * (_C2 + r * (_C3 + r * series)))
        bits[i] += np.int32(n) << np.int32(23)  # adds n to the exponent


@jit
def activate(values: np.ndarray, kind: int) -> None:
    """Apply the activation of a layer, in place."""
    if kind == RELU:
        for i in range(len(values)):
            values[i] = ZERO if values[i] <= 0 else values[i]  # NaN stays
    elif kind == TANH:
        for i in range(len(values)):
            values[i] = math.tanh(values[i])
    elif kind == SIGMOID:
        for i in range(len(values)):
            values[i] = ONE / (ONE + math.exp(-values[i]))


@jit
def backward_activation(grad_outputs: np.ndarray, outputs: np.ndarray, kind: int) -> None:
    """Turn the gradient of an activation's outputs into that of its inputs, in place."""
    if kind == RELU:
        for i in range(len(grad_outputs)):
            grad_outputs[i] = ZERO if outputs[i] <= 0 else grad_outputs[i]
    elif kind == TANH:
        for i in range(len(grad_outputs)):
            grad_outputs[i] *= ONE - outputs[i] * outputs[i]
    elif kind == SIGMOID:
        for i in range(len(grad_outputs)):
            grad_outputs[i] *= outputs[i] * (ONE - outputs[i])
