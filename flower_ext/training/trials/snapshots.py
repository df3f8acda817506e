"""Snapshots of everything that a model can store between two passes, to find what a pass changes.

A pass may change a module's attributes, its weights, an attribute of its class, a variable in the
closure of a function or a hook, or a global variable. Functions and classes that the module uses
have such variables, too. These count if the function or class is part of the same project. All
these variables are called places. A `snapshot` holds the values at all places, and `changed_places`
names the places where two snapshots differ. A change elsewhere can only be found by its effect, so
`find_carried_change` also compares results.
"""

import logging
import pickle
import random
import types
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.training.isolation import attempted, seeded
from flower_ext.training.params import Params

Snapshot = dict[str, Hashable]
"""Maps the name of each place to the value there, or to its checksum."""
_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, type(...)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
_EQUAL_TO_ITSELF = frozenset({type(None), bool, int, str, bytes})
_SEQUENCES = (list, tuple, set, frozenset)
_CODE = (type, types.FunctionType)
_BRANCHES = frozenset({*_SEQUENCES, dict, *_CODE, types.MethodType})
"""Most values have one of these types, so snapshots compare the type before any base class."""
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_SKIPPED = (
    *(types.ModuleType, logging.Logger, weakref.ref, types.BuiltinFunctionType),
    *(types.GenericAlias, types.UnionType),
)
_LIBRARIES = frozenset(
    {"torch", "numpy", "builtins", "typing", "collections", "functools", "abc", "enum"}
)
_DEEPEST = 40
_GENERATORS = "the global generator of numpy.random or random (draw from torch.rand instead)"


class Observed(NamedTuple):
    """A fresh computation on examples, and the roots of the snapshots that show what it stores."""

    roots: Mapping[str, Any]
    step: Callable[[Tree, Tree], Params]


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
    values: Snapshot = {}
    seen: dict[int, Any] = {}  # keeps objects alive, so that no identity is reused

    def read(name: str, value: Any, depth: int) -> None:
        # Read a number or a tensor at each of its places, because these may differ later.
        kind = type(value)
        if kind in _EQUAL_TO_ITSELF:
            values[name] = kind, value
            return
        if kind not in _BRANCHES:
            if isinstance(value, _ATOMS):
                values[name] = kind, repr(value)  # as a text, because NaN is unequal to itself
                return
            if isinstance(value, Tensor):
                values[name] = _checksum(value)
                return
            if isinstance(value, _Itself):
                values[name] = value
                return
            if isinstance(value, _SKIPPED):
                return
        if id(value) not in seen and depth <= _DEEPEST:
            seen[id(value)] = value
            for part, inner in _parts(name, value, values):
                read(part, inner, depth + 1)

    for name, root in roots.items():
        read(name, root, 0)
    return values


def changed_places(before: Snapshot, after: Snapshot) -> list[str]:
    """Return the places at which two snapshots differ."""
    return sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )


def find_carried_change(
    begin: Callable[[], Observed],
    inputs: Sequence[tuple[Tree, Tree]],
    orders: Sequence[Iterable[int]],
    device: torch.device,
) -> tuple[str | None, list[Params | Exception]]:
    """Return a place at which a step changes what later steps compute, and an empty list.

    If there is no such place, return None, and each input's result or error in the first order.

    Steps run on the features and targets of ``inputs``, in each of the ``orders``. ``begin`` is
    called once per order. Only the first step of an order that succeeds, and steps that fail before
    it, may store something, such as a table of positions. What they store must not depend on
    ``inputs``.
    """
    results = defaultdict[int, list[Params | Exception]](list)
    first: list[Snapshot] = []
    states = np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002
    try:
        for order in orders:
            roots, step = begin()
            before = prepared = _with_generators(roots)
            is_prepared = False
            for number in order:
                x, y = trees.mapped(Tensor.clone, inputs[number])  # the step may write into them
                with seeded(0, device):
                    result = attempted(step, x, y)
                results[number].append(result)
                after = _with_generators(roots)
                if not is_prepared:  # a step may raise before it stores anything
                    prepared, is_prepared = after, not isinstance(result, Exception)
                elif places := changed_places(prepared, after):
                    return places[0], []
            # The first input differs between orders, but the first steps must store the same.
            first = first or [before, prepared]
            for place in changed_places(*first):
                if first[1].get(place) != prepared.get(place):
                    return place, []
    finally:
        np.random.set_state(states[0])  # noqa: NPY002
        random.setstate(states[1])
    if not all(same_params(one, other) for one, *others in results.values() for other in others):
        return "a variable elsewhere", []
    return None, [results[number][0] for number in range(len(inputs))]


