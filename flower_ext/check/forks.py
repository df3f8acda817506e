"""Run a function in a forked process, within a time."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

R = TypeVar("R")


def in_fork(run: Callable[[], R], *, seconds: float) -> R | None:
    """Return the result of a function in a forked process; None if it takes too long or dies.

    The fork keeps what the app changes in its modules out of the next run.
    """
    _flush()
    reading, writing = os.pipe()
    if not (process := os.fork()):
        try:
            with os.fdopen(writing, "wb") as pipe:
                result = run()
                _flush()  # the caller ends this process as soon as it has the result
                pickle.dump(result, pipe)
        except BaseException:  # the process must end here, whatever happens
            traceback.print_exc()
        _flush()
        os._exit(0)
    os.close(writing)
    parts, deadline = [], time.monotonic() + seconds
    try:
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([reading], [], [], left)[0]:
                return None
            if not (part := os.read(reading, 1 << 20)):
                break
            parts.append(part)
        answer: R | None = pickle.loads(b"".join(parts)) if parts else None
        return answer
    except (EOFError, pickle.UnpicklingError):
        return None
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # an app may have replaced or closed it
            stream.flush()
