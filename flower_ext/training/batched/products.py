"""Products of small matrices, and activations, as loops over numbers that Numba translates.

For the few rows of a mini-batch these are faster than a BLAS library, which rearranges matrices.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, njit, types

from flower_ext.training.batched.layout import (
    BIAS,
    INPUTS,
    LINE,
    OUTPUTS,
    RELU,
    SIGMOID,
    TANH,
    WEIGHT,
)

ONE, ZERO = np.float32(1), np.float32(0)

loops = njit(error_model="numpy")
# Allows sums in any order, as vector registers need; NaN and infinity keep their meaning.
sums = njit(error_model="numpy", fastmath={"reassoc", "contract", "nsz"})


@extending.intrinsic
def _fetch_line(context: Any, values: Any, place: Any) -> Any:
    """Fetch the cache line of one number, as `fetch` does."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        where = builder.gep(array.data, [arguments[1]])
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [where.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [where.type], kind)
        builder.call(
            function, [where, number(0), number(2), number(1)]
        )  # data, to be read, into L2
        return context.get_dummy_value()

    return types.void(values, types.intp), generate


@loops
def fetch(values: np.ndarray, begin: int, size: int) -> None:
    """Let the processor fetch ``size`` values from ``begin`` into its caches; do not wait."""
    for place in range(begin, min(begin + size, len(values)), LINE):
        _fetch_line(values, place)  # type: ignore[call-arg]  # the context comes from Numba


@loops
def lines(values: np.ndarray, parts: int) -> int:
    """Return the size of parts of ``values`` that are whole lines of the processor's caches."""
    return int(len(values) // (LINE * parts) + 1) * LINE


@loops
def portion(values: np.ndarray, number: int, of: int) -> np.ndarray:
    """Return one of several parts of about equal length."""
    size = len(values) // of + 1
    return values[number * size :][:size]


@loops
def copy(values: np.ndarray, into: np.ndarray) -> None:
    """Write ``values`` to the beginning of ``into``."""
    for i in range(len(values)):  # several times as fast as an assignment
        into[i] = values[i]


@loops
def fill(into: np.ndarray, value: np.float32) -> None:
    """Write ``value`` everywhere."""
    for i in range(len(into)):
        into[i] = value


@loops
def tiles(layer: np.ndarray, count: int) -> int:
    """Return the number of tiles in which `multiply` computes the outputs of ``count`` rows."""
    return int(-(-layer[OUTPUTS] // 5) * -(-count // 2))


@sums
def multiply(
    weights: np.ndarray,
    layer: np.ndarray,
    values: np.ndarray,
    below: int,
    here: int,
    count: int,
    ahead: tuple[np.ndarray, np.ndarray],
) -> None:
    """Write x Wᵀ + b for rows x of a layer's inputs: two rows and five neurons at a time.

    Meanwhile the processor fetches ``ahead``, which the next training needs, into its caches.
    """
    wide, high = layer[INPUTS], layer[OUTPUTS]
    block, blocks = 0, tiles(layer, count)
    some, more = lines(ahead[0], blocks), lines(ahead[1], blocks)
    matrix = weights[layer[WEIGHT] :][: high * wide]
    for first in range(0, high, 5):
        # If fewer than five are left, the last one is repeated and computed twice.
        p, q, r = first, min(first + 1, high - 1), min(first + 2, high - 1)
        s, t = min(first + 3, high - 1), min(first + 4, high - 1)
        u, v, w = matrix[p * wide :][:wide], matrix[q * wide :][:wide], matrix[r * wide :][:wide]
        x, y = matrix[s * wide :][:wide], matrix[t * wide :][:wide]
        for row in range(0, count, 2):
            fetch(ahead[0], block * some, some)
            fetch(ahead[1], block * more, more)
            block += 1
            other = min(row + 1, count - 1)
            one, two = values[below + row * wide :][:wide], values[below + other * wide :][:wide]
            a = b = c = d = e = f = g = h = i = j = ZERO
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
            for place in range(high):
                values[here + row * high + place] += weights[layer[BIAS] + place]


@sums
def add_products(
    into: np.ndarray,
    factors: np.ndarray,
    targets: int,
    values: np.ndarray,
    sources: int,
    wide: int,
    ahead: tuple[np.ndarray, np.ndarray],
) -> None:
    """Add ``factors`` · ``values`` to ``into``: (targets, sources) · (sources, wide).

    Five sources and two targets at a time. If fewer than five sources are left, the last one is
    repeated with factors of zero (see `_send_dense`). Meanwhile the processor fetches ``ahead``.
    """
    block, blocks = 0, -(-sources // 5) * max(1, targets // 2)
    some, more = lines(ahead[0], blocks), lines(ahead[1], blocks)
    # Unsigned indices, because Numba would test every signed one for being negative.
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
            fetch(ahead[0], block * some, some)
            fetch(ahead[1], block * more, more)
            block += 1
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


@loops
def _five(row: np.ndarray, first: int) -> tuple[float, float, float, float, float]:
    return row[first], row[first + 1], row[first + 2], row[first + 3], row[first + 4]


@loops
def activate(values: np.ndarray, kind: int) -> None:
    """Apply the activation of a layer, in place."""
    if kind == RELU:
        for i in range(len(values)):
            values[i] = ZERO if values[i] <= 0 else values[i]  # NaN stays
    elif kind == TANH:
        for i in range(len(values)):
            values[i] = math.tanh(values[i])
    elif kind == SIGMOID:
        for i in range(len(values)):
            values[i] = ONE / (ONE + math.exp(-values[i]))


@loops
def through(slopes: np.ndarray, outputs: np.ndarray, kind: int) -> None:
    """Turn slopes by an activation's outputs into slopes by its inputs, in place."""
    if kind == RELU:
        for i in range(len(slopes)):
            slopes[i] = ZERO if outputs[i] <= 0 else slopes[i]
    elif kind == TANH:
        for i in range(len(slopes)):
            slopes[i] *= ONE - outputs[i] * outputs[i]
    elif kind == SIGMOID:
        for i in range(len(slopes)):
            slopes[i] *= outputs[i] * (ONE - outputs[i])
