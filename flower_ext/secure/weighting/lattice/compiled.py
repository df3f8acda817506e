"""Products of polynomials as loops that Numba compiles; `plain` computes the same with NumPy.

Residues modulo a prime q below 2^48 are whole numbers in float64. They are reduced lazily and may
reach 2^53 in magnitude. `_times` needs no integers of 128 bits, because a fused multiply-add gives
the low half of a product exactly.

Eight polynomials are transformed at once. Their coefficients alternate, ``x[8 * i + lane]``, so
that every operation works on eight neighbouring numbers.

Growth: a product is at most 0.79 q in magnitude if its first factor is at most 10 q and its second
at most q / 2. A transform starts from at most q / 2 and adds one product in each of its 12 stages.
It therefore stays below 10 q, which is less than 2^52.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from flower_ext.secure.weighting.lattice.layout import DEGREE, LANES

_ROUND = 1.5 * 2.0**52
"""To round a number below 2^51 in magnitude, add this constant and subtract it again."""
_ROWS = 64
_COLUMNS = DEGREE // _ROWS
_ROW = _COLUMNS * LANES
"""Count of numbers that the last six stages combine. They fit the first-level cache."""


def _fused(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a · b + c, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float64(types.float64, types.float64, types.float64), generate


_fma: Any = intrinsic(_fused)


Loop = TypeVar("Loop", bound=Callable[..., Any])


def _fast(loop: Loop) -> Loop:
    """Compile a loop, once per machine, so that it runs without Python's lock."""
    made: Any = njit(error_model="numpy", nogil=True, cache=True)(loop)
    return made  # type: ignore[no-any-return]


def _inline(function: Loop) -> Loop:
    """Compile a function into the loops that call it."""
    made: Any = njit(error_model="numpy", nogil=True, inline="always")(function)
    return made  # type: ignore[no-any-return]


@_inline
def _times(x: Any, w: Any, q: Any, inverse: Any) -> Any:
    """Return x · w modulo q: a whole number of magnitude up to 0.79 q."""
    high = x * w
    low = _fma(x, w, -high)
    quotient = _fma(high, inverse, _ROUND) - _ROUND
    return _fma(-quotient, q, high) + low


@_inline
def _reduced(x: Any, q: Any, inverse: Any) -> Any:
    """Return x modulo q, of magnitude barely above q / 2 at most."""
    return x - (_fma(x, inverse, _ROUND) - _ROUND) * q


@_inline
def _canonical(x: Any, q: Any, inverse: Any) -> Any:
    """Return x modulo q, from 0 to q - 1."""
    rest = _reduced(x, q, inverse)
    rest = rest + q if rest < 0 else rest
    return rest - q if rest >= q else rest


def _splat(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Store ``value`` in eight neighbours. A loop would take as long as a product."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        eight = ir.VectorType(ir.DoubleType(), LANES)
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        nothing = ir.Constant(eight, ir.Undefined)
        first = builder.insert_element(nothing, arguments[2], ir.Constant(ir.IntType(32), 0))
        place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.PointerType(eight))
        builder.store(builder.shuffle_vector(first, nothing, zeros), place, align=8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float64), generate


_spread: Any = intrinsic(_splat)


@_fast
def _two_stages(x: Any, roots: Any, start: Any, groups: Any, q: Any) -> None:
    """Take ``groups`` groups of neighbours through two stages; each becomes four groups.

    ``roots[start + g]`` belongs to group g in the first stage.
    """
    p = 1.0 / q
    width = x.shape[0] // (4 * groups)
    for g in range(groups):
        j, at = start + g, 4 * g * width
        u, v, w = roots[j], roots[2 * j], roots[2 * j + 1]
        one, two = x[at : at + width], x[at + width : at + 2 * width]
        three, four = x[at + 2 * width : at + 3 * width], x[at + 3 * width : at + 4 * width]
        for i in range(width):
            a, b, c, d = one[i], two[i], three[i], four[i]
            t = _times(c, u, q, p)
            a, c = a + t, a - t
            t = _times(d, u, q, p)
            b, d = b + t, b - t
            t = _times(b, v, q, p)
            a, b = a + t, a - t
            t = _times(d, w, q, p)
            c, d = c + t, c - t
            one[i], two[i], three[i], four[i] = a, b, c, d


@_fast
def _add_row(row: Any, key: Any, spread: Any, total: Any, q: Any) -> None:
    """Add a row, times its words of the key, to ``total``."""
    p = 1.0 / q
    for i in range(key.shape[0]):
        _spread(spread, LANES * i, key[i])
    for i in range(row.shape[0]):
        total[i] += _times(row[i], spread[i], q, p)


