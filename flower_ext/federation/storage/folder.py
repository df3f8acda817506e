"""Files that outlive a process: a folder for secrets and memory, and the format of files of arrays.

====================  =====================================================
node config           meaning
====================  =====================================================
``state-folder``      the folder; without it, memory and keys are in Flower's ``context.state``
``state-key-file``    a file with a key of 32 random bytes, which encrypts the folder's files
====================  =====================================================

Keys are in the subfolder `SECRETS`. Leave that subfolder out of backups: a client that continues
from an older state could use a mask twice, and two messages under one mask reveal their difference.

A SuperNode reads these values from its own node config only, because a server must not name paths
on other people's machines. In a simulation, one person owns everything, so clients read
``state-folder`` from the run config too. The files of a simulation outlive the process, but a loss
of power may destroy the newest files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from safetensors.numpy import load, save

from flower_ext.errors import InvalidValue
from flower_ext.federation import _flower_private as private
from flower_ext.federation.messages.records import Arrays
from flower_ext.files import held, read_key, sync_to_disk, write_whole
from flower_ext.secure.keys_and_ciphers import KEY_BYTES, decrypt, encrypt

SECRETS = "secrets"
_SEALED = b"flower_ext sealed 1\n"
_MAGIC = b"flower_ext 1\n"
_START = len(_MAGIC) + hashlib.sha256().digest_size


class Damaged(InvalidValue):
    """Stored bytes differ from the bytes that were written."""


@dataclass(frozen=True, kw_only=True)
class StateFolder:
    """A folder of files that only their owner can read; each is written whole or not at all.

    ``path`` is the folder. If ``sync`` is True, a file that was written survives a loss of power.
    ``key`` encrypts all files; without a key, they are not encrypted.
    """

    path: Path
    sync: bool
    key: bytes | None = None

    @classmethod
    def of(cls, context: Context) -> StateFolder | None:
        """Return the state folder of this client; None if no config names one."""
        if named := context.node_config.get("state-folder"):
            file = context.node_config.get("state-key-file")
            key = read_state_key(Path(str(file)).expanduser()) if file else None
            return cls(path=Path(str(named)).expanduser(), sync=True, key=key)
        if private.is_simulated(context) and (named := context.run_config.get("state-folder")):
            return cls(path=Path(str(named)).expanduser(), sync=False)
        return None

    def write(self, name: str, content: bytes) -> None:
        """Write ``content`` to the file ``name`` in the folder; an existing file is replaced.

        If the file cannot be written, its old content stays.
        """
        self._make(Path(name).parent)
        if self.key is not None:
            # The encryption binds the content to the name, so a moved file does not decrypt.
            content = _SEALED + encrypt(self.key, content, name.encode())
        write_whole(self.path / name, content, sync=self.sync)

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None if there is no such file.

        Raise `Damaged` if the file is encrypted but the folder has no key. With a key, raise it
        also if the file was altered or moved, or is not encrypted with this key.
        """
        file = self.path / name
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        sealed = content.startswith(_SEALED)
        if self.key is None:
            if sealed:
                raise Damaged(
                    f"{file} is encrypted: set state-key-file to the file that holds the key; on a "
                    "SuperNode, set it in the node config"
                )
            return content
        if not sealed:
            raise Damaged(
                f"{file} is not encrypted, but state-key-file is set: expected an encrypted file, "
                "or no state-key-file"
            )
        try:
            return decrypt(self.key, memoryview(content)[len(_SEALED) :], name.encode())
        except InvalidValue:
            raise Damaged(
                f"{file} cannot be decrypted: expected state-key-file to hold the key that "
                "encrypted it; if it does, the file was altered or moved, so restore it from a "
                "copy"
            ) from None

    @contextmanager
    def one_at_a_time(self, folder: str) -> Iterator[Path]:
        """Hold a lock in the block, so that only one process at a time runs it. Others wait.

        The block gets the path of the subfolder ``folder``, which holds the lock.
        """
        self._make(Path(folder))
        with held(self.path / folder / ".lock"):
            yield self.path / folder

    def _make(self, inside: Path) -> None:
        """Make the subfolder ``inside`` and its parents; only their owner can read them."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        above = [self.path / part for part in (inside, *inside.parents)]
        for folder in reversed(above):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
                if self.sync:
                    sync_to_disk(folder.parent)


def read_state_key(file: Path) -> bytes:
    """Return the 32 bytes of a state-key-file; refuse a file that other users can read."""
    expected = f"{KEY_BYTES} random bytes; create them by: head -c {KEY_BYTES} /dev/urandom"
    return read_key(file, "state-key-file", expected)


def safe_name(text: str) -> str:
    """Return ``text``, a name from a message, unchanged if it is safe as the name of a folder."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text) or text == SECRETS:
        raise InvalidValue(
            f"run={text!r} in the server's message: expected 1 to 64 letters, digits, - and _, and "
            f"not {SECRETS!r}"
        )
    return text


@dataclass(frozen=True)
class Stored:
    """The result of `deserialised`: plain values, and groups of arrays in their original order."""

    values: dict[str, Any]
    arrays: dict[str, Arrays]


def serialised(values: Mapping[str, Any], arrays: Mapping[str, Mapping[str, np.ndarray]]) -> bytes:
    """Return JSON-compatible values and groups of arrays as bytes with a checksum.

    The checksum shows torn or altered files.
    """
    groups = {group: list(members) for group, members in arrays.items()}
    every = [array for members in arrays.values() for array in members.values()]
    body = save(
        {str(number): np.asarray(array, order="C") for number, array in enumerate(every)},
        {"values": json.dumps(dict(values)), "groups": json.dumps(groups)},
    )
    return _MAGIC + hashlib.sha256(body).digest() + body


def deserialised(content: bytes) -> Stored:
    """Return the values and arrays that `serialised` put into ``content``.

    Raise `Damaged` if the checksum does not match.
    """
    body = content[_START:]
    if content[:_START] != _MAGIC + hashlib.sha256(body).digest():
        raise Damaged("torn or altered: the checksum does not match the content")
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"]
    arrays = load(body)
    numbers = iter(range(len(arrays)))
    groups = {
        group: {name: arrays[str(next(numbers))] for name in names}
        for group, names in json.loads(header["groups"]).items()
    }
    return Stored(json.loads(header["values"]), groups)
