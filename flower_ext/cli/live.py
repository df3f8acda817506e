"""Show a run while it goes on: its log and, in a terminal, a live view below the log.

The view reads the run directory, so it looks the same for every engine. In a pipe, with
``NO_COLOR``, or on a terminal that cannot move its cursor, only the log appears, without codes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flower_ext.cli.tracebacks import Tracebacks, without_codes
from flower_ext.privacy import LedgerCorrupt, epsilon_text
from flower_ext.privacy.guarantee import is_large
from flower_ext.runs.directory import NotARun, RunDirectory

_NAMED = re.compile(r"Run directory: (\S.*)")
_RECENT = 10
"""Number of recent rounds whose mean time predicts the time of the rounds to come."""


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
        self.path, self._config = path, config
        self.named: str | None = None
        """Path of the run directory as the log names it; it may be on another machine."""
        self.refused = False
        """True once the log has ended, if one of its tracebacks ended with an `InvalidValue`."""
        self._live: Live | None = None
        self._seen: tuple[int, ...] = ()
        self._panel: Panel | Text = Text()
        if path is not None and cursor_moves():
            # A new console measures the terminal as it is now; the commands' console may be older.
            self._live = Live(
                console=Console(highlight=False),
                get_renderable=self._now,
                refresh_per_second=2,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    def __enter__(self) -> RunView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop updating the view; its last state stays in the terminal."""
        if self._live is not None and self._live.is_started:
            last = self._now()
            self._live.stop()
            if isinstance(last, Panel):
                self._live.console.print(last)

    def show(self, line: str, stream: IO[str]) -> None:
        """Print a line of the log, above the view if there is one."""
        if found := _NAMED.search(without_codes(line)):
            self.named = found[1].strip()
        if self._live is not None:
            self._live.console.print(Text.from_ansi(line), soft_wrap=True)
            return
        plain = line if stream.isatty() and cursor_moves() else without_codes(line)
        stream.write(plain + "\n")
        stream.flush()

    def follow(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
    ) -> Followed:
        """Start a program and show its lines; no signal of the terminal reaches the program."""
        return Followed(command, self, env=env)

    def _now(self) -> Panel | Text:
        if self.path is None or not (self.path / "run.json").is_file():
            return Text("starting …", style="dim")
        run = RunDirectory(self.path)
        files = (run.metrics_path, self.path / "run.json")
        seen = tuple(file.stat().st_mtime_ns for file in files if file.exists())
        if seen != self._seen:
            # The run may be writing a file just now; the next refresh reads it whole.
            with suppress(NotARun, LedgerCorrupt, OSError, KeyError):
                self._panel, self._seen = panel(run, self._config), seen
        return self._panel


class Followed:
    """A program whose lines a view shows as they come."""

    def __init__(
        self,
        command: Sequence[str],
        view: RunView,
        *,
        env: Mapping[str, str] | None,
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
        try:
            self.process.stdin.write(text)
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # the program has ended, and its output says why

    def ended(self, seconds: float) -> bool:
        """Return True if the program ends within so many seconds."""
        try:
            self.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait(self, seconds: float | None = None) -> int:
        """Wait for the program's end; return its exit status, negative if a signal ended it."""
        status = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(2)  # a child of the program may hold its output open
        return status


def cursor_moves() -> bool:
    """Return True if standard output is a terminal that can redraw a picture."""
    dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown", "")
    return sys.stdout.isatty() and not dumb and not os.environ.get("NO_COLOR")


def panel(run: RunDirectory, config: Mapping[str, Any]) -> Panel:
    """Return a panel with a run's progress, its accuracy and the privacy it has spent."""
    facts, rows = run.facts, run.metrics()
    config = {**facts["config"], **config}
    total = _total(config, facts["config"])
    done = int(rows[-1]["round"]) if rows else 0
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("", ProgressBar(total=max(total, 1), completed=min(done, total), width=40))
    table.add_row("rounds", f"{done} of {total}{_left(rows, total - done)}")
    if row := _last(rows, "accuracy_mean"):
        if (error := row.get("accuracy_mean_error")) is not None:  # of a noised sum
            beside = f"± {error:.2g} by noise"
        else:
            beside = f"mean, {row.get('accuracy_worst_decile', 0):.3f} worst tenth"
        table.add_row("accuracy", f"{row['accuracy_mean']:.3f} {beside} (round {row['round']:.0f})")
    if spent := _spent(rows, config):
        table.add_row("privacy", spent)
    if row := _last(rows, "answered"):
        table.add_row("answered", f"{row['answered']:.0f} of {row.get('cohort', 0):.0f}")
    if refused := sum(row.get("refused", 0) for row in rows):
        table.add_row("refused", f"{refused:.0f} replies so far")
    return Panel(table, title=run.path.name, title_align="left", expand=False)


def _total(config: Mapping[str, Any], first: Mapping[str, Any]) -> int:
    """Return the number of rounds at the end; a planner may have replaced that of the settings."""
    rounds = int(config.get("rounds", 0))
    planned = first.get("planned-rounds")
    return rounds if planned is None else rounds + int(planned) - int(first.get("rounds", rounds))


def _left(rows: Sequence[Mapping[str, float]], rounds: int) -> str:
    recent = [row["seconds"] for row in rows[-_RECENT:] if "seconds" in row]
    if not recent or rounds <= 0:
        return ""
    seconds = round(sum(recent) / len(recent) * rounds)
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    return f", about {hours:d}:{minutes:02d}:{seconds % 60:02d} left"


def _spent(rows: Sequence[Mapping[str, float]], config: Mapping[str, Any]) -> str:
    parts = []
    for basis in ("provable", "published"):
        row = _last(rows, f"epsilon_{basis}")
        if row is None:
            continue
        spent, aim = row[f"epsilon_{basis}"], _aim(config, basis)
        left = f" of {aim:g}, {max(0.0, aim - spent):.3g} left" if aim else ""
        delta = f", δ {row['delta']:.3g}" if "delta" in row else ""
        delta += " is large" * is_large(row.get("delta", 0.0), row.get("privacy_units"))
        parts.append(f"ε {epsilon_text(spent)}{left}{delta} ({basis}, round {row['round']:.0f})")
    return "\n".join(parts)


def _aim(config: Mapping[str, Any], basis: str) -> float:
    """Return the ε on this basis at which the run ends; 0 if no ε ends it."""
    if basis == "provable" and config.get("budget"):
        return float(config["budget"])
    calibrated = config.get("calibration", "provable") == basis
    return float(config.get("epsilon", 0)) if calibrated and not _fixed_noise(config) else 0.0


def _fixed_noise(config: Mapping[str, Any]) -> bool:
    return bool(config.get("noise-multiplier") or config.get("noise-stddev"))


def _last(rows: Sequence[Mapping[str, float]], name: str) -> Mapping[str, float] | None:
    return next((row for row in reversed(rows) if name in row), None)


def _pump(source: IO[str], view: RunView, sink: IO[str]) -> None:
    tracebacks = Tracebacks()
    for line in source:
        for shown in tracebacks.shown(line.rstrip("\r\n")):
            view.show(shown, sink)
    for shown in tracebacks.rest():
        view.show(shown, sink)
    view.refused = view.refused or tracebacks.refused
