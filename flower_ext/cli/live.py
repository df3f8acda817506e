"""Show a run while it goes on: its log and, in a terminal, its progress below the log.

The progress is read from the run directory, so it looks the same for every engine. In a pipe, with
``NO_COLOR``, or on a terminal that cannot move its cursor, only the log appears, without codes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from flower_ext.runs.directory import NotARun, RunDirectory
from flower_ext.runs.round_metrics import describe_round

_NAMED = re.compile(r"Run directory: (\S.*)")
_BEGIN = "Traceback (most recent call last):"
_CHAINED = ("The above exception was", "During handling of the above exception")
_EXPLAINED = re.compile(r"flower_ext\.[\w.]+: |ModuleNotFoundError: .*pip install 'flower-ext")
"""Last line of an error of this package; the command prints that error's message at its end."""


class RunView:
    """Shows a run; use it as a context manager.

    Parameters
    ----------
    path : Path, optional
        The run directory, if it is known and on this machine.
    config : Mapping[str, Any]
        The run's settings.
    """

    def __init__(self, path: Path | None, config: Mapping[str, Any]) -> None:
        self.named: str | None = None
        """Path of the run directory as the log names it; it may be on another machine."""
        console = Console(highlight=False)  # measures the terminal as it is now
        is_live = path is not None and console.is_interactive and not console.no_color
        self._progress = RunProgress(path, config, console) if path and is_live else None

    def __enter__(self) -> RunView:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop updating the progress; its last state stays in the terminal, if the run began."""
        if self._progress is not None:
            self._progress.live.transient = not self._progress.has_begun
            self._progress.stop()

    def show(self, line: str, stream: IO[str]) -> None:
        """Print a line of the log, above the progress if it is shown."""
        text = Text.from_ansi(line)
        if directory := _NAMED.search(text.plain):
            self.named = directory[1].strip()
        console = Console(file=stream) if self._progress is None else self._progress.console
        console.print(text, soft_wrap=True)


class RunProgress(Progress):
    """The rounds of a run, the time that is left, and the last measurements."""

    def __init__(self, path: Path, config: Mapping[str, Any], console: Console) -> None:
        self._run, self._config = RunDirectory(path), config
        self._measured = ""
        super().__init__(
            TextColumn("[bold]rounds"),
            MofNCompleteColumn(separator=" of "),
            BarColumn(40),
            TimeRemainingColumn(compact=True),
            console=console,
            refresh_per_second=2,
            speed_estimate_period=float("inf"),  # a round may take longer than any period
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.add_task("rounds", total=None)

    @property
    def has_begun(self) -> bool:
        """True if the run has made its directory."""
        return (self._run.path / "run.json").is_file()

    def get_renderables(self) -> Iterable[RenderableType]:
        """Read the run directory again, and yield what it shows."""
        if not self.tasks or not self.has_begun:
            yield Text("starting …", style="dim")
            return
        # The run may be writing a file just now; the next refresh reads it whole.
        with suppress(NotARun, OSError, KeyError):
            rows, began = self._run.metrics(), self._run.config
            total = _total({**began, **self._config}, began)
            done = min(int(rows[-1]["round"]), total) if rows else 0
            newest: dict[str, float] = {}
            for row in rows:
                newest |= row
            self._measured = " · ".join(describe_round(newest))
            self.update(self.task_ids[0], total=max(total, 1), completed=done)
        shown = Group(self.make_tasks_table(self.tasks), Text(self._measured))
        yield Panel(shown, title=self._run.path.name, title_align="left", expand=False)


class Followed:
    """A program whose lines a view shows as they come; no signal of the terminal reaches it."""

    def __init__(
        self, command: Sequence[str], view: RunView, env: Mapping[str, str] | None = None
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
            Thread(target=_pump, args=(source, view, sink), daemon=True) for source, sink in pairs
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


class Tracebacks:
    """A filter that takes the lines of a log and returns the lines to show.

    The filter holds a traceback back until the next line after it. It then returns the traceback
    whole, or drops it if the message of its last error explains what to change.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        self._error = ""

    def shown(self, line: str) -> list[str]:
        """Take a line; return the lines that can be shown now."""
        plain = Text.from_ansi(line).plain
        if not self._held:
            if plain != _BEGIN:
                return [line]
        elif not self._error:
            if plain and not plain.startswith((" ", _BEGIN)):
                self._error = plain
        elif plain.startswith((_BEGIN, *_CHAINED)):
            self._error = ""
        elif plain:
            return [*self.rest(), *self.shown(line)]
        self._held.append(line)
        return []

    def rest(self) -> list[str]:
        """Return the lines that the filter still holds at the end of the log."""
        held = [] if _EXPLAINED.match(self._error) else self._held
        self._held, self._error = [], ""
        return held


def _total(config: Mapping[str, Any], first: Mapping[str, Any]) -> int:
    """Return the number of rounds at the end; a planner may have replaced that of the settings."""
    rounds = int(config.get("rounds", 0))
    planned = first.get("planned-rounds")
    return rounds if planned is None else rounds + int(planned) - int(first.get("rounds", rounds))


def _pump(source: IO[str], view: RunView, sink: IO[str]) -> None:
    tracebacks = Tracebacks()
    for line in source:
        for shown in tracebacks.shown(line.rstrip("\r\n")):
            view.show(shown, sink)
    for shown in tracebacks.rest():
        view.show(shown, sink)
