"""How a run ends before its time: by Ctrl-C, SIGTERM or SIGHUP, or because it failed.

Whatever ended it, its run directory says so and has a report; an interrupted run is told with the
command that goes on with it.
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
"""Seconds that a run has to write its end after it was interrupted."""


class LaunchFailed(FlowerExtError, RuntimeError):
    """The app could not be started, or its run did not complete."""


class Interrupted(LaunchFailed):
    """A signal ended the run; ``exit_status`` is the one that shells expect then."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_status = 128 + number


class Ended(KeyboardInterrupt):
    """SIGTERM or SIGHUP has come, which is treated as Ctrl-C is."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Raise `Ended` in the block on the first SIGTERM or SIGHUP; ``nohup`` is respected."""
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
    """Note in the run directory that a signal ended the run, and return what to tell people.

    Parameters
    ----------
    path : Path, optional
        The run directory, where it is on this machine.
    elsewhere : str, optional
        The run directory as the machine of the ServerApp names it.
    again : Sequence[str], optional
        The words of the command that goes on with the run; None where the app cannot.
    patience : float
        Seconds that a ServerApp has to write its end.
    """
    number = error.number if isinstance(error, Ended) else int(signal.SIGINT)
    how = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    said = f"the run was interrupted by {how}"
    if note_failure(path, said, patience=patience):
        lines = [said, f"Run directory: {path} (see report.html)"]
    elif path is None and elsewhere is not None:
        lines = [said, f"Run directory, on the machine of its ServerApp: {elsewhere}"]
    else:
        return Interrupted(f"{said} before it began; nobody's data were used", number)
    if again is not None:
        lines.append(f"To go on with it: {shlex.join(again)}")
    return Interrupted("\n".join(lines), number)


def note_failure(path: Path | None, reason: str, *, patience: float = 5) -> bool:
    """Let a run directory say how its run ended and have a report; return whether there is one.

    A process that still writes to it has ``patience`` seconds to come to its end. After that, the
    run is another's, or goes on, and nothing is changed.
    """
    if path is None or not (path / "run.json").is_file():
        return False
    deadline = time.monotonic() + patience
    run = RunDirectory.open(path)
    with suppress(NotARun, LedgerCorrupt, OSError):  # what ended the run is what counts
        while not run.free():
            if time.monotonic() > deadline:
                return True
            time.sleep(0.2)
        if run.facts["status"] == "running":
            run.finish("failed", reason)
        if run.facts["status"] == "failed" and not _reported(path):
            write_report(run)
    return True


def _reported(path: Path) -> bool:
    report = path / "report.html"
    return report.exists() and report.stat().st_mtime_ns >= (path / "run.json").stat().st_mtime_ns
