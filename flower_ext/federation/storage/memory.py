"""A client's memory between messages, such as a personal model, a control variate, or keys.

The memory is in Flower's ``context.state``, or in a folder that the client's owner names
(`folder`). Flower's state lasts as long as a simulated run, or as the process of a SuperNode. The
folder outlives run and process. No reply ever contains memory.
"""

import shutil
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context
from torch import Tensor

from flower_ext.errors import ProtocolError
from flower_ext.federation import _flower_private as private
from flower_ext.federation.messages.addresses import PARTITION, partition_of
from flower_ext.federation.messages.records import bytes_record, to_arrays, to_params, to_record
from flower_ext.federation.storage.folder import (
    SECRETS,
    Damaged,
    StateFolder,
    deserialised,
    safe_name,
    serialised,
)
from flower_ext.training import Params

_GROUP = "record"
_MEMORY, _SECRET, _PERMANENT = ".memory", ".secret", ".permanent"
"""Endings of names: of memory, of secrets, and of records that are never removed."""
_EARLIER = 2
"""Number of older versions of a memory that a folder keeps. If a checkpoint is damaged, a repeated
round needs these versions."""
_SECRETS_SECONDS = 24 * 60 * 60
"""Age in seconds at which a run's secrets are removed when another run begins. Younger secrets may
belong to a run in progress, which stores its secrets anew in each round of the client."""


class FolderRecords(MutableMapping[str, ArrayRecord]):
    """Records in the files of a folder, in place of those in the state of a context.

    A record's name is the path of its file in the folder. An iteration yields the names that begin
    with ``prefix``. Reading a record raises `Damaged` if its file was altered or encrypted with
    another key.
    """

    def __init__(self, folder: StateFolder, prefix: str) -> None:
        self._folder, self._prefix = folder, prefix

    def __getitem__(self, name: str) -> ArrayRecord:
        if (content := self._read(name)) is None:
            raise KeyError(name)
        try:
            return to_record(deserialised(content).arrays[_GROUP])
        except Damaged as error:
            raise Damaged(
                f"{self._folder.path / name}: {error}; restore the file as this client wrote it, "
                "or begin a new run"
            ) from None

    def __setitem__(self, name: str, record: ArrayRecord) -> None:
        self._folder.write(name, serialised({}, {_GROUP: to_arrays(record)}))

    def __delitem__(self, name: str) -> None:
        (self._folder.path / name).unlink(missing_ok=True)

    def __iter__(self) -> Iterator[str]:
        files = self._folder.path.glob(f"{self._prefix}*")
        return (file.relative_to(self._folder.path).as_posix() for file in files)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _read(self, name: str) -> bytes | None:
        return self._folder.read(name)


