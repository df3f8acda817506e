"""Cache files for results that can be computed again. A damaged file counts as missing."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from flower_ext.files import write_whole

_CHECKSUM = hashlib.sha256().digest_size


def read_cached(path: Path) -> bytes | None:
    """Return what `write_cached` wrote; None if it is missing, unreadable or damaged."""
    with suppress(OSError):
        stored = path.read_bytes()
        checksum, content = stored[:_CHECKSUM], stored[_CHECKSUM:]
        if hashlib.sha256(content).digest() == checksum:
            return content
    return None


def write_cached(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, because several processes may write it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, hashlib.sha256(content).digest() + content, sync=False)
