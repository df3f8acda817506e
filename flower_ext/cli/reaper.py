"""A process that ends everything a command started, once the command itself has ended.

A command cannot clean up after SIGKILL or a crash: its run would continue unseen and spend the rest
of its ε. The command therefore starts this file as a process of its own and holds the only write
end of that process's standard input. The system closes it when the command ends, however it ends.

The reaper finds processes by a variable that all of them inherit, and by their parents. A signal
that follows a parent's death (``PR_SET_PDEATHSIG``) would reach direct children only, and Linux
only; Ray's daemons and a SuperLink's ServerApp are grandchildren.

The file runs by itself: it imports nothing of the package.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MARK = "FLOWER_EXT_COMMAND"
"""Variable in the environment of all processes of a command."""

_PATIENCE = 30
"""Seconds after which the reaper gives up; a process may be stuck in the kernel that long."""


@contextmanager
def reaped() -> Iterator[None]:
    """End every process that starts in the block when the block or this process ends.

    Processes have to inherit the environment as it is inside the block.
    """
    mark, former = f"{os.getpid()}-{secrets.token_hex(8)}", os.environ.get(_MARK)
    # A session of its own keeps signals to the command's terminal and process group away.
    reaper = subprocess.Popen(
        [sys.executable, "-I", __file__, mark],  # no package's module may shadow the library's
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.environ[_MARK] = mark
    try:
        yield
    finally:
        if former is None:
            del os.environ[_MARK]
        else:
            os.environ[_MARK] = former
        reaper.communicate()


def descendants(root: int) -> set[tuple[int, str]]:
    """Return (pid, start time) of all descendants of a process.

    The start time tells a process from a later one with the same pid.
    """
    return _below({root}, _processes())


def still(family: set[tuple[int, str]]) -> list[int]:
    """Return the pids of those processes that have not ended."""
    return [pid for pid, _, began in _processes() if (pid, began) in family]


def _below(roots: set[int], table: list[tuple[int, int, str]]) -> set[tuple[int, str]]:
    found, frontier = set[tuple[int, str]](), roots
    while frontier:
        below = {(pid, began) for pid, parent, began in table if parent in frontier}
        frontier = {pid for pid, _ in below - found}
        found |= below
    return found


def _processes() -> list[tuple[int, int, str]]:
    """Return (pid, parent's pid, start time) of all processes of this machine but zombies."""
    if Path("/proc/self/stat").exists():  # Linux: small container images have no ps
        return [facts for entry in Path("/proc").glob("[0-9]*/stat") if (facts := _of(entry))]
    asked = ["ps", "-A", "-o", "pid=,ppid=,state=,lstart="]
    listed = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    rows = (line.split(maxsplit=3) for line in listed.splitlines())
    return [(int(pid), int(up), began) for pid, up, state, began in rows if state[0] != "Z"]


def _of(entry: Path) -> tuple[int, int, str] | None:
    try:
        fields = entry.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # the process has just ended
        return None
    return None if fields[0] == "Z" else (int(entry.parent.name), int(fields[1]), fields[19])


def _marked(mark: str) -> set[int]:
    """Return the pids of the processes that have inherited this mark."""
    entry = f"{_MARK}={mark}"
    if not Path("/proc/self/environ").exists():
        shown = ["ps", "-A", "-E", "-ww", "-o", "pid=,command="]
        listed = subprocess.run(shown, capture_output=True, text=True, check=False).stdout
        return {int(line.split()[0]) for line in listed.splitlines() if entry in line.split()}
    found = set()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # the process has just ended, or is another user's
            if entry.encode() in file.read_bytes().split(b"\0"):
                found.add(int(file.parent.name))
    return found


def _reap(mark: str) -> None:
    """Kill the processes with this mark, and their descendants, until there are none."""
    # A process may hide its environment, as Ray's workers do, but not its parent. SIGKILL leaves no
    # time to begin another round; run directories and ledgers survive it.
    deadline, doomed = time.monotonic() + _PATIENCE, set[tuple[int, str]]()
    while time.monotonic() < deadline:
        table, roots = _processes(), _marked(mark)
        doomed |= _below(roots, table) | {(pid, began) for pid, _, began in table if pid in roots}
        pids = [pid for pid, _, began in table if (pid, began) in doomed]
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    sys.stdin.buffer.read()  # returns when the command has ended
    _reap(sys.argv[1])
