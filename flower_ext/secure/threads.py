"""Run big-integer work in a thread for each core, because gmpy2 can release Python's lock."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from logging import getLogger
from typing import TypeVar

import gmpy2

log = getLogger("flwr")

Item = TypeVar("Item")
Result = TypeVar("Result")

_SLICES_PER_WORKER = 8
_LARGEST_SLICE = 64
_SECONDS_BETWEEN_LINES = 10.0


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_slices(
    work: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item], *, name: str = ""
) -> list[Result]:
    """Apply ``work`` to slices of ``items``, in a thread for each core; return results in order.

    If ``name`` is given, the log shows every ten seconds how many items are done, and how long the
    rest will take.
    """
    workers = cores()
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
