"""Convolutions and pooling of images, as loops over numbers that Numba translates.

The channels of a place are neighbours in memory, (height, width, channels), and a convolution's
weights are (kernel height, kernel width, channels, filters). A row of a window is then contiguous,
and each pass is a product of matrices that reads images in place.
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
    add_to_all,
    add_to_largest,
    find_largest,
    find_sum,
)


@loops
def turn(values: np.ndarray, rows: int, out: np.ndarray) -> None:
    """Write a matrix of ``rows`` rows to ``out``, with rows and columns exchanged."""
    columns = len(values) // rows
    for column in range(columns):
        for row in range(rows):
            out[column * rows + row] = values[row * columns + column]


@loops
def _repeat(row: np.ndarray, out: np.ndarray) -> None:
    """Fill ``out`` with copies of ``row``."""
    # Copies double in length, because short ones waste most of a vector.
    done = len(row)
    copy(row, out)
    while done < len(out):
        more = min(done, len(out) - done)
        copy(out[:more], out[done:])
        done += more


@loops
def _padded(layer: np.ndarray, image: np.ndarray, scratch: np.ndarray) -> np.ndarray:
    """Return an image with its border of zeros, in ``scratch``; without a border, the image."""
    pad_down, pad_right = layer[PAD_DOWN], layer[PAD_RIGHT]
    if pad_down == 0 and pad_right == 0:
        return image
    run, across = layer[WIDTH] * layer[CHANNELS], _across(layer)
    fill(scratch[: (layer[HEIGHT] + 2 * pad_down) * across], ZERO)
    for row in range(layer[HEIGHT]):
        copy(
            image[row * run :][:run],
            scratch[(row + pad_down) * across + pad_right * layer[CHANNELS] :],
        )
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
def backward_convolution(
    turned: np.ndarray,
    layer: np.ndarray,
    slopes: np.ndarray,
    input_slopes: np.ndarray,
    scratch: np.ndarray,
) -> None:
    """Backpropagate ``slopes`` through `convolve`, and write the image's slopes.

    ``turned`` has the layer's weights, (filters, kernel height, kernel width, channels).
    """
    filters, channels, across = layer[FILTERS], layer[CHANNELS], _across(layer)
    run, height = layer[KERNEL_WIDTH] * channels, layer[KERNEL_HEIGHT]
    pads = layer[PAD_DOWN] > 0 or layer[PAD_RIGHT] > 0
    out = scratch if pads else input_slopes
    fill(out[: padded_size(layer)], ZERO)
    # Rows of the product are rows of windows, and overlap if a step is smaller than the window. The
    # slopes then add up, because `multiply_tile` adds one row after the other.
    steps = (layer[RIGHT] * channels, filters, 1, STAY, height * run, STAY)
    for row in range(layer[OUT_HEIGHT]):
        for kernel in range(height):
            add_product(
                out[(row * layer[DOWN] + kernel) * across :],
                slopes[row * layer[OUT_WIDTH] * filters :],
                turned[kernel * run :],
                (layer[OUT_WIDTH], run, filters, NEXT),
                steps,
                ONE,
            )
    if pads:
        run, begin = layer[WIDTH] * channels, layer[PAD_RIGHT] * channels
        for row in range(layer[HEIGHT]):
            copy(out[(row + layer[PAD_DOWN]) * across + begin :][:run], input_slopes[row * run :])


@loops
def add_gradient_of_convolution(
    layer: np.ndarray,
    image: np.ndarray,
    slopes: np.ndarray,
    out: np.ndarray,
    factor: np.float32,
    scratch: np.ndarray,
) -> None:
    """Add ``factor`` times the gradient of a convolution's weight and bias to ``out``."""
    filters, channels, across = layer[FILTERS], layer[CHANNELS], _across(layer)
    width, height = layer[OUT_WIDTH], layer[OUT_HEIGHT]
    if layer[TRAINS_WEIGHT]:
        source, run = _padded(layer, image, scratch), layer[KERNEL_WIDTH] * channels
        # One product for each row of the kernel; its sums run over all places of the outputs.
        leap = layer[DOWN] * across
        steps = (filters, NEXT, layer[RIGHT] * channels, leap, filters, width * filters)
        for kernel in range(layer[KERNEL_HEIGHT]):
            add_product(
                out[layer[WEIGHT] + kernel * run * filters :],
                source[kernel * across :],
                slopes,
                (run, filters, width, height),
                steps,
                factor,
            )
    if layer[TRAINS_BIAS]:
        # A sum over places is the product with a row of ones. A step of 0 repeats a single one.
        fill(scratch[:1], ONE)
        shape = (NEXT, filters, height * width, NEXT)
        steps = (STAY, STAY, STAY, STAY, filters, STAY)
        add_product(out[layer[BIAS] :], scratch, slopes, shape, steps, factor)


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
            out, values = outputs[window * channels + channel :], image[corner + channel :]
            if layer[KIND] == POOL:
                find_largest(out, values, channels - channel, size, steps)
            else:
                find_sum(out, values, channels - channel, size, steps, share)


@loops
def backward_pool(
    layer: np.ndarray, image: np.ndarray, slopes: np.ndarray, input_slopes: np.ndarray
) -> None:
    """Backpropagate ``slopes`` through `pool`, and write the image's slopes."""
    channels = layer[CHANNELS]
    size = (layer[KERNEL_HEIGHT], layer[KERNEL_WIDTH])
    share = ONE / np.float32(size[0] * size[1])
    steps = (layer[WIDTH] * channels, channels)
    fill(input_slopes[: layer[INPUTS]], ZERO)
    for window in range(layer[OUT_HEIGHT] * layer[OUT_WIDTH]):
        corner = _corner(layer, window)
        for channel in range(0, channels, LANES):
            out, slope = input_slopes[corner + channel :], slopes[window * channels + channel :]
            if layer[KIND] == POOL:
                values = image[corner + channel :]
                add_to_largest(out, slope, values, channels - channel, size, steps)
            else:
                add_to_all(out, slope, channels - channel, size, steps, share)


@loops
def _corner(layer: np.ndarray, window: int) -> int:
    """Return the place of a window's first number."""
    row, column = window // layer[OUT_WIDTH], window % layer[OUT_WIDTH]
    return int((row * layer[DOWN] * layer[WIDTH] + column * layer[RIGHT]) * layer[CHANNELS])
