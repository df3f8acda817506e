"""What travels: tensors and settings as Flower records, and the checks on what comes back.

A reply that fails a check is refused: it is counted, reported, never aggregated, and a dropout
for the privacy plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from flower_ext.training import LocalTraining, Params, UnshareableModel

Arrays = dict[str, np.ndarray]
T = TypeVar("T")

MODEL = "arrays"
"""Record of a whole model (or its shared part), as every Flower app names it."""
UPDATE = "update"
"""Record of a difference, already bounded and noised where the plan asks the client to."""
ROUND = "round"
"""Record of the facts of a round."""
METRICS = "metrics"
SETTINGS = "settings"
"""Record of the method's own numbers (a regularisation weight, …)."""
CONFIG = "config"
"""What the user passes to ``start``, for ClientApps of their own."""
TRAINING = "training."
"""Prefix of the records that carry one ``LocalTraining`` each."""


class RefusedReply(ValueError):
    """A reply that must not be aggregated; the message says why."""


def to_record(params: Mapping[str, Tensor] | Mapping[str, np.ndarray]) -> ArrayRecord:
    """Tensors or arrays as an ArrayRecord, on the CPU, order kept."""
    arrays = {
        name: value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        for name, value in params.items()
    }
    # NumPy makes bare numbers of arrays without dimensions; Flower takes arrays only.
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def to_params(record: ArrayRecord) -> Params:
    """An ArrayRecord as tensors, each with its own memory."""
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}


def to_arrays(record: ArrayRecord) -> Arrays:
    """An ArrayRecord as NumPy arrays."""
    return {name: array.numpy() for name, array in record.items()}


def shared_arrays(record: ArrayRecord) -> Arrays:
    """The model that will be shared, or an error naming the array that may not be.

    Raises
    ------
    UnshareableModel
        An array is not floating-point (a counter, an index) or is a running statistic.
    """
    arrays = to_arrays(record)
    for name, array in arrays.items():
        layer, _, leaf = name.rpartition(".")
        if leaf in {"running_mean", "running_var", "num_batches_tracked"}:
            raise UnshareableModel(
                f"{name!r} is a BatchNorm statistic of the clients' data; neither clipping nor "
                f"noise covers it. Use GroupNorm in layer {layer!r} "
                "(flower_ext.training.replace_batch_norm) or make that layer personal."
            )
        if not np.issubdtype(array.dtype, np.floating):
            raise UnshareableModel(
                f"{name!r} has dtype {array.dtype}; only floating-point arrays can be shared"
            )
    return arrays


def training_records(trainings: Mapping[str, LocalTraining]) -> dict[str, ConfigRecord]:
    """One record for each phase of local training."""
    return {
        TRAINING + phase: ConfigRecord({k: v for k, v in asdict(t).items() if v is not None})
        for phase, t in trainings.items()
    }


def read_trainings(content: RecordDict) -> dict[str, LocalTraining]:
    """The phases of local training that a message asks for."""
    return {
        name.removeprefix(TRAINING): LocalTraining(**dict(record))  # type: ignore[arg-type]
        for name, record in content.config_records.items()
        if name.startswith(TRAINING)
    }


def payload_bytes(message: Message) -> int:
    """Bytes of all arrays in a message as they are serialised; the rest of it is small."""
    if not message.has_content():
        return 0
    records = message.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())


@dataclass(frozen=True)
class Accepted(Generic[T]):
    """The well-formed replies of a round, by partition, and why the others were refused."""

    values: dict[int, T]
    refusals: list[str]


