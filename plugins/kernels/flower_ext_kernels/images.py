"""Convolutions and pooling of images, as loops over numbers that Numba compiles.

The channels of a pixel are neighbours in memory, (height, width, channels), and a convolution's
weights are (kernel height, kernel width, channels, filters). A row of a window is then contiguous,
and each pass is a product of matrices that reads images in place. The variables ``image_width``,
``padded_width`` and ``window_width`` count the numbers in a row, pixels times channels.
"""

import numpy as np

from flower_ext_kernels.layer_table import (
    BIAS,
    CHANNELS,
    FILTERS,
    HEIGHT,
    INPUTS,
    KERNEL_HEIGHT,
    KERNEL_WIDTH,
    KIND,
    MAX_POOL,
    OUT_HEIGHT,
    OUT_WIDTH,
    OUTPUTS,
    PADDING_HEIGHT,
    PADDING_WIDTH,
    STRIDE_HEIGHT,
    STRIDE_WIDTH,
    TRAINS_BIAS,
    TRAINS_WEIGHT,
    WEIGHT,
    WIDTH,
)
from flower_ext_kernels.products import (
    INT_ONE,
    INT_ZERO,
    ONE,
    ZERO,
    add_product,
    copy,
    fill,
    jit,
)
from flower_ext_kernels.tiles import (
    LANES,
    add_to_all,
    add_to_largest,
    find_largest,
    find_sum,
)


@jit
def transpose(values: np.ndarray, rows: int, out: np.ndarray) -> None:
    """Write a matrix of ``rows`` rows to ``out``, with rows and columns exchanged."""
    columns = len(values) // rows
    for column in range(columns):
        for row in range(rows):
            out[column * rows + row] = values[row * columns + column]


@jit
def _repeat(row: np.ndarray, out: np.ndarray) -> None:
    """Fill ``out`` with copies of ``row``."""
    # Copies double in length, because short ones waste most of a vector.
    done = len(row)
    copy(row, out)
    while done < len(out):
        more = min(done, len(out) - done)
        copy(out[:more], out[done:])
        done += more


@jit
def _pad(layer: np.ndarray, image: np.ndarray, scratch: np.ndarray) -> np.ndarray:
    """Write the padded image to ``scratch`` and return it; without padding, return the image."""
    padding_height, padding_width = layer[PADDING_HEIGHT], layer[PADDING_WIDTH]
    if padding_height == 0 and padding_width == 0:
        return image
    channels, padded_width = layer[CHANNELS], _padded_width(layer)
    image_width = layer[WIDTH] * channels
    fill(scratch[: (layer[HEIGHT] + 2 * padding_height) * padded_width], ZERO)
    for row in range(layer[HEIGHT]):
        begin = (row + padding_height) * padded_width + padding_width * channels
        copy(image[row * image_width :][:image_width], scratch[begin:])
    return scratch


@jit
def _padded_width(layer: np.ndarray) -> int:
    """Return how many numbers a row of a padded image has."""
    return int((layer[WIDTH] + 2 * layer[PADDING_WIDTH]) * layer[CHANNELS])


@jit
def padded_size(layer: np.ndarray) -> int:
    """Return how many numbers a padded image has."""
    return int(layer[HEIGHT] + 2 * layer[PADDING_HEIGHT]) * _padded_width(layer)


@jit
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
    source, padded_width = _pad(layer, image, scratch), _padded_width(layer)
    # The left matrix has a window in each row. Neighbouring windows overlap in memory, and nothing
    # is copied: the inner sum goes along a row of the window, the outer sum down its rows.
    window_width = layer[KERNEL_WIDTH] * channels
    right = layer[STRIDE_WIDTH] * channels
    # For the literal 1, Numba compiles `add_product` again, with a sum over neighbouring numbers.
    strides = (filters, right, 1, padded_width, filters, window_width * filters)
    for row in range(layer[OUT_HEIGHT]):
        add_product(
            outputs[row * layer[OUT_WIDTH] * filters :],
            source[row * layer[STRIDE_HEIGHT] * padded_width :],
            weights[layer[WEIGHT] :],
            (layer[OUT_WIDTH], filters, window_width, layer[KERNEL_HEIGHT]),
            strides,
            ONE,
        )


