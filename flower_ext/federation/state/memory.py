"""A client's memory between messages: personal head, personal model, control variate, keys.

The memory is in Flower's ``context.state``, or in a folder of the client's owner (`folder`).
Flower's state lasts as long as a simulated run, or the process of a SuperNode; the folder outlives
both. No reply ever contains memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context
from torch import Tensor

from flower_ext.errors import ProtocolError
from flower_ext.federation.arrays import to_arrays, to_params, to_record
from flower_ext.federation.roster import partition_of
from flower_ext.federation.state.folder import SECRETS, StateFolder, safe_name
from flower_ext.federation.state.sealed import Damaged, pack, unpack
from flower_ext.training import Params

_KEPT = "memory"
_VERSION, _BEFORE = ".version", ".before"
_EARLIER = 2
"""Number of older versions to keep. If a checkpoint is damaged, a repeated round needs them."""

_SECRETS_SECONDS = 24 * 60 * 60
"""Age at which a run's secrets are removed when another run begins. A run stores them in each round
that a client takes part in, and two runs may use a folder at the same time."""


class ClientMemory:
    """One client's memory of one method in one run.

    A folder holds several versions of the memory, numbered by the training round that wrote them. A
    repeated round begins like the first attempt: with the newest version before it.

    Parameters
    ----------
    context : Context
    method : str
        Name of the method.
    run : str
        Identity of the run, which a resumed run keeps, unlike Flower's run id. Without it, the
        memory is in the context's state only.
    """

    def __init__(self, context: Context, method: str, run: str = "") -> None:
        self._state = context.state
        self._key = f"flower_ext.{method}"
        self._folder = StateFolder.of(context) if run else None
        if self._folder is not None:
            self._path = f"{safe_name(run)}/{method}-{partition_of(context.node_config)}"

    def load(self, before: int | None = None) -> Params | None:
        """Return the newest memory of a training round below ``before``, or None.

        Without a folder there is only the newest version, and ``before`` has no effect.

        Raises
        ------
        Damaged
            The file was altered or encrypted with another key.
        """
        if self._folder is None:
            kept = self._state.get(self._key)
            return to_params(kept) if isinstance(kept, ArrayRecord) else None
        version = self.newest(before)
        if version == 0:
            return None
        name = self._name(version)
        content = self._folder.read(name)
        assert content is not None
        try:
            return to_params(to_record(unpack(content).arrays[_KEPT]))
        except Damaged as error:
            raise Damaged(f"{self._folder.path / name}: {error}") from None

    def store(
        self, params: Mapping[str, Tensor], version: int = 1, *, and_before: bool = False
    ) -> None:
        """Store the memory of training round ``version``; keep only the two versions before it.

        The context's state holds only the newest version; with ``and_before``, also the one before.

        Raises
        ------
        OSError
            The memory could not be written, so nothing of this round may leave the client.
        """
        copies = {
            name: value.clone() for name, value in params.items()
        }  # a view would keep a whole batch alive
        if self._folder is None:
            if and_before and 0 < self.newest() < version:
                self._move(self._key, self._key + _BEFORE)
            self._state[self._key] = to_record(copies)
            self._state[self._key + _VERSION] = ConfigRecord({"round": version})
            return
        content = pack({"round": version}, {_KEPT: to_arrays(to_record(copies))})
        self._folder.write(self._name(version), content)
        before = sorted(other for other in self._versions() if other < version)
        for other in self._versions():
            if other not in (*before[-_EARLIER:], version):
                (self._folder.path / self._name(other)).unlink(missing_ok=True)

    def forget(self, after: int) -> None:
        """Drop the memory of training rounds above ``after``."""
        if self._folder is not None:
            for version in self._versions():
                if version > after:
                    (self._folder.path / self._name(version)).unlink(missing_ok=True)
            return
        while self.newest() > after:
            self._move(self._key + _BEFORE, self._key)

    def newest(self, before: int | None = None) -> int:
        """Return the last training round below ``before`` that stored memory; 0 if none did."""
        if self._folder is None:
            kept = self._state.get(self._key + _VERSION)
            version = kept["round"] if isinstance(kept, ConfigRecord) else 0
            return version if isinstance(version, int) else 0
        versions = self._versions()
        return max((v for v in versions if before is None or v < before), default=0)

    def _move(self, source: str, target: str) -> None:
        """Move a version in the context's state from ``source``, if it exists, to ``target``."""
        for part in ("", _VERSION):
            if target + part in self._state:
                del self._state[target + part]
            if source + part in self._state:
                self._state[target + part] = self._state.pop(source + part)

    def _name(self, version: int) -> str:
        return f"{self._path}/{version}.memory"

    def _versions(self) -> list[int]:
        assert self._folder is not None
        kept: Path = self._folder.path / self._path
        return [int(file.stem) for file in kept.glob("[0-9]*.memory")]


class ClientVault:
    """Secret bytes of one client and method: keys, and a record of their use.

    A SuperNode saves the context's state only after it received the reply, and loses it when it
    stops. If its owner names a folder (``--node-config "state-folder='/path'"``), every change is
    on disk before `store` returns, in a file that only its owner can read.

    Load the bytes, take one step, store the outcome, and only then send it. If two processes do so
    at the same time, the folder accepts one outcome, and the other process sends nothing.
    """

    def __init__(self, context: Context, method: str) -> None:
        self._context, self._key = context, f"flower_ext.{method}.vault"
        self._name = f"{SECRETS}/{context.run_id}-{context.node_id}-{method}.secret"
        self._loaded = False
        self._on_disk: bytes | None = None

    def load(self) -> bytes | None:
        """Return the bytes that were stored last, or None."""
        self._loaded = True
        folder = StateFolder.of(self._context)
        if folder is not None:
            self._on_disk = folder.read(self._name)
            if self._on_disk is not None:
                return self._on_disk
        kept = self._context.state.get(self._key)
        secret = kept.get("secret") if isinstance(kept, ConfigRecord) else None
        return secret if isinstance(secret, bytes) else None

    def store(self, secret: bytes) -> None:
        """Replace the stored bytes.

        Raises
        ------
        ProtocolError
            Another process stored something after this one loaded, so nothing may leave this one.
        """
        if (folder := StateFolder.of(self._context)) is not None:
            with folder.one_at_a_time(SECRETS) as secrets:
                before = folder.read(self._name)
                if self._loaded and before != self._on_disk:
                    raise ProtocolError(
                        "this client's state changed while it answered, so it answers nothing: "
                        "expected one process for each client, and one answer to each message"
                    )
                if before is None:
                    _remove_old(secrets)
                folder.write(self._name, secret)
            self._loaded, self._on_disk = True, secret
        self._context.state[self._key] = ConfigRecord({"secret": secret})


def _remove_old(secrets: Path) -> None:
    """Remove secrets of earlier runs: Flower tells no client that a run ended."""
    for file in secrets.glob("*.secret"):
        if time.time() - file.stat().st_mtime > _SECRETS_SECONDS:
            file.unlink()
