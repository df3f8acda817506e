"""Products of small matrices, and maxima, in the processor's vector registers.

Numba's own loops keep no block of a product in registers, but the functions of this module do. They
consist of operations of LLVM, which turns them into machine code. The last columns of a matrix may
fill only a part of a vector. A mask hides the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_MANY = llvm.get_host_cpu_features().get("avx512f", False)
LANES = 16 if _MANY else 8
"""Numbers in a vector of this processor."""
# A tile needs a register for each sum, for each vector of one matrix, and for one vector of the
# other: 25 + 5 + 1 of the 32 registers of AVX-512, or 12 + 2 + 1 of the 16 of AVX2.
TILE_HEIGHT, TILE_WIDTH = (5, 5) if _MANY else (6, 2)
"""Most rows of a tile, and most vectors in a row (columns for `dot_tile`); all of a tile's sums fit
the registers."""

_REAL, _WHOLE, _NARROW = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR, _MASK = ir.VectorType(_REAL, LANES), ir.VectorType(ir.IntType(1), LANES)
_NOTHING = ir.Constant(_VECTOR, None)


class _Vectors:
    """Operations on vectors of float32 inside an intrinsic."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def _call(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        module = self.builder.module
        made = cgutils.get_or_insert_function(module, kind, name)  # type: ignore[no-untyped-call]
        return self.builder.call(made, arguments)

    def every(self, value: Any) -> Any:
        """Return a vector of equal numbers."""
        empty = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        first = self.builder.insert_element(empty, value, _NARROW(0))
        zeros = ir.Constant(ir.VectorType(_NARROW, LANES), [0] * LANES)
        return self.builder.shuffle_vector(first, empty, zeros)

    def mask(self, columns: Any, number: int) -> Any:
        """Return a mask for vector ``number`` of a row: True in the first ``columns`` columns."""
        steps = ir.Constant(
            ir.VectorType(_WHOLE, LANES), [number * LANES + i for i in range(LANES)]
        )
        return self.builder.icmp_signed("<", steps, self.every(columns))

    def place(self, start: Any, *steps: Any) -> Any:
        """Return the address of the number that lies ``steps`` places after ``start``."""
        for step in steps:
            start = self.builder.gep(start, [_WHOLE(step) if isinstance(step, int) else step])
        return start

    def load(self, place: Any, mask: Any | None) -> Any:
        """Load a vector: zero where ``mask`` is false."""
        place = self.builder.bitcast(place, _VECTOR.as_pointer())
        if mask is None:
            return self.builder.load(place, align=4)
        name = f"llvm.masked.load.v{LANES}f32.p0"
        return self._call(name, _VECTOR, [place, _NARROW(4), mask, _NOTHING])

    def store(self, value: Any, place: Any, mask: Any | None) -> None:
        """Store the numbers of a vector for which ``mask`` is true.

        Loading them again soon is slow, because processors do not forward a masked store to a load.
        """
        place = self.builder.bitcast(place, _VECTOR.as_pointer())
        if mask is None:
            self.builder.store(value, place, align=4)
            return
        name = f"llvm.masked.store.v{LANES}f32.p0"
        self._call(name, ir.VoidType(), [value, place, _NARROW(4), mask])

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        """Return a · b + c, rounded once."""
        return self._call(f"llvm.fma.v{LANES}f32", _VECTOR, [a, b, c])

    def total(self, vector: Any) -> Any:
        """Return the sum of a vector's numbers, in any order."""
        kind = ir.FunctionType(_REAL, [_REAL, _VECTOR])
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        made = cgutils.get_or_insert_function(self.builder.module, kind, name)  # type: ignore[no-untyped-call]
        return self.builder.call(made, [_REAL(0), vector], fastmath=("reassoc",))

    def product(self, x: Any, y: Any) -> Any:
        return self.builder.mul(_WHOLE(x) if isinstance(x, int) else x, y)

    def variable(self) -> Any:
        """Return the address of a new vector variable, which begins as zero."""
        # LLVM keeps the variable in a register, although the code names an address in memory.
        made = cgutils.alloca_once(self.builder, _VECTOR)  # type: ignore[no-untyped-call]
        self.builder.store(_NOTHING, made)
        return made

    @contextmanager
    def loop(self, count: Any) -> Iterator[Any]:
        """Repeat the block ``count`` times; yield the number of the repetition."""
        with cgutils.for_range(self.builder, count) as turn:
            yield turn.index

    @contextmanager
    def cells(self, shape: Any, steps: Any) -> Iterator[Any]:
        """Repeat the block for every cell of a window; yield its distance from the first cell.

        ``shape`` is (height, width); ``steps`` is (down, right).
        """
        with self.loop(shape[0]) as row, self.loop(shape[1]) as column:
            yield self.builder.add(self.product(row, steps[0]), self.product(column, steps[1]))


