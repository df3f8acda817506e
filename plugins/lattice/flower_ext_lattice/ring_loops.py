"""Products of polynomials as loops that Numba compiles.

Residues modulo a prime q below 2^48 are whole numbers in float64. They are reduced lazily and may
reach 2^53 in magnitude. `_times` needs no integers of 128 bits, because a fused multiply-add gives
the low half of a product exactly.

Eight polynomials are transformed at once. Their coefficients alternate, ``x[8 * i + lane]``, so
that every operation works on eight neighbouring numbers.

Bounds on growth: a product is at most 0.79 q in magnitude if its first factor is at most 10 q and
its second at most q / 2. A transform starts from numbers of at most q / 2, and adds one product in
each of its 12 stages. Its numbers therefore stay below 10 q, which is less than 2^52.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from flower_ext_lattice.layout import DEGREE, LANES

_ROUND = 1.5 * 2.0**52
"""To round a number below 2^51 in magnitude, add this constant and subtract it again: near the
constant, float64 has whole numbers only."""
_ROWS = 64
_COLUMNS = DEGREE // _ROWS
_ROW = _COLUMNS * LANES
"""Count of the numbers that the last six stages combine, which fit the first-level cache."""


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
    low = _fma(x, w, -high)  # x · w − high, exactly: the rounding error of ``high``
    # Both summands below are whole numbers below 2^53, so nothing else is rounded.
    quotient = _fma(high, inverse, _ROUND) - _ROUND
    return _fma(-quotient, q, high) + low


@_inline
def _reduced(x: Any, q: Any, inverse: Any) -> Any:
    """Return x modulo q, of magnitude barely above q / 2 at most."""
    # The quotient is at most 32 and q has 48 bits, so the product is exact.
    return x - (_fma(x, inverse, _ROUND) - _ROUND) * q


@_inline
def _canonical(x: Any, q: Any, inverse: Any) -> Any:
    """Return x modulo q, from 0 to q - 1."""
    rest = _reduced(x, q, inverse)
    rest = rest + q if rest < 0 else rest
    return rest - q if rest >= q else rest


class _Vectors:
    """Arithmetic on vectors of eight numbers modulo q, 1.7 times as fast as loops of Numba.

    The factor is measured for `add_encoded` (Zen 4, AVX-512). Numba's own loops are slow where a
    factor changes after every eight numbers. The class writes code inside an intrinsic.
    """

    _eight = ir.VectorType(ir.DoubleType(), LANES)

    def __init__(self, builder: Any, modulus: Any) -> None:
        self._builder = builder
        q, inverse = (builder.extract_value(modulus, place) for place in (0, 1))
        self._fused = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module, ir.FunctionType(self._eight, [self._eight] * 3), f"llvm.fma.v{LANES}f64"
        )
        self._q, self._inverse = self.every(q), self.every(inverse)
        self._rounding = ir.Constant(self._eight, [_ROUND] * LANES)

    def every(self, value: Any) -> Any:
        """Return a vector of eight equal numbers."""
        nothing = ir.Constant(self._eight, ir.Undefined)
        first = self._builder.insert_element(nothing, value, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return self._builder.shuffle_vector(first, nothing, zeros)

    def place(self, array: Any, at: Any) -> Any:
        """Return the address of eight neighbours in an array, the first of them at ``at``."""
        pointer = self._builder.gep(array, [at])
        return self._builder.bitcast(pointer, ir.PointerType(self._eight))

    def load(self, place: Any) -> Any:
        return self._builder.load(place, align=8)

    def store(self, value: Any, place: Any) -> None:
        self._builder.store(value, place, align=8)

    def sum(self, x: Any, y: Any) -> Any:
        return self._builder.fadd(x, y)

    def difference(self, x: Any, y: Any) -> Any:
        return self._builder.fsub(x, y)

    def times(self, x: Any, w: Any) -> Any:
        """Return x · w modulo q, as `_times` does."""
        builder = self._builder
        high = builder.fmul(x, w)
        low = builder.call(self._fused, [x, w, builder.fneg(high)])
        quotient = builder.call(self._fused, [high, self._inverse, self._rounding])
        quotient = builder.fneg(builder.fsub(quotient, self._rounding))
        return builder.fadd(builder.call(self._fused, [quotient, self._q, high]), low)


def _product(typing_context: Any, row: Any, at: Any, factor: Any, total: Any, modulus: Any) -> Any:
    """Add eight neighbours of ``row``, times ``factor``, to eight neighbours of ``total``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, at, factor, target, modulus = arguments
        kinds = signature.args
        vectors = _Vectors(builder, modulus)
        place = vectors.place(context.make_array(kinds[0])(context, builder, source).data, at)
        sums = vectors.place(context.make_array(kinds[3])(context, builder, target).data, at)
        rest = vectors.times(vectors.load(place), vectors.every(factor))
        vectors.store(vectors.sum(vectors.load(sums), rest), sums)
        return context.get_dummy_value()

    return types.void(row, types.intp, types.float64, total, modulus), generate


