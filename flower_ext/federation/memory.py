"""What a client keeps between messages: personal head, personal model, control variate; keys.

Kept in Flower's ``context.state``: for the length of a run in simulation, for the life of the
process on a SuperNode. Nothing here is ever put into a reply.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context
from torch import Tensor

from flower_ext.federation.records import to_params, to_record
from flower_ext.training import Params


class ClientMemory:
    """One client's memory of one method."""

    def __init__(self, context: Context, method: str) -> None:
        self._state = context.state
        self._key = f"flower_ext.{method}"

    def load(self) -> Params | None:
        """What was stored last, or None in the client's first round."""
        kept = self._state.get(self._key)
        return to_params(kept) if isinstance(kept, ArrayRecord) else None

    def store(self, params: Mapping[str, Tensor]) -> None:
        """Replace what is kept."""
        own = {name: value.clone() for name, value in params.items()}  # not a row of a batch
        self._state[self._key] = to_record(own)


class ClientVault:
    """Bytes of one client and method that never leave it: secret keys, and what they were used for.

    A SuperNode takes over the context's state only after it took the reply, and forgets it when it
    stops. Where its owner names a folder (``--node-config "secrets-folder='/path'"``), every change
    is on disk before `store` returns, in a file that only its user can read, and outlives both.
    """

    def __init__(self, context: Context, method: str) -> None:
        self._state = context.state
        self._key = f"flower_ext.{method}.vault"
        folder = context.node_config.get("secrets-folder")
        name = f"{context.run_id}-{context.node_id}-{method}.secret"
        self._file = Path(str(folder)).expanduser() / name if folder else None

    def load(self) -> bytes | None:
        """What was stored last, or None."""
        if self._file is not None and self._file.exists():
            return self._file.read_bytes()
        kept = self._state.get(self._key)
        secret = kept.get("secret") if isinstance(kept, ConfigRecord) else None
        return secret if isinstance(secret, bytes) else None

    def store(self, secret: bytes) -> None:
        """Replace what is kept."""
        if self._file is not None:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = self._file.with_suffix(".new")
            fresh.unlink(missing_ok=True)
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(secret)
                stream.flush()
                os.fsync(stream.fileno())
            fresh.replace(self._file)
            folder = os.open(self._file.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        self._state[self._key] = ConfigRecord({"secret": secret})
