r"""Gaussian noise on whole numbers: a sampler, and a proof that it protects like continuous noise.

The discrete Gaussian N_Z(0, s²) gives a whole number k with a probability ∝ exp(−k²/2s²) (Canonne,
Kamath, Steinke 2020). If clients add shares of this noise to whole numbers, the server can sum them
exactly, modulo a power of two. No result then depends on how floats are rounded.

**Guarantee of a sum of shares.** Let v be a vector of d whole numbers, and let each of n clients
add N_Z(0, s²) to every coordinate. Then the sum is a function of v + N(0, S²) with S² = n s² − 16,
a *continuous* Gaussian, up to a factor exp(±τ) in every probability. All accounting of the
continuous Gaussian (privacy loss distributions, amplification by sampling) therefore holds for the
sum. The proof has five steps, with θ(r) = 2.01 exp(−2π² r²):

1. Poisson's summation formula: the sum over all whole numbers x of exp(−(x − c)²/2r²) lies within
   √(2π) r (1 ± θ(r)), for every real c and every r ≥ 1.
2. Let X ~ N_Z(0, a²) and Y ~ N_Z(0, b²) be independent, L a whole number and s² = L²a² + b². Then
   P(L X + Y = z) is a constant times exp(−z²/2s²) times a sum as in step 1 with r = ab/s. So
   L X + Y is N_Z(0, s²) up to a factor of (1 + θ(r))/(1 − θ(r)) (as in Kairouz, Liu, Steinke 2021,
   Theorem 9, where L is 1).
3. Add n shares one by one, by step 2 with L = 1. After k shares, r² is s² k/(k + 1) ≥ s²/2. The
   sum is therefore N_Z(0, n s²) up to the product of n − 1 such factors.
4. Let Y ~ N(0, n s² − 16), and let T(y) be a draw of the discrete Gaussian of stddev 4 around the
   real number y. By step 1, T(Y) is N_Z(0, n s²) up to the factors 1 ± θ(4) and 1 ± θ(√n s)
   (Peikert 2010). T(y + k) is T(y) + k in distribution for every whole number k.
5. So v + N_Z(0, n s²) is T(v + N(0, n s² − 16)) up to these factors, and T is post-processing.

If each share has a stddev of at least `LEAST_STDDEV`, τ is below 1e-135 for one coordinate of one
sum. Over a whole run of 10⁹ coordinates and 10⁶ rounds τ is below 1e-120, so neither ε nor δ
changes within double precision.

**The sampler.** `draw` is fast because 16 random bits find most numbers in a table that fits into
the processor's nearest cache.

6. A table holds the distribution function of one X ~ N_Z(0, a²), rounded down to multiples of
   2⁻¹²⁸, up to 13.5 stddevs on either side. Let U be a uniform number of 128 bits. The number of
   table entries that are at most U determines X. In 92 % of the draws, the first 16 bits of U
   already determine X; only the other draws take more bits. X has the same distribution as if each
   draw took all 128 bits.
7. Each probability of a table is wrong by 2⁻¹²⁸ at most, and the numbers beyond the table have a
   probability below 2⁻¹³⁰. So a draw from a table is within (13.5 a + 4) 2⁻¹²⁸ of N_Z(0, a²) in
   total variation.
8. `draw` returns L X + Y with L = ⌊√(s/3)⌋, b² = 10 L² and a² = s²/L² − 10, as exact fractions. By
   step 2 with r² = 10 (1 − 10 L²/s²) ≥ 8.4, this is N_Z(0, s²) up to a factor of 1 + 1e-71.
9. By steps 7 and 8, each draw is within 3·10⁴ · 2⁻¹²⁸ of N_Z(0, s²) in total variation, and 10⁹
   draws together are within 1e-24. This assumes ideal random bits. ChaCha20 supplies them, under a
   new key of 256 bits for each call.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache

import numpy as np

from flower_ext.checks import require_at_least_one, require_count
from flower_ext.errors import InvalidValue
from flower_ext.privacy.randomness import keystream

Words = Callable[[int], np.ndarray]
"""Function that returns the given number of uniform 64-bit words, fresh at every call."""

LEAST_STDDEV, MOST_STDDEV = 16.0, 2.0**18
"""Limits of the standard deviation of one share, in whole numbers."""
_SMOOTHED = 16.0
"""Variance that step 4 subtracts from the variance of a sum."""
_TAIL = 13.5
"""Length of a table on either side, in stddevs; numbers beyond have a probability below 2⁻¹³⁰."""
_BITS = 320
"""Number of fractional bits of the fixed-point numbers with which a table is computed."""
_DIGITS = 120
"""Number of decimal digits with which an exponential is computed: more than `_BITS` bits."""
_FINE = 10
"""Variance of Y in step 8, in units of L²."""
_UNDECIDED = -(2**31)
_KNOWN, _REST = np.uint64(16), np.uint64(48)
"""Number of bits of a 64-bit word that decide most draws, and number of its other bits."""
_TOGETHER = 2**15
"""Number of draws that are made at a time, so that they stay in the processor's caches."""


def share_stddev(total: float, shares: int) -> float:
    """Return the stddev of each of ``shares`` discrete shares that together replace one Gaussian.

    The sum of any h ≥ 1 shares then protects like a continuous Gaussian of variance
    ``total``² h / ``shares`` or more (step 5 at the top of this module), no matter what other
    clients add to the sum.

    ``total`` is the stddev of the Gaussian that the shares replace, in whole numbers. Refuse shares
    of a stddev below `LEAST_STDDEV` or above `MOST_STDDEV`.
    """
    require_at_least_one("shares", shares)
    stddev = math.sqrt(total**2 / shares + _SMOOTHED)
    _check(stddev)
    return stddev


