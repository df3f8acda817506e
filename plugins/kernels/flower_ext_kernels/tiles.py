"""Products of small matrices, and pooling, in the processor's vector registers.

Numba's own loops keep no block of a product in registers, but the functions of this module do. They
consist of operations of LLVM, which turns them into machine code. The last columns of a matrix may
fill only a part of a vector. A mask hides the rest.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_HAS_AVX512 = llvm.get_host_cpu_features().get("avx512f", False)
LANES = 16 if _HAS_AVX512 else 8
"""Numbers in a vector of this processor."""
# A tile needs a register for each sum, for each vector of one matrix, and for one vector of the
# other: 25 + 5 + 1 of the 32 registers of AVX-512, or 12 + 2 + 1 of the 16 of AVX2.
TILE_HEIGHT, TILE_WIDTH = (5, 5) if _HAS_AVX512 else (6, 2)
"""Most rows of a tile, and most vectors in a row (columns for `dot_tile`); all of a tile's sums fit
the registers."""

_FLOAT32, _INT64, _INT32 = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT32, LANES)
_ZEROS = ir.Constant(_VECTOR, None)


class _Vectors:
    """Operations on vectors of float32 inside an intrinsic."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def _call(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        module = self.builder.module
        function = cgutils.get_or_insert_function(module, kind, name)  # type: ignore[no-untyped-call]
        return self.builder.call(function, arguments)

    def broadcast(self, value: Any) -> Any:
        """Return a vector with ``value`` in all lanes."""
        empty = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        first = self.builder.insert_element(empty, value, _INT32(0))
        zeros = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
        return self.builder.shuffle_vector(first, empty, zeros)

    def mask(self, columns: Any, number: int) -> Any:
        """Return a mask for vector ``number`` of a row: True in the first ``columns`` columns."""
        indices = [number * LANES + lane for lane in range(LANES)]
        lanes = ir.Constant(ir.VectorType(_INT64, LANES), indices)
        return self.builder.icmp_signed("<", lanes, self.broadcast(columns))

    def address(self, start: Any, distance: Any) -> Any:
        """Return the address of the number that lies ``distance`` numbers after ``start``."""
        return self.builder.gep(start, [_int64(distance)])

    def load(self, address: Any, mask: Any | None) -> Any:
        """Load a vector: zero where ``mask`` is false."""
        address = self.builder.bitcast(address, _VECTOR.as_pointer())
        if mask is None:
            return self.builder.load(address, align=4)
        name = f"llvm.masked.load.v{LANES}f32.p0"
        return self._call(name, _VECTOR, [address, _INT32(4), mask, _ZEROS])

    def store(self, vector: Any, address: Any, mask: Any | None) -> None:
        """Store the numbers of a vector for which ``mask`` is true.

        Loading them again soon is slow, because processors do not forward a masked store to a load.
        """
        address = self.builder.bitcast(address, _VECTOR.as_pointer())
        if mask is None:
            self.builder.store(vector, address, align=4)
            return
        name = f"llvm.masked.store.v{LANES}f32.p0"
        self._call(name, ir.VoidType(), [vector, address, _INT32(4), mask])

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Return a · b + c, rounded once."""
        return self._call(f"llvm.fma.v{LANES}f32", _VECTOR, [a, b, c])

    def reduce_sum(self, vector: Any) -> Any:
        """Return the sum of a vector's numbers, in any order."""
        kind = ir.FunctionType(_FLOAT32, [_FLOAT32, _VECTOR])
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        module = self.builder.module
        function = cgutils.get_or_insert_function(module, kind, name)  # type: ignore[no-untyped-call]
        return self.builder.call(function, [_FLOAT32(0), vector], fastmath=("reassoc",))

    def multiply(self, x: Any, y: Any) -> Any:
        """Return the product of two integers."""
        return self.builder.mul(_int64(x), y)

    def new_variable(self) -> Any:
        """Return the address of a new vector variable, which begins as zero."""
        # LLVM keeps the variable in a register, although the code names an address in memory.
        variable = cgutils.alloca_once(self.builder, _VECTOR)  # type: ignore[no-untyped-call]
        self.builder.store(_ZEROS, variable)
        return variable

    @contextmanager
    def loop(self, count: Any) -> Iterator[Any]:
        """Repeat the block ``count`` times; yield the number of the repetition."""
        with cgutils.for_range(self.builder, count) as repetition:
            yield repetition.index

    @contextmanager
    def cells(self, shape: Any, strides: Any) -> Iterator[Any]:
        """Repeat the block for every cell of a window; yield its distance from the first cell.

        ``shape`` is (height, width); ``strides`` is (row stride, column stride).
        """
        with self.loop(shape[0]) as row, self.loop(shape[1]) as column:
            yield self.builder.add(
                self.multiply(row, strides[0]), self.multiply(column, strides[1])
            )


