"""A client's memory between messages, such as a personal model, a control variate, or keys.

The memory is in Flower's ``context.state``, or in a folder that the client's owner names
(`folder`). Flower's state lasts as long as a simulated run, or as the process of a SuperNode. The
folder outlives run and process. No reply ever contains memory.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from flwr.app import ConfigRecord, Context
from torch import Tensor

from flower_ext.errors import ProtocolError
from flower_ext.federation import _flower_private as private
from flower_ext.federation.messages.addresses import PARTITION, partition_of
from flower_ext.federation.messages.records import arrays_of, to_params, to_record
from flower_ext.federation.storage.folder import (
    SECRETS,
    Damaged,
    StateFolder,
    deserialised,
    safe_name,
    serialised,
)
from flower_ext.training import Params

_GROUP = "memory"
_EARLIER = 2
"""Number of older versions of a memory that a folder keeps. If a checkpoint is damaged, a repeated
round needs these versions."""

_PERMANENT = "permanent"
"""Ending of the names of permanent records, which are never removed."""

OF_MASKED_SUM = "-sum"
"""Ending of the names of vaults with keys of masked sums."""
_SECRETS_SECONDS = 24 * 60 * 60
"""Age in seconds at which a run's secrets are removed when another run begins. Younger secrets may
belong to a run in progress, which stores its secrets anew in each round of the client."""


class ClientMemory:
    """One client's memory of one method in one run.

    Each training round stores a new version of the memory, under the number of the round. Older
    versions are kept for a while, because a resumed run may repeat a round. The repeated round
    begins with the newest version that an earlier round stored, as the first attempt did.

    Parameters
    ----------
    context : Context
    method : str
        Name of the method.
    run : str
        The run's id in this package. A resumed run keeps it, although Flower gives the run a new
        id. If ``run`` is empty, the memory is in the context's state only.
    """

    def __init__(self, context: Context, method: str, run: str = "") -> None:
        self._state, self._key = context.state, f"flower_ext.{method}."
        self._folder = StateFolder.of(context) if run else None
        if self._folder is not None:
            self._inside = f"{safe_name(run)}/{method}-{partition_of(context.node_config)}"

    def load(self, before: int | None = None) -> Params | None:
        """Return the newest memory that a training round below ``before`` stored; None if none did.

        If the memory is in a context's state, return the newest memory of all rounds. Raise
        `Damaged` if the memory's file was altered or encrypted with another key.
        """
        if not (version := self.newest(before)):
            return None
        if self._folder is None:
            return to_params(self._state.array_records[f"{self._key}{version}"])
        content = self._folder.read(self._file(version))
        assert content is not None
        try:
            return to_params(to_record(deserialised(content).arrays[_GROUP]))
        except Damaged as error:
            path = self._folder.path / self._file(version)
            raise Damaged(
                f"{path}: {error}; restore the file as this client wrote it, or begin a new run"
            ) from None

    def store(
        self, params: Mapping[str, Tensor], version: int = 1, *, and_before: bool = False
    ) -> None:
        """Store ``params`` as this client's memory after training round ``version``.

        A folder also keeps the two previous versions. A context's state keeps one previous version
        if ``and_before`` is True, and none otherwise. All other versions are deleted. After an
        OSError, nothing of this round may leave the client.
        """
        # Clone, because a view would keep a whole batch in memory.
        memory = {name: value.clone() for name, value in params.items()}
        if self._folder is None:
            self._state[f"{self._key}{version}"] = to_record(memory)
        else:
            content = serialised({"round": version}, {_GROUP: arrays_of(memory)})
            self._folder.write(self._file(version), content)
        kept = int(and_before) if self._folder is None else _EARLIER
        earlier = sorted((other for other in self._versions() if other < version), reverse=True)
        # Versions with larger numbers are of rounds that a resumed run repeats.
        self._keep({version, *earlier[:kept]})

    def forget(self, after: int) -> None:
        """Delete the memory that training rounds above ``after`` stored."""
        self._keep({version for version in self._versions() if version <= after})

    def newest(self, before: int | None = None) -> int:
        """Return the last training round below ``before`` that stored memory; 0 if none did."""
        versions = self._versions()
        # Only a resumed run repeats a round, and no run resumes from a context's state.
        if before is not None and self._folder is not None:
            versions = [version for version in versions if version < before]
        return max(versions, default=0)

    def _versions(self) -> list[int]:
        if self._folder is not None:
            kept: Path = self._folder.path / self._inside
            return [int(file.stem) for file in kept.glob("[0-9]*.memory")]
        numbers = (n.removeprefix(self._key) for n in self._state if n.startswith(self._key))
        return [int(number) for number in numbers if number.isdecimal()]

    def _keep(self, kept: Set[int]) -> None:
        for version in set(self._versions()) - kept:
            if self._folder is None:
                del self._state[f"{self._key}{version}"]
            else:
                (self._folder.path / self._file(version)).unlink(missing_ok=True)

    def _file(self, version: int) -> str:
        return f"{self._inside}/{version}.memory"


class ClientVault:
    """Secret bytes of one client and method: keys, and a record of their use.

    Without a folder, the bytes are in the context's state. A SuperNode saves this state only after
    the ClientApp has replied, and loses the state when it stops. If the owner names a folder
    (``--node-config "state-folder='/path'"``), `store` writes the bytes to disk before it returns,
    in a file that only the owner can read.

    Load the bytes, take one step of the protocol, store the new bytes, and only then send a
    message. If two processes do this at the same time with a folder, the second call of `store`
    raises an error, so only one process sends a message.

    The server may give a node another id. The name of the file therefore has the client's
    partition, so that `forget_client` finds the keys, and a client finds the steps that it took.
    Only the file of a node without a partition has the node's id, because no server asks such a
    node to forget.

    Keys are removed when they are old. This is safe, because a client without keys answers nothing.
    With ``is_permanent``, the bytes record a step that this client must never repeat in the run.
    They are never removed.
    """

    def __init__(self, context: Context, method: str, *, is_permanent: bool = False) -> None:
        kind = _PERMANENT if is_permanent else "secret"
        owner = context.node_config.get(PARTITION, context.node_id)
        self._context, self._key = context, f"flower_ext.{method}.{kind}"
        self._name = f"{SECRETS}/{context.run_id}-{owner}-{method}.{kind}"
        self._loaded = False
        self._on_disk: bytes | None = None

    @property
    def outlives_process(self) -> bool:
        """True if the client's owner names a folder, so that the bytes survive a restart.

        Also True in a simulation, although the bytes may be lost there: a simulation that starts
        again is a new run and needs none of them.
        """
        return StateFolder.of(self._context) is not None or private.is_simulated(self._context)

    def load(self) -> bytes | None:
        """Return the bytes that were stored last; None if none were stored."""
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
        """Store ``secret`` in place of the bytes that were stored before.

        Raise a `ProtocolError` if another process has stored bytes since this process loaded them.
        After such an error, this process must not send anything.
        """
        if (folder := StateFolder.of(self._context)) is not None:
            with folder.one_at_a_time(SECRETS) as secrets:
                before = folder.read(self._name)
                # Another process may have answered meanwhile, under the same masks.
                if self._loaded and before != self._on_disk:
                    raise ProtocolError(
                        "this client's state changed while it answered, so it sends no answer: "
                        "expected one process for each client, and one answer to each message"
                    )
                if before is None:
                    _remove_old(secrets)
                folder.write(self._name, secret)
            self._loaded, self._on_disk = True, secret
        self._context.state[self._key] = ConfigRecord({"secret": secret})


def forget_client(context: Context, runs: Sequence[str]) -> None:
    """Delete a client's memory of ``runs``, for all methods, and its keys.

    Key files are named by Flower's ids of runs, not by ``runs``, so the keys of masked sums vanish
    for all runs: a run of another study that is computing a sum misses the client in this sum.

    Permanent records stay, because they record the client's actions and nothing about its data. If
    there is no folder, the function deletes only what the context's state holds, that is, the
    memory and keys of the run that asks. Those of other runs vanish with the SuperNode's process.
    """
    for name in [*context.state]:
        if name.startswith("flower_ext.") and not name.endswith(f".{_PERMANENT}"):
            del context.state[name]
    if (folder := StateFolder.of(context)) is None:
        return
    partition = partition_of(context.node_config)
    for run in runs:
        for kept in (folder.path / safe_name(run)).glob(f"*-{partition}"):
            shutil.rmtree(kept)
    # The second pattern also matches files that a killed process left.
    for names in (
        f"{context.run_id}-{partition}-*.secret",
        f"*-{partition}-*{OF_MASKED_SUM}.secret*",
    ):
        for secret in (folder.path / SECRETS).glob(names):
            secret.unlink(missing_ok=True)


def _remove_old(secrets: Path) -> None:
    """Remove secrets that are a day old.

    Flower does not tell a client when a run ends, but the run of such secrets has probably ended.
    """
    for file in secrets.glob("*.secret"):
        if time.time() - file.stat().st_mtime > _SECRETS_SECONDS:
            file.unlink()
