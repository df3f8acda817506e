"""The log of a run: follow the program that writes it, and show its lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import IO

from rich.console import Console
from rich.text import Text

_NAMED = re.compile(r"Run directory: (\S.*)")


class RunLog:
    """Shows the lines of a run's log, with colours only in a terminal that has them.

    Attributes
    ----------
    directory : str or None
        Path of the run directory as the log names it; it may be on another machine.
    """

    def __init__(self) -> None:
        self.directory: str | None = None

    def show(self, line: str, stream: IO[str]) -> None:
        """Print a line of the log."""
        text = Text.from_ansi(line)
        if named := _NAMED.search(text.plain):
            self.directory = named[1].strip()
        Console(file=stream, highlight=False).print(text, soft_wrap=True)


class Followed:
    """A program whose lines a log shows as they come; no signal of the terminal reaches it."""

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
            # Not by preexec_fn: an interruption during such a fork is raised in one of Python's own
            # callbacks, which ignore errors. The run would then begin, and nothing would end it.
            process_group=0,
        )
        pairs = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self._readers = [
            Thread(target=_pump, args=(source, log, sink), daemon=True) for source, sink in pairs
        ]
        for reader in self._readers:
            reader.start()

    def tell(self, text: str = "") -> None:
        """Write the program's whole input."""
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


def _pump(source: IO[str], log: RunLog, sink: IO[str]) -> None:
    for line in source:
        log.show(line.rstrip("\r\n"), sink)