def _int64(number: Any) -> Any:
    """Return a Python int as a constant, and a number of the code as it is."""
    return _INT64(number) if isinstance(number, int) else number


def _data_address(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    return context.make_array(kind)(context, builder, array).data


def _define_multiply_tile(
    typing_context: Any, out: Any, left: Any, right: Any, shape: Any, strides: Any, factor: Any
) -> Any:
    """Return the signature of `multiply_tile`, and the function that writes its code."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        starts = [
            _data_address(context, builder, signature.args[i], arguments[i]) for i in range(3)
        ]
        shape, strides = (
            cgutils.unpack_tuple(builder, arguments[i], len(signature.args[i]))  # type: ignore[no-untyped-call]
            for i in (3, 4)
        )
        vectors = _Vectors(builder)
        rows, columns, inner, outer = shape
        # Registers have no index, so there is separate code for each number of rows and vectors. A
        # row of whole vectors has code without a mask, for the reason in `_Vectors.store`.
        before_last = builder.sdiv(builder.sub(columns, _INT64(1)), _INT64(LANES))
        full = builder.icmp_signed("==", builder.srem(columns, _INT64(LANES)), _INT64(0))
        choice = builder.add(builder.mul(before_last, _INT64(2)), builder.zext(full, _INT64))
        choice = builder.add(rows, builder.mul(choice, _INT64(TILE_HEIGHT)))
        end = builder.append_basic_block()
        switch = builder.switch(choice, end)
        for whole in range(TILE_WIDTH):  # vectors before the last one
            for masked in (True, False):
                for height in range(1, TILE_HEIGHT + 1):
                    tile = builder.append_basic_block()
                    case = height + TILE_HEIGHT * (2 * whole + (not masked))
                    switch.add_case(_INT64(case), tile)
                    builder.position_at_end(tile)
                    masks = [None] * whole + [vectors.mask(columns, whole) if masked else None]
                    _write_tile(vectors, height, masks, inner, outer, starts, strides, arguments[5])
                    builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(out, left, right, shape, strides, types.float32), generate


def _write_tile(
    vectors: _Vectors,
    height: int,
    masks: Sequence[Any],
    inner: Any,
    outer: Any,
    starts: Sequence[Any],
    strides: Sequence[Any],
    factor: Any,
) -> None:
    """Write the code for a tile of ``height`` rows, with a vector for each mask."""
    builder = vectors.builder
    out, left, right = starts
    out_row, left_row, left_inner, left_outer, right_inner, right_outer = strides
    sums = [[vectors.new_variable() for _ in masks] for _ in range(height)]
    with vectors.loop(outer) as repetition:
        left_begin = vectors.address(left, vectors.multiply(repetition, left_outer))
        right_begin = vectors.address(right, vectors.multiply(repetition, right_outer))
        with vectors.loop(inner) as position:
            left_column = vectors.address(left_begin, vectors.multiply(position, left_inner))
            right_row = vectors.address(right_begin, vectors.multiply(position, right_inner))
            loaded = [
                vectors.load(vectors.address(right_row, number * LANES), mask)
                for number, mask in enumerate(masks)
            ]
            # Every loaded vector serves all rows, and every number of the left matrix all vectors.
            for row in range(height):
                value = builder.load(vectors.address(left_column, vectors.multiply(row, left_row)))
                value = vectors.broadcast(value)
                for vector, total in zip(loaded, sums[row], strict=True):
                    builder.store(vectors.multiply_add(value, vector, builder.load(total)), total)
    scale = vectors.broadcast(factor)
    for row in range(height):
        begin = vectors.address(out, vectors.multiply(row, out_row))
        for number, (total, mask) in enumerate(zip(sums[row], masks, strict=True)):
            target = vectors.address(begin, number * LANES)
            old = vectors.load(target, mask)
            vectors.store(vectors.multiply_add(scale, builder.load(total), old), target, mask)


def _define_dot_tile(
    typing_context: Any, out: Any, left: Any, right: Any, shape: Any, strides: Any
) -> Any:
    """Return the signature of `dot_tile`, and the function that writes its code."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        starts = [
            _data_address(context, builder, signature.args[i], arguments[i]) for i in range(3)
        ]
        shape, strides = (
            cgutils.unpack_tuple(builder, arguments[i], len(signature.args[i]))  # type: ignore[no-untyped-call]
            for i in (3, 4)
        )
        rows, columns, inner = shape
        end = builder.append_basic_block()
        choice = builder.add(rows, builder.mul(columns, _INT64(TILE_HEIGHT + 1)))
        switch = builder.switch(choice, end)
        for width in range(1, TILE_WIDTH + 1):
            for height in range(1, TILE_HEIGHT + 1):
                tile = builder.append_basic_block()
                switch.add_case(_INT64(height + (TILE_HEIGHT + 1) * width), tile)
                builder.position_at_end(tile)
                _write_dot_tile(_Vectors(builder), height, width, inner, starts, strides)
                builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(out, left, right, shape, strides), generate


