"""The forward and the backward pass of a mini-batch through a chain of layers, for Numba.

The forward pass stores the outputs of all layers. A layer's outputs are in the order of examples.
"""

from typing import Any

import numba
import numpy as np

from flower_ext_kernels.dense import add_gradient_of_dense, backward_dense, forward_dense
from flower_ext_kernels.images import (
    add_gradient_of_convolution,
    backward_convolution,
    backward_pool,
    convolve,
    padded_size,
    pool,
    transpose,
)
from flower_ext_kernels.layer_table import (
    ACTIVATION,
    CHANNELS,
    CONVOLUTION,
    DENSE,
    DROPOUT,
    FILTERS,
    IMAGE_NORM,
    INPUTS,
    KERNEL_HEIGHT,
    KERNEL_WIDTH,
    KIND,
    NORM,
    OUTPUTS,
    PRECEDING_INPUTS,
    SETTING,
    TRAINS_BIAS,
    TRAINS_WEIGHT,
    TRANSPOSE,
    WEIGHT,
)
from flower_ext_kernels.norms_and_dropout import (
    add_gradient_of_image_norm,
    add_gradient_of_norm,
    backward_image_norm,
    backward_norm,
    count_layer_draws,
    dropout,
    normalise,
    normalise_image,
)
from flower_ext_kernels.prefetch import no_prefetch
from flower_ext_kernels.products import (
    ONE,
    ZERO,
    activate,
    backward_activation,
    exponential,
    jit,
)

carray: Any = numba.carray  # type: ignore[attr-defined]
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, Any]
"""Arrays for one mini-batch, in this order.

``outputs`` has the features and the outputs of all layers. ``gradients`` has the gradient of the
loss with respect to each of them. ``norm_memory`` has what normalisations store for the backward
pass. ``scratch`` is the address of the working memory of one layer.
"""


@jit
def count_draws(layers: np.ndarray, count: int) -> int:
    """Return the number of draws in one pass of ``count`` rows."""
    total = 0
    for layer in layers:
        if layer[KIND] == DROPOUT:
            total += count_layer_draws(layer, count)
    return total


@jit
def forward(
    weights: np.ndarray,
    layers: np.ndarray,
    batch_size: int,
    arrays: Arrays,
    targets: np.ndarray,
    rows: np.ndarray,
    drawn: np.ndarray,
    prefetched: tuple[np.ndarray, np.ndarray],
) -> None:
    """Run the forward pass, and write the gradient of the mean cross-entropy of the last outputs.

    ``rows`` has the indices of the mini-batch's examples, at most ``batch_size``. The caller has
    written their features to the beginning of ``outputs``.
    """
    outputs, gradients, norm_memory, scratch = arrays
    count = len(rows)
    output_start = used_draws = 0
    for layer in layers:
        # Where one layer writes its outputs, the next one reads its inputs. Positions are those of
        # a full mini-batch, also if this one has fewer rows.
        input_start = batch_size * layer[PRECEDING_INPUTS]
        output_start = input_start + batch_size * layer[INPUTS]
        inputs = outputs[input_start:][: count * layer[INPUTS]]
        if layer[KIND] == DENSE:
            layer_prefetched = prefetched if input_start == 0 else no_prefetch(inputs)
            forward_dense(
                weights, layer, outputs, input_start, output_start, count, layer_prefetched
            )
        elif layer[KIND] == NORM:
            normalised = norm_memory[output_start:]
            scales = norm_memory[len(outputs) + output_start :]  # in the second half
            normalise(weights, layer, inputs, outputs[output_start:], normalised, scales)
        elif layer[KIND] == DROPOUT:
            dropout(layer, drawn[used_draws:], inputs, outputs[output_start:])
            used_draws += count_layer_draws(layer, count)
        elif layer[KIND] == IMAGE_NORM:
            for row in range(count):
                start, size = row * layer[INPUTS], layer[INPUTS]
                normalise_image(
                    weights,
                    layer,
                    inputs[start:][:size],
                    outputs[output_start + start :],
                    norm_memory[output_start + start :],
                    norm_memory[len(outputs) + output_start + start :],
                    carray(scratch, 2 * layer[CHANNELS]),
                )
        else:
            _forward_images(weights, layer, count, inputs, outputs[output_start:], scratch)
        activate(outputs[output_start:][: count * layer[OUTPUTS]], layer[ACTIVATION])
    logits = outputs[output_start:][: count * layers[-1, OUTPUTS]]
    _write_loss_gradient(logits, gradients[output_start:], targets, rows)


