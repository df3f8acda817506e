"""Tensors and settings as Flower records, and the names of all records in messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_ext.errors import InvalidValue, knowing_no_data
from flower_ext.federation.arrays import Arrays as Arrays
from flower_ext.federation.arrays import to_arrays as to_arrays
from flower_ext.federation.arrays import to_params as to_params
from flower_ext.federation.arrays import to_record as to_record
from flower_ext.federation.uploads import METRICS as METRICS
from flower_ext.federation.uploads import UPDATE as UPDATE
from flower_ext.federation.uploads import Update as Update
from flower_ext.federation.uploads import metrics_record as metrics_record
from flower_ext.training import LocalTraining

K = TypeVar("K", ArrayRecord, ConfigRecord, MetricRecord)

MODEL = "arrays"
"""Record of a whole model (or its shared part), as every Flower app names it."""
ROUND = "round"
"""Record of a round: its number, its run, and the protection that it asks for."""
SETTINGS = "settings"
"""Record of the method's own numbers (a regularisation weight, …)."""
FROZEN = "frozen"
"""Record with which the server asks a client to confirm the frozen part of its model."""
SECURE_SUM = "secure-sum"
"""Record of the server's message to a client for a masked sum."""
WEIGHTED_SUM = "weighted-sum"
"""Record of the server's message to a silo for a weighted sum."""
QUERY = "query"
"""Config record of a query outside training: its name and its fields, as JSON."""
QUESTION = "question"
"""Record of a method's question to its client side, outside the rounds."""
WITHDRAWN = "withdrawn"
"""Record in a query: the users whose records a silo leaves out of its answer."""
ANSWER = "answer"
"""Record of a client's arrays, without noise, in answer to a question."""
CONFIG = "config"
"""Record of the values that the user passes to ``start``, for their own ClientApps."""
TRAINING = "training."
"""Prefix of the records that carry one ``LocalTraining`` each."""
RESERVED = frozenset({MODEL, ROUND, SETTINGS, CONFIG, SECURE_SUM, WEIGHTED_SUM, QUERY})
"""Names of records that a method's own groups must not have."""


def of_kind(content: RecordDict, kind: type[K]) -> dict[str, K]:
    """Return a copy of the records of one kind, without Flower's check of each."""
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def training_records(trainings: Mapping[str, LocalTraining]) -> dict[str, ConfigRecord]:
    """Return one record for each phase of local training."""
    return {
        TRAINING + phase: ConfigRecord({k: v for k, v in vars(t).items() if v is not None})
        for phase, t in trainings.items()
    }


def read_trainings(content: RecordDict) -> dict[str, LocalTraining]:
    """Return the phases of local training that a message asks for."""
    return {
        name.removeprefix(TRAINING): LocalTraining(**dict(record))  # type: ignore[arg-type]
        for name, record in of_kind(content, ConfigRecord).items()
        if name.startswith(TRAINING)
    }


def to_bytes_array(data: bytes) -> np.ndarray:
    """Return bytes as a uint8 array, which is sent and counted like any other array."""
    return np.frombuffer(data, dtype=np.uint8)


def bytes_record(name: str, data: bytes) -> ArrayRecord:
    """Return a record with one array of bytes."""
    return to_record({name: to_bytes_array(data)})


def single_message(arrays: Arrays, *names: str) -> tuple[str, bytes]:
    """Undo `bytes_record`: return the name, one of ``names``, and the bytes of the one array.

    Raises
    ------
    InvalidValue
        ``arrays`` does not hold exactly one array, or that array has a different name or is not of
        bytes.
    """
    with knowing_no_data():
        if len(arrays) == 1:
            ((name, array),) = arrays.items()
            if name in names and array.dtype == np.uint8 and array.ndim == 1:
                return name, array.tobytes()
        types = {name: f"{array.dtype}{array.shape}" for name, array in arrays.items()}
        raise InvalidValue(f"message with arrays {types}: expected bytes (uint8) of one of {names}")