def _with_generators(roots: Mapping[str, Any]) -> Snapshot:
    """Return a snapshot that includes the states of the global generators of NumPy and Python."""
    states = pickle.dumps((np.random.get_state(legacy=False), random.getstate()))  # noqa: NPY002
    return snapshot(**roots, **{_GENERATORS: states})


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Return True if all values are equal: exactly on a CPU, up to rounding on an accelerator."""
    exact = {"rtol": 0.0, "atol": 0.0} if one.is_cpu else {}
    return torch.allclose(one, other, equal_nan=True, **exact)


def same_params(one: Params | Exception, other: Params | Exception) -> bool:
    """Return True if `same_numbers` is true for all parameters, or if two errors are given."""
    if isinstance(one, Exception) or isinstance(other, Exception):
        return isinstance(one, Exception) and isinstance(other, Exception)
    return all(map(same_numbers, one.values(), other.values()))


def _checksum(tensor: Tensor) -> Hashable:
    try:
        flat = tensor.detach().cpu().contiguous().view(-1)
        crc = zlib.crc32(flat.view(torch.uint8).numpy().data)
        return tuple(tensor.shape), str(tensor.dtype), crc
    except Exception:  # an unusual tensor, such as one that `vmap` leaves behind
        return _Itself(tensor)


def _parts(name: str, value: Any, values: Snapshot) -> Iterable[tuple[str, Any]]:
    """Return an object's places and their contents; add the object's length to ``values``."""
    if isinstance(value, Mapping):
        values[name] = type(value), len(value)
        return [(_inner(name, key), inner) for key, inner in [*value.items()]]
    if isinstance(value, _SEQUENCES):
        values[name] = type(value), len(value)
        return [(f"{name}[{number}]", inner) for number, inner in enumerate(value)]
    if isinstance(value, type):
        return _of_class(value)
    if isinstance(value, types.FunctionType):
        return _of_function(name, value)
    if isinstance(value, types.MethodType):
        return [(name, value.__self__), (f"{name}()", value.__func__)]
    if isinstance(value, partial):
        return [(f"{name}.{key}", getattr(value, key)) for key in ("func", "args", "keywords")]
    if isinstance(value, classmethod | staticmethod):
        return [(name, value.__func__)]
    if isinstance(value, torch.Generator):
        return [(name, value.get_state())]
    return _of_object(name, value)


def _inner(name: str, key: Any) -> str:
    return f"{name}.{key}" if isinstance(key, str) else f"{name}[{key!r}]"


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    if _package(kind.__module__) not in _LIBRARIES:
        for key, inner in [*vars(kind).items()]:
            if not (key.startswith("__") and key.endswith("__")):
                yield f"{kind.__name__}.{key}", inner
    yield from ((base.__name__, base) for base in kind.__bases__)


def _of_function(name: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if _package(function.__module__) in _LIBRARIES:
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
    variables = function.__globals__
    for variable in _names(code):
        value = variables.get(variable)
        if value is None:  # most names are those of attributes
            continue
        if isinstance(value, _CODE):
            if _is_near(value, function):
                yield variable, value
        elif not isinstance(value, _SKIPPED):
            yield f"global {variable}", value


def _of_object(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        for key, inner in [*held.items()]:
            # The parameters, buffers and children of a module are its attributes.
            hidden = isinstance(value, nn.Module) and key in _OF_MODULES
            yield (name if hidden else _inner(name, key)), inner
        yield type(value).__name__, type(value)
        yield f"{name}()", vars(type(value)).get("__call__")
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot != "__dict__" and hasattr(value, slot):
                yield f"{name}.{slot}", getattr(value, slot)
    if (pickled := _pickled(value)) is not None:
        yield f"{name} as pickled", pickled


def _pickled(value: Any) -> Any:
    """Return the state of an object that does not keep it in its attributes; None for others.

    Iterators, queues and random generators are such objects: pickling them reveals their state. An
    object that cannot be pickled is compared by its identity.
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

    It should if ``value`` and the function are in the same project. In an installed library, they
    must be in the same module, because the snapshot would otherwise reach whole libraries.
    """
    if "site-packages" in function.__code__.co_filename:
        return bool(value.__module__ == function.__module__)
    return _package(value.__module__) == _package(function.__module__)


@cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that a function uses, and the names that functions within it use."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return (*dict.fromkeys((*code.co_names, *chain.from_iterable(map(_names, inner)))),)


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]
