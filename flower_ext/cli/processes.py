"""Processes that commands start: Flower's programs, their environment and ports, and their end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from flower_ext.errors import FlowerExtError

HOST = "127.0.0.1"


class ProcessFailed(FlowerExtError, RuntimeError):
    """A program is missing, did not start, or does not do what was asked of it."""


def executable(name: str) -> str:
    """Return the path of one of Flower's programs.

    Raises
    ------
    ProcessFailed
        It is not installed.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ProcessFailed(f"the command {name} was not found; pip install 'flwr[simulation]'")
    return found


def environment() -> dict[str, str]:
    """Return the variables of Flower's processes, with which they use what is installed here."""
    # The environment that runs this command has what the app needs; flwr looks there for its
    # own commands, and need not install anything.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONIOENCODING": ":replace",  # a run's log has ε, at which its stream would end
        **os.environ,
        "PATH": path,
    }


def hint_on_spaces() -> str:
    """Return what may be behind an error of a SuperLink that this environment runs, or nothing."""
    # flwr 1.41 names the folder of its tables in a list that is separated by spaces.
    if " " not in sys.prefix:
        return ""
    return (
        f"\nFlower's SuperLink finds no tables below a path with spaces, as {sys.prefix}: install "
        "into an environment elsewhere, or run with --in-process"
    )


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def listens(host: str, port: int, *, seconds: float = 2) -> bool:
    """Return whether somebody accepts connections there within ``seconds``."""
    try:
        with socket.create_connection((host, port), timeout=seconds):
            return True
    except OSError:
        return False


def check_free(port: int, option: str) -> None:
    """Refuse a port of loopback that somebody listens on; ``option`` names another one.

    Raises
    ------
    ProcessFailed
        Says which port it is.
    """
    if listens(HOST, port):
        raise ProcessFailed(
            f"port {port} of {HOST} is in use by another process: end that one, or name another "
            f"port by {option}"
        )


def wait_for_port(port: int, process: subprocess.Popen[bytes], seconds: float = 60) -> None:
    """Wait until ``process`` listens on a port of loopback.

    Raises
    ------
    ProcessFailed
        ``process`` has ended or takes too long.
    """
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        if listens(HOST, port):
            return
        time.sleep(0.1)
    raise ProcessFailed(f"nothing listens on port {port}; exit status {process.poll()}")


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a process and its group; one that has ended is no error."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def end_tree(process: subprocess.Popen[bytes], *, seconds: float = 20) -> None:
    """End a process and everything that descends from it: by SIGTERM first, then by SIGKILL.

    Ray's agents outlive the processes that started them, in sessions of their own.
    """
    family = _descendants(process.pid)
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    family |= _descendants(process.pid)
    process.kill()
    process.wait()
    for pid in _still(family):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _descendants(root: int) -> set[tuple[int, str]]:
    """(pid, time of its start) of all processes below one; the time tells a reused pid apart."""
    table = _processes()
    found, frontier = set[tuple[int, str]](), {root}
    while frontier:
        below = {(pid, began) for pid, parent, began in table if parent in frontier}
        frontier = {pid for pid, _ in below - found}
        found |= below
    return found


def _still(family: Iterable[tuple[int, str]]) -> list[int]:
    there = {(pid, began) for pid, _, began in _processes()}
    return [pid for pid, began in family if (pid, began) in there]


def _processes() -> list[tuple[int, int, str]]:
    """(pid, its parent's, time of its start) of the processes of this machine."""
    if Path("/proc/self/stat").exists():  # Linux, whose smaller images have no ps
        return [facts for entry in Path("/proc").glob("[0-9]*/stat") if (facts := _of(entry))]
    asked = ["ps", "-A", "-o", "pid=,ppid=,lstart="]
    listed = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    rows = (line.split(maxsplit=2) for line in listed.splitlines())
    return [(int(pid), int(parent), began) for pid, parent, began in rows]


def _of(entry: Path) -> tuple[int, int, str] | None:
    try:
        fields = entry.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # it has just ended
        return None
    return int(entry.parent.name), int(fields[1]), fields[19]
