"""Run big-integer work on several cores, in threads: gmpy2 can release Python's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import gmpy2

from flower_ext.checks import require_at_least_one

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int, int], None]
"""Called with the number of finished items and the number of all items."""

_SLICES_PER_WORKER = 8
_LARGEST_SLICE = 64


def map_slices(
    work: Callable[[Sequence[Item]], Sequence[Result]],
    items: Sequence[Item],
    *,
    workers: int = 1,
    progress: Progress | None = None,
) -> list[Result]:
    """Apply ``work`` to slices of ``items`` in ``workers`` threads, and return results in order.

    Raises
    ------
    ValueError
        ``workers`` is below one.
    """
    require_at_least_one("workers", workers)
    size = min(_LARGEST_SLICE, max(1, len(items) // (_SLICES_PER_WORKER * workers)))
    slices = [items[start : start + size] for start in range(0, len(items), size)]
    results: list[Result] = []
    with ThreadPoolExecutor(workers, initializer=_release_lock) as pool:
        for part in pool.map(work, slices):
            results.extend(part)
            if progress is not None:
                progress(len(results), len(items))
    return results


def _release_lock() -> None:
    # Each thread has its own gmpy2 context, so the caller's context does not change.
    gmpy2.get_context().allow_release_gil = True
