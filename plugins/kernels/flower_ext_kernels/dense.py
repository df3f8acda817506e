"""Passes through a dense layer, for Numba.

The few rows of a mini-batch are multiplied in tiles that fit the processor's registers. A BLAS
library rearranges matrices first, which takes longer than such products.
"""

from __future__ import annotations

import numpy as np

from flower_ext_kernels.layer_table import (
    BIAS,
    INPUTS,
    OUTPUTS,
    TRAINS_BIAS,
    TRAINS_WEIGHT,
    WEIGHT,
)
from flower_ext_kernels.products import (
    NEXT,
    ONE,
    STAY,
    ZERO,
    add_product,
    fetch,
    fill,
    lines,
    loops,
    share,
)
from flower_ext_kernels.tiles import LANES, TILE_HEIGHT, TILE_WIDTH, dot_tile, multiply_tile


@loops
def tiles(layer: np.ndarray, count: int) -> int:
    """Return the number of tiles in which `multiply` computes the outputs of ``count`` rows."""
    return int(-(-layer[OUTPUTS] // TILE_WIDTH) * -(-count // TILE_HEIGHT))


@loops
def multiply(
    weights: np.ndarray,
    layer: np.ndarray,
    values: np.ndarray,
    below: int,
    above: int,
    count: int,
    ahead: tuple[np.ndarray, np.ndarray],
) -> None:
    """Write x Wᵀ + b for ``count`` rows x.

    The rows begin at position ``below`` of ``values``, and the outputs at position ``above``.
    Meanwhile the processor fetches ``ahead``, which the next training needs, into its caches.
    """
    width, height = layer[INPUTS], layer[OUTPUTS]
    matrix = weights[layer[WEIGHT] :]
    neurons, rows = share(height, TILE_WIDTH), share(count, TILE_HEIGHT)
    sizes, tile = _sizes(ahead, tiles(layer, count)), 0
    # The outer loop is over neurons: a few rows of the matrix stay in the nearest cache, while all
    # rows of the mini-batch pass by.
    for neuron in range(0, height, neurons):
        for row in range(0, count, rows):
            _fetch(ahead, sizes, tile)
            tile += 1
            dot_tile(
                values[above + row * height + neuron :],
                values[below + row * width :],
                matrix[neuron * width :],
                (min(rows, count - row), min(neurons, height - neuron), width),
                (height, width, width),
            )
    if layer[BIAS] >= 0:
        for row in range(count):
            for place in range(height):
                values[above + row * height + place] += weights[layer[BIAS] + place]


@loops
def backward_dense(
    weights: np.ndarray, layer: np.ndarray, count: int, slopes: np.ndarray, input_slopes: np.ndarray
) -> None:
    """Backpropagate ``slopes`` through `multiply`, and write the slopes of its inputs."""
    width, height = layer[INPUTS], layer[OUTPUTS]
    fill(input_slopes[: count * width], ZERO)
    steps = width, height, NEXT, STAY, width, STAY
    add_product(
        input_slopes, slopes, weights[layer[WEIGHT] :], (count, width, height, NEXT), steps, ONE
    )


@loops
def add_gradient_of_dense(
    layer: np.ndarray,
    count: int,
    inputs: np.ndarray,
    slopes: np.ndarray,
    out: np.ndarray,
    factor: np.float32,
    ahead: tuple[np.ndarray, np.ndarray],
) -> None:
    """Add ``factor`` times the gradient of a dense layer's weight and bias to ``out``.

    Meanwhile the processor fetches ``ahead``, as in `multiply`.
    """
    width, height = layer[INPUTS], layer[OUTPUTS]
    if layer[TRAINS_WEIGHT]:
        vectors = -(-width // LANES)
        # A tile is a block of the gradient, and the sum over the mini-batch stays in registers.
        neurons, columns = share(height, TILE_HEIGHT), LANES * share(vectors, TILE_WIDTH)
        sizes, tile = _sizes(ahead, -(-height // TILE_HEIGHT) * -(-vectors // TILE_WIDTH)), 0
        steps = width, NEXT, height, STAY, width, STAY
        for column in range(0, width, columns):
            for neuron in range(0, height, neurons):
                _fetch(ahead, sizes, tile)
                tile += 1
                multiply_tile(
                    out[layer[WEIGHT] + neuron * width + column :],
                    slopes[neuron:],
                    inputs[column:],
                    (min(neurons, height - neuron), min(columns, width - column), count, NEXT),
                    steps,
                    factor,
                )
    if layer[TRAINS_BIAS]:
        for row in range(count):
            for place in range(height):
                out[layer[BIAS] + place] += factor * slopes[row * height + place]


@loops
def _sizes(ahead: tuple[np.ndarray, np.ndarray], parts: int) -> tuple[int, int]:
    """Return how many numbers of each array are fetched at a time."""
    return lines(ahead[0], parts), lines(ahead[1], parts)


@loops
def _fetch(ahead: tuple[np.ndarray, np.ndarray], sizes: tuple[int, int], part: int) -> None:
    fetch(ahead[0], part * sizes[0], sizes[0])
    fetch(ahead[1], part * sizes[1], sizes[1])
