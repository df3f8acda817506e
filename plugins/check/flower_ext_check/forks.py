"""Run functions in forks of this process. An app's code may change, hang or end such a fork."""

import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from threading import Thread
from typing import TypeVar

R = TypeVar("R")
_FORKING = get_context("fork")


def in_fork(run: Callable[[], R], *, seconds: float | None = None) -> R | None:
    """Run a function in a forked process, and return its result.

    Return None if the forked process dies, or needs more than ``seconds``. Changes that the app
    makes to its modules end with the fork, so the next run does not see them. If this process
    ends, the fork ends as well.
    """
    _flush()
    receiver, sender = _FORKING.Pipe(duplex=False)
    process = _FORKING.Process(target=_send_result, args=(run, sender))
    process.start()
    sender.close()  # when the fork ends, no sender is left, and `recv` raises EOFError
    try:
        result: R | None = receiver.recv() if receiver.poll(seconds) else None
        return result
    except (EOFError, pickle.UnpicklingError):
        return None
    finally:
        receiver.close()
        process.kill()
        process.join()


def _send_result(run: Callable[[], R], sender: Connection) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    result = run()
    _flush()  # the caller ends this process as soon as it has the result
    sender.send(result)


def _end_with_parent() -> None:
    """End this process as soon as the process that forked it has ended, even if it was killed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # an app may have replaced or closed it
            stream.flush()
