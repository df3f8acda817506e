"""Where a client keeps what outlives its process: a folder that its owner names.

====================  =====================================================
node config           meaning
====================  =====================================================
``state-folder``      the folder; without it, memory and keys live in Flower's ``context.state``
``state-key-file``    32 random bytes with which its files are encrypted
====================  =====================================================

A SuperNode listens to its own node config alone, since a server may not name paths on other
people's machines. In simulation all is one person's, and the run's ``state-folder`` counts; what is
written there outlives the process, not the machine's power.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from flwr.app import Context

from flower_ext.errors import InvalidValue
from flower_ext.federation import _flower_private as private
from flower_ext.federation.state.sealed import Damaged
from flower_ext.runs.files import sync_to_disk, write_whole

KEY_BYTES = 32
_SEALED = b"flower_ext sealed 1\n"
_NONCE_BYTES = 12


@dataclass(frozen=True, kw_only=True)
class StateFolder:
    """Files that only their owner reads, each whole or not there."""

    path: Path
    sync: bool
    key: bytes | None = None

    @classmethod
    def of(cls, context: Context) -> StateFolder | None:
        """The folder of this client, or None where nobody named one.

        Raises
        ------
        ValueError, PermissionError
            The key file is no key, or others can read it.
        """
        if named := context.node_config.get("state-folder"):
            file = context.node_config.get("state-key-file")
            key = read_key(Path(str(file)).expanduser()) if file else None
            return cls(path=Path(str(named)).expanduser(), sync=True, key=key)
        if private.in_simulation() and (named := context.run_config.get("state-folder")):
            return cls(path=Path(str(named)).expanduser(), sync=False)
        return None

    def write(self, name: str, content: bytes) -> None:
        """Replace a file; ``name`` is a path inside the folder.

        Raises
        ------
        OSError
            It could not be written; the old content is still there.
        """
        file = self.path / name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        inside = [self.path, *reversed([self.path / part for part in Path(name).parents][:-1])]
        for folder in inside:
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
                if self.sync:
                    sync_to_disk(folder.parent)
        write_whole(file, self._sealed(name, content), sync=self.sync)

    def read(self, name: str) -> bytes | None:
        """A file's content, or None if there is no such file.

        Raises
        ------
        Damaged
            It was altered, is encrypted with another key, or is not where it was written.
        """
        file = self.path / name
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        sealed = content.startswith(_SEALED)
        if self.key is None:
            if sealed:
                raise Damaged(f"{file} is encrypted: name its key, node config state-key-file")
            return content
        if not sealed:
            raise Damaged(f"{file} is not encrypted, though node config names a state-key-file")
        start = len(_SEALED) + _NONCE_BYTES
        try:
            return ChaCha20Poly1305(self.key).decrypt(
                content[len(_SEALED) : start], content[start:], name.encode()
            )
        except InvalidTag:
            raise Damaged(
                f"{file} was altered, moved, or encrypted with another key than that of node "
                "config state-key-file"
            ) from None

    def _sealed(self, name: str, content: bytes) -> bytes:
        if self.key is None:
            return content
        nonce = os.urandom(_NONCE_BYTES)
        return _SEALED + nonce + ChaCha20Poly1305(self.key).encrypt(nonce, content, name.encode())


def read_key(file: Path) -> bytes:
    """The key in a file.

    Raises
    ------
    ValueError
        It does not hold 32 bytes.
    PermissionError
        Others than its owner can read it.
    """
    key = file.read_bytes()
    if len(key) != KEY_BYTES:
        raise InvalidValue(
            f"state-key-file {file} holds {len(key)} bytes: expected {KEY_BYTES} random ones, as "
            f"from: head -c {KEY_BYTES} /dev/urandom"
        )
    if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PermissionError(f"state-key-file {file} can be read by others: chmod 600 {file}")
    return key


def safe_name(text: str) -> str:
    """A name from a message, if it can be the name of a folder and nothing else.

    Raises
    ------
    ValueError
        It is not letters, digits, ``-`` and ``_``, at most 64 of them.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
        raise InvalidValue(f"run={text!r} in the server's message: expected letters and digits")
    return text
