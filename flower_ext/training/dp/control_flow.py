"""A check for models that choose their operations by values of their features.

In such a model, the values of one example may decide which operations run on another. A model that
reads no value applies the same operations to all batches of one shape.

One way to read values is harmless. Hugging Face's models, for example, test whether all numbers of
a mask are 1. `Passes` adds an extra last row to each batch, the same in every batch. If this row
alone decides the test, its answer does not depend on the examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_READING_TOO = {_aten._pack_padded_sequence.default}
_ROW_BY_ROW = {
    *(_aten._to_copy.default, _aten.detach.default, _aten.alias.default, _aten.clone.default),
    *(_aten.eq.Scalar, _aten.ne.Scalar, _aten.gt.Scalar, _aten.ge.Scalar, _aten.lt.Scalar),
    *(_aten.le.Scalar, _aten.logical_not.default, _aten.bitwise_not.default),
    *(_aten.slice.Tensor, _aten.index.Tensor, _aten.view.default),
}
"""Operations that compute a row from one row, if the number of rows stays the same."""
_OUT_OF_SIGHT = {
    *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.__format__),
    *(Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage, Tensor.__dlpack__),
}
"""Methods that read or expose values without an operation that `ControlFlowWatch` sees."""


class ReadsValues(Exception):
    """A model reads or stores values of its features."""


class ControlFlowWatch(TorchDispatchMode):
    """Raise `ReadsValues` if a model reads or stores a number that is computed from its features.

    Examples of reading are ``x.sum().item()`` and ``if x.any()``. The last row of each of the
    ``features`` is the same in every pass.
    """

    def __init__(self, features: Sequence[Tensor], model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_rows, self.needs_last = len(features[0]), False
        self._of_model = {_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        self._derived: dict[int, StorageWeakRef] = {}  # references, so that no address is reused
        for leaf in features:
            self._mark_derived(leaf)
        self._by_row = [*features]
        self._decided = list[Tensor]()
        self._counts: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Inspect one operation, then run it."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        draws = torch.Tag.nondeterministic_seeded in func.tags
        depends = draws or any(map(self.is_derived, inputs))
        written = [*_written(func, args)] if depends else []
        if any(_storage(tensor) in self._of_model for tensor in written):
            raise ReadsValues(f"{func} writes into the model")
        if depends and _reads(func, inputs):
            if not _is_among(inputs[0], self._decided):
                raise ReadsValues(str(func))
            self.needs_last = True
        out = func(*args, **(kwargs or {}))
        if depends:
            for tensor in [*written, *tree_leaves(out)]:
                if isinstance(tensor, Tensor):
                    self._mark_derived(tensor)
            if inputs and isinstance(out, Tensor):
                self._note_decision(func, args, inputs[0], out)
                self._note_rows(func, args, inputs, out)
        return out

    def is_derived(self, tensor: Tensor) -> bool:
        """Return True if a tensor was computed from features."""
        return _storage(tensor) in self._derived

    def _mark_derived(self, tensor: Tensor) -> None:
        if (storage := _storage(tensor)) not in self._derived:
            self._derived[storage] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def _note_decision(self, func: Any, args: tuple[Any, ...], tested: Tensor, out: Tensor) -> None:
        """Remember ``out`` if it is the answer to a harmless test, which the last row decides.

        If ``func`` asks whether all numbers are true, for example, a zero in that row decides it.
        """
        if func == _aten.eq.Scalar and any(
            tested is count and args[1] == most for count, most in self._counts
        ):
            self._decided.append(out)
        if not _is_among(tested, self._by_row):
            return
        has_zero, has_some = not bool(tested[-1].all()), bool(tested[-1].any())
        if (func == _aten.all.default and has_zero) or (func == _aten.any.default and has_some):
            self._decided.append(out)
        if func == _aten.sum.default and has_zero and tested.dtype == torch.bool:
            self._counts.append((out, tested.numel()))  # the last row keeps the sum below this

    def _note_rows(
        self, func: Any, args: tuple[Any, ...], inputs: Sequence[Tensor], out: Tensor
    ) -> None:
        """Remember ``out`` if each of its rows was computed from the same row of the features."""
        if func not in _ROW_BY_ROW or not _is_among(inputs[0], self._by_row):
            return
        along_rows = (func == _aten.slice.Tensor and args[1:2] in [(), (0,)]) or (
            func == _aten.index.Tensor and args[1][0] is not None
        )
        has_rows = out.dim() and len(out) == self.num_rows
        if has_rows and not along_rows and not any(map(self.is_derived, inputs[1:])):
            self._by_row.append(out)


class _OutOfSight(TorchFunctionMode):
    def __init__(self, watch: ControlFlowWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _OUT_OF_SIGHT and self.watch.is_derived(args[0]):
            raise ReadsValues(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(features: Sequence[Tensor], model: nn.Module) -> Iterator[ControlFlowWatch]:
    """Raise `ReadsValues` if ``model`` reads or stores a value of ``features`` in this context."""
    with _OutOfSight(watch := ControlFlowWatch(features, model)), watch:
        yield watch


def _reads(func: Any, inputs: Sequence[Tensor]) -> bool:
    if func == _aten.index.Tensor:  # indexing by numbers gives a shape known beforehand
        return any(index.dtype in (torch.bool, torch.uint8) for index in inputs[1:])
    if func.namespace not in ("aten", "prims"):  # an unknown operation may read anything
        return True
    return not _READING.isdisjoint(func.tags) or func in _READING_TOO


def _written(func: Any, args: tuple[Any, ...]) -> Iterator[Tensor]:
    for value, argument in zip(args, func._schema.arguments, strict=False):
        alias = argument.alias_info
        if isinstance(value, Tensor) and alias is not None and alias.is_write:
            yield value


def _is_among(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
