"""Arrays of a model as Flower carries them, in this process or out of it, and their bytes."""

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
    """An array that becomes bytes only where it leaves this process.

    Flower's own serialises at once, which clients in the server's process would do for nothing.
    Whoever makes one must not change ``values`` afterwards.
    """

    values: np.ndarray
    stype = "numpy.ndarray"

    def __init__(self, values: np.ndarray) -> None:
        self.__dict__["values"] = values  # Flower's setter would look for chunks to drop

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """As NumPy names it."""
        return _name(self.values.dtype)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Of ``values``."""
        return self.values.shape

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """As Flower serialises."""
        return bytes(Array(self.values).data)

    def deflate(self) -> bytes:
        """As Flower's own, under its name: SuperLink takes arrays by no other."""
        return bytes(Array(self.values).deflate())

    def numpy(self) -> np.ndarray:
        """A copy, as from bytes."""
        return self.values.copy()


@lru_cache(maxsize=64)
def _name(dtype: np.dtype) -> str:
    return str(dtype)


def to_record(params: Mapping[str, Tensor] | Mapping[str, np.ndarray]) -> ArrayRecord:
    """Tensors or arrays as an ArrayRecord, on the CPU, order kept; not to be changed afterwards."""
    arrays = {
        # NumPy makes bare numbers of arrays without dimensions; Flower takes arrays only.
        name: UnsentArray(np.asarray(v.numpy(force=True) if isinstance(v, Tensor) else v))
        for name, v in params.items()
    }
    return record_of(ArrayRecord, arrays)


def to_params(record: ArrayRecord) -> Params:
    """An ArrayRecord as tensors, each with its own memory."""
    return {name: torch.from_numpy(values.copy()) for name, values in to_arrays(record).items()}


def to_arrays(record: ArrayRecord) -> Arrays:
    """An ArrayRecord as NumPy arrays, which are not to be changed."""
    return {name: read_array(array) for name, array in record.items()}


def read_array(array: Array) -> np.ndarray:
    """One array, which is not to be changed.

    Raises
    ------
    ValueError
        Its bytes are not what its header says, or hold Python objects.
    """
    return array.values if isinstance(array, UnsentArray) else _read_npy(array)


def _read_npy(array: Array) -> np.ndarray:
    """One array in NumPy's format and nothing else: no pickle, no archive, nothing after it.

    Unlike ``numpy.load``, it takes no memory for numbers that are only announced.
    """
    if array.stype != "numpy.ndarray":
        raise InvalidValue(f"serialised as {array.stype!r}: expected 'numpy.ndarray'")
    file = BytesIO(array.data)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }[np.lib.format.read_magic(file)]
    shape, fortran_order, dtype = read_header(file)
    start = file.tell()
    if dtype.hasobject:
        raise InvalidValue("it holds pickled objects")
    if (tuple(array.shape), array.dtype) != (shape, str(dtype)):
        raise InvalidValue(f"it holds {dtype}{shape}, not {array.dtype}{tuple(array.shape)}")
    if min(shape, default=0) < 0 or len(array.data) - start != math.prod(shape) * dtype.itemsize:
        raise InvalidValue(f"{len(array.data) - start} bytes for {dtype}{shape}")
    values = np.frombuffer(array.data, dtype, count=math.prod(shape), offset=start)
    return values.reshape(shape, order="F" if fortran_order else "C")


def record_bytes(record: ArrayRecord) -> int:
    """Return the bytes of a record's arrays as they are serialised."""
    return sum(
        array_bytes(array.values.shape, array.values.dtype)
        if isinstance(array, UnsentArray)
        else len(array.data)
        for array in record.values()
    )


def array_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the bytes of one array as Flower serialises it: a header and its numbers."""
    return math.prod(shape) * dtype.itemsize + _header_bytes(shape, dtype)


@lru_cache(maxsize=1024)
def _header_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Bytes that NumPy's format puts before the numbers of such an array."""
    file = BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, facts)
    return file.tell()
