"""The content of messages: Flower records of tensors and settings, with their names.

Flower serialises an array as soon as it is made. That is wasted time if clients run in the server's
process, so an `UnsentArray` is serialised only when it leaves the process.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO
from typing import TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from flower_ext.errors import InvalidValue, knowing_no_data
from flower_ext.federation import _flower_private as private
from flower_ext.privacy.mechanisms.updates import split_into
from flower_ext.training import LocalTraining, Params

Arrays = dict[str, np.ndarray]
K = TypeVar("K", ArrayRecord, ConfigRecord, MetricRecord)

MODEL = "arrays"
"""Record of a whole model (or its shared part), as every Flower app names it."""
UPDATE = "update"
"""Record of a client's update, bounded and noised if the plan asks the client to do so."""
METRICS = "metrics"
"""Record of the numbers that a client reports."""
ROUND = "round"
"""Record of a round: its number, its run, and the protection that it asks for."""
SETTINGS = "settings"
"""Record of the method's own numbers (a regularisation weight, …)."""
FROZEN = "frozen"
"""Record with which the server asks a client to confirm the frozen part of its model."""
QUERY = "query"
"""Config record of a query outside training: its name and its fields, as JSON."""
QUESTION = "question"
"""Record of a method's question to its client side, outside the rounds."""
SIZE = "size"
"""Empty record that asks for a client's number of training examples."""
FORGET = "forget"
"""Record that asks a client to delete what it remembers of some runs: the runs."""
WITHDRAWN = "withdrawn"
"""Record in a query: the users whose records a silo leaves out of its answer."""
ANSWER = "answer"
"""Record of a client's arrays, without noise, in answer to a question."""
CONFIG = "config"
"""Record of the values that the user passes to ``start``, for their own ClientApps."""
TRAINING = "training."
"""Prefix of the records that carry one ``LocalTraining`` each."""
SUM = "sum."
"""Prefix of the record with the server's message for a sum (see `ClientSum.name`)."""
ADDRESS = "address"
"""Record of the partition that a message is for (see `addresses.check_addressee`)."""
_RESERVED = frozenset({MODEL, ROUND, SETTINGS, CONFIG, QUERY, ADDRESS})


class UnsentArray(Array):
    """An array that is serialised only when it leaves this process.

    Do not change ``values`` after you create the array.
    """

    values: np.ndarray
    stype = "numpy.ndarray"

    def __init__(self, values: np.ndarray) -> None:
        self.__dict__["values"] = values  # Flower's setter would look for chunks to drop

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """NumPy's name of the type."""
        return _name(self.values.dtype)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of ``values``."""
        return self.values.shape

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The array's bytes as Flower serialises them."""
        return bytes(Array(self.values).data)

    def deflate(self) -> bytes:
        """Return the bytes of Flower's own ``Array``, the only class that a SuperLink accepts."""
        return bytes(Array(self.values).deflate())

    def numpy(self) -> np.ndarray:
        """Return a copy, as Flower's class does."""
        return self.values.copy()


@lru_cache(maxsize=64)
def _name(dtype: np.dtype) -> str:
    return str(dtype)


def to_record(params: Mapping[str, Tensor] | Mapping[str, np.ndarray]) -> ArrayRecord:
    """Return tensors or arrays as an ArrayRecord on the CPU, in the given order.

    The record may share the memory of ``params``, so do not change ``params`` afterwards.
    """
    arrays = arrays_of(params)
    return private.record_of(
        ArrayRecord, {name: UnsentArray(array) for name, array in arrays.items()}
    )


def arrays_of(params: Mapping[str, Tensor] | Mapping[str, np.ndarray]) -> Arrays:
    """Return tensors or arrays as arrays on the CPU, in the given order.

    The result may share the memory of ``params``, so do not change ``params`` afterwards.
    """
    # NumPy may turn arrays without dimensions into numbers, but Flower takes only arrays.
    return {
        name: np.asarray(value.numpy(force=True) if isinstance(value, Tensor) else value)
        for name, value in params.items()
    }