def _butterflies(
    typing_context: Any, x: Any, at: Any, width: Any, powers: Any, modulus: Any
) -> Any:
    """Apply two stages of the transform to four vectors of eight numbers.

    The vectors begin at ``at``, and ``width``, 2 ``width`` and 3 ``width`` numbers behind it.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, at, width, powers, modulus = arguments
        u, v, w = cgutils.unpack_tuple(builder, powers, 3)  # type: ignore[no-untyped-call]
        vectors = _Vectors(builder, modulus)
        data = context.make_array(signature.args[0])(context, builder, array).data
        places = [vectors.place(data, at)]
        for _ in range(3):
            at = builder.add(at, width)
            places.append(vectors.place(data, at))
        numbers = [vectors.load(place) for place in places]
        # Two pairs that lie half the group apart, then two pairs that lie a quarter apart.
        for upper, lower, root in ((0, 2, u), (1, 3, u), (0, 1, v), (2, 3, w)):
            a, t = numbers[upper], vectors.times(numbers[lower], vectors.every(root))
            numbers[upper], numbers[lower] = vectors.sum(a, t), vectors.difference(a, t)
        for number, place in zip(numbers, places, strict=True):
            vectors.store(number, place)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, powers, modulus), generate


_add_product: Any = intrinsic(_product)
_pass_two_stages: Any = intrinsic(_butterflies)


@_fast
def _two_stages(x: Any, start: Any, groups: Any, modulus: Any) -> None:
    """Apply two stages of the transform to ``groups`` groups of neighbours.

    The stages divide each group into four groups. ``roots[start + g]`` belongs to group g in the
    first stage.
    """
    roots, width = modulus[2], x.shape[0] // (4 * groups)
    # Two stages in one pass halve the loads and stores.
    for g in range(groups):
        j = start + g
        # As in a heap, the halves of group j have the numbers 2 j and 2 j + 1.
        powers = roots[j], roots[2 * j], roots[2 * j + 1]
        for i in range(0, width, LANES):
            _pass_two_stages(x, 4 * g * width + i, width, powers, modulus)


@_fast
def _add_row(row: Any, factors: Any, total: Any, modulus: Any) -> None:
    """Multiply each eight numbers in ``row`` by their factor; add the products to ``total``."""
    for i in range(factors.shape[0]):
        _add_product(row, LANES * i, factors[i], total, modulus)


@_fast
def _transformed_row(x: Any, r: Any, modulus: Any) -> Any:
    """Apply the last six stages to row ``r`` of ``x``, in place, and return the row.

    These stages combine only numbers of the same row. The caller can therefore finish each row
    while it is in the nearest cache.
    """
    row = x[r * _ROW : (r + 1) * _ROW]
    for stage in (1, 4, 16):
        _two_stages(row, stage * (_ROWS + r), stage, modulus)
    return row


@_fast
def transform(x: Any, modulus: Any) -> None:
    """Transform eight alternating polynomials in place; ``modulus`` is `ring.Prime.modulus`."""
    for stage in (1, 4, 16):
        _two_stages(x, stage, stage, modulus)
    for r in range(_ROWS):
        _transformed_row(x, r, modulus)


@_fast
def _add_later_stages(x: Any, multipliers: Any, totals: Any, modulus: Any) -> None:
    """Transform from the third stage on; add the products with ``multipliers`` to ``totals``."""
    for stage in (4, 16):
        _two_stages(x, stage, stage, modulus)
    for r in range(_ROWS):
        row = _transformed_row(x, r, modulus)
        for part in range(multipliers.shape[0]):
            factors = multipliers[part, r * _COLUMNS : (r + 1) * _COLUMNS]
            _add_row(row, factors, totals[part, r * _ROW : (r + 1) * _ROW], modulus)


@_fast
def add_products(x: Any, multipliers: Any, totals: Any, modulus: Any) -> None:
    """Implement `ring.add_products`; ``modulus`` is `ring.Prime.modulus`.

    Multipliers are of magnitude up to q / 2, and each call adds at most 0.79 q to a total.
    """
    _two_stages(x, 1, 1, modulus)
    _add_later_stages(x, multipliers, totals, modulus)


@_fast
def add_encoded(
    values: Any,
    scale: Any,
    count: Any,
    squares: Any,
    x: Any,
    multipliers: Any,
    totals: Any,
    modulus: Any,
) -> None:
    """Implement `ring.add_encoded`; ``modulus`` is `ring.Prime.modulus`.

    The loop that encodes also does the first two stages, which saves passes through memory.
    ``squares`` holds 512 partial sums, so that additions do not wait for one another.
    """
    q, p, roots = modulus
    u, v, w = roots[1], roots[2], roots[3]
    step, quarter = squares.shape[0], x.shape[0] // 4
    for start in range(0, quarter, step):
        # The same places in each quarter: the first two stages combine just these numbers.
        in_0, in_1 = values[start:][:step], values[quarter + start :][:step]
        in_2, in_3 = values[2 * quarter + start :][:step], values[3 * quarter + start :][:step]
        out_0, out_1 = x[start:][:step], x[quarter + start :][:step]
        out_2, out_3 = x[2 * quarter + start :][:step], x[3 * quarter + start :][:step]
        for i in range(step):
            a, b, c, d = in_0[i] * scale, in_1[i] * scale, in_2[i] * scale, in_3[i] * scale
            # NaN and numbers too large for the ring also get here. They show in the squares, by
            # which the silo refuses the update.
            squares[i] += (a * a + b * b) + (c * c + d * d)
            a, b = ((a + _ROUND) - _ROUND) * count, ((b + _ROUND) - _ROUND) * count
            c, d = ((c + _ROUND) - _ROUND) * count, ((d + _ROUND) - _ROUND) * count
            t = _times(c, u, q, p)
            a, c = a + t, a - t
            t = _times(d, u, q, p)
            b, d = b + t, b - t
            t = _times(b, v, q, p)
            out_0[i], out_1[i] = a + t, a - t
            t = _times(d, w, q, p)
            out_2[i], out_3[i] = c + t, c - t
    _add_later_stages(x, multipliers, totals, modulus)


@_fast
def reduce(x: Any, q: Any) -> None:
    """Bring numbers of magnitude up to 2^53 into (-q, q), in place."""
    p = 1.0 / q
    for i in range(x.shape[0]):
        x[i] = _reduced(x[i], q, p)


@_fast
def invert(x: Any, back: Any, q: Any, scale: Any) -> None:
    """Implement `ring.invert`, for magnitudes up to 2^52.

    ``back`` holds the inverses of the roots, and ``scale`` is the inverse of 4096 modulo q.
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
                # This undoes a butterfly, but for a factor of 2. ``scale`` removes all of them. The
                # sums are reduced at once, since they would double in each of the 12 stages.
                a, b = low[i], high[i]
                low[i] = _reduced(a + b, q, p)
                high[i] = _times(a - b, w, q, p)
        groups, width = groups // 2, width * 2
    for i in range(x.shape[0]):
        x[i] = _canonical(_times(x[i], scale, q, p), q, p)


