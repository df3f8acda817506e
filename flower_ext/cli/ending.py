"""Errors that end a run early, and signals that do: Ctrl-C, SIGTERM and SIGHUP."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from flower_ext.errors import FlowerExtError

GRACE = 30
"""Seconds that an interrupted run has to write its last files."""


class LaunchFailed(FlowerExtError, RuntimeError):
    """The app could not be started, or its run did not complete."""


class Refused(LaunchFailed):
    """The run refused a value; ``exit_status`` is that of all refused values."""

    exit_status = 2


class Interrupted(LaunchFailed):
    """A signal ended the run; ``exit_status`` is 128 + the signal's number, as in shells."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_status = 128 + number


class Ended(KeyboardInterrupt):
    """The process received SIGTERM or SIGHUP, which commands treat like Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Raise `Ended` in the block on the first SIGTERM or SIGHUP.

    A signal that was ignored before, as SIGHUP under ``nohup``, stays ignored.
    """
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]

    def end(number: int, _: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Ended(number)

    former = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