@jit
def backward_convolution(
    transposed: np.ndarray,
    layer: np.ndarray,
    grad_outputs: np.ndarray,
    grad_inputs: np.ndarray,
    scratch: np.ndarray,
) -> None:
    """Backpropagate ``grad_outputs`` through `convolve`, and write ``grad_inputs``.

    ``transposed`` has the layer's weights, (filters, kernel height, kernel width, channels).
    """
    filters, channels, padded_width = layer[FILTERS], layer[CHANNELS], _padded_width(layer)
    window_width, height = layer[KERNEL_WIDTH] * channels, layer[KERNEL_HEIGHT]
    pads = layer[PADDING_HEIGHT] > 0 or layer[PADDING_WIDTH] > 0
    out = scratch if pads else grad_inputs
    fill(out[: padded_size(layer)], ZERO)
    # Rows of the product are rows of windows, and overlap if the stride is smaller than the window.
    # The gradients then add up, because `multiply_tile` adds one row after the other.
    right = layer[STRIDE_WIDTH] * channels
    strides = (right, filters, 1, INT_ZERO, height * window_width, INT_ZERO)
    for row in range(layer[OUT_HEIGHT]):
        for kernel_row in range(height):
            add_product(
                out[(row * layer[STRIDE_HEIGHT] + kernel_row) * padded_width :],
                grad_outputs[row * layer[OUT_WIDTH] * filters :],
                transposed[kernel_row * window_width :],
                (layer[OUT_WIDTH], window_width, filters, INT_ONE),
                strides,
                ONE,
            )
    if pads:
        image_width = layer[WIDTH] * channels
        for row in range(layer[HEIGHT]):
            begin = (row + layer[PADDING_HEIGHT]) * padded_width + layer[PADDING_WIDTH] * channels
            copy(out[begin:][:image_width], grad_inputs[row * image_width :])


@jit
def add_gradient_of_convolution(
    layer: np.ndarray,
    image: np.ndarray,
    grad_outputs: np.ndarray,
    out: np.ndarray,
    factor: np.float32,
    scratch: np.ndarray,
) -> None:
    """Add ``factor`` times the gradient of a convolution's weight and bias to ``out``."""
    filters, channels, padded_width = layer[FILTERS], layer[CHANNELS], _padded_width(layer)
    width, height = layer[OUT_WIDTH], layer[OUT_HEIGHT]
    if layer[TRAINS_WEIGHT]:
        source, window_width = _pad(layer, image, scratch), layer[KERNEL_WIDTH] * channels
        # One product for each row of the kernel; its sums run over all pixels of the outputs.
        right, down = layer[STRIDE_WIDTH] * channels, layer[STRIDE_HEIGHT] * padded_width
        strides = (filters, INT_ONE, right, down, filters, width * filters)
        for kernel_row in range(layer[KERNEL_HEIGHT]):
            add_product(
                out[layer[WEIGHT] + kernel_row * window_width * filters :],
                source[kernel_row * padded_width :],
                grad_outputs,
                (window_width, filters, width, height),
                strides,
                factor,
            )
    if layer[TRAINS_BIAS]:
        # A sum over pixels is the product with a row of ones. A stride of 0 repeats a single one.
        fill(scratch[:1], ONE)
        shape = (INT_ONE, filters, height * width, INT_ONE)
        strides = (INT_ZERO, INT_ZERO, INT_ZERO, INT_ZERO, filters, INT_ZERO)
        add_product(out[layer[BIAS] :], scratch, grad_outputs, shape, strides, factor)


@jit
def pool(layer: np.ndarray, image: np.ndarray, outputs: np.ndarray) -> None:
    """Write the maxima or the averages of windows, channel by channel, to ``outputs``."""
    channels = layer[CHANNELS]
    size = (layer[KERNEL_HEIGHT], layer[KERNEL_WIDTH])
    inverse_size = ONE / np.float32(size[0] * size[1])
    strides = (layer[WIDTH] * channels, channels)
    for window in range(layer[OUT_HEIGHT] * layer[OUT_WIDTH]):
        corner = _corner(layer, window)
        # A vector holds several channels of one pixel, which are neighbours in memory.
        for channel in range(0, channels, LANES):
            out, values = outputs[window * channels + channel :], image[corner + channel :]
            if layer[KIND] == MAX_POOL:
                find_largest(out, values, channels - channel, size, strides)
            else:
                find_sum(out, values, channels - channel, size, strides, inverse_size)


@jit
def backward_pool(
    layer: np.ndarray, image: np.ndarray, grad_outputs: np.ndarray, grad_inputs: np.ndarray
) -> None:
    """Backpropagate ``grad_outputs`` through `pool`, and write ``grad_inputs``."""
    channels = layer[CHANNELS]
    size = (layer[KERNEL_HEIGHT], layer[KERNEL_WIDTH])
    inverse_size = ONE / np.float32(size[0] * size[1])
    strides = (layer[WIDTH] * channels, channels)
    fill(grad_inputs[: layer[INPUTS]], ZERO)
    for window in range(layer[OUT_HEIGHT] * layer[OUT_WIDTH]):
        corner = _corner(layer, window)
        for channel in range(0, channels, LANES):
            out = grad_inputs[corner + channel :]
            gradients = grad_outputs[window * channels + channel :]
            if layer[KIND] == MAX_POOL:
                values = image[corner + channel :]
                add_to_largest(out, gradients, values, channels - channel, size, strides)
            else:
                add_to_all(out, gradients, channels - channel, size, strides, inverse_size)


@jit
def _corner(layer: np.ndarray, window: int) -> int:
    """Return the position of a window's first number in the image."""
    row, column = window // layer[OUT_WIDTH], window % layer[OUT_WIDTH]
    pixel = row * layer[STRIDE_HEIGHT] * layer[WIDTH] + column * layer[STRIDE_WIDTH]
    return int(pixel * layer[CHANNELS])
