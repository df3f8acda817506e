"""Convert a model's arrays to Flower records, and read arrays from records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from flower_ext.errors import InvalidValue
from flower_ext.federation._flower_private import record_of
from flower_ext.training import Params

Arrays = dict[str, np.ndarray]


class UnsentArray(Array):
    """An array that is serialised only when it leaves this process.

    Flower's own class serialises at once, which is wasted time if clients run in the server's
    process. Do not change ``values`` afterwards.
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
        """Return the bytes of Flower's own class, because the SuperLink accepts no other class."""
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
    return record_of(ArrayRecord, {name: UnsentArray(array) for name, array in arrays.items()})


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
    """Undo `flattened` for arrays with the names and shapes of ``like``."""
    names = sorted(like)
    ends = np.cumsum([like[name].size for name in names])[:-1]
    parts = zip(names, np.split(vector, ends), strict=True)
    return {name: part.reshape(like[name].shape) for name, part in parts}


def to_params(record: ArrayRecord) -> Params:
    """Return an ArrayRecord as tensors, each with its own memory."""
    return {name: torch.from_numpy(values.copy()) for name, values in to_arrays(record).items()}


def to_arrays(record: ArrayRecord) -> Arrays:
    """Return an ArrayRecord as NumPy arrays. Do not change them."""
    return {name: read_array(array) for name, array in record.items()}


def read_array(array: Array) -> np.ndarray:
    """Return one array, in the byte order of this machine. Do not change it.

    Raises
    ------
    ValueError
        The bytes do not match their header, or hold Python objects.
    """
    values = array.values if isinstance(array, UnsentArray) else _read_npy(array)
    # PyTorch reads only this machine's byte order, and NumPy counts the byte order as part of a
    # dtype.
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _read_npy(array: Array) -> np.ndarray:
    """Read one array in NumPy's format; refuse pickles, archives and surplus bytes.

    The function first checks that the bytes hold as many numbers as the header claims. A header
    that claims too many therefore allocates no memory, as it would in ``numpy.load``.
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
            f"the array has {len(array.data) - start} bytes of numbers: expected as many as "
            f"{dtype}{shape} takes"
        )
    values = np.frombuffer(array.data, dtype, count=math.prod(shape), offset=start)
    return values.reshape(shape, order="F" if fortran_order else "C")


def record_bytes(record: ArrayRecord) -> int:
    """Return the number of bytes that a record's arrays take when serialised."""
    return sum(
        array_bytes(array.values.shape, array.values.dtype)
        if isinstance(array, UnsentArray)
        else len(array.data)
        for array in record.values()
    )


@lru_cache(maxsize=1024)
def array_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the number of bytes of one array as Flower serialises it: a header and its numbers."""
    file = BytesIO()
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.tell() + math.prod(shape) * dtype.itemsize