def _start(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    return context.make_array(kind)(context, builder, array).data


def _multiplied(
    typing_context: Any, out: Any, left: Any, right: Any, shape: Any, steps: Any, factor: Any
) -> Any:
    """Add a tile of a product to ``out``; see `multiply_tile`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        starts = [_start(context, builder, signature.args[i], arguments[i]) for i in range(3)]
        shape, steps = (
            cgutils.unpack_tuple(builder, arguments[i], len(signature.args[i]))  # type: ignore[no-untyped-call]
            for i in (3, 4)
        )
        vectors = _Vectors(builder)
        rows, columns, inner, outer = shape
        # Registers have no index, so there is separate code for each number of rows and vectors. A
        # row of whole vectors has code without a mask, for the reason in `_Vectors.store`.
        last = builder.sub(columns, _WHOLE(1))
        needed = builder.sdiv(last, _WHOLE(LANES))
        full = builder.icmp_signed("==", builder.srem(columns, _WHOLE(LANES)), _WHOLE(0))
        choice = builder.add(builder.mul(needed, _WHOLE(2)), builder.zext(full, _WHOLE))
        choice = builder.add(rows, builder.mul(choice, _WHOLE(TILE_HEIGHT)))
        end = builder.append_basic_block()
        switch = builder.switch(choice, end)
        for across in range(TILE_WIDTH):
            for masked in (True, False):
                for height in range(1, TILE_HEIGHT + 1):
                    tile = builder.append_basic_block()
                    switch.add_case(
                        _WHOLE(height + TILE_HEIGHT * (2 * across + (not masked))), tile
                    )
                    builder.position_at_end(tile)
                    masks = [None] * across + [vectors.mask(columns, across) if masked else None]
                    _tile(vectors, height, masks, inner, outer, starts, steps, arguments[5])
                    builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(out, left, right, shape, steps, types.float32), generate


def _tile(
    vectors: _Vectors,
    height: int,
    masks: Sequence[Any],
    inner: Any,
    outer: Any,
    starts: Sequence[Any],
    steps: Sequence[Any],
    factor: Any,
) -> None:
    """Write the code for a tile of ``height`` rows, with a vector for each mask."""
    builder = vectors.builder
    out, left, right = starts
    out_row, left_row, left_inner, left_outer, right_inner, right_outer = steps
    sums = [[vectors.variable() for _ in masks] for _ in range(height)]
    with vectors.loop(outer) as turn:
        lefts = vectors.place(left, vectors.product(turn, left_outer))
        rights = vectors.place(right, vectors.product(turn, right_outer))
        with vectors.loop(inner) as step:
            left_step = vectors.place(lefts, vectors.product(step, left_inner))
            right_step = vectors.place(rights, vectors.product(step, right_inner))
            loaded = [
                vectors.load(vectors.place(right_step, number * LANES), mask)
                for number, mask in enumerate(masks)
            ]
            # Every loaded vector serves all rows, and every number of the left matrix all vectors.
            for row in range(height):
                value = builder.load(vectors.place(left_step, vectors.product(row, left_row)))
                value = vectors.every(value)
                for number, place in enumerate(sums[row]):
                    builder.store(vectors.fused(value, loaded[number], builder.load(place)), place)
    scale = vectors.every(factor)
    for row in range(height):
        begin = vectors.place(out, vectors.product(row, out_row))
        for number, place in enumerate(sums[row]):
            target = vectors.place(begin, number * LANES)
            value = vectors.fused(scale, builder.load(place), vectors.load(target, masks[number]))
            vectors.store(value, target, masks[number])


def _dotted(typing_context: Any, out: Any, left: Any, right: Any, shape: Any, steps: Any) -> Any:
    """Write a tile of a product with a transposed matrix; see `dot_tile`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        starts = [_start(context, builder, signature.args[i], arguments[i]) for i in range(3)]
        shape, steps = (
            cgutils.unpack_tuple(builder, arguments[i], len(signature.args[i]))  # type: ignore[no-untyped-call]
            for i in (3, 4)
        )
        rows, columns, inner = shape
        end = builder.append_basic_block()
        choice = builder.add(rows, builder.mul(columns, _WHOLE(TILE_HEIGHT + 1)))
        switch = builder.switch(choice, end)
        for width in range(1, TILE_WIDTH + 1):
            for height in range(1, TILE_HEIGHT + 1):
                tile = builder.append_basic_block()
                switch.add_case(_WHOLE(height + (TILE_HEIGHT + 1) * width), tile)
                builder.position_at_end(tile)
                _dot_tile(_Vectors(builder), height, width, inner, starts, steps)
                builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(out, left, right, shape, steps), generate


def _dot_tile(
    vectors: _Vectors,
    height: int,
    width: int,
    inner: Any,
    starts: Sequence[Any],
    steps: Sequence[Any],
) -> None:
    """Write the code for a tile of ``height`` rows and ``width`` columns."""
    builder = vectors.builder
    out, left, right = starts
    out_row, left_row, right_row = steps
    lefts = [vectors.place(left, vectors.product(row, left_row)) for row in range(height)]
    rights = [vectors.place(right, vectors.product(row, right_row)) for row in range(width)]
    # The numbers along the sum are neighbours in both matrices. Each lane therefore sums a part of
    # them, and only at the end are the lanes added up.
    sums = [[vectors.variable() for _ in rights] for _ in lefts]

    def add(step: Any, mask: Any | None) -> None:
        loaded = [vectors.load(vectors.place(begin, step), mask) for begin in rights]
        for begin, places in zip(lefts, sums, strict=True):
            value = vectors.load(vectors.place(begin, step), mask)
            for factor, place in zip(loaded, places, strict=True):
                builder.store(vectors.fused(value, factor, builder.load(place)), place)

    whole = builder.sdiv(inner, _WHOLE(LANES))
    with vectors.loop(whole) as number:
        add(vectors.product(LANES, number), None)
    done = vectors.product(LANES, whole)
    rest = builder.sub(inner, done)
    with builder.if_then(builder.icmp_signed(">", rest, _WHOLE(0))):
        add(done, vectors.mask(rest, 0))
    for row, places in enumerate(sums):
        begin = vectors.place(out, vectors.product(row, out_row))
        for column, place in enumerate(places):
            builder.store(vectors.total(builder.load(place)), vectors.place(begin, column))


def _window_intrinsic(write: Callable[..., None]) -> Any:
    """Make an intrinsic that works on a window, from a function that writes its code.

    The intrinsic takes arrays, the number of columns, the shape and the steps of the window, and
    maybe a factor. ``write`` gets the builder's vectors, a mask of the columns, shape, steps, the
    addresses of the arrays, and the factor.
    """

    @wraps(write)  # for Numba, which needs the number of parameters
    def typed(typing_context: Any, *kinds: Any) -> Any:
        arrays = [kind for kind in kinds if isinstance(kind, types.Array)]
        _, shape, steps, *factor = kinds[len(arrays) :]

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            starts = [_start(context, builder, kind, arguments[i]) for i, kind in enumerate(arrays)]
            columns, *window = arguments[len(arrays) : len(arrays) + 3]
            shape, steps = (cgutils.unpack_tuple(builder, pair, 2) for pair in window)  # type: ignore[no-untyped-call]
            vectors, factor = _Vectors(builder), arguments[len(arrays) + 3 :]
            write(vectors, vectors.mask(columns, 0), shape, steps, *starts, *factor)
            return context.get_dummy_value()

        real = [types.float32 for _ in factor]
        return types.void(*arrays, types.int64, shape, steps, *real), generate

    return intrinsic(typed)


def _sum(
    vectors: _Vectors, mask: Any, shape: Any, steps: Any, out: Any, values: Any, factor: Any
) -> None:
    """Write ``factor`` times the sum over a window; see `find_sum`."""
    builder, total = vectors.builder, vectors.variable()
    with vectors.cells(shape, steps) as step:
        loaded = vectors.load(vectors.place(values, step), mask)
        builder.store(builder.fadd(builder.load(total), loaded), total)
    scaled = builder.fmul(builder.load(total), vectors.every(factor))
    vectors.store(scaled, out, mask)


def _spread(
    vectors: _Vectors, mask: Any, shape: Any, steps: Any, out: Any, slopes: Any, factor: Any
) -> None:
    """Add ``factor`` times slopes to all cells of a window; see `add_to_all`."""
    scale, loaded = vectors.every(factor), vectors.load(slopes, mask)
    with vectors.cells(shape, steps) as step:
        place = vectors.place(out, step)
        vectors.store(vectors.fused(scale, loaded, vectors.load(place, mask)), place, mask)


def _largest(vectors: _Vectors, mask: Any, shape: Any, steps: Any, out: Any, values: Any) -> None:
    """Write the maxima over a window; see `find_largest`."""
    maxima = _maxima(vectors, values, mask, shape, steps)
    vectors.store(vectors.builder.load(maxima), out, mask)


def _add_to_maxima(
    vectors: _Vectors, mask: Any, shape: Any, steps: Any, out: Any, slopes: Any, values: Any
) -> None:
    """Add slopes to the cells with the maxima; see `add_to_largest`."""
    builder = vectors.builder
    best = builder.load(_maxima(vectors, values, mask, shape, steps))
    unsent = vectors.variable()  # the slopes that no cell has received yet
    builder.store(vectors.load(slopes, mask), unsent)
    with vectors.cells(shape, steps) as step:
        loaded = vectors.load(vectors.place(values, step), mask)
        # "ueq" is also true if the maximum is NaN, so that its slope goes somewhere, too.
        hit = builder.fcmp_unordered("ueq", loaded, best)
        place, rest = vectors.place(out, step), builder.load(unsent)
        old = vectors.load(place, mask)
        vectors.store(builder.fadd(old, builder.select(hit, rest, _NOTHING)), place, mask)
        builder.store(builder.select(hit, _NOTHING, rest), unsent)


def _maxima(vectors: _Vectors, values: Any, mask: Any, shape: Any, steps: Any) -> Any:
    """Return the address of the maxima over all cells; NaN wins, as in PyTorch."""
    builder, maxima = vectors.builder, vectors.variable()
    builder.store(vectors.load(values, mask), maxima)
    with vectors.cells(shape, steps) as step:
        loaded, best = vectors.load(vectors.place(values, step), mask), builder.load(maxima)
        larger = builder.or_(
            builder.fcmp_ordered(">", loaded, best), builder.fcmp_unordered("uno", loaded, loaded)
        )
        builder.store(builder.select(larger, loaded, best), maxima)
    return maxima


multiply_tile: Any = intrinsic(_multiplied)
"""``multiply_tile(out, left, right, shape, steps, factor)``.

Add ``factor`` times a product to ``out``. For all rows r and columns n of a tile, the element
``out[r · out_row + n]`` grows by ``factor`` times the sum over u and k of
``left[r · left_row + k · left_inner + u · left_outer] ·
right[n + k · right_inner + u · right_outer]``. Rows are added one after the other, so that rows of
``out`` may overlap. ``shape`` is (rows, columns, inner, outer); ``steps`` is (out_row,
left_row, left_inner, left_outer, right_inner, right_outer).
"""
dot_tile: Any = intrinsic(_dotted)
"""``dot_tile(out, left, right, (rows, columns, inner), (out_row, left_row, right_row))``.

Write a product with a transposed matrix: for all rows r and columns n of a tile,
``out[r · out_row + n]`` is the sum over k of ``left[r · left_row + k] ·
right[n · right_row + k]``. A tile has up to `TILE_HEIGHT` rows and `TILE_WIDTH` columns.
"""
find_largest: Any = _window_intrinsic(_largest)
"""``find_largest(out, values, columns, (height, width), (down, right))``: maxima over a window.

The window has ``height`` · ``width`` cells. Each cell lies ``down`` numbers after the cell above
it, and ``right`` numbers after the cell to its left. A cell has up to `LANES` columns, one number
each.
"""
add_to_largest: Any = _window_intrinsic(_add_to_maxima)
"""``add_to_largest(out, slopes, values, columns, (height, width), (down, right))``.

Add ``slopes`` to ``out``: in each column, to the first cell with the maximum of ``values``.
"""
find_sum: Any = _window_intrinsic(_sum)
"""``find_sum(out, values, columns, (height, width), (down, right), factor)``.

Write ``factor`` times the sum over a window to ``out``.
"""
add_to_all: Any = _window_intrinsic(_spread)
"""``add_to_all(out, slopes, columns, (height, width), (down, right), factor)``.

Add ``factor`` times ``slopes`` to ``out`` at all cells.
"""
