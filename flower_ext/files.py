"""Write whole files that only their user can read, cache and lock files, and read TOML."""

import csv
import fcntl
import hashlib
import io
import os
import re
import socket
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from glob import escape
from pathlib import Path
from secrets import token_hex
from typing import IO, Any, TypeVar

import psutil

from flower_ext.errors import FlowerExtError, InvalidValue

FOLDER_VARIABLE = "FLOWER_EXT_DATA"
"""Environment variable that names the folder of data sets."""
_CHECKSUM = hashlib.sha256().digest_size

T = TypeVar("T")


class InUse(FlowerExtError, RuntimeError):
    """Another run holds the lock of this directory or file."""


def write_whole(path: Path, content: bytes, *, sync: bool = True, private: bool = True) -> None:
    """Write ``content`` to the file ``path``; replace the file if it exists.

    After a crash of this process, the file has either the old or the new content. With ``sync``,
    this also holds after a power failure, and the new content is on disk when the function returns.
    If the file is ``private``, only the user can read it (mode 0600). The message of an `OSError`
    names the file.
    """
    with whole_file(path, sync=sync, private=private) as stream:
        stream.write(content)


@contextmanager
def whole_file(path: Path, *, sync: bool = True, private: bool = True) -> Iterator[IO[bytes]]:
    """Open a new file, which replaces ``path`` if the ``with`` block ends without an error.

    The options and the guarantees are those of `write_whole`.
    """
    writer = f"{os.getpid()}-{token_hex(4)}@{socket.gethostname()}"  # unique
    draft = path.with_name(f".{path.name}.{writer}.draft")
    # A rename is atomic, so a reader sees the old or the new content, never a part of either.
    try:
        _remove_drafts_of_the_dead(path)
        try:
            with _opened(draft, os.O_EXCL, sync, private=private) as stream:
                yield stream
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


def append_line(path: Path, line: bytes, *, sync: bool = True) -> None:
    """Append a line to a file. A crash may leave this line incomplete, but no earlier one."""
    try:
        with _opened(path, os.O_APPEND, sync, private=True) as stream:
            stream.write(line + b"\n")
    except OSError as error:
        raise not_written(path, error) from error


def whole_lines(path: Path) -> list[bytes]:
    """Return a file's lines, without an incomplete last line; an empty list if there is no file."""
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1].splitlines()


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidValue(f"{path}: expected a TOML file; {error.strerror}") from None
    except ValueError as error:
        raise InvalidValue(f"{path} is not valid TOML: {error}") from None


def read_secret(path: Path, name: str, expected: str) -> bytes:
    """Return the content of a secret file; refuse a file that other users can read.

    Errors begin with ``name``, the setting that names the file. If the file is missing, they end
    with ``expected``, a description of the right file.
    """
    try:
        with path.open("rb") as stream:
            mode, content = os.fstat(stream.fileno()).st_mode, stream.read()
    except OSError as error:
        raise InvalidValue(f"{name}={path}: {error.strerror}; expected {expected}") from None
    if mode & 0o077:
        raise InvalidValue(f"{name}={path}: other users can read it; run chmod 600 {path}")
    return content


def read_key(path: Path, name: str, expected: str, *, is_text: bool = False) -> bytes:
    """Return the 32 bytes of a secret file, with the errors of `read_secret`.

    With ``is_text``, the file holds them as lower-case hexadecimal digits.
    """
    content = read_secret(path, name, expected)
    if is_text:
        is_key = re.fullmatch(rb"[0-9a-f]{64}\s*", content)
        content = bytes.fromhex(content.decode()) if is_key else b""
    if len(content) != 32:
        raise InvalidValue(f"{name}={path}: the file holds no key; expected {expected}")
    return content


def from_table(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    """Make a dataclass from a TOML table, whose names have hyphens in place of underscores.

    An error for a missing or unknown field begins with ``where``.
    """
    known = {each.name.replace("_", "-"): each.name for each in fields(kind)}  # type: ignore[arg-type]
    expected = ", ".join(sorted(known))
    if not isinstance(table, Mapping):
        raise InvalidValue(f"{where}={table!r}: expected a table of {expected}")
    if unknown := sorted(table.keys() - known):
        raise InvalidValue(f"{where} has {unknown[0]!r}: expected {expected}")
    try:
        return kind(**{known[name]: value for name, value in table.items()})
    except TypeError as error:
        raise InvalidValue(
            f"{where}: {error}".replace(f"{kind.__name__}.__init__() ", "")
        ) from None


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on disk and survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Wait for the lock on a file, and hold it during the ``with`` block. Keep the block short."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


LAST_MOMENTS = 5
"""Seconds to wait for a lock: processes that inherited it may outlive a killed run by a moment."""


def lock(path: Path, *, seconds: float = LAST_MOMENTS) -> IO[str]:
    """Take the lock on the file ``path``; the caller releases it by closing the returned file.

    The lock also ends when this process and all processes that it forked have ended. The function
    writes the name of this process into the file. If another process still holds the lock after
    ``seconds``, the error `InUse` names that process.
    """
    stream = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="utf-8")
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = stream.read() or "another process"
                stream.close()
                raise InUse(
                    f"{path.parent} is in use by {holder}, or by a process that it started: wait "
                    "until they have ended, or name a different directory"
                ) from None
            time.sleep(0.1)
    stream.truncate()
    stream.write(f"process {os.getpid()} on {socket.gethostname()} since {time.ctime()}")
    stream.flush()
    return stream


def not_written(path: Path, error: OSError) -> OSError:
    """Return ``error`` with a message that names the file, which cannot be written."""
    return type(error)(error.errno, f"{error.strerror or error}: cannot be written", str(path))


@contextmanager
def _opened(path: Path, how: int, sync: bool, *, private: bool) -> Iterator[IO[bytes]]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o600 if private else 0o666)
    with os.fdopen(descriptor, "wb") as stream:
        yield stream
        stream.flush()
        if sync:
            os.fsync(descriptor)


def _remove_drafts_of_the_dead(path: Path) -> None:
    """Remove unfinished files of `whole_file`, left by killed processes: they may hold secrets."""
    # Machines may share the folder, and a process id has a meaning only on its own machine.
    for draft in path.parent.glob(f".{escape(path.name)}.*-*@{escape(socket.gethostname())}.draft"):
        writer = draft.name.removeprefix(f".{path.name}.").partition("-")[0]
        if writer.isdecimal() and not psutil.pid_exists(int(writer)):
            draft.unlink(missing_ok=True)


def read_cached(path: Path) -> bytes | None:
    """Return what `write_cached` wrote; None if the file is missing, unreadable or damaged."""
    with suppress(OSError):
        stored = path.read_bytes()
        checksum, content = stored[:_CHECKSUM], stored[_CHECKSUM:]
        if hashlib.sha256(content).digest() == checksum:
            return content
    return None


def write_cached(path: Path, content: bytes) -> None:
    """Cache a result that can be computed again; several processes may write it at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, hashlib.sha256(content).digest() + content, sync=False)
