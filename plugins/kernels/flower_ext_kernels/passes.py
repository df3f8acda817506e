"""The passes of a mini-batch through a chain of layers, forwards and backwards, for Numba.

The forward pass stores the outputs of all layers. A layer's outputs are in the order of examples.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from flower_ext_kernels.dense import add_gradient_of_dense, backward_dense, multiply
from flower_ext_kernels.images import (
    add_gradient_of_convolution,
    backward_convolution,
    backward_pool,
    convolve,
    padded_size,
    pool,
    turn,
)
from flower_ext_kernels.layer_table import (
    ACROSS,
    ACTIVATION,
    CHANNELS,
    CONVOLUTION,
    DENSE,
    DROP,
    FILTERS,
    IMAGE_NORM,
    INPUTS,
    KERNEL_HEIGHT,
    KERNEL_WIDTH,
    KIND,
    NORM,
    OUTPUTS,
    SETTING,
    TRAINS_BIAS,
    TRAINS_WEIGHT,
    TURN,
    WEIGHT,
)
from flower_ext_kernels.norms_and_dropout import (
    add_gradient_of_image_norm,
    add_gradient_of_norm,
    backward_image_norm,
    backward_norm,
    drop,
    normalise,
    normalise_image,
    numbers_drawn,
)
from flower_ext_kernels.products import (
    ONE,
    ZERO,
    activate,
    backward_activation,
    exponential,
    loops,
    nothing,
)

carray: Any = numba.carray  # type: ignore[attr-defined]
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, Any]
"""Outputs of all layers for a mini-batch, their slopes, what normalisations store for the backward
pass (``norms``), and the address of a layer's working memory (``scratch``)."""


@loops
def drawn_by(layers: np.ndarray, count: int) -> int:
    """Return the number of draws in one pass of ``count`` rows."""
    total = 0
    for layer in layers:
        if layer[KIND] == DROP:
            total += numbers_drawn(layer, count)
    return total


@loops
def forward(
    weights: np.ndarray,
    layers: np.ndarray,
    most: int,
    arrays: Arrays,
    targets: np.ndarray,
    rows: np.ndarray,
    drawn: np.ndarray,
    ahead: tuple[np.ndarray, np.ndarray],
) -> None:
    """Run the forward pass; write the gradient of the mean cross-entropy for the last outputs."""
    outputs, slopes, norms, scratch = arrays
    count = len(rows)
    above = used_draws = 0
    for layer in layers:
        # Where one layer writes its outputs, the next one reads its inputs. Positions are those of
        # a full mini-batch, also if this one has fewer rows.
        below, above = most * layer[ACROSS], most * (layer[ACROSS] + layer[INPUTS])
        inputs = outputs[below:][: count * layer[INPUTS]]
        if layer[KIND] == DENSE:
            fetched = ahead if below == 0 else nothing(inputs)
            multiply(weights, layer, outputs, below, above, count, fetched)
        elif layer[KIND] == NORM:
            scales = norms[len(outputs) + above :]  # in the second half of ``norms``
            normalise(weights, layer, inputs, outputs[above:], norms[above:], scales)
        elif layer[KIND] == DROP:
            drop(layer, drawn[used_draws:], inputs, outputs[above:])
            used_draws += numbers_drawn(layer, count)
        elif layer[KIND] == IMAGE_NORM:
            for row in range(count):
                start, size = row * layer[INPUTS], layer[INPUTS]
                normalise_image(
                    weights,
                    layer,
                    inputs[start:][:size],
                    outputs[above + start :],
                    norms[above + start :],
                    norms[len(outputs) + above + start :],
                    carray(scratch, 2 * layer[CHANNELS]),
                )
        else:
            _forward_images(weights, layer, count, inputs, outputs[above:], scratch)
        activate(outputs[above:][: count * layer[OUTPUTS]], layer[ACTIVATION])
    classes = layers[-1, OUTPUTS]
    _slopes_of_loss(outputs[above:][: count * classes], slopes[above:], targets, rows)


@loops
def _slopes_of_loss(
    logits: np.ndarray, slopes: np.ndarray, targets: np.ndarray, rows: np.ndarray
) -> None:
    """Write to ``slopes`` the gradient of the mean cross-entropy with respect to ``logits``."""
    count = len(rows)
    classes = len(logits) // count
    for start in range(0, len(logits), classes):
        # Without the largest logit no exponential overflows, and the quotients stay the same.
        largest = logits[start]
        for label in range(start + 1, start + classes):
            largest = max(largest, logits[label])
        for label in range(start, start + classes):
            slopes[label] = logits[label] - largest
    exponential(slopes[: len(logits)])
    for place, row in enumerate(rows):
        slope = slopes[place * classes :][:classes]
        total = ZERO
        for label in range(classes):
            total += slope[label]
        portion = ONE / (total * np.float32(count))
        for label in range(classes):
            slope[label] *= portion
        slope[targets[row]] -= ONE / np.float32(count)


@loops
def _forward_images(
    weights: np.ndarray,
    layer: np.ndarray,
    count: int,
    inputs: np.ndarray,
    outputs: np.ndarray,
    scratch: Any,
) -> None:
    """Write the outputs of a convolution, a pooling or a turn."""
    if layer[KIND] == CONVOLUTION:
        border = carray(scratch, padded_size(layer))
        for row in range(count):
            image = inputs[row * layer[INPUTS] :][: layer[INPUTS]]
            convolve(weights, layer, image, outputs[row * layer[OUTPUTS] :], border)
    else:
        for row in range(count):
            image, out = inputs[row * layer[INPUTS] :], outputs[row * layer[OUTPUTS] :]
            if layer[KIND] == TURN:
                turn(image[: layer[INPUTS]], layer[SETTING], out)
            else:
                pool(layer, image, out)


