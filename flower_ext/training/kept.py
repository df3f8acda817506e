"""Files of what can be computed again: whole and unchanged, or as good as not there."""

from __future__ import annotations

import hashlib
import tempfile
from contextlib import suppress
from pathlib import Path

_CHECKSUM = hashlib.sha256().digest_size


def recall(path: Path) -> bytes | None:
    """Return what `keep` wrote; None where it is missing, unreadable or damaged."""
    with suppress(OSError):
        kept = path.read_bytes()
        if hashlib.sha256(kept[_CHECKSUM:]).digest() == kept[:_CHECKSUM]:
            return kept[_CHECKSUM:]
    return None


def keep(path: Path, content: bytes) -> None:
    """Write all of it or nothing, as several processes may do this at a time.

    Raises
    ------
    OSError
        It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        made = Path(file.name)
        try:
            file.write(hashlib.sha256(content).digest() + content)
            file.flush()
            made.replace(path)
        except OSError:
            made.unlink()
            raise