def _write_dot_tile(
    vectors: _Vectors,
    height: int,
    width: int,
    inner: Any,
    starts: Sequence[Any],
    strides: Sequence[Any],
) -> None:
    """Write the code for a tile of ``height`` rows and ``width`` columns."""
    builder = vectors.builder
    out, left, right = starts
    out_row, left_row, right_row = strides
    lefts = [vectors.address(left, vectors.multiply(row, left_row)) for row in range(height)]
    rights = [vectors.address(right, vectors.multiply(row, right_row)) for row in range(width)]
    # The numbers along the sum are neighbours in both matrices. Each lane therefore sums a part of
    # them, and only at the end are the lanes added up.
    sums = [[vectors.new_variable() for _ in rights] for _ in lefts]

    def add(position: Any, mask: Any | None) -> None:
        loaded = [vectors.load(vectors.address(begin, position), mask) for begin in rights]
        for begin, row_sums in zip(lefts, sums, strict=True):
            vector = vectors.load(vectors.address(begin, position), mask)
            for other, total in zip(loaded, row_sums, strict=True):
                builder.store(vectors.multiply_add(vector, other, builder.load(total)), total)

    whole = builder.sdiv(inner, _INT64(LANES))
    with vectors.loop(whole) as number:
        add(vectors.multiply(LANES, number), None)
    done = vectors.multiply(LANES, whole)
    rest = builder.sub(inner, done)
    with builder.if_then(builder.icmp_signed(">", rest, _INT64(0))):
        add(done, vectors.mask(rest, 0))
    for row, row_sums in enumerate(sums):
        begin = vectors.address(out, vectors.multiply(row, out_row))
        for column, total in enumerate(row_sums):
            builder.store(vectors.reduce_sum(builder.load(total)), vectors.address(begin, column))


def _define_window_intrinsic(write: Callable[..., None]) -> Any:
    """Return an intrinsic that works on a window. The function ``write`` writes its code.

    The intrinsic takes arrays, the number of columns, the shape and the strides of the window, and
    maybe a factor. ``write`` takes a `_Vectors`, a mask of the columns, shape, strides, the
    addresses of the arrays, and the factor.
    """

    @wraps(write)  # for Numba, which needs the number of parameters
    def define(typing_context: Any, *kinds: Any) -> Any:
        arrays = [kind for kind in kinds if isinstance(kind, types.Array)]
        _, shape, strides, *factor = kinds[len(arrays) :]

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            starts = [
                _data_address(context, builder, kind, arguments[i]) for i, kind in enumerate(arrays)
            ]
            columns, *window = arguments[len(arrays) : len(arrays) + 3]
            shape, strides = (cgutils.unpack_tuple(builder, pair, 2) for pair in window)  # type: ignore[no-untyped-call]
            vectors, factor = _Vectors(builder), arguments[len(arrays) + 3 :]
            write(vectors, vectors.mask(columns, 0), shape, strides, *starts, *factor)
            return context.get_dummy_value()

        numbers = [types.float32 for _ in factor]
        return types.void(*arrays, types.int64, shape, strides, *numbers), generate

    return intrinsic(define)


def _write_sum(
    vectors: _Vectors, mask: Any, shape: Any, strides: Any, out: Any, values: Any, factor: Any
) -> None:
    """Write the code of `find_sum`."""
    builder, total = vectors.builder, vectors.new_variable()
    with vectors.cells(shape, strides) as distance:
        loaded = vectors.load(vectors.address(values, distance), mask)
        builder.store(builder.fadd(builder.load(total), loaded), total)
    scaled = builder.fmul(builder.load(total), vectors.broadcast(factor))
    vectors.store(scaled, out, mask)


