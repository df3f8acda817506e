"""Normalisation and dropout between layers, as loops over numbers that Numba translates.

Indices are unsigned, because Numba would test whether a signed index is negative.
"""

from __future__ import annotations

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
from flower_ext_kernels.products import ONE, ZERO, copy, fill, loops, sums


@sums
def normalise(
    weights: np.ndarray,
    layer: np.ndarray,
    inputs: np.ndarray,
    outputs: np.ndarray,
    normed: np.ndarray,
    scales: np.ndarray,
) -> None:
    """Normalise rows of ``inputs`` to mean 0 and variance 1 by group, then apply weight and bias.

    Write the results to ``outputs``, the values before weight and bias to ``normed``, and
    1 / √(variance + ε) of each group to ``scales``.
    """
    width, groups = np.uint64(layer[INPUTS]), np.uint64(layer[GROUPS])
    size, epsilon = width // groups, ONE / np.float32(layer[SETTING])
    share = ONE / np.float32(size)
    for row in range(np.uint64(len(inputs)) // width):
        values, unscaled = inputs[row * width :][:width], normed[row * width :][:width]
        for group in range(groups):
            start = group * size
            # First the mean, then the variance: E[x²] − E[x]² would cancel if the mean is large.
            mean = variance = ZERO
            for i in range(size):
                mean += values[start + i]
            mean *= share
            for i in range(size):
                variance += (values[start + i] - mean) * (values[start + i] - mean)
            scale = ONE / np.float32(math.sqrt(variance * share + epsilon))
            scales[row * groups + group] = scale
            for i in range(size):
                unscaled[start + i] = (values[start + i] - mean) * scale
        out = outputs[row * width :][:width]
        for i in range(width):
            out[i] = unscaled[i]
        if layer[WEIGHT] >= 0:
            weight = weights[layer[WEIGHT] :][:width]
            for i in range(width):
                out[i] *= weight[i]
        if layer[BIAS] >= 0:
            bias = weights[layer[BIAS] :][:width]
            for i in range(width):
                out[i] += bias[i]


@sums
def backward_norm(
    weights: np.ndarray,
    layer: np.ndarray,
    slopes: np.ndarray,
    input_slopes: np.ndarray,
    normed: np.ndarray,
    scales: np.ndarray,
) -> None:
    """Backpropagate ``slopes`` through `normalise`, and write the slopes of its inputs."""
    width, groups = np.uint64(layer[INPUTS]), np.uint64(layer[GROUPS])
    size = width // groups
    share = ONE / np.float32(size)
    for row in range(np.uint64(len(slopes)) // width):
        slope, unscaled = slopes[row * width :][:width], normed[row * width :][:width]
        out = input_slopes[row * width :][:width]
        for i in range(width):
            out[i] = slope[i]
        if layer[WEIGHT] >= 0:
            weight = weights[layer[WEIGHT] :][:width]
            for i in range(width):
                out[i] *= weight[i]
        for group in range(groups):
            start, scale = group * size, scales[row * groups + group]
            # A shift or a scaling of the inputs does not change the outputs. The slopes therefore
            # lose their mean (``level``) and their part along the normalised values (``along``).
            level = along = ZERO
            for i in range(size):
                level += out[start + i]
                along += out[start + i] * unscaled[start + i]
            level *= share
            along *= share
            for i in range(size):
                out[start + i] = scale * (out[start + i] - level - unscaled[start + i] * along)


@loops
def add_gradient_of_norm(
    layer: np.ndarray,
    slopes: np.ndarray,
    normed: np.ndarray,
    out: np.ndarray,
    factor: np.float32,
) -> None:
    """Add ``factor`` times the gradient of `normalise`'s weight and bias to ``out``."""
    width = np.uint64(layer[INPUTS])
    for row in range(np.uint64(len(slopes)) // width):
        slope, unscaled = slopes[row * width :][:width], normed[row * width :][:width]
        if layer[TRAINS_WEIGHT]:
            weight = out[layer[WEIGHT] :][:width]
            for i in range(width):
                weight[i] += factor * slope[i] * unscaled[i]
        if layer[TRAINS_BIAS]:
            bias = out[layer[BIAS] :][:width]
            for i in range(width):
                bias[i] += factor * slope[i]


@sums
def normalise_image(
    weights: np.ndarray,
    layer: np.ndarray,
    image: np.ndarray,
    outputs: np.ndarray,
    normed: np.ndarray,
    scales: np.ndarray,
    scratch: np.ndarray,
) -> None:
    """Normalise an image (places, channels) by groups of channels, as `normalise` does for rows.

    ``scales`` receives one number per channel. ``scratch`` has space for two numbers per channel.
    """
    width = np.uint64(layer[CHANNELS])
    places, epsilon = np.uint64(len(image)) // width, ONE / np.float32(layer[SETTING])
    means, squares = scratch[:width], scratch[width:][:width]
    fill(means, ZERO)
    for place in range(places):
        values = image[place * width :][:width]
        for i in range(width):
            means[i] += values[i]
    _mean_by_group(means, layer[GROUPS], places)
    fill(squares, ZERO)
    for place in range(places):
        values = image[place * width :][:width]
        for i in range(width):
            squares[i] += (values[i] - means[i]) * (values[i] - means[i])
    _mean_by_group(squares, layer[GROUPS], places)
    for i in range(width):
        scales[i] = ONE / np.float32(math.sqrt(squares[i] + epsilon))
    for place in range(places):
        values, unscaled = image[place * width :][:width], normed[place * width :][:width]
        for i in range(width):
            unscaled[i] = (values[i] - means[i]) * scales[i]
        out = outputs[place * width :][:width]
        if layer[WEIGHT] >= 0:
            weight, bias = weights[layer[WEIGHT] :][:width], weights[layer[BIAS] :][:width]
            for i in range(width):
                out[i] = unscaled[i] * weight[i] + bias[i]
        else:
            copy(unscaled, out)


@sums
def _mean_by_group(values: np.ndarray, groups: int, places: Any) -> None:
    """Replace each channel's sum over places with the mean over all places of its whole group."""
    size = np.uint64(len(values)) // np.uint64(groups)
    share = ONE / (np.float32(size) * np.float32(places))
    for start in range(np.uint64(0), np.uint64(len(values)), size):
        total = ZERO
        for i in range(start, start + size):
            total += values[i]
        for i in range(start, start + size):
            values[i] = total * share


@sums
def backward_image_norm(
    weights: np.ndarray,
    layer: np.ndarray,
    slopes: np.ndarray,
    input_slopes: np.ndarray,
    normed: np.ndarray,
    scales: np.ndarray,
    scratch: np.ndarray,
) -> None:
    """Backpropagate ``slopes`` through `normalise_image`, and write the image's slopes.

    ``scratch`` has space for three numbers per channel.
    """
    width = np.uint64(layer[CHANNELS])
    places = np.uint64(len(slopes)) // width
    levels, along, weight = scratch[:width], scratch[width:][:width], scratch[2 * width :][:width]
    # A channel's weight is constant over places, so it can multiply the sums instead.
    _sum_over_places(slopes, normed, levels, along)
    fill(weight, ONE)
    if layer[WEIGHT] >= 0:
        copy(weights[layer[WEIGHT] :][:width], weight)
    for i in range(width):
        levels[i] *= weight[i]
        along[i] *= weight[i]
    _mean_by_group(levels, layer[GROUPS], places)
    _mean_by_group(along, layer[GROUPS], places)
    for place in range(places):
        slope, unscaled = slopes[place * width :][:width], normed[place * width :][:width]
        below = input_slopes[place * width :][:width]
        for i in range(width):
            below[i] = scales[i] * (slope[i] * weight[i] - levels[i] - unscaled[i] * along[i])


@sums
def add_gradient_of_image_norm(
    layer: np.ndarray,
    slopes: np.ndarray,
    normed: np.ndarray,
    out: np.ndarray,
    factor: np.float32,
    scratch: np.ndarray,
) -> None:
    """Add ``factor`` times the gradient of `normalise_image`'s weight and bias to ``out``."""
    width = np.uint64(layer[CHANNELS])
    levels, along = scratch[:width], scratch[width:][:width]
    _sum_over_places(slopes, normed, levels, along)
    if layer[TRAINS_WEIGHT]:
        weight = out[layer[WEIGHT] :][:width]
        for i in range(width):
            weight[i] += factor * along[i]
    if layer[TRAINS_BIAS]:
        bias = out[layer[BIAS] :][:width]
        for i in range(width):
            bias[i] += factor * levels[i]


@sums
def _sum_over_places(
    slopes: np.ndarray, normed: np.ndarray, levels: np.ndarray, along: np.ndarray
) -> None:
    """Sum each channel's ``slopes`` into ``levels``, and ``slopes`` · ``normed`` into ``along``."""
    width = np.uint64(len(levels))
    fill(levels, ZERO)
    fill(along, ZERO)
    for place in range(np.uint64(len(slopes)) // width):
        slope, unscaled = slopes[place * width :][:width], normed[place * width :][:width]
        for i in range(width):
            levels[i] += slope[i]
            along[i] += slope[i] * unscaled[i]


@loops
def drop(layer: np.ndarray, drawn: Any, values: np.ndarray, out: np.ndarray) -> None:
    """Apply dropout: write scaled values to ``out``, and 0 for those that ``drawn`` drops."""
    dropped = layer[SETTING]
    scale = np.float32(LEVELS / (LEVELS - dropped))
    least = np.float32(dropped - LEVELS // 2)  # draws are signed, from −LEVELS / 2 on
    for i in range(np.uint64(len(values))):
        out[i] = values[i] * (scale if np.float32(drawn[i]) >= least else ZERO)


@loops
def numbers_drawn(layer: np.ndarray, count: int) -> Any:
    """Return how many numbers dropout draws for ``count`` rows."""
    return (count * layer[INPUTS] + AT_A_TIME - 1) // AT_A_TIME * AT_A_TIME