@loops
def backward(
    weights: np.ndarray,
    layers: np.ndarray,
    most: int,
    arrays: Arrays,
    count: int,
    drawn: np.ndarray,
    out: np.ndarray,
    factor: np.float32,
    ahead: tuple[np.ndarray, np.ndarray],
) -> None:
    """Run the backward pass: add ``factor`` · gradient to ``out``, which may be ``weights``."""
    outputs, slopes, norms, scratch = arrays
    # Layers below the lowest trained one need no slopes. Draws are used from the last one back.
    lowest, used_draws = 0, len(drawn)
    while not (layers[lowest, TRAINS_WEIGHT] or layers[lowest, TRAINS_BIAS]):
        lowest += 1
    for number in range(len(layers) - 1, lowest - 1, -1):
        layer = layers[number]
        width, height = layer[INPUTS], layer[OUTPUTS]
        below, above = most * layer[ACROSS], most * (layer[ACROSS] + width)
        upper, input_slopes = slopes[above:][: count * height], slopes[below:]
        backward_activation(upper, outputs[above:][: count * height], layer[ACTIVATION])
        if layer[KIND] == DROP:
            used_draws -= numbers_drawn(layer, count)
            drop(layer, drawn[used_draws:], upper, input_slopes)
        elif layer[KIND] == NORM:
            unscaled, scales = norms[above:], norms[len(outputs) + above :]
            if number > lowest:
                backward_norm(weights, layer, upper, input_slopes, unscaled, scales)
            add_gradient_of_norm(layer, upper, unscaled, out, factor)
        elif layer[KIND] == IMAGE_NORM:
            channel_scratch = carray(scratch, 3 * layer[CHANNELS])
            # All slopes first: ``out`` may be the weights, which the slopes depend on.
            for row in range(count if number > lowest else 0):
                place = above + row * height
                unscaled, scales = norms[place:], norms[len(outputs) + place :]
                slope = upper[row * height :][:height]
                backward_image_norm(
                    weights,
                    layer,
                    slope,
                    input_slopes[row * width :],
                    unscaled,
                    scales,
                    channel_scratch,
                )
            for row in range(count):
                slope, unscaled = upper[row * height :][:height], norms[above + row * height :]
                add_gradient_of_image_norm(layer, slope, unscaled, out, factor, channel_scratch)
        elif layer[KIND] == DENSE:
            if number > lowest:  # before its weights change
                backward_dense(weights, layer, count, upper, input_slopes)
            fetched = ahead if below == 0 else nothing(upper)
            add_gradient_of_dense(layer, count, outputs[below:], upper, out, factor, fetched)
        else:
            if layer[KIND] == CONVOLUTION and number > lowest:  # before its weights change
                _backward_convolutions(weights, layer, count, upper, input_slopes, scratch)
            _backward_images(
                layer, count, outputs[below:], upper, input_slopes, out, factor, scratch
            )


@loops
def _backward_images(
    layer: np.ndarray,
    count: int,
    inputs: np.ndarray,
    slopes: np.ndarray,
    input_slopes: np.ndarray,
    out: np.ndarray,
    factor: np.float32,
    scratch: Any,
) -> None:
    """Add a convolution's gradient to ``out``, or backpropagate through a pooling or a turn."""
    width, height = layer[INPUTS], layer[OUTPUTS]
    if layer[KIND] == CONVOLUTION:
        border = carray(scratch, padded_size(layer))
        for row in range(count):
            image, slope = inputs[row * width :][:width], slopes[row * height :][:height]
            add_gradient_of_convolution(layer, image, slope, out, factor, border)
    else:
        for row in range(count):
            image, slope = inputs[row * width :][:width], slopes[row * height :][:height]
            if layer[KIND] == TURN:
                turn(slope, width // layer[SETTING], input_slopes[row * width :])
            else:
                backward_pool(layer, image, slope, input_slopes[row * width :])


@loops
def _backward_convolutions(
    weights: np.ndarray,
    layer: np.ndarray,
    count: int,
    slopes: np.ndarray,
    input_slopes: np.ndarray,
    scratch: Any,
) -> None:
    width, height, filters, size = layer[INPUTS], layer[OUTPUTS], layer[FILTERS], weight_size(layer)
    turned = carray(scratch, size)
    border = carray(scratch, size + padded_size(layer))[size:]
    turn(weights[layer[WEIGHT] :][:size], size // filters, turned)
    for row in range(count):
        slope = slopes[row * height :][:height]
        backward_convolution(turned, layer, slope, input_slopes[row * width :], border)


@loops
def weight_size(layer: np.ndarray) -> int:
    """Return how many numbers a layer's weight has."""
    if layer[KIND] == DENSE:
        return int(layer[OUTPUTS] * layer[INPUTS])
    if layer[KIND] == CONVOLUTION:
        window = layer[KERNEL_HEIGHT] * layer[KERNEL_WIDTH]
        return int(window * layer[CHANNELS] * layer[FILTERS])
    return bias_size(layer)


@loops
def bias_size(layer: np.ndarray) -> int:
    """Return how many numbers a layer's bias has."""
    return int(layer[FILTERS] if layer[FILTERS] > 0 else layer[OUTPUTS])
