"""SGD on chains of layers, as loops over numbers that Numba translates.

With a library, a model leaves the processor's nearest caches between operations. Here one model
stays in them from its first step to its last.

All numbers of a network are one array, with a table of its layers (see `layer_table`). Nothing here
allocates, raises or uses Python, so the result is machine code that runs without Numba. `native`
compiles `train` and `are_classes` in a separate process.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flower_ext_kernels.dense import tiles
from flower_ext_kernels.layer_table import (
    ACROSS,
    BATCH_SIZE,
    BIAS,
    COLUMNS,
    COUNT,
    FEATURES,
    HAS_TERMS,
    INPUTS,
    JOB_COUNTS,
    JOB_INTEGERS,
    JOB_NUMBERS,
    JOB_RATES,
    LEARNING_RATE,
    LINE,
    MOMENTUM,
    OFFSET,
    ORDER,
    OUTPUTS,
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
    drawn_by,
    forward,
    weight_size,
)
from flower_ext_kernels.products import ONE, ZERO, copy, fill, loops, nothing, portion

_MOST_AHEAD = 2**16
"""Most features, and weights, of the next job that are fetched in advance: 256 kB of each."""
_BURST = 24 * LINE
"""Most numbers to fetch at once: if they were more, the processor would wait for them."""


def train(
    numbers: Any,
    integers: Any,
    drawn: Any,
    counts: Any,
    rates: Any,
    jobs: int,
    table: Any,
    depth: int,
    size: int,
    outputs: Any,
    slopes: Any,
    scratch: Any,
    norms: Any,
    model_scratch: Any,
) -> None:
    """Train networks one after the other, as `local.train` does with the cross-entropy loss.

    Parameters
    ----------
    numbers, integers : addresses of float32 and int64 arrays, (jobs, 4) and (jobs, 2)
    drawn : addresses of int16 arrays, (jobs,)
        Random numbers of all dropout, pass after pass.
    counts, rates : int64, float64 (jobs, 4)
    jobs : int
        Number of jobs; `layer_table` names the columns above.
    table : int64 (depth, COLUMNS)
    depth, size : int
        Number of layers, and of numbers in a network.
    outputs, slopes : float32 (rows of a mini-batch · widths of inputs and layers,)
        Features and outputs of all layers, and derivatives of the loss with respect to them.
    scratch : float32 (largest `Layer.scratch`,)
        Working memory of one layer for one example.
    norms : float32 (2 · rows of a mini-batch · widths of inputs and layers,)
        Outputs of normalisations before weight and bias, and the scales of their groups.
    model_scratch : float32 (3 · size,)
        Working memory as large as three networks: the velocity, and SAM's gradient and point.

    Notes
    -----
    Each array is an argument of its own, because Python calls machine code through C, which passes
    only numbers and addresses. `_descend` also takes addresses: only the job tells the lengths.
    """
    layers = carray(table, (depth, COLUMNS))
    memory = (outputs, slopes, scratch, norms, model_scratch)
    count_of, rate_of = carray(counts, (jobs, JOB_COUNTS)), carray(rates, (jobs, JOB_RATES))
    for job in range(jobs):
        first_number, first_integer = JOB_NUMBERS * job, JOB_INTEGERS * job
        count = count_of[job, COUNT]
        weights = carray(numbers[first_number + WEIGHTS], size)
        copy(carray(numbers[first_number + START], size), weights)
        following = min(job + 1, jobs - 1)  # the last job fetches its own, in vain
        features_ahead = min(count_of[following, COUNT] * layers[0, INPUTS], _MOST_AHEAD)
        _descend(
            weights,
            layers,
            carray(numbers[first_number + FEATURES], (count, layers[0, INPUTS])),
            carray(integers[first_integer + TARGETS], count),
            integers[first_integer + ORDER],
            drawn[job],
            count_of[job],
            rate_of[job],
            carray(numbers[first_number + OFFSET], size),
            memory,
            (
                carray(numbers[JOB_NUMBERS * following + FEATURES], features_ahead),
                carray(numbers[JOB_NUMBERS * following + WEIGHTS], min(size, _MOST_AHEAD)),
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


@loops
def _descend(
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
    ahead: tuple[np.ndarray, np.ndarray],
) -> None:
    """Train one job, from its first step to its last.

    ``memory`` holds the addresses of the five working arrays, in the order of `train`'s arguments.
    Meanwhile the processor fetches ``ahead``: the next job's features, and the memory where its
    weights will be.
    """
    outputs, slopes, scratch, norms, model_scratch = memory
    count, has_terms = counts[COUNT], counts[HAS_TERMS]
    most = min(count, counts[BATCH_SIZE])
    last = len(layers) - 1
    width = layers[last, ACROSS] + layers[last, INPUTS] + layers[last, OUTPUTS]
    arrays = (
        carray(outputs, most * width),
        carray(slopes, most * width),
        carray(norms, 2 * most * width),
        scratch,
    )
    first_inputs = arrays[0]
    rate, beta = np.float32(rates[LEARNING_RATE]), np.float32(rates[MOMENTUM])
    radius, pull = np.float32(rates[SAM_RADIUS]), np.float32(rates[PULL])
    # Plain SGD adds each gradient to the weights right away, and needs no array for it.
    plain = beta == 0 and radius == 0 and not has_terms
    models = carray(model_scratch, (3, len(weights)))
    velocity, climb, climbed = models[0], models[1], models[2]
    if not plain:
        fill(velocity, ZERO)
    none = nothing(weights)
    # The forward pass fetches a part before each tile. If these parts would be too large, the
    # backward pass fetches parts too. Only the first layer fetches, and only if it is dense: it is
    # usually the largest, so its many tiles leave time for many small parts.
    bursts = counts[STEPS] * tiles(layers[0], most)
    passes = 1 + int(len(ahead[0]) + len(ahead[1]) > _BURST * bursts)
    point, first, begin, used_draws = weights, 0, 0, 0
    for step in range(counts[STEPS]):
        soon = _part(ahead, passes * step, passes * counts[STEPS])
        later = _part(ahead, passes * step + 1, passes * counts[STEPS]) if passes > 1 else none
        # ``begin`` is where this epoch's order begins, and ``first`` the first row of the step.
        rows = carray(order, begin + count)[begin + first :][: min(most, count - first)]
        for place, row in enumerate(rows):
            copy(features[row], first_inputs[place * features.shape[1] :])
        needed = drawn_by(layers, len(rows))
        if radius > 0:
            draws = carray(drawn, used_draws + needed)[used_draws:]
            forward(weights, layers, most, arrays, targets, rows, draws, soon)
            fill(climb, ZERO)
            backward(weights, layers, most, arrays, len(rows), draws, climb, ONE, none)
            used_draws += needed
            if has_terms:
                _add_terms(climb, weights, layers, pull, offset)
            _climb(weights, climb, radius, climbed)
            point = climbed
        draws = carray(drawn, used_draws + needed)[used_draws:]
        used_draws += needed
        forward(point, layers, most, arrays, targets, rows, draws, soon)
        if plain:
            backward(weights, layers, most, arrays, len(rows), draws, weights, -rate, later)
        else:
            for i in range(len(weights)):
                velocity[i] *= beta
            backward(point, layers, most, arrays, len(rows), draws, velocity, ONE, later)
            if has_terms:
                _add_terms(velocity, point, layers, pull, offset)
            for i in range(len(weights)):
                weights[i] -= rate * velocity[i]
        first += most
        if first >= count:
            first, begin = 0, begin + count


@loops
def _part(
    ahead: tuple[np.ndarray, np.ndarray], number: int, of: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return part ``number`` of each array when divided into ``of`` parts."""
    return portion(ahead[0], number, of), portion(ahead[1], number, of)


@loops
def _add_terms(
    slopes: np.ndarray,
    point: np.ndarray,
    layers: np.ndarray,
    pull: np.float32,
    offset: np.ndarray,
) -> None:
    """For trained parameters, add the terms' gradient at ``point`` to a gradient or velocity."""
    for layer in layers:
        for part, trains, size in (
            (layer[WEIGHT], layer[TRAINS_WEIGHT], weight_size(layer)),
            (layer[BIAS], layer[TRAINS_BIAS], bias_size(layer)),
        ):
            if trains:
                for i in range(part, part + size):
                    slopes[i] += pull * point[i] + offset[i]


@loops
def _climb(weights: np.ndarray, slope: np.ndarray, radius: np.float32, out: np.ndarray) -> None:
    """Write SAM's point w + q g/‖g‖, with g = ``slope``, to ``out``; w itself if g is 0."""
    total = 0.0  # in double precision, so that small squares count next to a large sum
    for value in slope:
        total += value * value
    scale = radius / np.float32(math.sqrt(total)) if total > 0 else ZERO
    for i in range(len(weights)):
        out[i] = weights[i] + scale * slope[i]