def accept(
    replies: Iterable[Message],
    *,
    asked: Mapping[int, int],
    server_round: int,
    read: Callable[[Message], T],
) -> Accepted[T]:
    """One well-formed reply of this round from each node that was asked.

    Parameters
    ----------
    asked : Mapping[int, int]
        Node ids by partition.
    read : Callable[[Message], T]
        Reads one reply, or raises `RefusedReply`.
    """
    waiting = {node: partition for partition, node in asked.items()}
    values: dict[int, T] = {}
    refusals: list[str] = []
    for reply in replies:
        node = reply.metadata.src_node_id
        try:
            if node not in waiting:
                raise RefusedReply("not asked in this round, or answered already")
            if reply.metadata.group_id != str(server_round):
                raise RefusedReply(f"answers round {reply.metadata.group_id}")
            values[waiting[node]] = read(reply)
            del waiting[node]
        except RefusedReply as refusal:
            refusals.append(f"round {server_round}, node {node}: {refusal}")
    return Accepted(dict(sorted(values.items())), refusals)


@dataclass(frozen=True)
class Update:
    """One accepted reply: the difference to the global model, and its metrics."""

    arrays: Arrays
    metrics: dict[str, float]


def read_update(reply: Message, *, base: Mapping[str, np.ndarray], trust_models: bool) -> Update:
    """The update in a training reply.

    Parameters
    ----------
    reply : Message
    base : Mapping[str, np.ndarray]
        The global model that was sent: names, shapes and dtypes that the update must have.
    trust_models : bool
        Whether a whole model (record ``arrays``) is accepted in place of an update: only where
        the server bounds and noises, so that any ClientApp can take part.

    Raises
    ------
    RefusedReply
        Error reply, missing record, wrong names, shapes or dtypes, unreadable or non-finite data.
    """
    content = _content(reply)
    if UPDATE in content.array_records:
        arrays = _checked(content.array_records[UPDATE], base)
    elif trust_models and MODEL in content.array_records:
        model = _checked(content.array_records[MODEL], base)
        arrays = {name: model[name] - base[name] for name in base}
    else:
        expected = f"{UPDATE!r} or {MODEL!r}" if trust_models else f"{UPDATE!r}"
        raise RefusedReply(f"no array record {expected}; it has {sorted(content.keys())}")
    return Update(arrays, read_metrics(reply))


def read_metrics(reply: Message) -> dict[str, float]:
    """Finite scalar metrics of a reply.

    Raises
    ------
    RefusedReply
        Error reply, or a value is not a finite number.
    """
    content = _content(reply)
    merged: dict[str, float] = {}
    for record in content.metric_records.values():
        for name, value in record.items():
            if not isinstance(value, int | float) or not np.isfinite(value):
                raise RefusedReply(f"metric {name!r} is {value!r}, not a finite number")
            merged[name] = float(value)
    return merged


def metrics_record(values: Mapping[str, float]) -> MetricRecord:
    """Plain numbers as a MetricRecord (which takes no NumPy scalars)."""
    return MetricRecord({name: float(value) for name, value in values.items()})


def _content(reply: Message) -> RecordDict:
    if reply.has_error():
        raise RefusedReply(f"the client failed: {reply.error.reason or reply.error.code}")
    if not reply.has_content():
        raise RefusedReply("the reply is empty")
    return reply.content


def _checked(record: ArrayRecord, base: Mapping[str, np.ndarray]) -> Arrays:
    if set(record) != set(base):
        missing, extra = sorted(set(base) - set(record)), sorted(set(record) - set(base))
        raise RefusedReply(f"array names differ: missing {missing}, unexpected {extra}")
    arrays: Arrays = {}
    for name, expected in base.items():
        sent = record[name]
        if tuple(sent.shape) != expected.shape or sent.dtype != str(expected.dtype):
            raise RefusedReply(
                f"{name!r} is {sent.dtype}{tuple(sent.shape)}, "
                f"expected {expected.dtype}{expected.shape}"
            )
        try:
            array = sent.numpy()
        except Exception as error:  # whatever a hostile payload provokes, it is one refusal
            raise RefusedReply(f"{name!r} cannot be read: {error}") from error
        if array.shape != expected.shape or array.dtype != expected.dtype:
            raise RefusedReply(f"{name!r} holds other data than it declares")
        if not np.isfinite(array).all():
            raise RefusedReply(f"{name!r} holds NaN or infinite values")
        arrays[name] = array
    return arrays