@_fast
def switch(mod_q1: Any, mod_q2: Any, high: Any, low: Any, constants: Any, words: Any) -> None:
    """Implement `ring.switch`. Each row of ``constants`` belongs to one prime q.

    A row holds q; 2^56 and 2^28 modulo q; the inverse of the other prime modulo q; and 2^16 (2^48 -
    q) / q.
    """
    # By the Chinese remainder theorem, c / (q1 q2) is y1 / q1 + y2 / q2 modulo 1, where y1 is c
    # times the inverse of q2, modulo q1. The word is therefore the sum of y · 2^64 / q, modulo
    # 2^64. Both q are just below 2^48: a summand is y · 2^16 plus a rest small enough for float64.
    for i in range(words.shape[0]):
        # Two halves of 28 bits, because ``low`` has more bits than float64.
        top, bottom = float(low[i] >> 28), float(low[i] & 0xFFFFFFF)
        whole, fraction = 0, 0.0
        for prime in range(2):
            q, unit, shift = constants[prime, 0], constants[prime, 1], constants[prime, 2]
            inverse, remainder = constants[prime, 3], constants[prime, 4]
            p = 1.0 / q
            v = mod_q1[i] if prime == 0 else mod_q2[i]
            v = v + _times(high[i], unit, q, p) + _times(top, shift, q, p)
            y = _canonical(_times(v + bottom, inverse, q, p), q, p)
            whole += int(y)
            fraction += y * remainder
        words[i] = (whole << 16) + int((fraction + _ROUND) - _ROUND)


@_fast
def to_residues(words: Any, q: Any, x: Any) -> None:
    """Implement `ring.to_residues`; residues are of magnitude up to q."""
    p = 1.0 / q
    for i in range(words.shape[0]):
        word = words[i]  # of 64 bits, more than float64 has: split it, with the sign in ``top``
        top, bottom = float(word >> 28), float(word & 0xFFFFFFF)
        x[i] = _reduced(_times(top, 268435456.0, q, p) + bottom, q, p)


@_fast
def join(mod_q1: Any, mod_q2: Any, inverse: Any, q1: Any, q2: Any, words: Any) -> None:
    """Implement `ring.add_joined`; ``inverse`` is the inverse of q1 modulo q2."""
    q, p = float(q2), 1.0 / float(q2)
    # Garner's form of the Chinese remainder theorem: the number is mod_q1 + q1 · t. The product
    # wraps modulo 2^64, as the sum does.
    for i in range(words.shape[0]):
        t = int(_canonical(_times(mod_q2[i] - mod_q1[i], inverse, q, p), q, p))
        if t > q2 // 2:  # the number is negative
            t -= q2
        words[i] += int(mod_q1[i]) + q1 * t
