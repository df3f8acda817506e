"""A watch on models that read values of their features, by which a branch may turn a whole batch.

A model that reads no value applies the same operations to every batch of a shape, whatever its
numbers. One kind of reading is harmless: a test whether *all* or *any* values are true, if a row
that is in every batch decides the answer. Hugging Face's models test in this way whether a mask
hides anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
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
"""Operations that keep each row the row of one example, if the number of rows stays the same."""
_OUT_OF_SIGHT = {
    *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__, Tensor.__format__),
    *(Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage, Tensor.__dlpack__),
}
"""Methods that read values, or expose them, without an operation that a watch sees."""
_DROPPING = {
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout),
}


class ReadsValues(Exception):
    """A model reads values of its features, or keeps some of them."""


class Watch(TorchDispatchMode):
    """Raise `ReadsValues` if a model reads a value derived from its features, or keeps it.

    Parameters
    ----------
    features : sequence of Tensor
        The model's inputs, one row per example; the last row is the same in every pass.
    model : nn.Module
    """

    def __init__(self, features: Sequence[Tensor], model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self.needs_last = len(features[0]), False
        self._own = {_place(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        self._seen: dict[int, StorageWeakRef] = {}  # else an address could be reused
        for leaf in features:
            self._see(leaf)
        self._by_row, self._settled = [*features], list[Tensor]()
        self._counts: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Inspect one operation, then run it."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        depends = drawn or any(map(self.follows, given))
        written = [*_written(func, args)] if depends else []
        if any(_place(tensor) in self._own for tensor in written):
            raise ReadsValues(f"{func} writes into the model")
        if depends and _reads(func, given):
            if not _among(given[0], self._settled):
                raise ReadsValues(str(func))
            self.needs_last = True
        out = func(*args, **(kwargs or {}))
        if depends:
            for tensor in [*written, *tree_leaves(out)]:
                if isinstance(tensor, Tensor):
                    self._see(tensor)
            if given and isinstance(out, Tensor):
                self._note(func, args, given, out)
        return out

    def follows(self, tensor: Tensor) -> bool:
        """Return True if a tensor was derived from features."""
        return _place(tensor) in self._seen

    def _see(self, tensor: Tensor) -> None:
        if (place := _place(tensor)) not in self._seen:
            self._seen[place] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def _note(self, func: Any, args: tuple[Any, ...], given: list[Tensor], out: Tensor) -> None:
        """Record results with one row per example, and answers that the last row decides."""
        taken = given[0]
        if func == _aten.eq.Scalar and any(
            taken is count and args[1] == most for count, most in self._counts
        ):
            self._settled.append(out)
        if not _among(taken, self._by_row):
            return
        if func in _ROW_BY_ROW and not any(map(self.follows, given[1:])):
            along_rows = (func == _aten.slice.Tensor and args[1:2] in [(), (0,)]) or (
                func == _aten.index.Tensor and args[1][0] is not None
            )
            if not along_rows and out.dim() and len(out) == self.rows:
                self._by_row.append(out)
        has_zero, has_some = not bool(taken[-1].all()), bool(taken[-1].any())
        if (func == _aten.all.default and has_zero) or (func == _aten.any.default and has_some):
            self._settled.append(out)
        if func == _aten.sum.default and has_zero and taken.dtype == torch.bool:
            self._counts.append((out, taken.numel()))  # the count never reaches this number


class _OutOfSight(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _OUT_OF_SIGHT and self.watch.follows(args[0]):
            raise ReadsValues(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(features: Sequence[Tensor], model: nn.Module) -> Iterator[Watch]:
    """Raise `ReadsValues` if ``model`` reads or keeps a value of ``features`` within the block."""
    with _OutOfSight(watch := Watch(features, model)), watch:
        yield watch


class deterministic(TorchFunctionMode):
    """Switch off a model's random parts, such as dropout, so that it does the same twice."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the function without its random part."""
        if func in _DROPPING:
            return args[0] if args else (kwargs or {})["input"]
        if func is functional.rrelu:
            return functional.leaky_relu(args[0], 0.2)
        if func is functional.scaled_dot_product_attention:
            kwargs = {name: own for name, own in (kwargs or {}).items() if name != "dropout_p"}
        return func(*args, **(kwargs or {}))


def _reads(func: Any, given: list[Tensor]) -> bool:
    if func == _aten.index.Tensor:  # indexing by numbers gives a shape known beforehand
        return any(index.dtype in (torch.bool, torch.uint8) for index in given[1:])
    if func.namespace not in ("aten", "prims"):  # an unknown operation may read anything
        return True
    return not _READING.isdisjoint(func.tags) or func in _READING_TOO


def _written(func: Any, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes into."""
    for value, said in zip(args, func._schema.arguments, strict=False):
        if isinstance(value, Tensor) and said.alias_info is not None and said.alias_info.is_write:
            yield value


def _among(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _place(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place
