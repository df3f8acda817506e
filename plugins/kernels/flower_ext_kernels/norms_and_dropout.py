"""Normalisation and dropout between layers, as loops over numbers that Numba compiles.

Indices are unsigned, because Numba would test whether a signed index is negative.
"""

import math
from typing import Any

import numpy as np

from flower_ext.training.models.dropout import AT_A_TIME, LEVELS
from flower_ext_kernels.layer_table import (
    BIAS,
    CHANNELS,
    GROUPS,
    INPUTS,
    SETTING,
    TRAINS_BIAS,
    TRAINS_WEIGHT,
    WEIGHT,
)
from flower_ext_kernels.products import ONE, ZERO, copy, fill, jit, jit_any_order


@jit_any_order
def normalise(
    weights: np.ndarray,
    layer: np.ndarray,
    inputs: np.ndarray,
    outputs: np.ndarray,
    normalised: np.ndarray,
    scales: np.ndarray,
) -> None:
    """Normalise rows of ``inputs`` to mean 0 and variance 1 by group, then apply weight and bias.

    Write the results to ``outputs``, the values before weight and bias to ``normalised``, and
    1 / √(variance + ε) of each group to ``scales``.
    """
    width, groups = np.uint64(layer[INPUTS]), np.uint64(layer[GROUPS])
    size, epsilon = width // groups, ONE / np.float32(layer[SETTING])
    inverse_size = ONE / np.float32(size)
    for row in range(np.uint64(len(inputs)) // width):
        values, normalised_row = inputs[row * width :][:width], normalised[row * width :][:width]
        for group in range(groups):
            start = group * size
            # First the mean, then the variance: E[x²] − E[x]² would cancel if the mean is large.
            mean = variance = ZERO
            for i in range(size):
                mean += values[start + i]
            mean *= inverse_size
            for i in range(size):
                variance += (values[start + i] - mean) * (values[start + i] - mean)
            scale = ONE / np.float32(math.sqrt(variance * inverse_size + epsilon))
            scales[row * groups + group] = scale
            for i in range(size):
                normalised_row[start + i] = (values[start + i] - mean) * scale
        out = outputs[row * width :][:width]
        for i in range(width):
            out[i] = normalised_row[i]
        if layer[WEIGHT] >= 0:
            weight = weights[layer[WEIGHT] :][:width]
            for i in range(width):
                out[i] *= weight[i]
        if layer[BIAS] >= 0:
            bias = weights[layer[BIAS] :][:width]
            for i in range(width):
                out[i] += bias[i]


@jit_any_order
def backward_norm(
    weights: np.ndarray,
    layer: np.ndarray,
    grad_outputs: np.ndarray,
    grad_inputs: np.ndarray,
    normalised: np.ndarray,
    scales: np.ndarray,
) -> None:
    """Backpropagate ``grad_outputs`` through `normalise`, and write ``grad_inputs``."""
    width, groups = np.uint64(layer[INPUTS]), np.uint64(layer[GROUPS])
    size = width // groups
    inverse_size = ONE / np.float32(size)
    for row in range(np.uint64(len(grad_outputs)) // width):
        grad_row = grad_outputs[row * width :][:width]
        normalised_row = normalised[row * width :][:width]
        out = grad_inputs[row * width :][:width]
        for i in range(width):
            out[i] = grad_row[i]
        if layer[WEIGHT] >= 0:
            weight = weights[layer[WEIGHT] :][:width]
            for i in range(width):
                out[i] *= weight[i]
        for group in range(groups):
            start, scale = group * size, scales[row * groups + group]
            # A shift or a scaling of the inputs does not change the outputs. The gradient therefore
            # loses its mean, and its projection on the normalised values.
            mean_gradient = mean_product = ZERO
            for i in range(size):
                mean_gradient += out[start + i]
                mean_product += out[start + i] * normalised_row[start + i]
            mean_gradient *= inverse_size
            mean_product *= inverse_size
            for i in range(size):
                projection = normalised_row[start + i] * mean_product
                out[start + i] = scale * (out[start + i] - mean_gradient - projection)


@jit
def add_gradient_of_norm(
    layer: np.ndarray,
    grad_outputs: np.ndarray,
    normalised: np.ndarray,
    out: np.ndarray,
    factor: np.float32,
) -> None:
    """Add ``factor`` times the gradient of `normalise`'s weight and bias to ``out``."""
    width = np.uint64(layer[INPUTS])
    for row in range(np.uint64(len(grad_outputs)) // width):
        grad_row = grad_outputs[row * width :][:width]
        normalised_row = normalised[row * width :][:width]
        if layer[TRAINS_WEIGHT]:
            weight = out[layer[WEIGHT] :][:width]
            for i in range(width):
                weight[i] += factor * grad_row[i] * normalised_row[i]
        if layer[TRAINS_BIAS]:
            bias = out[layer[BIAS] :][:width]
            for i in range(width):
                bias[i] += factor * grad_row[i]


@jit_any_order
def normalise_image(
    weights: np.ndarray,
    layer: np.ndarray,
    image: np.ndarray,
    outputs: np.ndarray,
    normalised: np.ndarray,
    scales: np.ndarray,
    scratch: np.ndarray,
) -> None:
    """Normalise an image (pixels, channels) by groups of channels, as `normalise` does for rows.

    ``scales`` receives one number per channel. ``scratch`` has space for two numbers per channel.
    """
    width = np.uint64(layer[CHANNELS])
    pixels, epsilon = np.uint64(len(image)) // width, ONE / np.float32(layer[SETTING])
    means, squares = scratch[:width], scratch[width:][:width]
    fill(means, ZERO)
    for pixel in range(pixels):
        values = image[pixel * width :][:width]
        for i in range(width):
            means[i] += values[i]
    _mean_by_group(means, layer[GROUPS], pixels)
    fill(squares, ZERO)
    for pixel in range(pixels):
        values = image[pixel * width :][:width]
        for i in range(width):
            squares[i] += (values[i] - means[i]) * (values[i] - means[i])
    _mean_by_group(squares, layer[GROUPS], pixels)
    for i in range(width):
        scales[i] = ONE / np.float32(math.sqrt(squares[i] + epsilon))
    for pixel in range(pixels):
        values, normalised_row = image[pixel * width :][:width], normalised[pixel * width :][:width]
        for i in range(width):
            normalised_row[i] = (values[i] - means[i]) * scales[i]
        out = outputs[pixel * width :][:width]
        if layer[WEIGHT] >= 0:
            weight, bias = weights[layer[WEIGHT] :][:width], weights[layer[BIAS] :][:width]
            for i in range(width):
                out[i] = normalised_row[i] * weight[i] + bias[i]
        else:
            copy(normalised_row, out)


@jit_any_order
def _mean_by_group(values: np.ndarray, groups: int, pixels: Any) -> None:
    """Replace each channel's sum over pixels with the mean over the pixels of its whole group."""
    size = np.uint64(len(values)) // np.uint64(groups)
    inverse_size = ONE / (np.float32(size) * np.float32(pixels))
    for start in range(np.uint64(0), np.uint64(len(values)), size):
        total = ZERO
        for i in range(start, start + size):
            total += values[i]
        for i in range(start, start + size):
            values[i] = total * inverse_size


@jit_any_order
def backward_image_norm(
    weights: np.ndarray,
    layer: np.ndarray,
    grad_outputs: np.ndarray,
    grad_inputs: np.ndarray,
    normalised: np.ndarray,
    scales: np.ndarray,
    scratch: np.ndarray,
) -> None:
    """Backpropagate ``grad_outputs`` through `normalise_image`, and write ``grad_inputs``.

    ``scratch`` has space for three numbers per channel.
    """
    width = np.uint64(layer[CHANNELS])
    pixels = np.uint64(len(grad_outputs)) // width
    mean_gradients, mean_products = scratch[:width], scratch[width:][:width]
    weight = scratch[2 * width :][:width]
    # A channel's weight is constant over pixels, so it can multiply the sums instead.
    _sum_over_pixels(grad_outputs, normalised, mean_gradients, mean_products)
    fill(weight, ONE)
    if layer[WEIGHT] >= 0:
        copy(weights[layer[WEIGHT] :][:width], weight)
    for i in range(width):
        mean_gradients[i] *= weight[i]
        mean_products[i] *= weight[i]
    _mean_by_group(mean_gradients, layer[GROUPS], pixels)
    _mean_by_group(mean_products, layer[GROUPS], pixels)
    for pixel in range(pixels):
        grad_row = grad_outputs[pixel * width :][:width]
        normalised_row = normalised[pixel * width :][:width]
        out = grad_inputs[pixel * width :][:width]
        for i in range(width):
            projection = normalised_row[i] * mean_products[i]
            out[i] = scales[i] * (grad_row[i] * weight[i] - mean_gradients[i] - projection)


@jit_any_order
def add_gradient_of_image_norm(
    layer: np.ndarray,
    grad_outputs: np.ndarray,
    normalised: np.ndarray,
    out: np.ndarray,
    factor: np.float32,
    scratch: np.ndarray,
) -> None:
    """Add ``factor`` times the gradient of `normalise_image`'s weight and bias to ``out``."""
    width = np.uint64(layer[CHANNELS])
    gradient_sums, product_sums = scratch[:width], scratch[width:][:width]
    _sum_over_pixels(grad_outputs, normalised, gradient_sums, product_sums)
    if layer[TRAINS_WEIGHT]:
        weight = out[layer[WEIGHT] :][:width]
        for i in range(width):
            weight[i] += factor * product_sums[i]
    if layer[TRAINS_BIAS]:
        bias = out[layer[BIAS] :][:width]
        for i in range(width):
            bias[i] += factor * gradient_sums[i]


@jit_any_order
def _sum_over_pixels(
    grad_outputs: np.ndarray,
    normalised: np.ndarray,
    gradient_sums: np.ndarray,
    product_sums: np.ndarray,
) -> None:
    """Sum ``grad_outputs``, and ``grad_outputs`` · ``normalised``, over pixels, by channel."""
    width = np.uint64(len(gradient_sums))
    fill(gradient_sums, ZERO)
    fill(product_sums, ZERO)
    for pixel in range(np.uint64(len(grad_outputs)) // width):
        grad_row = grad_outputs[pixel * width :][:width]
        normalised_row = normalised[pixel * width :][:width]
        for i in range(width):
            gradient_sums[i] += grad_row[i]
            product_sums[i] += grad_row[i] * normalised_row[i]


@jit
def dropout(layer: np.ndarray, drawn: Any, values: np.ndarray, out: np.ndarray) -> None:
    """Write scaled values to ``out``, and 0 where the random number in ``drawn`` drops a value."""
    levels_dropped = layer[SETTING]
    scale = np.float32(LEVELS / (LEVELS - levels_dropped))
    least = np.float32(levels_dropped - LEVELS // 2)  # draws are signed, from −LEVELS / 2 on
    for i in range(np.uint64(len(values))):
        out[i] = values[i] * (scale if np.float32(drawn[i]) >= least else ZERO)


@jit
def count_layer_draws(layer: np.ndarray, count: int) -> Any:
    """Return how many numbers dropout draws for ``count`` rows."""
    return (count * layer[INPUTS] + AT_A_TIME - 1) // AT_A_TIME * AT_A_TIME
