"""Convolutions and pooling of images, as loops over numbers that Numba translates.

The channels of a place are neighbours in memory, (height, width, channels), and a convolution's
weights are (kernel height, kernel width, channels, filters). A row of a window is then contiguous,
and each pass is a product of matrices that reads images in place.

A *slope* is the derivative of the loss with respect to one number. An argument ``slopes`` has the
slopes of a layer's outputs; ``down`` receives those of its inputs.
"""

from __future__ import annotations

import numpy as np

from flower_ext_kernels.layer_table import (
    BIAS,
    CHANNELS,
    DOWN,
    FILTERS,
    HEIGHT,
    INPUTS,
    KERNEL_HEIGHT,
    KERNEL_WIDTH,
    KIND,
    OUT_HEIGHT,
    OUT_WIDTH,
    OUTPUTS,
    PAD_DOWN,
    PAD_RIGHT,
    POOL,
    RIGHT,
    TRAINS_BIAS,
    TRAINS_WEIGHT,
    WEIGHT,
    WIDTH,
)
from flower_ext_kernels.products import (
    NEXT,
    ONE,
    STAY,
    ZERO,
    add_product,
    copy,
    fill,
    loops,
)
from flower_ext_kernels.tiles import (
    LANES,
    find_largest,
    find_sum,
    send_to_all,
    send_to_largest,
)


@loops
def turn(values: np.ndarray, rows: int, into: np.ndarray) -> None:
    """Write a matrix of ``rows`` rows to ``into``, with rows and columns exchanged."""
    columns = len(values) // rows
    for column in range(columns):
        for row in range(rows):
            into[column * rows + row] = values[row * columns + column]


@loops
def _repeat(row: np.ndarray, into: np.ndarray) -> None:
    """Fill ``into`` with copies of ``row``."""
    # Copies double in length, because short ones waste most of a vector.
    done = len(row)
    copy(row, into)
    while done < len(into):
        more = min(done, len(into) - done)
        copy(into[:more], into[done:])
        done += more


@loops
def _padded(layer: np.ndarray, image: np.ndarray, scratch: np.ndarray) -> np.ndarray:
    """Return an image with its border of zeros, in ``scratch``; without a border, the image."""
    down, right = layer[PAD_DOWN], layer[PAD_RIGHT]
    if down == 0 and right == 0:
        return image
    run, across = layer[WIDTH] * layer[CHANNELS], _across(layer)
    fill(scratch[: (layer[HEIGHT] + 2 * down) * across], ZERO)
    for row in range(layer[HEIGHT]):
        copy(image[row * run :][:run], scratch[(row + down) * across + right * layer[CHANNELS] :])
    return scratch


@loops
def _across(layer: np.ndarray) -> int:
    """Return how many numbers a row of a padded image has."""
    return int((layer[WIDTH] + 2 * layer[PAD_RIGHT]) * layer[CHANNELS])


@loops
def padded_size(layer: np.ndarray) -> int:
    """Return how many numbers a padded image has."""
    return int(layer[HEIGHT] + 2 * layer[PAD_DOWN]) * _across(layer)


@loops
def convolve(
    weights: np.ndarray,
    layer: np.ndarray,
    image: np.ndarray,
    outputs: np.ndarray,
    scratch: np.ndarray,
) -> None:
    """Write the convolution of an image, plus the bias, to ``outputs``."""
    filters, channels = layer[FILTERS], layer[CHANNELS]
    if layer[BIAS] >= 0:
        _repeat(weights[layer[BIAS] :][:filters], outputs[: layer[OUTPUTS]])
    else:
        fill(outputs[: layer[OUTPUTS]], ZERO)
    source, across = _padded(layer, image, scratch), _across(layer)
    # The left matrix has a window in each row. Neighbouring windows overlap in memory, and nothing
    # is copied: the inner sum runs along a row of the window, the outer sum down its rows.
    run = layer[KERNEL_WIDTH] * channels
    steps = (filters, layer[RIGHT] * channels, 1, across, filters, run * filters)
    for row in range(layer[OUT_HEIGHT]):
        add_product(
            outputs[row * layer[OUT_WIDTH] * filters :],
            source[row * layer[DOWN] * across :],
            weights[layer[WEIGHT] :],
            (layer[OUT_WIDTH], filters, run, layer[KERNEL_HEIGHT]),
            steps,
            ONE,
        )


