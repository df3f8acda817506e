"""SGD on a network of dense layers, as compiled loops over its numbers.

A mini-batch has few rows. BLAS libraries rearrange matrices before they multiply them, which takes
longer than these products, and between one operation and the next a model leaves the processor's
nearest caches. Here one model stays there from its first step to its last.

All numbers of a network are one array, with a table of its layers (see `layout`). This module is
imported only where there is something to train: importing Numba takes half a second.
"""

from __future__ import annotations

import math
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba import config, njit

from flower_ext.training.layout import (
    ACTIVATION,
    BIAS,
    INPUTS,
    LINE,
    OUTPUTS,
    RELU,
    SIGMOID,
    TANH,
    TRAINS_BIAS,
    TRAINS_WEIGHT,
    WEIGHT,
)

_settings: Any = config
if _settings.CPU_NAME is None and _settings.CPU_FEATURES is None:  # nothing was asked for
    # Registers of 512 bits where there are: on some processors LLVM prefers half of them.
    _settings.CPU_FEATURES = f"{llvm.get_host_cpu_features().flatten()},-prefer-256-bit"

_ONE, _ZERO = np.float32(1), np.float32(0)

_loops = njit(cache=True, nogil=True, error_model="numpy")
# Sums in any order, which vector registers want; NaN and infinity stay what they are.
_sums = njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})


