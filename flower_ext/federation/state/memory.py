"""What a client keeps between messages: personal head, personal model, control variate; keys.

Kept in Flower's ``context.state``, for the length of a run in simulation and for the life of the
process on a SuperNode; or in a folder of the client's owner (`folder`), which outlives both.
Nothing here is ever put into a reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context
from torch import Tensor

from flower_ext.federation.arrays import to_arrays, to_params, to_record
from flower_ext.federation.cohort import partition_of
from flower_ext.federation.state.folder import StateFolder, safe_name
from flower_ext.federation.state.sealed import Damaged, pack, unpack
from flower_ext.training import Params

_KEPT = "memory"
_VERSION, _BEFORE = ".version", ".before"
_EARLIER = 2
"""A round may be done again whose checkpoint is harmed: then it begins one version earlier."""


class ClientMemory:
    """One client's memory of one method in one run.

    In a folder it is kept in versions, numbered by the training round that left them. A round that
    is done again begins where it began the first time: with the newest version before it.

    Parameters
    ----------
    context : Context
    method : str
    run : str
        Identifies the run for longer than Flower's own id, which a resumed run does not keep.
        Without one there is only the context's state.
    """

    def __init__(self, context: Context, method: str, run: str = "") -> None:
        self._state = context.state
        self._key = f"flower_ext.{method}"
        self._folder = StateFolder.of(context) if run else None
        if self._folder is not None:
            self._path = f"{safe_name(run)}/{method}-{partition_of(context.node_config)}"

    def load(self, before: int | None = None) -> Params | None:
        """What training rounds below ``before`` left, or None if they left nothing.

        Without a folder only the newest is kept, and returned whatever ``before`` says.

        Raises
        ------
        Damaged
            The file was altered, or is encrypted with another key.
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
        """Keep what training round ``version`` leaves, and the two versions before it; no others.

        The context's state holds the newest alone, with ``and_before`` the one before it as well.

        Raises
        ------
        OSError
            It could not be written: nothing of this round may leave the client.
        """
        own = {name: value.clone() for name, value in params.items()}  # not a row of a batch
        if self._folder is None:
            if and_before and 0 < self.newest() < version:
                self._move(self._key, self._key + _BEFORE)
            self._state[self._key] = to_record(own)
            self._state[self._key + _VERSION] = ConfigRecord({"round": version})
            return
        content = pack({"round": version}, {_KEPT: to_arrays(to_record(own))})
        self._folder.write(self._name(version), content)
        before = sorted(other for other in self._versions() if other < version)
        for other in self._versions():
            if other not in (*before[-_EARLIER:], version):
                (self._folder.path / self._name(other)).unlink(missing_ok=True)

    def forget(self, after: int) -> None:
        """Go back to what the training round ``after`` left, or the last before it."""
        if self._folder is not None:
            for version in self._versions():
                if version > after:
                    (self._folder.path / self._name(version)).unlink(missing_ok=True)
            return
        while self.newest() > after:
            self._move(self._key + _BEFORE, self._key)

    def newest(self, before: int | None = None) -> int:
        """The last training round below ``before`` that left something; 0 if none did."""
        if self._folder is None:
            kept = self._state.get(self._key + _VERSION)
            version = kept["round"] if isinstance(kept, ConfigRecord) else 0
            return version if isinstance(version, int) else 0
        versions = self._versions()
        return max((v for v in versions if before is None or v < before), default=0)

    def _move(self, source: str, target: str) -> None:
        """Replace one version in the context's state by another, which may be none."""
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
    """Bytes of one client and method that never leave it: secret keys, and what they were used for.

    A SuperNode takes over the context's state only after it took the reply, and forgets it when it
    stops. Where its owner names a folder (``--node-config "state-folder='/path'"``), every change
    is on disk before `store` returns, in a file that only its user can read, and outlives both.
    """

    def __init__(self, context: Context, method: str) -> None:
        self._context, self._key = context, f"flower_ext.{method}.vault"
        self._name = f"{context.run_id}-{context.node_id}-{method}.secret"

    def load(self) -> bytes | None:
        """What was stored last, or None."""
        folder = StateFolder.of(self._context)
        if folder is not None and (stored := folder.read(self._name)) is not None:
            return stored
        kept = self._context.state.get(self._key)
        secret = kept.get("secret") if isinstance(kept, ConfigRecord) else None
        return secret if isinstance(secret, bytes) else None

    def store(self, secret: bytes) -> None:
        """Replace what is kept."""
        if (folder := StateFolder.of(self._context)) is not None:
            folder.write(self._name, secret)
        self._context.state[self._key] = ConfigRecord({"secret": secret})