@jit
def _write_loss_gradient(
    logits: np.ndarray, grad_outputs: np.ndarray, targets: np.ndarray, rows: np.ndarray
) -> None:
    """Write the gradient of the mean cross-entropy with respect to ``logits``."""
    count = len(rows)
    classes = len(logits) // count
    for start in range(0, len(logits), classes):
        # Without the largest logit no exponential overflows, and the quotients stay the same.
        largest = logits[start]
        for label in range(start + 1, start + classes):
            largest = max(largest, logits[label])
        for label in range(start, start + classes):
            grad_outputs[label] = logits[label] - largest
    exponential(grad_outputs[: len(logits)])
    for number, row in enumerate(rows):
        grad_row = grad_outputs[number * classes :][:classes]
        total = ZERO
        for label in range(classes):
            total += grad_row[label]
        scale = ONE / (total * np.float32(count))
        for label in range(classes):
            grad_row[label] *= scale
        grad_row[targets[row]] -= ONE / np.float32(count)


@jit
def _forward_images(
    weights: np.ndarray,
    layer: np.ndarray,
    count: int,
    inputs: np.ndarray,
    outputs: np.ndarray,
    scratch: Any,
) -> None:
    """Write the outputs of a convolution, a pooling or a transposition."""
    # Two loops, here and in `_backward_images`: a branch inside a single one takes 1 % more time.
    if layer[KIND] == CONVOLUTION:
        padded = carray(scratch, padded_size(layer))
        for row in range(count):
            image = inputs[row * layer[INPUTS] :][: layer[INPUTS]]
            convolve(weights, layer, image, outputs[row * layer[OUTPUTS] :], padded)
    else:
        for row in range(count):
            image, out = inputs[row * layer[INPUTS] :], outputs[row * layer[OUTPUTS] :]
            if layer[KIND] == TRANSPOSE:
                transpose(image[: layer[INPUTS]], layer[SETTING], out)
            else:
                pool(layer, image, out)


@jit
def backward(
    weights: np.ndarray,
    layers: np.ndarray,
    batch_size: int,
    arrays: Arrays,
    count: int,
    drawn: np.ndarray,
    out: np.ndarray,
    factor: np.float32,
    prefetched: tuple[np.ndarray, np.ndarray],
) -> None:
    """Run the backward pass: add ``factor`` · gradient to ``out``; ``out`` may be ``weights``."""
    outputs, gradients, norm_memory, scratch = arrays
    # Layers before the first trained one need no gradients. The pass uses the draws backwards.
    first, used_draws = 0, len(drawn)
    while not (layers[first, TRAINS_WEIGHT] or layers[first, TRAINS_BIAS]):
        first += 1
    for number in range(len(layers) - 1, first - 1, -1):
        layer = layers[number]
        input_size, output_size = layer[INPUTS], layer[OUTPUTS]
        input_start = batch_size * layer[PRECEDING_INPUTS]
        output_start = input_start + batch_size * input_size
        grad_outputs = gradients[output_start:][: count * output_size]
        grad_inputs = gradients[input_start:]
        backward_activation(
            grad_outputs, outputs[output_start:][: count * output_size], layer[ACTIVATION]
        )
        if layer[KIND] == DROPOUT:
            used_draws -= count_layer_draws(layer, count)
            dropout(layer, drawn[used_draws:], grad_outputs, grad_inputs)
        elif layer[KIND] == NORM:
            normalised = norm_memory[output_start:]
            scales = norm_memory[len(outputs) + output_start :]
            if number > first:
                backward_norm(weights, layer, grad_outputs, grad_inputs, normalised, scales)
            add_gradient_of_norm(layer, grad_outputs, normalised, out, factor)
        elif layer[KIND] == IMAGE_NORM:
            channel_scratch = carray(scratch, 3 * layer[CHANNELS])
            # First all gradients of inputs: they need the weights, and ``out`` may be the weights.
            for row in range(count if number > first else 0):
                start = output_start + row * output_size
                backward_image_norm(
                    weights,
                    layer,
                    grad_outputs[row * output_size :][:output_size],
                    grad_inputs[row * input_size :],
                    norm_memory[start:],
                    norm_memory[len(outputs) + start :],
                    channel_scratch,
                )
            for row in range(count):
                grad_image = grad_outputs[row * output_size :][:output_size]
                normalised = norm_memory[output_start + row * output_size :]
                add_gradient_of_image_norm(
                    layer, grad_image, normalised, out, factor, channel_scratch
                )
        elif layer[KIND] == DENSE:
            if number > first:  # before its weights change
                backward_dense(weights, layer, count, grad_outputs, grad_inputs)
            layer_prefetched = prefetched if input_start == 0 else no_prefetch(grad_outputs)
            add_gradient_of_dense(
                layer, count, outputs[input_start:], grad_outputs, out, factor, layer_prefetched
            )
        else:
            if layer[KIND] == CONVOLUTION and number > first:  # before its weights change
                _backward_convolutions(weights, layer, count, grad_outputs, grad_inputs, scratch)
            _backward_images(
                layer, count, outputs[input_start:], grad_outputs, grad_inputs, out, factor, scratch
            )


