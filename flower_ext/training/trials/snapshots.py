"""Snapshots of everything that a model can store between two passes, to find what a pass changes.

A pass may change a module's attributes, its weights, an attribute of its class, a variable that a
function or a hook encloses, or a global variable. Functions and classes that the module uses have
such variables, too; they count if they belong to the same project. All these variables are called
places. A `snapshot` holds the values at all places, and `changed_places` names the places where two
snapshots differ. A change elsewhere can only be found by its effect, so the trials also compare
results.
"""

from __future__ import annotations

import logging
import types
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from flower_ext.training.params import Params

Snapshot = dict[str, Hashable]
"""Maps the name of each place to the value there, or to its checksum."""
_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, type(...)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_SKIPPED = (
    *(types.ModuleType, logging.Logger, weakref.ref, types.BuiltinFunctionType),
    *(types.GenericAlias, types.UnionType),
)
_LIBRARIES = ("torch", "numpy", "builtins", "typing", "collections", "functools", "abc", "enum")
_DEEPEST = 40


class _Itself:
    """An object that snapshots compare by its identity only; it lives as long as the snapshot."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def snapshot(**roots: Any) -> Snapshot:
    """Return the values at all places that can be reached from ``roots``, by the places' names."""
    reading = _Reading()
    for name, root in roots.items():
        reading.read(name, root, 0)
    return reading.values


