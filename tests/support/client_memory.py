"""Memory of clients, for tests."""

import torch
from flwr.app import Context, RecordDict

from flower_ext.federation.storage.folder import deserialised


def context(run_config=None, kind=Context, **node_config) -> Context:
    facts = {"partition-id": 2, **{n.replace("_", "-"): v for n, v in node_config.items()}}
    return kind(
        run_id=7, node_id=3, node_config=facts, state=RecordDict(), run_config=run_config or {}
    )


def secret_in(file) -> bytes:
    """Return the bytes that a `ClientVault` stored in a file."""
    ((array,),) = (group.values() for group in deserialised(file.read_bytes()).arrays.values())
    return array.tobytes()


def params(value: float) -> dict[str, torch.Tensor]:
    return {"b": torch.full((3,), value), "a": torch.tensor(value, dtype=torch.float64)}


def disk_full(descriptor):
    raise OSError("disk is full")