def flattened(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return all numbers of the arrays as one vector, in ascending order of the names."""
    return np.concatenate([arrays[name].reshape(-1) for name in sorted(arrays)])


def shaped(vector: np.ndarray, like: Arrays) -> Arrays:
    """Split a vector, made by `flattened`, into arrays with the names and shapes of ``like``."""
    return split_into({name: like[name].shape for name in sorted(like)}, vector)


def to_params(record: ArrayRecord) -> Params:
    """Return an ArrayRecord as tensors, each with its own memory."""
    return {name: torch.from_numpy(values.copy()) for name, values in to_arrays(record).items()}


def to_arrays(record: ArrayRecord) -> Arrays:
    """Return an ArrayRecord as NumPy arrays. Do not change them."""
    return {name: read_array(array) for name, array in record.items()}


def read_array(array: Array) -> np.ndarray:
    """Return one array, in the byte order of this machine. Do not change it."""
    values = array.values if isinstance(array, UnsentArray) else _read_npy(array)
    # PyTorch reads only this machine's byte order, and NumPy counts the byte order as part of a
    # dtype.
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _read_npy(array: Array) -> np.ndarray:
    """Read one array in NumPy's format; refuse pickles, archives and surplus bytes.

    Unlike in ``numpy.load``, a false header cannot make the function allocate memory.
    """
    if array.stype != "numpy.ndarray":
        raise InvalidValue(f"stype={array.stype!r} of an array: expected 'numpy.ndarray'")
    file = BytesIO(array.data)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }[np.lib.format.read_magic(file)]
    shape, fortran_order, dtype = read_header(file)
    start = file.tell()
    if dtype.hasobject:
        raise InvalidValue("the array holds pickled objects: expected numbers")
    if (tuple(array.shape), array.dtype) != (shape, str(dtype)):
        raise InvalidValue(
            f"the array holds {dtype}{shape}: expected {array.dtype}{tuple(array.shape)}"
        )
    if min(shape, default=0) < 0 or len(array.data) - start != math.prod(shape) * dtype.itemsize:
        raise InvalidValue(
            f"the array has {len(array.data) - start} bytes of numbers: expected the number of "
            f"bytes that {dtype}{shape} takes"
        )
    values = np.frombuffer(array.data, dtype, count=math.prod(shape), offset=start)
    return values.reshape(shape, order="F" if fortran_order else "C")


@lru_cache(maxsize=1024)
def array_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the number of bytes of one array as Flower serialises it: a header and its numbers."""
    file = BytesIO()
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.tell() + math.prod(shape) * dtype.itemsize


def is_reserved(name: str) -> bool:
    """Return True for the name of a record that a method's own groups must not have."""
    return name in _RESERVED or name.startswith((TRAINING, SUM))


def of_kind(content: RecordDict, kind: type[K]) -> dict[str, K]:
    """Return the records of one kind by name; skip Flower's own check of each record."""
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
    """Return the name and the bytes of the only array in a record that `bytes_record` made.

    Raise an error if the record does not hold exactly one array, if the array does not hold bytes,
    or if its name is not in ``names``. Without ``names``, every name is accepted.
    """
    with knowing_no_data():
        if len(arrays) == 1:
            ((name, array),) = arrays.items()
            if name in (names or arrays) and array.dtype == np.uint8 and array.ndim == 1:
                return name, array.tobytes()
        types = {name: f"{array.dtype}{array.shape}" for name, array in arrays.items()}
        raise InvalidValue(
            f"the message has arrays {types}: expected one array of bytes (uint8)"
            + (f" with a name in {names}" if names else "")
        )


def metrics_record(values: Mapping[str, float]) -> MetricRecord:
    """Return plain numbers as a MetricRecord, which takes no NumPy scalars."""
    return private.record_of(MetricRecord, {name: float(value) for name, value in values.items()})
