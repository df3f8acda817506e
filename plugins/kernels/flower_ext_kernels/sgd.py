"""SGD on chains of layers, as loops over numbers that Numba compiles.

With a library, a model leaves the processor's nearest caches between operations. Here one model
stays in them from its first step to its last.

One array holds all numbers of a network, and a table describes its layers (see `layer_table`).
Nothing here allocates, raises or uses Python, so the result is machine code that runs without
Numba. `native` compiles `train` and `are_classes` in a separate process.
"""

import math
from typing import Any

import numpy as np

from flower_ext_kernels.dense import count_tiles
from flower_ext_kernels.layer_table import (
    BATCH_SIZE,
    BIAS,
    COLUMNS,
    COUNT,
    FEATURES,
    HAS_TERMS,
    INPUTS,
    JOB_COUNTS,
    JOB_FLOATS,
    JOB_INTEGERS,
    JOB_RATES,
    LEARNING_RATE,
    MOMENTUM,
    OFFSET,
    ORDER,
    OUTPUTS,
    PRECEDING_INPUTS,
    PULL,
    SAM_RADIUS,
    START,
    STEPS,
    TARGETS,
    TRAINS_BIAS,
    TRAINS_WEIGHT,
    WEIGHT,
    WEIGHTS,
)
from flower_ext_kernels.passes import (
    backward,
    bias_size,
    carray,
    count_draws,
    forward,
    weight_size,
)
from flower_ext_kernels.prefetch import MOST_AT_ONCE, MOST_PREFETCHED, no_prefetch, portions
from flower_ext_kernels.products import ONE, ZERO, copy, fill, jit


def train(
    floats: Any,
    integers: Any,
    drawn: Any,
    counts: Any,
    rates: Any,
    jobs: int,
    table: Any,
    depth: int,
    size: int,
    outputs: Any,
    gradients: Any,
    scratch: Any,
    norm_memory: Any,
    model_scratch: Any,
) -> None:
    """Train networks one after the other, as `local.train` does with the cross-entropy loss.

    Parameters
    ----------
    floats, integers : addresses of float32 and int64 arrays, (jobs, 4) and (jobs, 2)
    drawn : addresses of int16 arrays, (jobs,)
        Random numbers of all dropout, pass after pass.
    counts, rates : int64, float64 (jobs, 4)
    jobs : int
        Number of jobs; `layer_table` names the columns above.
    table : int64 (depth, COLUMNS)
    depth, size : int
        Number of layers, and of numbers in a network.
    outputs, gradients : float32 (rows of a mini-batch · widths of inputs and layers,)
        Features and outputs of all layers, and the gradient of the loss with respect to them.
    scratch : float32 (largest `Layer.scratch_size`,)
        Working memory of one layer for one example.
    norm_memory : float32 (2 · rows of a mini-batch · widths of inputs and layers,)
        Outputs of normalisations before weight and bias, and the scales of their groups.
    model_scratch : float32 (3 · size,)
        Working memory as large as three networks: the velocity, SAM's gradient, and the weights
        that SAM perturbs.

    Notes
    -----
    Each array is an argument of its own, because Python calls machine code through C, which passes
    only numbers and addresses. `_train_job` also takes addresses, since each job implies other
    lengths.
    """
    layers = carray(table, (depth, COLUMNS))
    memory = (outputs, gradients, scratch, norm_memory, model_scratch)
    count_of, rate_of = carray(counts, (jobs, JOB_COUNTS)), carray(rates, (jobs, JOB_RATES))
    for job in range(jobs):
        first_float, first_integer = JOB_FLOATS * job, JOB_INTEGERS * job
        count = count_of[job, COUNT]
        weights = carray(floats[first_float + WEIGHTS], size)
        copy(carray(floats[first_float + START], size), weights)
        following = min(job + 1, jobs - 1)  # the last job prefetches its own arrays, in vain
        prefetched_features = min(count_of[following, COUNT] * layers[0, INPUTS], MOST_PREFETCHED)
        _train_job(
            weights,
            layers,
            carray(floats[first_float + FEATURES], (count, layers[0, INPUTS])),
            carray(integers[first_integer + TARGETS], count),
            integers[first_integer + ORDER],
            drawn[job],
            count_of[job],
            rate_of[job],
            carray(floats[first_float + OFFSET], size),
            memory,
            (
                carray(floats[JOB_FLOATS * following + FEATURES], prefetched_features),
                carray(floats[JOB_FLOATS * following + WEIGHTS], min(size, MOST_PREFETCHED)),
            ),
        )


def are_classes(targets: Any, counts: Any, jobs: int, classes: int, answers: Any) -> None:
    """Write 1 to ``answers`` for each job with targets from 0 to ``classes`` − 1 only, else 0.

    Parameters
    ----------
    targets : addresses of int64 arrays, (jobs,)
    counts, answers : int64 (jobs,)
        Numbers of targets, and the answers.
    """
    for job in range(jobs):
        answers[job] = 1
        for target in carray(targets[job], counts[job]):
            if not 0 <= target < classes:
                answers[job] = 0
                break