@_fast
def add_products(x: Any, keys: Any, totals: Any, roots: Any, q: Any, spread: Any) -> None:
    """Transform eight polynomials and add their products with the keys to the totals.

    Parameters
    ----------
    x : float64 (32768,)
        Eight polynomials of coefficients up to q / 2 in magnitude, lane by lane. Overwritten with
        their transforms.
    keys : float64 (parts, 4096)
        Transformed, of magnitude up to q / 2. Every part is multiplied with all eight polynomials.
    totals : float64 (parts, 32768)
        Transformed. Each call adds at most 0.79 q in magnitude.
    roots : float64 (4096,)
        Powers of the root of unity; see `ring`.
    q : float
        The prime.
    spread : float64 (512,)
        Scratch memory.
    """
    for stage in (1, 4, 16):
        _two_stages(x, roots, stage, stage, q)
    for r in range(_ROWS):
        row = x[r * _ROW : (r + 1) * _ROW]
        for stage in (1, 4, 16):
            _two_stages(row, roots, stage * (_ROWS + r), stage, q)
        for part in range(keys.shape[0]):
            key = keys[part, r * _COLUMNS : (r + 1) * _COLUMNS]
            _add_row(row, key, spread, totals[part, r * _ROW : (r + 1) * _ROW], q)


@_fast
def reduce(x: Any, q: Any) -> None:
    """Bring numbers of magnitude up to 2^52 into (-q, q), in place."""
    p = 1.0 / q
    for i in range(x.shape[0]):
        x[i] = _reduced(x[i], q, p)


@_fast
def invert(x: Any, back: Any, q: Any, scale: Any) -> None:
    """Undo the transform of eight polynomials in place; residues end up from 0 to q - 1.

    Parameters
    ----------
    x : float64 (32768,)
        Transforms of magnitude up to 2^52.
    back : float64 (4096,)
        Inverses of the powers of the root.
    q, scale : float
        ``scale`` is the inverse of 4096 modulo q.
    """
    p = 1.0 / q
    for i in range(x.shape[0]):
        x[i] = _reduced(x[i], q, p)
    groups, width = DEGREE // 2, LANES
    while groups >= 1:
        for group in range(groups):
            w = back[groups + group]
            low = x[2 * group * width : (2 * group + 1) * width]
            high = x[(2 * group + 1) * width : (2 * group + 2) * width]
            for i in range(width):
                a, b = low[i], high[i]
                low[i] = _reduced(a + b, q, p)
                high[i] = _times(a - b, w, q, p)
        groups, width = groups // 2, width * 2
    for i in range(x.shape[0]):
        x[i] = _canonical(_times(x[i], scale, q, p), q, p)


@_fast
def encode(values: Any, scale: Any, count: Any, x: Any, squares: Any) -> None:
    """Set x to count · rint(scale · values), and add the squares of scale · values to ``squares``.

    ``squares`` holds 512 partial sums, so that additions do not wait for one another.
    """
    step = squares.shape[0]
    for start in range(0, values.shape[0], step):
        own, out = values[start : start + step], x[start : start + step]
        for i in range(own.shape[0]):
            scaled = own[i] * scale
            squares[i] += scaled * scaled
            out[i] = ((scaled + _ROUND) - _ROUND) * count


@_fast
def switch(one: Any, two: Any, high: Any, low: Any, facts: Any, words: Any) -> None:
    """Add 2^56 · high + low modulo q1 · q2, and round the result to words of 64 bits.

    Parameters
    ----------
    one, two : float64 (count,)
        Nonnegative residues modulo q1 and q2.
    high : float64 (count,)
        Whole numbers of magnitude up to 2^50.
    low : int64 (count,)
        Numbers of magnitude up to 2^56.
    facts : float64 (2, 5)
        For each prime: q; 2^56 and 2^28 modulo q; the inverse of the other prime modulo q; and
        2^16 (2^48 - q) / q.
    words : uint64 (count,)
    """
    for i in range(words.shape[0]):
        top, bottom = float(low[i] >> 28), float(low[i] & 0xFFFFFFF)
        whole, fraction = 0, 0.0
        for prime in range(2):
            q = facts[prime, 0]
            p = 1.0 / q
            v = one[i] if prime == 0 else two[i]
            v = v + _times(high[i], facts[prime, 1], q, p) + _times(top, facts[prime, 2], q, p)
            y = _canonical(_times(v + bottom, facts[prime, 3], q, p), q, p)
            whole += int(y)
            fraction += y * facts[prime, 4]
        words[i] = (whole << 16) + int((fraction + _ROUND) - _ROUND)


@_fast
def split(words: Any, q: Any, x: Any) -> None:
    """Set x to signed words modulo q, of magnitude up to q."""
    p = 1.0 / q
    for i in range(words.shape[0]):
        word = words[i]
        top, bottom = float(word >> 28), float(word & 0xFFFFFFF)
        x[i] = _reduced(_times(top, 268435456.0, q, p) + bottom, q, p)


@_fast
def join(one: Any, two: Any, inverse: Any, q: Any, other: Any, words: Any) -> None:
    """Add to words (int64) the signed number with residues ``one`` and ``two``.

    Parameters
    ----------
    one, two : float64 (count,)
        Nonnegative residues modulo ``q`` and ``other``.
    inverse : float
        Inverse of q modulo ``other``.
    q, other : int
    words : int64 (count,)
        Sums are modulo 2^64.
    """
    p = 1.0 / float(other)
    for i in range(words.shape[0]):
        t = int(_canonical(_times(two[i] - one[i], inverse, float(other), p), float(other), p))
        if t > other // 2:
            t -= other
        words[i] += int(one[i]) + q * t