class FolderSecrets(FolderRecords):
    """Secrets in the files of a folder, which several processes never replace at the same time.

    Writing a record raises a `ProtocolError` if another process has written it since this object
    read or wrote it.
    """

    def __init__(self, folder: StateFolder) -> None:
        super().__init__(folder, f"{SECRETS}/")
        self._known: dict[str, bytes | None] = {}

    def __setitem__(self, name: str, record: ArrayRecord) -> None:
        with self._folder.one_at_a_time(SECRETS) as secrets:
            before = super()._read(name)
            # Another process may have answered meanwhile, under the same masks.
            if self._known.get(name, before) != before:
                raise ProtocolError(
                    "this client's state changed while it answered, so it sends no answer: "
                    "expected one process for each client, and one answer to each message"
                )
            if before is None:
                _remove_old(secrets)
            super().__setitem__(name, record)
            self._read(name)

    def _read(self, name: str) -> bytes | None:
        self._known[name] = content = super()._read(name)
        return content


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
        folder = StateFolder.of(context) if run else None
        self._outlives_run = folder is not None
        self._records: MutableMapping[str, Any] = context.state
        self._prefix = f"flower_ext.{method}."
        if folder is not None:
            self._prefix = f"{safe_name(run)}/{method}-{partition_of(context.node_config)}/"
            self._records = FolderRecords(folder, self._prefix)

    def load(self, before: int | None = None) -> Params | None:
        """Return the newest memory that a training round below ``before`` stored; None if none did.

        If the memory is in a context's state, return the newest memory of all rounds. Raise
        `Damaged` if the memory's file was altered or encrypted with another key.
        """
        version = self.newest(before)
        return to_params(self._records[self._name(version)]) if version else None

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
        self._records[self._name(version)] = to_record(memory)
        kept = _EARLIER if self._outlives_run else int(and_before)
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
        if before is not None and self._outlives_run:
            versions = [version for version in versions if version < before]
        return max(versions, default=0)

    def _versions(self) -> list[int]:
        names = [name.removesuffix(_MEMORY) for name in self._records if name.endswith(_MEMORY)]
        numbers = (n.removeprefix(self._prefix) for n in names if n.startswith(self._prefix))
        return [int(number) for number in numbers if number.isdecimal()]

    def _keep(self, kept: Set[int]) -> None:
        for version in set(self._versions()) - kept:
            del self._records[self._name(version)]

    def _name(self, version: int) -> str:
        return f"{self._prefix}{version}{_MEMORY}"


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
        kind = _PERMANENT if is_permanent else _SECRET
        owner = context.node_config.get(PARTITION, context.node_id)
        self._context, self._name = context, f"{SECRETS}/{context.run_id}-{owner}-{method}{kind}"

    @cached_property
    def _records(self) -> MutableMapping[str, Any]:
        folder = StateFolder.of(self._context)
        return self._context.state if folder is None else FolderSecrets(folder)

    @property
    def outlives_process(self) -> bool:
        """True if the client's owner names a folder, so that the bytes survive a restart.

        Also True in a simulation, although the bytes may be lost there: a simulation that starts
        again is a new run and needs none of them.
        """
        return isinstance(self._records, FolderSecrets) or private.is_simulated(self._context)

    def load(self) -> bytes | None:
        """Return the bytes that were stored last; None if none were stored.

        Raise `Damaged` if the file was altered or encrypted with another key.
        """
        record = self._records.get(self._name)
        return None if record is None else to_arrays(record)[_SECRET].tobytes()

    def store(self, secret: bytes) -> None:
        """Store ``secret`` in place of the bytes that were stored before.

        Raise a `ProtocolError` if another process has stored bytes since this process loaded them.
        After such an error, this process must not send anything.
        """
        self._records[self._name] = bytes_record(_SECRET, secret)


def forget_client(context: Context, runs: Sequence[str], *, vaults: str) -> None:
    """Delete a client's memory of ``runs``, for all methods, and its keys.

    Also delete the keys in vaults of all runs whose method ends with ``vaults``. Their files are
    named by Flower's ids of runs, not by ``runs``.

    Permanent records stay, because they record the client's actions and nothing about its data. If
    there is no folder, the function deletes only what the context's state holds, that is, the
    memory and keys of the run that asks. Those of other runs vanish with the SuperNode's process.
    """
    for name in list(context.state):
        if name.endswith((_MEMORY, _SECRET)):
            del context.state[name]
    if (folder := StateFolder.of(context)) is None:
        return
    partition = partition_of(context.node_config)
    for run in runs:
        for kept in (folder.path / safe_name(run)).glob(f"*-{partition}"):
            shutil.rmtree(kept)
    # The second pattern also matches files that a killed process left.
    for names in (
        f"{context.run_id}-{partition}-*{_SECRET}",
        f"*-{partition}-*{vaults}{_SECRET}*",
    ):
        for secret in (folder.path / SECRETS).glob(names):
            secret.unlink(missing_ok=True)


def _remove_old(secrets: Path) -> None:
    """Remove secrets that are a day old.

    Flower does not tell a client when a run ends, but the run of such secrets has probably ended.
    """
    for file in secrets.glob(f"*{_SECRET}"):
        if time.time() - file.stat().st_mtime > _SECRETS_SECONDS:
            file.unlink()