def _write_add_to_all(
    vectors: _Vectors, mask: Any, shape: Any, strides: Any, out: Any, gradients: Any, factor: Any
) -> None:
    """Write the code of `add_to_all`."""
    scale, loaded = vectors.broadcast(factor), vectors.load(gradients, mask)
    with vectors.cells(shape, strides) as distance:
        cell = vectors.address(out, distance)
        vectors.store(vectors.multiply_add(scale, loaded, vectors.load(cell, mask)), cell, mask)


def _write_largest(
    vectors: _Vectors, mask: Any, shape: Any, strides: Any, out: Any, values: Any
) -> None:
    """Write the code of `find_largest`."""
    maxima = _find_maxima(vectors, values, mask, shape, strides)
    vectors.store(vectors.builder.load(maxima), out, mask)


def _write_add_to_largest(
    vectors: _Vectors, mask: Any, shape: Any, strides: Any, out: Any, gradients: Any, values: Any
) -> None:
    """Write the code of `add_to_largest`."""
    builder = vectors.builder
    maxima = builder.load(_find_maxima(vectors, values, mask, shape, strides))
    unassigned = vectors.new_variable()  # the gradients that no cell has received yet
    builder.store(vectors.load(gradients, mask), unassigned)
    with vectors.cells(shape, strides) as distance:
        loaded = vectors.load(vectors.address(values, distance), mask)
        # "ueq" is also true if the maximum is NaN, so that some cell receives its gradient, too.
        is_maximum = builder.fcmp_unordered("ueq", loaded, maxima)
        cell, rest = vectors.address(out, distance), builder.load(unassigned)
        old = vectors.load(cell, mask)
        vectors.store(builder.fadd(old, builder.select(is_maximum, rest, _ZEROS)), cell, mask)
        builder.store(builder.select(is_maximum, _ZEROS, rest), unassigned)


def _find_maxima(vectors: _Vectors, values: Any, mask: Any, shape: Any, strides: Any) -> Any:
    """Write code that finds the maxima over all cells, and return their address.

    NaN counts as larger than any number, as in PyTorch.
    """
    builder, maxima = vectors.builder, vectors.new_variable()
    builder.store(vectors.load(values, mask), maxima)
    with vectors.cells(shape, strides) as distance:
        loaded = vectors.load(vectors.address(values, distance), mask)
        largest = builder.load(maxima)
        is_larger = builder.fcmp_ordered(">", loaded, largest)
        is_nan = builder.fcmp_unordered("uno", loaded, loaded)
        larger = builder.or_(is_larger, is_nan)
        builder.store(builder.select(larger, loaded, largest), maxima)
    return maxima


multiply_tile: Any = intrinsic(_define_multiply_tile)
"""``multiply_tile(out, left, right, shape, strides, factor)``.

Add ``factor`` times a product to ``out``. For all rows r and columns n of a tile, the element
``out[r · out_row + n]`` grows by ``factor`` times the sum over u and k of
``left[r · left_row + k · left_inner + u · left_outer] ·
right[n + k · right_inner + u · right_outer]``. Rows are added one after the other, so that rows of
``out`` may overlap. ``shape`` is (rows, columns, inner, outer); ``strides`` is (out_row,
left_row, left_inner, left_outer, right_inner, right_outer).
"""
dot_tile: Any = intrinsic(_define_dot_tile)
"""``dot_tile(out, left, right, (rows, columns, inner), (out_row, left_row, right_row))``.

Write a product with a transposed matrix: for all rows r and columns n of a tile,
``out[r · out_row + n]`` is the sum over k of ``left[r · left_row + k] ·
right[n · right_row + k]``. A tile has up to `TILE_HEIGHT` rows and `TILE_WIDTH` columns.
"""
find_largest: Any = _define_window_intrinsic(_write_largest)
"""``find_largest(out, values, columns, shape, strides)``.

Write the maxima over a window to ``out``. The window has ``shape`` (height, width). ``strides`` is
(row stride, column stride): the distances, in numbers, from one cell to the cell below it and to
the cell on its right. A cell has up to `LANES` columns, one number each.
"""
add_to_largest: Any = _define_window_intrinsic(_write_add_to_largest)
"""``add_to_largest(out, gradients, values, columns, shape, strides)``.

Add ``gradients`` to ``out``: in each column, to the first cell with the maximum of ``values``.
"""
find_sum: Any = _define_window_intrinsic(_write_sum)
"""``find_sum(out, values, columns, shape, strides, factor)``.

Write ``factor`` times the sum over a window to ``out``.
"""
add_to_all: Any = _define_window_intrinsic(_write_add_to_all)
"""``add_to_all(out, gradients, columns, shape, strides, factor)``.

Add ``factor`` times ``gradients`` to ``out`` at all cells.
"""