def continuous_stddev(stddev: float) -> float:
    """Return the stddev of the continuous Gaussian noise that one share of discrete noise replaces.

    ``stddev`` is the stddev of the share. See step 5 at the top of this module, with n = 1.
    """
    return math.sqrt(max(0.0, stddev**2 - _SMOOTHED))


def draw(stddev: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return ``count`` independent draws of N_Z(0, stddev²), as int64 of shape (count,).

    A draw is L X + Y, with X and Y from two short tables (see step 8 at the top of this module).
    Refuse a stddev below `LEAST_STDDEV` or above `MOST_STDDEV`.
    """
    _check(stddev)
    require_count("count", count)
    step, coarse, fine = _tables(stddev)
    words = _words(rng)
    drawn = np.empty(count, dtype=np.int64)
    for start in range(0, count, _TOGETHER):
        part = drawn[start : start + _TOGETHER]
        part[:] = coarse.draw(len(part), words)
        part *= step
        part += fine.draw(len(part), words)
    return drawn


@dataclass(frozen=True, kw_only=True)
class _Table:
    """The distribution function F of a discrete Gaussian, and the draws that 16 bits determine.

    Parameters
    ----------
    high, low : ndarray
        The upper and the lower 64-bit word of 2¹²⁸ F(k), rounded down, for k = −``reach``, …,
        ``reach`` − 1.
    decided : ndarray
        For each value of the first 16 random bits, the draw as int32; `_UNDECIDED` if they do not
        determine the draw.
    """

    reach: int
    high: np.ndarray
    low: np.ndarray
    decided: np.ndarray

    def draw(self, count: int, words: Words) -> np.ndarray:
        """Return ``count`` draws as int32 (see step 6 at the top of this module)."""
        # First look up 16 bits: they suffice for most draws, and their table fits into a cache.
        first = words((count + 3) // 4).view("<u2")[:count]
        drawn = self.decided.take(first)
        places = np.flatnonzero(drawn == _UNDECIDED)
        more = first[places].astype(np.uint64) << _REST | words(len(places)) >> _KNOWN
        entries = np.searchsorted(self.high, more, side="left")
        # If 64 bits do not determine a draw, 64 more bits do. This happens at most once in 2⁴⁰
        # draws. The index is never out of range, because the last entry is 2¹²⁸ − 1.
        for at in np.flatnonzero(self.high[entries] == more):
            end = int(np.searchsorted(self.high, more[at], side="right"))
            low = self.low[entries[at] : end]
            entries[at] += int(np.searchsorted(low, words(1)[0], side="right"))
        drawn[places] = entries - self.reach
        return drawn


def _words(rng: np.random.Generator) -> Words:
    """Return a source of uniform 64-bit words: ChaCha20, under a key that ``rng`` draws."""
    stream = keystream(rng.bytes(32))
    return lambda count: np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8")


def _check(stddev: float) -> None:
    if not LEAST_STDDEV <= stddev <= MOST_STDDEV:
        raise InvalidValue(
            f"stddev={stddev!r} of discrete noise: expected {LEAST_STDDEV:g} to {MOST_STDDEV:g} "
            "steps of the grid; if it is smaller, take a finer grid; if larger, a coarser grid"
        )


@lru_cache(maxsize=4)
def _tables(stddev: float) -> tuple[int, _Table, _Table]:
    """Return L, and the tables from which `draw` takes X and Y: step 8 at the top."""
    variance = Fraction(stddev) ** 2
    step = math.isqrt(int(stddev / 3))  # makes both tables about equally long
    fine = Fraction(_FINE * step**2)
    return step, _table((variance - fine) / step**2), _table(fine)


def _table(variance: Fraction) -> _Table:
    """Return the table of N_Z(0, variance).

    Rounding down makes an entry at most 1 smaller than 2¹²⁸ F. All other errors of an entry are at
    most one part in 2²³⁰.

    Weights are multiples of 2⁻³²⁰. They are computed in fewer than 2¹⁴ steps, and each step adds
    at most 2¹⁵ · 2⁻³²⁰ to a weight's error. All errors together stay below 2⁻²⁸⁰.
    """
    with localcontext(prec=_DIGITS):  # ratio r: weights are r^(k²), and (k+1)² - k² = 2k + 1
        exponent = Decimal(-variance.denominator) / (2 * variance.numerator)
        ratio = int(exponent.exp() * 2**_BITS)
    square = ratio * ratio >> _BITS
    reach = math.ceil(_TAIL * math.sqrt(variance)) + 1
    weights, weight, power = [1 << _BITS], 1 << _BITS, ratio
    for _ in range(reach):
        weight = weight * power >> _BITS
        power = power * square >> _BITS
        weights.append(weight)
    signed = [*weights[:0:-1], *weights[:-1]]  # the last weight follows from the others
    # Whole numbers throughout: floats would lose the tail, where an attacker would look.
    whole = sum(signed) + weights[-1]
    summed, words = 0, bytearray()
    for weight in signed:
        summed += weight
        words += ((summed << 128) // whole).to_bytes(16, "big")
    entries = np.frombuffer(bytes(words), dtype=">u8").reshape(-1, 2).astype(np.uint64)
    high, low = np.ascontiguousarray(entries[:, 0]), np.ascontiguousarray(entries[:, 1])
    edges = np.arange(2**16, dtype=np.uint64) << np.uint64(48)
    below = np.append(np.searchsorted(high, edges, side="left"), len(high))
    values = (below[:-1] - reach).astype(np.int32)
    decided = np.where(below[:-1] == below[1:], values, np.int32(_UNDECIDED))
    return _Table(reach=reach, high=high, low=low, decided=decided)
