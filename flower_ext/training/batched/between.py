"""Normalisation and dropout between dense layers, as loops over numbers that Numba translates.

Indices are unsigned, because Numba would test every signed one for being negative.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flower_ext.training.batched.layout import (
    BIAS,
    GROUPS,
    INPUTS,
    SETTING,
    TRAINS_BIAS,
    TRAINS_WEIGHT,
    WEIGHT,
)
from flower_ext.training.batched.products import ONE, ZERO, loops, sums
from flower_ext.training.dropout import AT_A_TIME, LEVELS


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
    wide, groups = np.uint64(layer[INPUTS]), np.uint64(layer[GROUPS])
    size, epsilon = wide // groups, ONE / np.float32(layer[SETTING])
    share = ONE / np.float32(size)
    for row in range(np.uint64(len(inputs)) // wide):
        values, own = inputs[row * wide :][:wide], normed[row * wide :][:wide]
        for group in range(groups):
            start = group * size
            mean = variance = ZERO
            for i in range(size):
                mean += values[start + i]
            mean *= share
            for i in range(size):
                variance += (values[start + i] - mean) * (values[start + i] - mean)
            scale = ONE / np.float32(math.sqrt(variance * share + epsilon))
            scales[row * groups + group] = scale
            for i in range(size):
                own[start + i] = (values[start + i] - mean) * scale
        into = outputs[row * wide :][:wide]
        for i in range(wide):
            into[i] = own[i]
        if layer[WEIGHT] >= 0:
            weight = weights[layer[WEIGHT] :][:wide]
            for i in range(wide):
                into[i] *= weight[i]
        if layer[BIAS] >= 0:
            bias = weights[layer[BIAS] :][:wide]
            for i in range(wide):
                into[i] += bias[i]


@sums
def through_norm(
    weights: np.ndarray,
    layer: np.ndarray,
    slopes: np.ndarray,
    down: np.ndarray,
    normed: np.ndarray,
    scales: np.ndarray,
) -> None:
    """Turn slopes by the outputs of `normalise` into slopes by its inputs, written to ``down``."""
    wide, groups = np.uint64(layer[INPUTS]), np.uint64(layer[GROUPS])
    size = wide // groups
    share = ONE / np.float32(size)
    for row in range(np.uint64(len(slopes)) // wide):
        slope, own = slopes[row * wide :][:wide], normed[row * wide :][:wide]
        into = down[row * wide :][:wide]
        for i in range(wide):
            into[i] = slope[i]
        if layer[WEIGHT] >= 0:
            weight = weights[layer[WEIGHT] :][:wide]
            for i in range(wide):
                into[i] *= weight[i]
        for group in range(groups):
            start, scale = group * size, scales[row * groups + group]
            level = along = ZERO
            for i in range(size):
                level += into[start + i]
                along += into[start + i] * own[start + i]
            level *= share
            along *= share
            for i in range(size):
                into[start + i] = scale * (into[start + i] - level - own[start + i] * along)


@loops
def send_norm(
    layer: np.ndarray,
    slopes: np.ndarray,
    normed: np.ndarray,
    into: np.ndarray,
    factor: np.float32,
) -> None:
    """Add ``factor`` times the gradient of a norm's weight and bias to ``into``."""
    wide = np.uint64(layer[INPUTS])
    for row in range(np.uint64(len(slopes)) // wide):
        slope, own = slopes[row * wide :][:wide], normed[row * wide :][:wide]
        if layer[TRAINS_WEIGHT]:
            weight = into[layer[WEIGHT] :][:wide]
            for i in range(wide):
                weight[i] += factor * slope[i] * own[i]
        if layer[TRAINS_BIAS]:
            bias = into[layer[BIAS] :][:wide]
            for i in range(wide):
                bias[i] += factor * slope[i]


@loops
def drop(layer: np.ndarray, drawn: Any, values: np.ndarray, into: np.ndarray) -> None:
    """Write ``values`` to ``into``: 0 where ``drawn`` drops them, else scaled up."""
    dropped = layer[SETTING]
    scale = np.float32(LEVELS / (LEVELS - dropped))
    least = np.float32(dropped - LEVELS // 2)
    for i in range(np.uint64(len(values))):
        into[i] = values[i] * (scale if np.float32(drawn[i]) >= least else ZERO)


@loops
def numbers_drawn(layer: np.ndarray, count: int) -> Any:
    """Return how many numbers dropout draws for ``count`` rows."""
    return (count * layer[INPUTS] + AT_A_TIME - 1) // AT_A_TIME * AT_A_TIME
