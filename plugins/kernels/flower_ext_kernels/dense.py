"""Passes through a dense layer, for Numba.

The few rows of a mini-batch are multiplied in tiles that fit the processor's registers. A BLAS
library rearranges matrices first, which takes longer than such products.
"""

import numpy as np

from flower_ext_kernels.layer_table import (
    BIAS,
    INPUTS,
    OUTPUTS,
    TRAINS_BIAS,
    TRAINS_WEIGHT,
    WEIGHT,
)
from flower_ext_kernels.prefetch import part_lengths, prefetch_part
from flower_ext_kernels.products import (
    INT_ONE,
    INT_ZERO,
    ONE,
    ZERO,
    add_product,
    even_part_size,
    fill,
    jit,
)
from flower_ext_kernels.tiles import LANES, TILE_HEIGHT, TILE_WIDTH, dot_tile, multiply_tile


@jit
def count_tiles(layer: np.ndarray, count: int) -> int:
    """Return the number of tiles in which `forward_dense` computes ``count`` rows."""
    return int(-(-layer[OUTPUTS] // TILE_WIDTH) * -(-count // TILE_HEIGHT))


@jit
def forward_dense(
    weights: np.ndarray,
    layer: np.ndarray,
    values: np.ndarray,
    input_start: int,
    output_start: int,
    count: int,
    prefetched: tuple[np.ndarray, np.ndarray],
) -> None:
    """Write x Wᵀ + b for ``count`` rows x.

    The rows begin at position ``input_start`` of ``values``, and the outputs at ``output_start``.
    Meanwhile the processor prefetches ``prefetched``, which the next job needs.
    """
    width, height = layer[INPUTS], layer[OUTPUTS]
    matrix = weights[layer[WEIGHT] :]
    neurons, rows = even_part_size(height, TILE_WIDTH), even_part_size(count, TILE_HEIGHT)
    lengths, tile = part_lengths(prefetched, count_tiles(layer, count)), 0
    # The outer loop is over neurons: a few rows of the matrix stay in the nearest cache, while all
    # rows of the mini-batch pass by.
    for neuron in range(0, height, neurons):
        for row in range(0, count, rows):
            prefetch_part(prefetched, lengths, tile)
            tile += 1
            dot_tile(
                values[output_start + row * height + neuron :],
                values[input_start + row * width :],
                matrix[neuron * width :],
                (min(rows, count - row), min(neurons, height - neuron), width),
                (height, width, width),
            )
    if layer[BIAS] >= 0:
        for row in range(count):
            for neuron in range(height):
                values[output_start + row * height + neuron] += weights[layer[BIAS] + neuron]


@jit
def backward_dense(
    weights: np.ndarray,
    layer: np.ndarray,
    count: int,
    grad_outputs: np.ndarray,
    grad_inputs: np.ndarray,
) -> None:
    """Backpropagate ``grad_outputs`` through `forward_dense`, and write ``grad_inputs``."""
    width, height = layer[INPUTS], layer[OUTPUTS]
    matrix, shape = weights[layer[WEIGHT] :], (count, width, height, INT_ONE)
    strides = width, height, INT_ONE, INT_ZERO, width, INT_ZERO
    fill(grad_inputs[: count * width], ZERO)
    add_product(grad_inputs, grad_outputs, matrix, shape, strides, ONE)


@jit
def add_gradient_of_dense(
    layer: np.ndarray,
    count: int,
    inputs: np.ndarray,
    grad_outputs: np.ndarray,
    out: np.ndarray,
    factor: np.float32,
    prefetched: tuple[np.ndarray, np.ndarray],
) -> None:
    """Add ``factor`` times the gradient of a dense layer's weight and bias to ``out``.

    Meanwhile the processor prefetches ``prefetched``, as in `forward_dense`.
    """
    width, height = layer[INPUTS], layer[OUTPUTS]
    if layer[TRAINS_WEIGHT]:
        vectors = -(-width // LANES)
        # A tile is a block of the gradient, and the sum over the mini-batch stays in registers.
        neurons = even_part_size(height, TILE_HEIGHT)
        columns = LANES * even_part_size(vectors, TILE_WIDTH)
        tiles, tile = -(-height // TILE_HEIGHT) * -(-vectors // TILE_WIDTH), 0
        lengths = part_lengths(prefetched, tiles)
        strides = width, INT_ONE, height, INT_ZERO, width, INT_ZERO
        for column in range(0, width, columns):
            for neuron in range(0, height, neurons):
                prefetch_part(prefetched, lengths, tile)
                tile += 1
                multiply_tile(
                    out[layer[WEIGHT] + neuron * width + column :],
                    grad_outputs[neuron:],
                    inputs[column:],
                    (min(neurons, height - neuron), min(columns, width - column), count, INT_ONE),
                    strides,
                    factor,
                )
    if layer[TRAINS_BIAS]:
        for row in range(count):
            for neuron in range(height):
                out[layer[BIAS] + neuron] += factor * grad_outputs[row * height + neuron]