@loops
def through_convolution(
    turned: np.ndarray, layer: np.ndarray, slopes: np.ndarray, down: np.ndarray, scratch: np.ndarray
) -> None:
    """Backpropagate ``slopes`` through `convolve`; write the image's slopes to ``down``.

    ``turned`` has the layer's weights, (filters, kernel height, kernel width, channels).
    """
    filters, channels, across = layer[FILTERS], layer[CHANNELS], _across(layer)
    run, high = layer[KERNEL_WIDTH] * channels, layer[KERNEL_HEIGHT]
    pads = layer[PAD_DOWN] > 0 or layer[PAD_RIGHT] > 0
    into = scratch if pads else down
    fill(into[: padded_size(layer)], ZERO)
    # Rows of the product are rows of windows, and overlap if a step is smaller than the window. The
    # slopes then add up, because `multiply_tile` adds one row after the other.
    steps = (layer[RIGHT] * channels, filters, 1, STAY, high * run, STAY)
    for row in range(layer[OUT_HEIGHT]):
        for kernel in range(high):
            add_product(
                into[(row * layer[DOWN] + kernel) * across :],
                slopes[row * layer[OUT_WIDTH] * filters :],
                turned[kernel * run :],
                (layer[OUT_WIDTH], run, filters, NEXT),
                steps,
                ONE,
            )
    if pads:
        run, begin = layer[WIDTH] * channels, layer[PAD_RIGHT] * channels
        for row in range(layer[HEIGHT]):
            copy(into[(row + layer[PAD_DOWN]) * across + begin :][:run], down[row * run :])


@loops
def send_convolution(
    layer: np.ndarray,
    image: np.ndarray,
    slopes: np.ndarray,
    into: np.ndarray,
    factor: np.float32,
    scratch: np.ndarray,
) -> None:
    """Add ``factor`` times the gradient of a convolution's weight and bias to ``into``."""
    filters, channels, across = layer[FILTERS], layer[CHANNELS], _across(layer)
    wide, high = layer[OUT_WIDTH], layer[OUT_HEIGHT]
    if layer[TRAINS_WEIGHT]:
        source, run = _padded(layer, image, scratch), layer[KERNEL_WIDTH] * channels
        # One product for each row of the kernel; its sums run over all places of the outputs.
        leap = layer[DOWN] * across
        steps = (filters, NEXT, layer[RIGHT] * channels, leap, filters, wide * filters)
        for kernel in range(layer[KERNEL_HEIGHT]):
            add_product(
                into[layer[WEIGHT] + kernel * run * filters :],
                source[kernel * across :],
                slopes,
                (run, filters, wide, high),
                steps,
                factor,
            )
    if layer[TRAINS_BIAS]:
        # A sum over places is the product with a row of ones. A step of 0 repeats a single one.
        fill(scratch[:1], ONE)
        shape = (NEXT, filters, high * wide, NEXT)
        steps = (STAY, STAY, STAY, STAY, filters, STAY)
        add_product(into[layer[BIAS] :], scratch, slopes, shape, steps, factor)


@loops
def pool(layer: np.ndarray, image: np.ndarray, outputs: np.ndarray) -> None:
    """Write the maxima or the means of windows, channel by channel, to ``outputs``."""
    channels = layer[CHANNELS]
    size = (layer[KERNEL_HEIGHT], layer[KERNEL_WIDTH])
    share = ONE / np.float32(size[0] * size[1])
    steps = (layer[WIDTH] * channels, channels)
    for window in range(layer[OUT_HEIGHT] * layer[OUT_WIDTH]):
        corner = _corner(layer, window)
        # A vector holds the same place in several channels, which are neighbours in memory.
        for channel in range(0, channels, LANES):
            into, values = outputs[window * channels + channel :], image[corner + channel :]
            if layer[KIND] == POOL:
                find_largest(into, values, channels - channel, size, steps)
            else:
                find_sum(into, values, channels - channel, size, steps, share)


@loops
def through_pool(
    layer: np.ndarray, image: np.ndarray, slopes: np.ndarray, down: np.ndarray
) -> None:
    """Backpropagate ``slopes`` through `pool`; write the image's slopes to ``down``."""
    channels = layer[CHANNELS]
    size = (layer[KERNEL_HEIGHT], layer[KERNEL_WIDTH])
    share = ONE / np.float32(size[0] * size[1])
    steps = (layer[WIDTH] * channels, channels)
    fill(down[: layer[INPUTS]], ZERO)
    for window in range(layer[OUT_HEIGHT] * layer[OUT_WIDTH]):
        corner = _corner(layer, window)
        for channel in range(0, channels, LANES):
            into, slope = down[corner + channel :], slopes[window * channels + channel :]
            if layer[KIND] == POOL:
                values = image[corner + channel :]
                send_to_largest(into, slope, values, channels - channel, size, steps)
            else:
                send_to_all(into, slope, channels - channel, size, steps, share)


@loops
def _corner(layer: np.ndarray, window: int) -> int:
    """Return the place of a window's first number."""
    row, column = window // layer[OUT_WIDTH], window % layer[OUT_WIDTH]
    return int((row * layer[DOWN] * layer[WIDTH] + column * layer[RIGHT]) * layer[CHANNELS])
