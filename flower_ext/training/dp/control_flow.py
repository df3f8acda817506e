"""A check for models that choose their operations by values of their features.

In such a model, the values of one example may decide which operations run on another. A model that
reads no value applies the same operations to all batches of one shape.

One way to read values is harmless. Hugging Face's models, for example, test whether all numbers of
a mask are 1. `DecidedTests` gives such tests an answer that depends on no example.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_READING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_READING_WITHOUT_TAG = {_aten._pack_padded_sequence.default}  # it reads the lengths
_NOT_DISPATCHED = {
    *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.__format__),
    *(Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage, Tensor.__dlpack__),
}
"""Methods that read or expose values without an operation that `ControlFlowWatch` sees."""
_ANSWERS = {
    **dict.fromkeys((torch.all, Tensor.all), False),
    **dict.fromkeys((torch.any, Tensor.any), True),
}
"""Answers to tests of whole tensors, as if some of their numbers were 0 and others were not."""
_SUMS = (torch.sum, Tensor.sum)


class ReadsValues(Exception):
    """A model reads or stores values of its features."""


class DecidedTests(TorchFunctionMode):
    """Answer tests of whole tensors, such as ``mask.all()``, without reading any number.

    ``all`` then returns False, and ``any`` returns True. A sum of booleans returns 0: such a sum
    is a test, too, because models compare it with the tensor's size.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer a test; run any other function."""
        if len(args) == 1 and not kwargs:
            if func in _ANSWERS:
                return torch.tensor(_ANSWERS[func], device=args[0].device)
            if func in _SUMS and args[0].dtype == torch.bool:
                return torch.tensor(0, device=args[0].device)
        return func(*args, **(kwargs or {}))


class ControlFlowWatch(TorchDispatchMode):
    """Raise `ReadsValues` if a model reads or stores a number that is computed from its features.

    Examples of reading are ``x.sum().item()`` and ``if x.any()``.
    """

    def __init__(self, features: Sequence[Tensor], model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model_storages = {*map(_storage, [*model.parameters(), *model.buffers()])}
        # Weak references: while one exists, no new tensor gets the same address.
        self._derived: dict[int, StorageWeakRef] = {}
        for leaf in features:
            self._mark_derived(leaf)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Inspect one operation, then run it."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # A random draw counts as derived: operations that depend on it may differ in each pass.
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if not draws and not any(map(self.is_derived, inputs)):
            return func(*args, **(kwargs or {}))
        written = [*_written(func, args, kwargs or {})]
        if any(_storage(tensor) in self._model_storages for tensor in written):
            raise ReadsValues(f"{func} writes into the model")
        if _reads(func, inputs):
            raise ReadsValues(f"{func} reads a number that depends on the features")
        out = func(*args, **(kwargs or {}))
        for tensor in [*written, *tree_leaves(out)]:
            if isinstance(tensor, Tensor):
                self._mark_derived(tensor)
        return out

    def is_derived(self, tensor: Tensor) -> bool:
        """Return True if a tensor was computed from features."""
        return _storage(tensor) in self._derived

    def _mark_derived(self, tensor: Tensor) -> None:
        if (storage := _storage(tensor)) not in self._derived:
            self._derived[storage] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class _MethodWatch(TorchFunctionMode):
    """Raise `ReadsValues` for the methods in `_NOT_DISPATCHED`."""

    def __init__(self, watch: ControlFlowWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _NOT_DISPATCHED and self.watch.is_derived(args[0]):
            raise ReadsValues(f"Tensor.{func.__name__} reads a number that depends on the features")
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(features: Sequence[Tensor], model: nn.Module) -> Iterator[None]:
    """Raise `ReadsValues` if ``model`` reads or stores a value of ``features`` in this context."""
    with _MethodWatch(watch := ControlFlowWatch(features, model)), watch:
        yield


def _reads(func: Any, inputs: Sequence[Tensor]) -> bool:
    if func == _aten.index.Tensor:  # indexing by numbers gives a shape known beforehand
        # Indexing by booleans returns as many rows as there are True.
        return any(index.dtype in (torch.bool, torch.uint8) for index in inputs[1:])
    if func.namespace not in ("aten", "prims"):  # an unknown operation may read anything
        return True
    return not _READING_TAGS.isdisjoint(func.tags) or func in _READING_WITHOUT_TAG


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        if isinstance(value, Tensor) and alias is not None and alias.is_write:
            yield value


def _storage(tensor: Tensor) -> int:
    # Views of a tensor share its storage, so a write through any view is seen.
    address: int = tensor.untyped_storage()._cdata
    return address
