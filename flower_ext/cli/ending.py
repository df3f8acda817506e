"""The early end of a run: by Ctrl-C, SIGTERM or SIGHUP, or because the run failed.

In each case the run directory records the reason and gets a report. After an interruption, the
message names the command that continues the run.
"""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from flower_ext.errors import FlowerExtError
from flower_ext.privacy import LedgerCorrupt
from flower_ext.runs.directory import NotARun, RunDirectory
from flower_ext.runs.report import write_report

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


def interrupted(
    error: KeyboardInterrupt,
    path: Path | None,
    elsewhere: str | None,
    again: Sequence[str] | None,
    *,
    patience: float = 5,
) -> Interrupted:
    """Record in the run directory that a signal ended the run; return the error to raise.

    Parameters
    ----------
    error : KeyboardInterrupt
        The interruption; an `Ended` names its signal, any other is Ctrl-C.
    path : Path, optional
        The run directory, if it is on this machine.
    elsewhere : str, optional
        The path of the run directory on the machine of the ServerApp.
    again : Sequence[str], optional
        Words of the command that continues the run; None if the app's runs cannot continue.
    patience : float
        Seconds that a ServerApp has to write its last files.
    """
    number = error.number if isinstance(error, Ended) else int(signal.SIGINT)
    how = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    sentence = f"the run was interrupted by {how}"
    if note_failure(path, sentence, patience=patience):
        lines = [sentence, f"Run directory: {path} (see report.html)"]
    elif path is None and elsewhere is not None:
        lines = [sentence, f"Run directory, on the machine of its ServerApp: {elsewhere}"]
    else:
        return Interrupted(f"{sentence} before it began; nobody's data were used", number)
    if again is not None:
        lines.append(f"To continue it: {shlex.join(again)}")
    return Interrupted("\n".join(lines), number)


def note_failure(path: Path | None, reason: str, *, patience: float = 5) -> bool:
    """Record in a run directory that its run failed, and write its report.

    A process that still writes to the directory has ``patience`` seconds to end. If it does not,
    the run continues or belongs to another command, and the function changes nothing.

    Returns
    -------
    bool
        True if there is such a run directory on this machine.
    """
    if path is None or not (path / "run.json").is_file():
        return False
    deadline = time.monotonic() + patience
    run = RunDirectory.open(path)
    with suppress(NotARun, LedgerCorrupt, OSError):  # an error here must not hide the run's own
        while not run.free():
            if time.monotonic() > deadline:
                return True
            time.sleep(0.2)
        if run.facts["status"] == "running":
            run.finish("failed", reason)
        if run.facts["status"] == "failed":
            write_report(run)
    return True
