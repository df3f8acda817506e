"""Prefetch the next job's features and weights while the current job computes.

An argument ``prefetched`` holds two arrays, or parts of them: the next job's features, and the
memory where its weights will be.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types

from flower_ext_kernels.layer_table import LINE
from flower_ext_kernels.products import jit

MOST_PREFETCHED = 2**16
"""Most features, and most weights, that are prefetched for the next job: 256 kB of each."""
MOST_AT_ONCE = 24 * LINE
"""Most numbers to prefetch at once: if they were more, the processor would wait for them."""


@extending.intrinsic
def _prefetch_line(context: Any, values: Any, position: Any) -> Any:
    """Prefetch the cache line of the number at ``position``; do not wait."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.gep(array.data, [arguments[1]])
        int32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, int32, int32, int32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
        # Data, to be read, into L2.
        builder.call(function, [address, int32(0), int32(2), int32(1)])
        return context.get_dummy_value()

    return types.void(values, types.intp), generate


@jit
def _prefetch(values: np.ndarray, begin: int, size: int) -> None:
    """Prefetch ``size`` values from position ``begin``; do not wait."""
    for position in range(begin, min(begin + size, len(values)), LINE):
        _prefetch_line(values, position)  # type: ignore[call-arg]  # the context comes from Numba


@jit
def prefetch_part(
    prefetched: tuple[np.ndarray, np.ndarray], lengths: tuple[int, int], number: int
) -> None:
    """Prefetch part ``number`` of each array; `part_lengths` returns the ``lengths`` of a part."""
    _prefetch(prefetched[0], number * lengths[0], lengths[0])
    _prefetch(prefetched[1], number * lengths[1], lengths[1])


@jit
def part_lengths(prefetched: tuple[np.ndarray, np.ndarray], parts: int) -> tuple[int, int]:
    """Return the length of a part of each array, a multiple of `LINE`, for ``parts`` parts."""
    return _part_length(prefetched[0], parts), _part_length(prefetched[1], parts)


@jit
def _part_length(values: np.ndarray, parts: int) -> int:
    # Parts may be a line too long, because `_prefetch` stops at the end of the values.
    return int(len(values) // (LINE * parts) + 1) * LINE


@jit
def no_prefetch(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two empty arrays, for a pass in which the processor prefetches nothing."""
    return values[:0], values[:0]


@jit
def portions(
    prefetched: tuple[np.ndarray, np.ndarray], number: int, of: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return part ``number`` of each array, divided into ``of`` parts of about equal length."""
    return _portion(prefetched[0], number, of), _portion(prefetched[1], number, of)


@jit
def _portion(values: np.ndarray, number: int, of: int) -> np.ndarray:
    size = len(values) // of + 1
    return values[number * size :][:size]