def changed_places(before: Snapshot, after: Snapshot) -> list[str]:
    """Return the places at which two snapshots differ."""
    return sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Return True if all values are equal: exactly on a CPU, up to rounding on an accelerator."""
    exact = {"rtol": 0.0, "atol": 0.0} if one.is_cpu else {}
    return torch.allclose(one, other, equal_nan=True, **exact)


def same_params(one: Params | None, other: Params | None) -> bool:
    """Return True if `same_numbers` is true for all parameters, or both are None."""
    if one is None or other is None:
        return one is other
    return all(map(same_numbers, one.values(), other.values()))


@dataclass(frozen=True)
class _Kind:
    """A way to read the values of a type.

    ``whole`` reads a value as a whole, ``parts`` reads its parts. Without both, it is not read.
    """

    whole: Callable[[Any], Hashable] | None = None
    parts: Callable[[str, Any, Snapshot], Iterable[tuple[str, Any]]] | None = None


class _Reading:
    """The values that one snapshot has read so far."""

    def __init__(self) -> None:
        self.values: Snapshot = {}
        self._seen: dict[int, Any] = {}  # keeps objects alive, so that no identity is reused
        self._kinds: dict[type, _Kind] = {}

    def read(self, name: str, value: Any, depth: int) -> None:
        """Read an object and all that can be reached from it."""
        kind = self._kinds.get(type(value)) or self._kind_of(value)
        if kind.whole is not None:  # read it at each of its places, because these may differ later
            self.values[name] = kind.whole(value)
        elif kind.parts is not None and id(value) not in self._seen and depth <= _DEEPEST:
            self._seen[id(value)] = value
            for part, inner in kind.parts(name, value, self.values):
                self.read(part, inner, depth + 1)

    def _kind_of(self, value: Any) -> _Kind:
        kind = _kind(value)
        if value.__class__ is type(value):  # a proxy looks like an object of another type
            self._kinds[type(value)] = kind
        return kind


def _checksum(tensor: Tensor) -> Hashable:
    try:
        flat = tensor.detach().cpu().contiguous().view(-1)
        crc = zlib.crc32(flat.view(torch.uint8).numpy().data)
        return tuple(tensor.shape), str(tensor.dtype), crc
    except Exception:  # an unusual tensor, such as one that `vmap` leaves behind
        return _Itself(tensor)


def _kind(value: Any) -> _Kind:
    for types_of_kind, kind in _KINDS:
        if isinstance(value, types_of_kind):
            return kind
    return _Kind(parts=_of_object)


def _as_text(value: Any) -> Hashable:
    return type(value), repr(value)  # as a text, because NaN is unequal to itself


def _of_mapping(name: str, value: Any, values: Snapshot) -> Iterator[tuple[str, Any]]:
    """Return the name of a place and the value there, for each key of the mapping ``value``.

    The mapping's own type and length are added to ``values``.
    """
    values[name] = type(value), len(value)
    return ((_inner(name, key), inner) for key, inner in [*value.items()])


def _of_container(name: str, value: Any, values: Snapshot) -> Iterator[tuple[str, Any]]:
    values[name] = type(value), len(value)
    return ((f"{name}[{n}]", inner) for n, inner in enumerate(value))


def _of_method(name: str, method: types.MethodType, _: Snapshot) -> Iterator[tuple[str, Any]]:
    yield name, method.__self__
    yield f"{name}()", method.__func__


def _of_partial(name: str, value: Any, _: Snapshot) -> Iterator[tuple[str, Any]]:
    return ((f"{name}.{key}", getattr(value, key)) for key in ("func", "args", "keywords"))


def _inner(name: str, key: Any) -> str:
    return f"{name}.{key}" if isinstance(key, str) else f"{name}[{key!r}]"


def _of_class(_: str, kind: type, __: Snapshot) -> Iterator[tuple[str, Any]]:
    if not _in_library(kind.__module__):
        for key, inner in [*vars(kind).items()]:
            if not (key.startswith("__") and key.endswith("__")):
                yield f"{kind.__name__}.{key}", inner
    yield from ((base.__name__, base) for base in kind.__bases__)


def _of_function(name: str, function: types.FunctionType, _: Snapshot) -> Iterator[tuple[str, Any]]:
    if _in_library(function.__module__ or ""):
        return
    code = function.__code__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{variable} of {name}", cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    # Most functions have none of these. If a pass adds some, it adds a place.
    if function.__defaults__:
        yield f"defaults of {name}", function.__defaults__
    if function.__kwdefaults__:
        yield f"keyword defaults of {name}", function.__kwdefaults__
    if attributes := vars(function):
        yield f"attributes of {name}", attributes
    for variable in _names(code):
        value = function.__globals__.get(variable)
        if isinstance(value, type | types.FunctionType):
            if _is_near(value, function):
                yield variable, value
        elif value is not None and not isinstance(value, _SKIPPED):
            yield f"global {variable}", value


def _of_object(name: str, value: Any, _: Snapshot) -> Iterator[tuple[str, Any]]:
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        for key, inner in [*held.items()]:
            # The parameters, buffers and children of a module are its attributes.
            hidden = isinstance(value, nn.Module) and key in _OF_MODULES
            yield (name if hidden else _inner(name, key)), inner
        yield type(value).__name__, type(value)
        yield f"{name}()", vars(type(value)).get("__call__")
    for slot in _slots(value):
        if hasattr(value, slot):
            yield f"{name}.{slot}", getattr(value, slot)
    if (pickled := _pickled(value)) is not None:
        yield f"{name} as pickled", pickled


def _slots(value: Any) -> Iterator[str]:
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        yield from (slot for slot in names if slot != "__dict__")


def _pickled(value: Any) -> Any:
    """Return the state of an object that does not keep it in its attributes.

    Iterators, queues and random generators are such objects: pickling them reveals their state. The
    result is None for any other object, because the snapshot reads its attributes. An object that
    cannot be pickled is compared by its identity.
    """
    pickles_itself = any("__reduce__" in vars(base) for base in type(value).__mro__[:-1])
    if isinstance(getattr(value, "__dict__", None), dict) and not pickles_itself:
        return None
    try:
        pickled = value.__reduce_ex__(4)
    except Exception:  # an object may refuse with any error
        return _Itself(value)
    if isinstance(pickled, tuple):
        return [list(part) if isinstance(part, Iterator) else part for part in pickled]
    return pickled


def _is_near(value: Any, function: types.FunctionType) -> bool:
    """Return True if a snapshot that reads ``function`` should also read ``value``, which it uses.

    Both must be in the same project. If the function is in an installed library, both must be in
    the same module, because the snapshot would otherwise reach whole libraries.
    """
    if "site-packages" in function.__code__.co_filename:
        return bool(value.__module__ == function.__module__)
    return _package(value.__module__) == _package(function.__module__)


@cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that a function uses, and the names that functions within it use."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return (*code.co_names, *chain.from_iterable(map(_names, inner)))


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _in_library(module: str) -> bool:
    return _package(module) in _LIBRARIES


_KINDS: tuple[tuple[Any, _Kind], ...] = (
    (_ATOMS, _Kind(whole=_as_text)),
    (Tensor, _Kind(whole=_checksum)),
    (_Itself, _Kind(whole=lambda itself: itself)),
    (_SKIPPED, _Kind()),
    (Mapping, _Kind(parts=_of_mapping)),
    ((list, tuple, set, frozenset), _Kind(parts=_of_container)),
    (type, _Kind(parts=_of_class)),
    (types.FunctionType, _Kind(parts=_of_function)),
    (types.MethodType, _Kind(parts=_of_method)),
    (partial, _Kind(parts=_of_partial)),
    (classmethod | staticmethod, _Kind(parts=lambda name, value, _: [(name, value.__func__)])),
    (torch.Generator, _Kind(parts=lambda name, value, _: [(name, value.get_state())])),
)
"""Types, and how to read their values. The first type that fits counts.

If no type fits, `_of_object` reads the value.
"""