@_loops
def descend(
    weights: np.ndarray,
    layers: np.ndarray,
    features: np.ndarray,
    targets: np.ndarray,
    order: np.ndarray,
    batch_size: int,
    steps: int,
    learning_rate: float,
    momentum: float,
    sam_radius: float,
    pull: float,
    offset: np.ndarray,
) -> None:
    """Train ``weights`` in place, as `local.minimise` with the cross-entropy loss does.

    Parameters
    ----------
    weights : float32 (P,)
    layers : int64 (layers, 7)
    features : float32 (n, inputs)
    targets : int64 (n,)
        Classes (see `are_classes`).
    order : int64 (epochs · n,)
        Rows in the order in which they are used, epoch after epoch.
    pull, offset : float, float32 (P,) or (0,)
        The gradient of all terms of the objective at w is pull · w + offset.
    """
    count = len(features)
    per_epoch = math.ceil(count / batch_size)
    begins = _begins(layers, min(count, batch_size))
    outputs, slopes = _aligned(begins[-1]), _aligned(begins[-1])
    rate, beta, radius = np.float32(learning_rate), np.float32(momentum), np.float32(sam_radius)
    plain = momentum == 0 and sam_radius == 0 and len(offset) == 0
    velocity = np.zeros(0 if plain else len(weights), np.float32)
    point = weights
    for step in range(steps):
        first = step % per_epoch * batch_size
        rows = order[step // per_epoch * count + first :][: min(batch_size, count - first)]
        for place, row in enumerate(rows):
            _copy(features[row], outputs[place * features.shape[1] :])
        if radius > 0:
            _slope(weights, layers, begins, outputs, slopes, targets, rows)
            climb = np.zeros(len(weights), np.float32)
            _send(weights, layers, begins, outputs, slopes, len(rows), climb, _ONE)
            _add_terms(climb, weights, layers, pull, offset)
            point = _climbed(weights, climb, radius)
        _slope(point, layers, begins, outputs, slopes, targets, rows)
        if plain:
            _send(weights, layers, begins, outputs, slopes, len(rows), weights, -rate)
            continue
        velocity *= beta
        _send(point, layers, begins, outputs, slopes, len(rows), velocity, _ONE)
        _add_terms(velocity, point, layers, pull, offset)
        weights -= rate * velocity


@_loops
def _copy(values: np.ndarray, into: np.ndarray) -> None:
    for i in range(len(values)):  # several times as fast as an assignment
        into[i] = values[i]


@_loops
def _aligned(size: int) -> np.ndarray:
    """Numbers that begin with a line of the caches, which a register then loads at once."""
    longer = np.empty(size + LINE, np.float32)
    return longer[-(longer.ctypes.data // longer.itemsize) % LINE :][:size]


@_loops
def are_classes(targets: np.ndarray, classes: int) -> bool:
    """Whether all are integers from 0 to ``classes`` − 1."""
    for target in targets:
        if not 0 <= target < classes:
            break
    else:
        return True
    return False


@_loops
def _begins(layers: np.ndarray, rows: int) -> np.ndarray:
    """Where the inputs of each layer begin, then the outputs of the last, and where they end."""
    begins = np.zeros(len(layers) + 2, np.int64)
    for number, layer in enumerate(layers):
        begins[number + 1] = begins[number] + rows * layer[INPUTS]
    begins[-1] = begins[-2] + rows * layers[-1, OUTPUTS]
    return begins


@_loops
def _slope(
    weights: np.ndarray,
    layers: np.ndarray,
    begins: np.ndarray,
    outputs: np.ndarray,
    slopes: np.ndarray,
    targets: np.ndarray,
    rows: np.ndarray,
) -> None:
    """Forward pass; the slope of the mean cross-entropy by the last outputs to ``slopes``."""
    count = len(rows)
    for number, layer in enumerate(layers):
        _multiply(weights, layer, outputs, begins[number], begins[number + 1], count)
        _activate(outputs[begins[number + 1] :][: count * layer[OUTPUTS]], layer[ACTIVATION])
    classes = layers[-1, OUTPUTS]
    for place, row in enumerate(rows):
        start = begins[-2] + place * classes
        logits, slope = outputs[start : start + classes], slopes[start : start + classes]
        largest = logits.max()
        total = _ZERO
        for label in range(classes):
            slope[label] = math.exp(logits[label] - largest)
            total += slope[label]
        slope *= _ONE / (total * np.float32(count))
        slope[targets[row]] -= _ONE / np.float32(count)


@_loops
def _send(
    weights: np.ndarray,
    layers: np.ndarray,
    begins: np.ndarray,
    outputs: np.ndarray,
    slopes: np.ndarray,
    count: int,
    into: np.ndarray,
    factor: np.float32,
) -> None:
    """Backward pass: ``factor`` times the gradient onto ``into``, which may be ``weights``."""
    lowest = 0
    while not (layers[lowest, TRAINS_WEIGHT] or layers[lowest, TRAINS_BIAS]):
        lowest += 1
    for number in range(len(layers) - 1, lowest - 1, -1):
        layer, below, here = layers[number], begins[number], begins[number + 1]
        wide, high = layer[INPUTS], layer[OUTPUTS]
        own = slice(here, here + count * high)
        _through(slopes[own], outputs[own], layer[ACTIVATION])
        if number > lowest:  # before the weights change
            slopes[below : below + count * wide] = _ZERO
            factors = _factors(slopes[own].reshape(count, high), _ONE)
            _add_products(slopes[below:], factors, count, weights[layer[WEIGHT] :], high, wide)
        if layer[TRAINS_WEIGHT]:
            factors = _factors(slopes[own].reshape(count, high).T, factor)
            _add_products(into[layer[WEIGHT] :], factors, high, outputs[below:], count, wide)
        if layer[TRAINS_BIAS]:
            for row in range(count):
                for place in range(high):
                    into[layer[BIAS] + place] += factor * slopes[here + row * high + place]


@_loops
def _factors(values: np.ndarray, factor: np.float32) -> np.ndarray:
    """``factor`` times ``values``, with columns of zeros up to a multiple of five."""
    rows, columns = values.shape
    found = np.zeros((rows, columns + -columns % 5), np.float32)
    for row in range(rows):
        for column in range(columns):
            found[row, column] = factor * values[row, column]
    return found


@_sums
def _multiply(
    weights: np.ndarray, layer: np.ndarray, values: np.ndarray, below: int, here: int, count: int
) -> None:
    """Rows x of a layer's inputs to x Wᵀ + b: two rows and five neurons at a time."""
    wide, high = layer[INPUTS], layer[OUTPUTS]
    matrix = weights[layer[WEIGHT] :][: high * wide]
    for first in range(0, high, 5):
        # The last one again where there are fewer: it is computed twice.
        p, q, r = first, min(first + 1, high - 1), min(first + 2, high - 1)
        s, t = min(first + 3, high - 1), min(first + 4, high - 1)
        u, v, w = matrix[p * wide :][:wide], matrix[q * wide :][:wide], matrix[r * wide :][:wide]
        x, y = matrix[s * wide :][:wide], matrix[t * wide :][:wide]
        for row in range(0, count, 2):
            other = min(row + 1, count - 1)
            one, two = values[below + row * wide :][:wide], values[below + other * wide :][:wide]
            a = b = c = d = e = f = g = h = i = j = _ZERO
            for k in range(wide):
                a += one[k] * u[k]
                b += one[k] * v[k]
                c += one[k] * w[k]
                d += one[k] * x[k]
                e += one[k] * y[k]
                f += two[k] * u[k]
                g += two[k] * v[k]
                h += two[k] * w[k]
                i += two[k] * x[k]
                j += two[k] * y[k]
            outputs = values[here + row * high :][:high]
            outputs[p], outputs[q], outputs[r], outputs[s], outputs[t] = a, b, c, d, e
            outputs = values[here + other * high :][:high]
            outputs[p], outputs[q], outputs[r], outputs[s], outputs[t] = f, g, h, i, j
    if layer[BIAS] >= 0:
        for row in range(count):
            values[here + row * high :][:high] += weights[layer[BIAS] :][:high]


@_sums
def _add_products(
    into: np.ndarray,
    factors: np.ndarray,
    targets: int,
    values: np.ndarray,
    sources: int,
    wide: int,
) -> None:
    """``into`` += ``factors`` · ``values``: (targets, wide), (targets, sources), (sources, wide).

    Five sources and two targets at a time. Where there are fewer sources the last comes again, by
    zero (see `_factors`).
    """
    # Unsigned places, as Numba would look at each of any other kind whether it is negative.
    size, last = np.uint64(wide), np.uint64((sources - 1) * wide)
    for first in range(0, sources, 5):
        p = np.uint64(first * wide)
        q = min(p + size, last)
        r = min(q + size, last)
        s = min(r + size, last)
        t = min(s + size, last)
        for pair in range(0, targets - 1, 2):
            a, b, c, d, e = _five(factors[pair], first)
            f, g, h, i, j = _five(factors[pair + 1], first)
            one = np.uint64(pair * wide)
            two = one + size
            for k in range(size):
                u, v, w = values[p + k], values[q + k], values[r + k]
                x, y = values[s + k], values[t + k]
                into[one + k] += a * u + b * v + c * w + d * x + e * y
                into[two + k] += f * u + g * v + h * w + i * x + j * y
        if targets % 2:
            a, b, c, d, e = _five(factors[targets - 1], first)
            one = np.uint64((targets - 1) * wide)
            for k in range(size):
                u, v, w = values[p + k], values[q + k], values[r + k]
                x, y = values[s + k], values[t + k]
                into[one + k] += a * u + b * v + c * w + d * x + e * y


@_loops
def _five(row: np.ndarray, first: int) -> tuple[float, float, float, float, float]:
    return row[first], row[first + 1], row[first + 2], row[first + 3], row[first + 4]


@_loops
def _activate(values: np.ndarray, kind: int) -> None:
    if kind == RELU:
        for i in range(len(values)):
            values[i] = _ZERO if values[i] <= 0 else values[i]  # NaN stays
    elif kind == TANH:
        for i in range(len(values)):
            values[i] = math.tanh(values[i])
    elif kind == SIGMOID:
        for i in range(len(values)):
            values[i] = _ONE / (_ONE + math.exp(-values[i]))


@_loops
def _through(slopes: np.ndarray, outputs: np.ndarray, kind: int) -> None:
    """Slopes by what an activation puts out to slopes by what it takes."""
    if kind == RELU:
        for i in range(len(slopes)):
            slopes[i] = _ZERO if outputs[i] <= 0 else slopes[i]
    elif kind == TANH:
        for i in range(len(slopes)):
            slopes[i] *= _ONE - outputs[i] * outputs[i]
    elif kind == SIGMOID:
        for i in range(len(slopes)):
            slopes[i] *= outputs[i] * (_ONE - outputs[i])


@_loops
def _add_terms(
    slopes: np.ndarray, point: np.ndarray, layers: np.ndarray, pull: float, offset: np.ndarray
) -> None:
    """The terms' part of the gradient at ``point``, for what is trained."""
    if len(offset) == 0:
        return
    factor = np.float32(pull)
    for layer in layers:
        for part, trains, size in (
            (layer[WEIGHT], layer[TRAINS_WEIGHT], layer[INPUTS] * layer[OUTPUTS]),
            (layer[BIAS], layer[TRAINS_BIAS], layer[OUTPUTS]),
        ):
            if trains:
                for i in range(part, part + size):
                    slopes[i] += factor * point[i] + offset[i]


@_loops
def _climbed(weights: np.ndarray, slope: np.ndarray, radius: np.float32) -> np.ndarray:
    """SAM's point w + q g/‖g‖; w itself where it is flat."""
    total = 0.0
    for value in slope:
        total += value * value
    if total == 0:
        return weights.copy()
    return weights + radius / np.float32(math.sqrt(total)) * slope
