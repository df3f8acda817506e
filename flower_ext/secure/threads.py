"""Run big-integer work on several cores, in threads: gmpy2 can release Python's lock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from logging import getLogger
from typing import TypeVar

import gmpy2

from flower_ext.checks import require_at_least_one

log = getLogger("flwr")

Item = TypeVar("Item")
Result = TypeVar("Result")

_SLICES_PER_WORKER = 8
_LARGEST_SLICE = 64
_SECONDS_BETWEEN_LINES = 10.0


def map_slices(
    work: Callable[[Sequence[Item]], Sequence[Result]],
    items: Sequence[Item],
    *,
    workers: int = 1,
    name: str = "",
) -> list[Result]:
    """Apply ``work`` to slices of ``items`` in ``workers`` threads, and return results in order.

    Work with a ``name`` that takes longer than ten seconds logs how much of it is left.

    Raises
    ------
    ValueError
        ``workers`` is below one.
    """
    require_at_least_one("workers", workers)
    size = min(_LARGEST_SLICE, max(1, len(items) // (_SLICES_PER_WORKER * workers)))
    slices = [items[start : start + size] for start in range(0, len(items), size)]
    results: list[Result] = []
    started = logged = time.monotonic()
    with ThreadPoolExecutor(workers, initializer=_release_lock) as pool:
        for part in pool.map(work, slices):
            results.extend(part)
            now, done, total = time.monotonic(), len(results), len(items)
            if name and now - logged >= _SECONDS_BETWEEN_LINES and done < total:
                logged, left = now, (now - started) * (total - done) / done
                log.info("%s: %d of %d, %.0f s left", name, done, total, left)
    return results


def _release_lock() -> None:
    # Each thread has its own gmpy2 context, so the caller's context does not change.
    gmpy2.get_context().allow_release_gil = True
