"""Start and end the processes of commands: Flower's programs, their environment and ports."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from flower_ext.errors import FlowerExtError

HOST = "127.0.0.1"


class ProcessFailed(FlowerExtError, RuntimeError):
    """A program is missing, did not start, or failed to do its task."""


def executable(name: str) -> str:
    """Return the path of one of Flower's programs.

    Raises
    ------
    ProcessFailed
        The program is not installed.
    """
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise ProcessFailed(
            f"the command {name} was not found; install it: pip install 'flwr[simulation]'"
        )
    return path


def environment() -> dict[str, str]:
    """Return variables for Flower's processes, so that they use the packages installed here."""
    # The environment of this command has the packages that the app needs. With these variables
    # flwr finds its own commands there and installs nothing.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONIOENCODING": ":replace",  # the ε in a run's log would end the stream
        **os.environ,
        "PATH": path,
    }


def hint_on_spaces() -> str:
    """Return a hint if spaces in the environment's path may have caused a SuperLink's error.

    The hint is empty if the path has no spaces.
    """
    # flwr 1.41 puts the folder of its database tables into a list that is separated by spaces.
    if " " not in sys.prefix:
        return ""
    return (
        f"\nFlower's SuperLink does not find its database tables below a path with spaces, here "
        f"{sys.prefix}: install into an environment whose path has none, or run with --in-process"
    )


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def listens(host: str, port: int, *, seconds: float = 2) -> bool:
    """Return True if a process accepts a connection on that port within ``seconds``."""
    try:
        with socket.create_connection((host, port), timeout=seconds):
            return True
    except OSError:
        return False


def check_free(port: int, option: str) -> None:
    """Refuse a port of loopback that is in use; ``option`` is the option that changes the port.

    Raises
    ------
    ProcessFailed
        The port is in use; the message names it.
    """
    if listens(HOST, port):
        raise ProcessFailed(
            f"port {port} of {HOST} is in use by another process: end that process, or choose "
            f"another port by {option}"
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
    raise ProcessFailed(
        f"nothing listens on port {port}; the process's exit status is {process.poll()}"
    )


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and its group; do nothing if they have ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def end_tree(process: subprocess.Popen[bytes], *, seconds: float = 20) -> None:
    """End a process and all its descendants.

    The process gets SIGTERM and ``seconds`` to end; whatever is left then gets SIGKILL. Ray's
    agents need this, because they live in sessions of their own and outlive their parents.
    """
    family = _descendants(process.pid)
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    family |= _descendants(process.pid)
    process.kill()
    process.wait()
    for descendant in family:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            descendant.kill()


def _descendants(pid: int) -> set[psutil.Process]:
    try:
        return {*psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()
