"""The folder, named by a client's owner, for memory and keys that outlive the process.

The node config names it as ``state-folder``; without it, memory and keys live in Flower's
``context.state``. Its files are as private as the client's data, and belong on the same disk.

Keys are in its folder `SECRETS`. Leave that folder out of backups: a client that continues from an
older state could use a mask twice, and two messages under one mask reveal their difference.

A SuperNode reads the name from its own node config only, because a server must not name paths on
other people's machines. A simulation, where one person owns everything, reads the run's
``state-folder``. Its files outlive the process, but are not synced against a loss of power.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context

from flower_ext.errors import InvalidValue
from flower_ext.federation import _flower_private as private
from flower_ext.runs.files import held, sync_to_disk, write_whole

SECRETS = "secrets"


@dataclass(frozen=True, kw_only=True)
class StateFolder:
    """Files that only their owner can read, each written whole or not at all."""

    path: Path
    sync: bool

    @classmethod
    def of(cls, context: Context) -> StateFolder | None:
        """Return the folder of this client, or None if nobody named one."""
        if named := context.node_config.get("state-folder"):
            return cls(path=Path(str(named)).expanduser(), sync=True)
        if private.in_simulation() and (named := context.run_config.get("state-folder")):
            return cls(path=Path(str(named)).expanduser(), sync=False)
        return None

    def write(self, name: str, content: bytes) -> None:
        """Replace the file with the path ``name`` inside the folder.

        Raises
        ------
        OSError
            The file could not be written; its old content is intact.
        """
        file = self.path / name
        self._make(Path(name).parent)
        write_whole(file, content, sync=self.sync)

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None if there is no such file."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    @contextmanager
    def one_at_a_time(self, folder: str) -> Iterator[Path]:
        """Let one process at a time enter the block, and give it the path of ``folder`` inside."""
        self._make(Path(folder))
        with held(self.path / folder / ".lock"):
            yield self.path / folder

    def _make(self, inside: Path) -> None:
        """Make the folder ``inside`` and those above it, which only their owner can read."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        above = [self.path / part for part in (inside, *inside.parents)]
        for folder in reversed(above):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
                if self.sync:
                    sync_to_disk(folder.parent)


def safe_name(text: str) -> str:
    """Return a name from a message, if it is safe as the name of a folder.

    Raises
    ------
    InvalidValue
        The name is not made of 1 to 64 letters, digits, ``-`` and ``_``, or is `SECRETS`.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text) or text == SECRETS:
        raise InvalidValue(
            f"run={text!r} in the server's message: expected 1 to 64 letters, digits, - and _"
        )
    return text