@jit
def _backward_images(
    layer: np.ndarray,
    count: int,
    inputs: np.ndarray,
    grad_outputs: np.ndarray,
    grad_inputs: np.ndarray,
    out: np.ndarray,
    factor: np.float32,
    scratch: Any,
) -> None:
    """Add a convolution's gradient to ``out``, or backpropagate a pooling or a transposition."""
    input_size, output_size = layer[INPUTS], layer[OUTPUTS]
    if layer[KIND] == CONVOLUTION:
        padded = carray(scratch, padded_size(layer))
        for row in range(count):
            image = inputs[row * input_size :][:input_size]
            grad_image = grad_outputs[row * output_size :][:output_size]
            add_gradient_of_convolution(layer, image, grad_image, out, factor, padded)
    else:
        for row in range(count):
            image = inputs[row * input_size :][:input_size]
            grad_image = grad_outputs[row * output_size :][:output_size]
            if layer[KIND] == TRANSPOSE:
                rows = input_size // layer[SETTING]
                transpose(grad_image, rows, grad_inputs[row * input_size :])
            else:
                backward_pool(layer, image, grad_image, grad_inputs[row * input_size :])


@jit
def _backward_convolutions(
    weights: np.ndarray,
    layer: np.ndarray,
    count: int,
    grad_outputs: np.ndarray,
    grad_inputs: np.ndarray,
    scratch: Any,
) -> None:
    """Backpropagate ``grad_outputs`` through a convolution, and write ``grad_inputs``."""
    input_size, output_size, size = layer[INPUTS], layer[OUTPUTS], weight_size(layer)
    transposed = carray(scratch, size)
    padded = carray(scratch, size + padded_size(layer))[size:]
    transpose(weights[layer[WEIGHT] :][:size], size // layer[FILTERS], transposed)
    for row in range(count):
        grad_image = grad_outputs[row * output_size :][:output_size]
        backward_convolution(transposed, layer, grad_image, grad_inputs[row * input_size :], padded)


@jit
def weight_size(layer: np.ndarray) -> int:
    """Return how many numbers a layer's weight has."""
    if layer[KIND] == DENSE:
        return int(layer[OUTPUTS] * layer[INPUTS])
    if layer[KIND] == CONVOLUTION:
        window = layer[KERNEL_HEIGHT] * layer[KERNEL_WIDTH]
        return int(window * layer[CHANNELS] * layer[FILTERS])
    return bias_size(layer)


@jit
def bias_size(layer: np.ndarray) -> int:
    """Return how many numbers a layer's bias has."""
    return int(layer[FILTERS] if layer[FILTERS] > 0 else layer[OUTPUTS])
