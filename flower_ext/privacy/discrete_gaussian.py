r"""Gaussian noise on whole numbers: its sampler, and what it is worth for the accountant.

The discrete Gaussian N_Z(0, s²) gives a whole number k with a probability ∝ exp(−k²/2s²) (Canonne,
Kamath, Steinke 2020). Clients that add shares of it to whole numbers can be summed modulo a power
of two, exactly, and nothing is left that depends on how floats are rounded.

**What a sum of shares is worth.** Let v be a vector of d whole numbers, and let n clients add
N_Z(0, s²) each to every coordinate. Then the sum is, up to a factor exp(±τ) in every probability,
a function of v + N(0, S²) with S² = n s² − 16, a *continuous* Gaussian. All accounting of the
continuous Gaussian (privacy loss distributions, amplification by sampling) therefore holds for the
sum. The steps, where θ(r) = 2.01 exp(−2π² r²):

1. Poisson's summation formula: the sum over all whole numbers x of exp(−(x − c)²/2r²) lies within
   √(2π) r (1 ± θ(r)), for every real c and every r ≥ 1.
2. For independent X ~ N_Z(0, a²) and Y ~ N_Z(0, b²), P(X + Y = z) is exp(−z²/2(a² + b²)) times a
   sum as in step 1 with r² = a²b²/(a² + b²), over a constant. So X + Y is N_Z(0, a² + b²) up to a
   factor of (1 + θ(r))/(1 − θ(r)) (as in Kairouz, Liu, Steinke 2021, Theorem 9).
3. Adding n shares one by one, r² is s² k/(k + 1) ≥ s²/2: the sum is N_Z(0, n s²) up to the product
   of n − 1 such factors.
4. Let Y ~ N(0, n s² − 16), and let T(y) be a draw of the discrete Gaussian of stddev 4 around the
   real number y. By step 1, T(Y) is N_Z(0, n s²) up to the factors 1 ± θ(4) and 1 ± θ(√n s)
   (Peikert 2010). T(y + k) is T(y) + k in distribution for every whole number k.
5. So v + N_Z(0, n s²) is T(v + N(0, n s² − 16)) up to these factors, and T is post-processing.

`sum_distance` is τ for one coordinate and sum: below 1e-135 for shares of at least `LEAST_STDDEV`.
Over a whole run of 10⁹ coordinates and 10⁶ rounds τ is below 1e-120, so that neither ε nor δ
changes within double precision.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np

from flower_ext.checks import require_at_least_one, require_count
from flower_ext.errors import InvalidValue

LEAST_STDDEV, MOST_STDDEV = 16.0, 2.0**18
"""Of one share, in whole numbers."""
_SMOOTHED = 16.0
"""Variance that step 4 takes from a sum."""
_TAIL = 13.5
"""Stddevs beyond which a draw has a probability below 2⁻¹³⁰."""
_BITS = 320
"""Of the fixed-point numbers in which a table is computed."""


def share_stddev(total: float, shares: int) -> float:
    """Return the stddev s of each share, so that ``shares`` of them are worth ``total``.

    Any h ≥ 1 of them are then worth a continuous Gaussian of variance ``total``² h / ``shares``
    or more (step 5 above), whatever the others do.

    Parameters
    ----------
    total : float
        In whole numbers.

    Raises
    ------
    InvalidValue
        A share would be below `LEAST_STDDEV` or above `MOST_STDDEV`.
    """
    require_at_least_one("shares", shares)
    stddev = math.sqrt(total**2 / shares + _SMOOTHED)
    _check(stddev)
    return stddev


def sum_distance(stddev: float, shares: int) -> float:
    """Return a bound on ln of the factor by which step 5 misses a probability of one coordinate."""
    _check(stddev)
    each = 2.01 * math.exp(-(math.pi**2) * stddev**2)  # θ(r) at r² = s²/2
    smoothed = 2.01 * math.exp(-2 * math.pi**2 * _SMOOTHED)
    return 2.1 * (shares * each + 2 * smoothed)  # ln((1 + θ)/(1 − θ)) < 2.1 θ


def draw(stddev: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return ``count`` independent draws of N_Z(0, stddev²), as int64 of shape (count,).

    The magnitude is found in a table of its distribution function, whose entries are exact to
    2⁻¹²⁸, by a uniform number of 128 bits. So with the bits of an ideal generator, each draw is
    within (13.5 s + 3) 2⁻¹²⁸ of the discrete Gaussian in total variation: for 10⁹ draws at the
    largest s, within 1e-23.

    Raises
    ------
    InvalidValue
        ``stddev`` is below `LEAST_STDDEV` or above `MOST_STDDEV`.
    """
    _check(stddev)
    require_count("count", count)
    high, low = _table(stddev)
    first = rng.integers(0, 2**64 - 1, size=count, dtype=np.uint64, endpoint=True)
    magnitude = np.searchsorted(high, first, side="left")
    # Where the first 64 bits decide nothing, 64 more do: once in 2⁴⁰ draws or less often.
    for place in np.flatnonzero(high[np.minimum(magnitude, len(high) - 1)] == first):
        second = rng.integers(0, 2**64 - 1, dtype=np.uint64, endpoint=True)
        end = int(np.searchsorted(high, first[place], side="right"))
        magnitude[place] += int(np.searchsorted(low[magnitude[place] : end], second, side="right"))
    bits = np.frombuffer(rng.bytes((count + 7) // 8), dtype=np.uint8)
    negative = np.unpackbits(bits, count=count).astype(bool)
    drawn = magnitude.astype(np.int64, copy=False)
    np.negative(drawn, out=drawn, where=negative)
    return drawn


def _check(stddev: float) -> None:
    if not LEAST_STDDEV <= stddev <= MOST_STDDEV:
        raise InvalidValue(
            f"stddev={stddev!r} of discrete noise: expected {LEAST_STDDEV:g} to {MOST_STDDEV:g} "
            "whole numbers; choose another grid"
        )


@lru_cache(maxsize=4)
def _table(stddev: float) -> tuple[np.ndarray, np.ndarray]:
    """Return 2¹²⁸ P(|X| ≤ m) rounded down, for m = 0, 1, … but the last, as two words each.

    Whole numbers of 320 fractional bits: each of the up to 2²² steps adds an error of at most
    2²² · 2⁻³²⁰ to a weight, so that all together stay below 2⁻²⁵⁰.
    """
    ratio = _exp_minus(1 / (2 * Fraction(stddev) ** 2))  # r = exp(−1/2s²); weights are r^(m²)
    square = ratio * ratio >> _BITS
    last = math.ceil(_TAIL * stddev) + 1
    weights, weight, step = [1 << _BITS], 1 << _BITS, ratio
    for _ in range(last):
        weight = weight * step >> _BITS
        step = step * square >> _BITS
        weights.append(2 * weight)  # both signs
    whole = sum(weights)
    summed, words = 0, bytearray()
    for weight in weights[:-1]:
        summed += weight
        words += ((summed << 128) // whole).to_bytes(16, "big")
    entries = np.frombuffer(bytes(words), dtype=">u8").reshape(-1, 2).astype(np.uint64)
    return np.ascontiguousarray(entries[:, 0]), np.ascontiguousarray(entries[:, 1])


def _exp_minus(x: Fraction) -> int:
    """Return exp(−x) for 0 ≤ x ≤ 1 as a whole number of 2⁻³²⁰ (Taylor's series)."""
    scaled = (x.numerator << _BITS) // x.denominator
    term = total = 1 << _BITS
    for n in range(1, 80):  # 80! is above 2³²⁰
        term = -(term * scaled >> _BITS) // n
        total += term
    return total
