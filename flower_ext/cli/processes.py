"""Start the processes of a command, show their logs, and end them."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import IO

from rich.console import Console
from rich.text import Text

from flower_ext.errors import FlowerExtError

_NAMED = re.compile(r"Run directory: (\S.*)")
GRACE = 30
"""Seconds that an interrupted run has to write its last files."""


class LaunchFailed(FlowerExtError, RuntimeError):
    """The app could not be started, or its run did not complete."""


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


def executable(name: str) -> str:
    """Return the path of one of Flower's programs."""
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise LaunchFailed(
            f"the command {name} was not found; install it: pip install 'flwr[simulation]'"
        )
    return path


def environment() -> dict[str, str]:
    """Return environment variables that let Flower's processes use this process's packages."""
    # The environment of this command has the packages that the app needs. With these variables
    # flwr finds its own commands there and installs nothing.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONIOENCODING": ":replace",  # else an ε in the log may raise an error
        **os.environ,
        "PATH": path,
    }


class RunLog:
    """Shows the lines of a run's log, with colours only in a terminal that has them."""

    directory: str | None = None
    """Path of the run directory as the log names it; it may be on another machine."""

    def show(self, line: str, stream: IO[str]) -> None:
        """Print a line of the log."""
        text = Text.from_ansi(line)
        if named := _NAMED.search(text.plain):
            self.directory = named[1].strip()
        Console(file=stream, highlight=False).print(text, soft_wrap=True)


class Followed:
    """A program whose output is shown line by line. Ctrl-C in the terminal does not reach it."""

    def __init__(
        self, command: Sequence[str], log: RunLog, env: Mapping[str, str] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            command,
            env={**(os.environ if env is None else env), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            # Do not use preexec_fn: Python raises an interruption during such a fork in one of its
            # callbacks, which ignore errors. The run would begin, and nothing would end it.
            process_group=0,
        )

        def show(source: IO[str], sink: IO[str]) -> None:
            for line in source:
                log.show(line.rstrip("\r\n"), sink)

        pairs = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self._readers = [Thread(target=show, args=pair, daemon=True) for pair in pairs]
        for reader in self._readers:
            reader.start()

    def tell(self, text: str = "") -> None:
        """Write ``text``, the program's whole input, and close the input."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the program has ended, and its output says why
            self.process.stdin.write(text)
            self.process.stdin.close()

    def wait(self, seconds: float | None = None) -> int:
        """Wait for the program's end; return its exit status, negative if a signal ended it."""
        status = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(2)  # a child of the program may hold its output open
        return status


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and its group; do nothing if they have ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def end_groups(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """End processes and their groups: by SIGTERM, and after 20 seconds by SIGKILL.

    Each process leads its own group. Descendants in other groups, such as Ray's daemons, may
    outlive it; `flower_ext.cli.reaper` ends those.
    """
    leaders = [*processes]
    for leader in leaders:
        signal_group(leader, signal.SIGCONT)  # a stopped process would not receive SIGTERM
        signal_group(leader, signal.SIGTERM)
    for leader in leaders:
        with suppress(subprocess.TimeoutExpired):
            leader.wait(20)
        signal_group(leader, signal.SIGKILL)
        leader.wait()


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Raise `Ended` in the block on the first SIGTERM or SIGHUP.

    A signal that was ignored before, as SIGHUP under ``nohup``, stays ignored. In a thread other
    than the main thread, the block changes nothing, because such a thread receives no signals.
    """
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if current_thread() is main_thread() and signal.getsignal(number) is not signal.SIG_IGN
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
