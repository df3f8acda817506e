"""The functions of `ring_loops` with NumPy alone: far slower, with the same words to the last bit.

Residues may differ from `ring_loops` by multiples of q until they are reduced to 0 to q - 1.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_ext_lattice.layout import DEGREE, LANES

Reals = NDArray[np.float64]
Integers = NDArray[np.int64]
Modulus = tuple[float, float, Reals]
_LOW = (1 << 28) - 1


def _times(x: Reals, w: Any, q: float) -> Reals:
    """Return x · w modulo q, of magnitude up to 1.5 q.

    Both products wrap modulo 2^64, so their difference is exact.
    """
    quotient = np.rint(x * (w / q)).astype(np.int64)
    wrapped = x.astype(np.int64) * np.asarray(w).astype(np.int64) - quotient * np.int64(q)
    return _reduced(wrapped.astype(np.float64), q)


def _reduced(x: Reals, q: float) -> Reals:
    return x - np.rint(x / q) * q


def _canonical(x: Reals, q: float) -> Reals:
    rest = _reduced(x, q)
    rest = np.where(rest < 0, rest + q, rest)
    return np.where(rest >= q, rest - q, rest)


def transform(x: Reals, modulus: Modulus) -> None:
    """See `ring_loops.transform`."""
    q, _, roots = modulus
    groups = 1
    while groups < DEGREE:
        pairs = x.reshape(groups, 2, -1)
        product = _times(pairs[:, 1], roots[groups : 2 * groups, None], q)
        pairs[:, 1] = _reduced(pairs[:, 0] - product, q)
        pairs[:, 0] = _reduced(pairs[:, 0] + product, q)
        groups *= 2


def add_products(x: Reals, multipliers: Reals, totals: Reals, modulus: Modulus) -> None:
    """See `ring_loops.add_products`."""
    transform(x, modulus)
    for multiplier, total in zip(multipliers, totals, strict=True):
        total += _times(x.reshape(DEGREE, LANES), multiplier[:, None], modulus[0]).reshape(-1)


def reduce(x: Reals, q: float) -> None:
    """See `ring_loops.reduce`."""
    x[:] = _reduced(x, q)


def invert(x: Reals, back: Reals, q: float, scale: float) -> None:
    """See `ring_loops.invert`."""
    x[:] = _reduced(x, q)
    groups = DEGREE // 2
    while groups >= 1:
        pairs = x.reshape(groups, 2, -1)
        low, high = pairs[:, 0].copy(), pairs[:, 1]
        pairs[:, 0] = _reduced(low + high, q)
        pairs[:, 1] = _times(low - high, back[groups : 2 * groups, None], q)
        groups //= 2
    x[:] = _canonical(_times(x, scale, q), q)


def add_encoded(
    values: NDArray[Any],
    scale: float,
    count: float,
    squares: Reals,
    x: Reals,
    multipliers: Reals,
    totals: Reals,
    modulus: Modulus,
) -> None:
    """See `ring_loops.add_encoded`."""
    scaled = values * np.float64(scale)
    squares += np.square(scaled).reshape(-1, len(squares)).sum(0)
    x[:] = np.rint(scaled) * count
    add_products(x, multipliers, totals, modulus)


def switch(
    mod_q1: Reals,
    mod_q2: Reals,
    high: Reals,
    low: Integers,
    constants: Reals,
    words: NDArray[np.uint64],
) -> None:
    """See `ring_loops.switch`."""
    top, bottom = (low >> 28).astype(np.float64), (low & _LOW).astype(np.float64)
    whole, fraction = np.zeros(len(words), np.int64), np.zeros(len(words))
    for residues, (q, unit, shift, inverse, factor) in zip(
        (mod_q1, mod_q2), constants, strict=True
    ):
        value = residues + _times(high, unit, q) + _times(top, shift, q)
        y = _canonical(_times(value + bottom, inverse, q), q)
        whole += y.astype(np.int64)
        fraction += y * factor
    words[:] = ((whole << 16) + np.rint(fraction).astype(np.int64)).view(np.uint64)


def to_residues(words: Integers, q: float, x: Reals) -> None:
    """See `ring_loops.to_residues`."""
    top, bottom = (words >> 28).astype(np.float64), (words & _LOW).astype(np.float64)
    x[:] = _reduced(_times(top, 268435456.0, q) + bottom, q)


def join(mod_q1: Reals, mod_q2: Reals, inverse: float, q1: int, q2: int, words: Integers) -> None:
    """See `ring_loops.join`."""
    t = _canonical(_times(mod_q2 - mod_q1, inverse, float(q2)), float(q2)).astype(np.int64)
    t = np.where(t > q2 // 2, t - q2, t)
    words += mod_q1.astype(np.int64) + np.int64(q1) * t