@jit
def _train_job(
    weights: np.ndarray,
    layers: np.ndarray,
    features: np.ndarray,
    targets: np.ndarray,
    order: Any,
    drawn: Any,
    counts: np.ndarray,
    rates: np.ndarray,
    offset: np.ndarray,
    memory: tuple[Any, Any, Any, Any, Any],
    prefetched: tuple[np.ndarray, np.ndarray],
) -> None:
    """Train one job, from its first step to its last.

    ``memory`` holds the addresses of the five working arrays, in the order of `train`'s arguments.
    Meanwhile the processor prefetches ``prefetched``, which the next job needs.
    """
    outputs, gradients, scratch, norm_memory, model_scratch = memory
    count, has_terms = counts[COUNT], counts[HAS_TERMS]
    batch_size = min(count, counts[BATCH_SIZE])
    last = len(layers) - 1
    width = layers[last, PRECEDING_INPUTS] + layers[last, INPUTS] + layers[last, OUTPUTS]
    arrays = (
        carray(outputs, batch_size * width),
        carray(gradients, batch_size * width),
        carray(norm_memory, 2 * batch_size * width),
        scratch,
    )
    network_inputs = arrays[0]
    rate, beta = np.float32(rates[LEARNING_RATE]), np.float32(rates[MOMENTUM])
    radius, pull = np.float32(rates[SAM_RADIUS]), np.float32(rates[PULL])
    # Plain SGD adds each gradient to the weights right away, and needs no array for it.
    plain = beta == 0 and radius == 0 and not has_terms
    models = carray(model_scratch, (3, len(weights)))
    velocity, sam_gradient, perturbed = models[0], models[1], models[2]
    if not plain:
        fill(velocity, ZERO)
    no_part = no_prefetch(weights)
    # The forward pass prefetches a part before each tile. If these parts would be too large, the
    # backward pass prefetches parts, too. Only the first layer does so, and only if it is dense: it
    # is usually the largest, so its many tiles leave time for many small parts.
    tiles = counts[STEPS] * count_tiles(layers[0], batch_size)
    passes = 1 + int(len(prefetched[0]) + len(prefetched[1]) > MOST_AT_ONCE * tiles)
    parts = passes * counts[STEPS]
    point, first_row, epoch_start, used_draws = weights, 0, 0, 0
    for step in range(counts[STEPS]):
        forward_part = portions(prefetched, passes * step, parts)
        backward_part = portions(prefetched, passes * step + 1, parts) if passes > 1 else no_part
        # The order has all epochs. A step takes its rows from ``first_row`` of the current epoch.
        epochs = carray(order, epoch_start + count)
        rows = epochs[epoch_start + first_row :][: min(batch_size, count - first_row)]
        for number, row in enumerate(rows):
            copy(features[row], network_inputs[number * features.shape[1] :])
        needed = count_draws(layers, len(rows))
        if radius > 0:
            draws = carray(drawn, used_draws + needed)[used_draws:]
            forward(weights, layers, batch_size, arrays, targets, rows, draws, forward_part)
            fill(sam_gradient, ZERO)
            backward(
                weights, layers, batch_size, arrays, len(rows), draws, sam_gradient, ONE, no_part
            )
            used_draws += needed
            if has_terms:
                _add_terms(sam_gradient, weights, layers, pull, offset)
            _perturb(weights, sam_gradient, radius, perturbed)
            point = perturbed
        draws = carray(drawn, used_draws + needed)[used_draws:]
        used_draws += needed
        forward(point, layers, batch_size, arrays, targets, rows, draws, forward_part)
        if plain:
            backward(
                weights, layers, batch_size, arrays, len(rows), draws, weights, -rate, backward_part
            )
        else:
            for i in range(len(weights)):
                velocity[i] *= beta
            backward(
                point, layers, batch_size, arrays, len(rows), draws, velocity, ONE, backward_part
            )
            if has_terms:
                _add_terms(velocity, point, layers, pull, offset)
            for i in range(len(weights)):
                weights[i] -= rate * velocity[i]
        first_row += batch_size
        if first_row >= count:
            first_row, epoch_start = 0, epoch_start + count


@jit
def _add_terms(
    gradient: np.ndarray,
    point: np.ndarray,
    layers: np.ndarray,
    pull: np.float32,
    offset: np.ndarray,
) -> None:
    """Add to ``gradient`` the gradient of the loss's extra terms at ``point``."""
    for layer in layers:
        for start, trains, size in (
            (layer[WEIGHT], layer[TRAINS_WEIGHT], weight_size(layer)),
            (layer[BIAS], layer[TRAINS_BIAS], bias_size(layer)),
        ):
            if trains:
                for i in range(start, start + size):
                    gradient[i] += pull * point[i] + offset[i]


@jit
def _perturb(
    weights: np.ndarray, gradient: np.ndarray, radius: np.float32, out: np.ndarray
) -> None:
    """Write SAM's perturbed weights w + radius · g/‖g‖ to ``out``; w if the gradient g is 0."""
    total = 0.0  # in double precision, so that small squares count next to a large sum
    for value in gradient:
        total += value * value
    scale = radius / np.float32(math.sqrt(total)) if total > 0 else ZERO
    for i in range(len(weights)):
        out[i] = weights[i] + scale * gradient[i]
