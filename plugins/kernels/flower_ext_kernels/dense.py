"""Passes through a dense layer, for Numba.

The few rows of a mini-batch are multiplied in tiles that fit the processor's registers. A BLAS
library rearranges matrices first, which takes longer than such products.

A *slope* is the derivative of the loss with respect to one number. An argument ``slopes`` has the
slopes of a layer's outputs; ``down`` receives those of its inputs.
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
from flower_ext_kernels.tiles import HIGH, LANES, WIDE, dot_tile, multiply_tile


@loops
def tiles(layer: np.ndarray, count: int) -> int:
    """Return the number of tiles in which `multiply` computes the outputs of ``count`` rows."""
    return int(-(-layer[OUTPUTS] // WIDE) * -(-count // HIGH))


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
    wide, high = layer[INPUTS], layer[OUTPUTS]
    matrix = weights[layer[WEIGHT] :]
    neurons, rows = share(high, WIDE), share(count, HIGH)
    sizes, tile = _sizes(ahead, tiles(layer, count)), 0
    # The outer loop is over neurons: a few rows of the matrix stay in the nearest cache, while all
    # rows of the mini-batch pass by.
    for neuron in range(0, high, neurons):
        for row in range(0, count, rows):
            _fetch(ahead, sizes, tile)
            tile += 1
            dot_tile(
                values[above + row * high + neuron :],
                values[below + row * wide :],
                matrix[neuron * wide :],
                (min(rows, count - row), min(neurons, high - neuron), wide),
                (high, wide, wide),
            )
    if layer[BIAS] >= 0:
        for row in range(count):
            for place in range(high):
                values[above + row * high + place] += weights[layer[BIAS] + place]


@loops
def through_dense(
    weights: np.ndarray, layer: np.ndarray, count: int, slopes: np.ndarray, down: np.ndarray
) -> None:
    """Backpropagate ``slopes`` through `multiply`, from outputs to inputs; write to ``down``."""
    wide, high = layer[INPUTS], layer[OUTPUTS]
    fill(down[: count * wide], ZERO)
    steps = wide, high, NEXT, STAY, wide, STAY
    add_product(down, slopes, weights[layer[WEIGHT] :], (count, wide, high, NEXT), steps, ONE)


@loops
def send_dense(
    layer: np.ndarray,
    count: int,
    inputs: np.ndarray,
    slopes: np.ndarray,
    into: np.ndarray,
    factor: np.float32,
    ahead: tuple[np.ndarray, np.ndarray],
) -> None:
    """Add ``factor`` times the gradient of a dense layer's weight and bias to ``into``.

    Meanwhile the processor fetches ``ahead``, as in `multiply`.
    """
    wide, high = layer[INPUTS], layer[OUTPUTS]
    if layer[TRAINS_WEIGHT]:
        vectors = -(-wide // LANES)
        # A tile is a block of the gradient, and the sum over the mini-batch stays in registers.
        neurons, columns = share(high, HIGH), LANES * share(vectors, WIDE)
        sizes, tile = _sizes(ahead, -(-high // HIGH) * -(-vectors // WIDE)), 0
        steps = wide, NEXT, high, STAY, wide, STAY
        for column in range(0, wide, columns):
            for neuron in range(0, high, neurons):
                _fetch(ahead, sizes, tile)
                tile += 1
                multiply_tile(
                    into[layer[WEIGHT] + neuron * wide + column :],
                    slopes[neuron:],
                    inputs[column:],
                    (min(neurons, high - neuron), min(columns, wide - column), count, NEXT),
                    steps,
                    factor,
                )
    if layer[TRAINS_BIAS]:
        for row in range(count):
            for place in range(high):
                into[layer[BIAS] + place] += factor * slopes[row * high + place]


@loops
def _sizes(ahead: tuple[np.ndarray, np.ndarray], parts: int) -> tuple[int, int]:
    """Return how many numbers of each array are fetched at a time."""
    return lines(ahead[0], parts), lines(ahead[1], parts)


@loops
def _fetch(ahead: tuple[np.ndarray, np.ndarray], sizes: tuple[int, int], part: int) -> None:
    fetch(ahead[0], part * sizes[0], sizes[0])
    fetch(ahead[1], part * sizes[1], sizes[1])
