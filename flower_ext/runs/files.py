"""Files that are written whole, read by their user alone, and locked by one run at a time."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape
from math import nan
from pathlib import Path
from secrets import token_hex
from typing import IO, Any

import psutil

from flower_ext.errors import FlowerExtError


class InUse(FlowerExtError, RuntimeError):
    """Another run holds the lock of this directory."""


def write_whole(path: Path, content: bytes, *, sync: bool = True, private: bool = True) -> None:
    """Replace a file; whatever happens, it has either the old or the new content.

    Parameters
    ----------
    sync : bool
        Make the new content survive a power failure, not only a crash of this process.
    private : bool
        Mode 0600; otherwise the user's umask applies.

    Raises
    ------
    OSError
        The file could not be written and keeps its old content; the message names it.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}-{token_hex(4)}.draft")  # one per writer
    try:
        _remove_drafts_of_the_dead(path)
        try:
            _write(draft, content, os.O_EXCL, sync, private)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        if sync:
            sync_to_disk(path.parent)
    except OSError as error:
        raise not_written(path, error) from error


def write_rows(
    path: Path, header: Sequence[object], rows: Iterable[Sequence[object]], **options: bool
) -> None:
    """Write a CSV file, whole or not at all; ``options`` are those of `write_whole`."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow(header)
    writer.writerows(rows)
    write_whole(path, stream.getvalue().encode(), **options)


def append_line(path: Path, line: bytes, *, sync: bool = True, private: bool = True) -> None:
    """Append a line to a file. A crash may tear this line, but no earlier one.

    Raises
    ------
    OSError
        The file could not be written; the message names it.
    """
    try:
        _write(path, line + b"\n", os.O_APPEND, sync, private)
    except OSError as error:
        raise not_written(path, error) from error


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file, without a last line that a crash tore; empty if it is missing."""
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1].splitlines()


def sync_to_disk(path: Path) -> None:
    """Make what was written to a file, or into a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock during the block, and wait for it first; for work of milliseconds."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def lock(path: Path) -> IO[bytes]:
    """Take a lock, which the caller releases by closing the returned file.

    The lock ends at the latest with this process and those that it forked. Its file names the
    process.

    Raises
    ------
    InUse
        Another process holds the lock; the message names it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    stream = os.fdopen(descriptor, "r+b")
    deadline = time.monotonic() + _LAST_MOMENTS
    while not _locked(stream):
        holder = _holder(stream)
        if _runs(holder) or time.monotonic() > deadline:
            stream.close()
            raise InUse(f"{path.parent} is in use by {_named(holder)}, or name another directory")
        time.sleep(0.1)
    _name_holder(stream)
    return stream


def is_locked(path: Path) -> bool:
    """Return True if a process holds the lock."""
    if not path.exists():
        return False
    with path.open("r+b") as stream:
        return not _locked(stream)


_LAST_MOMENTS = 10
"""Seconds to wait for processes that have inherited the lock of a process that has ended."""

_CLOCK_TOLERANCE = 2.0
"""Seconds by which two readings of a process's beginning may differ."""


def _locked(stream: IO[bytes]) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _name_holder(stream: IO[bytes]) -> None:
    pid = os.getpid()
    holder = {"pid": pid, "host": socket.gethostname(), "began": _began(pid), "since": time.ctime()}
    stream.seek(0)
    stream.write(json.dumps(holder).encode())
    stream.truncate()
    stream.flush()


def _holder(stream: IO[bytes]) -> dict[str, Any] | None:
    """Return the process that a lock's file names; None if it has not written its name yet."""
    stream.seek(0)
    try:
        return dict(json.loads(stream.read()))
    except ValueError:
        return None


def _runs(holder: Mapping[str, Any] | None) -> bool:
    """Return True if the holder of a lock may still run; another machine's always may."""
    if holder is None:
        return False
    elsewhere = bool(holder["host"] != socket.gethostname())
    # The clock may have been set since, by less than the system takes to use up all its pids.
    return elsewhere or abs(_began(holder["pid"]) - holder["began"]) < _CLOCK_TOLERANCE


def _named(holder: Mapping[str, Any] | None) -> str:
    if holder is None or not _runs(holder):
        return "processes of a run whose first process has ended: end them"
    pid, host = holder["pid"], holder["host"]
    where = "" if host == socket.gethostname() else f" on {host}"
    return (
        f"process {pid}{where} since {holder['since']}: wait until it ends, end it by "
        f"`kill {pid}`{where}"
    )


def _began(pid: int) -> float:
    """Return when a process began, which tells it from a later one; NaN if it has ended."""
    try:
        process = psutil.Process(pid)
        return nan if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return nan


def not_written(path: Path, error: OSError) -> OSError:
    """Return the same error with the name of the file in its message."""
    return type(error)(error.errno, f"{error.strerror or error}: cannot be written", str(path))


def _write(path: Path, content: bytes, how: int, sync: bool, private: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o600 if private else 0o666)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        if sync:
            os.fsync(descriptor)


def _remove_drafts_of_the_dead(path: Path) -> None:
    """Remove drafts of a file that killed processes of this machine left; they may hold secrets."""
    for draft in path.parent.glob(f".{escape(path.name)}.*-*.draft"):
        writer = draft.name.rsplit(".", 2)[1].partition("-")[0]
        if writer.isdecimal() and not psutil.pid_exists(int(writer)):
            draft.unlink(missing_ok=True)
