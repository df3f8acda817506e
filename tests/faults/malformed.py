"""Malformed messages, each made from a well-formed one.

Every mutation makes any message malformed; none leaves a message valid by chance.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ConfigRecord, Error, Message, MetricRecord, RecordDict

from flower_ext.federation.messages import records

Mutation = Callable[[Message, np.random.Generator], None]


def copied(message: Message) -> Message:
    """Return a copy that may be changed without changing ``message``; the copies share arrays."""
    fresh = copy.copy(message)
    metadata = copy.copy(message.metadata)
    metadata.__dict__.update(message.metadata.__dict__)
    content = message.content if message.has_content() else None
    fresh.__dict__["_metadata"] = metadata
    if content is not None:
        fresh.__dict__["_content"] = RecordDict({k: copy_record(r) for k, r in content.items()})
    return fresh


def copy_record(record: Any) -> Any:
    """Return another record with the same values."""
    fresh = type(record)()
    for name, value in record.items():
        fresh[name] = value
    return fresh


def malformed(
    message: Message, rng: np.random.Generator, mutations: Mapping[str, Mutation]
) -> tuple[str, Message]:
    """Return a malformed copy of a well-formed message, and the name of its fault."""
    name = str(rng.choice(list(mutations)))
    changed = copied(message)
    mutations[name](changed, rng)
    return name, changed


def npy(values: np.ndarray, *, allow_pickle: bool = False) -> bytes:
    """Return an array as NumPy writes it."""
    file = BytesIO()
    np.save(file, values, allow_pickle=allow_pickle)
    return file.getvalue()


def archive(values: np.ndarray) -> bytes:
    """Return a zip file of arrays, which ``numpy.load`` opens, too."""
    file = BytesIO()
    np.savez(file, values)
    return file.getvalue()


def announced(values: np.ndarray, shape: tuple[int, ...]) -> bytes:
    """Return the header of an array of ``shape``, followed by other numbers."""
    file = BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(values.dtype), "fortran_order": False}
    np.lib.format.write_array_header_1_0(file, {**facts, "shape": shape})
    return file.getvalue() + values.tobytes()


class Executed(RuntimeError):
    """Raised when a pickled object is loaded."""


def _explode() -> None:
    raise Executed("a pickled object was executed")


class _Bomb:
    def __reduce__(self) -> Any:
        return _explode, ()


def _forged(data: bytes, like: Array, **declared: Any) -> Array:
    facts = {"dtype": like.dtype, "shape": tuple(like.shape), "stype": like.stype, **declared}
    return Array(data=data, **facts)


def _values(changed: Callable[[np.ndarray, np.random.Generator], np.ndarray]) -> Any:
    def change(array: Array, rng: np.random.Generator) -> Array:
        return Array(np.asarray(changed(array.numpy().copy(), rng)))

    return change


def _with(*specials: float) -> Any:
    """Return a fault that replaces one number, or all, by a value that no model has."""

    def change(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        special = rng.choice(np.array(specials))
        if rng.random() < 0.5:
            values[...] = special
        else:
            values.flat[rng.integers(values.size)] = special
        return values

    return change


ARRAYS: dict[str, Callable[[Array, np.random.Generator], Array]] = {
    "one dimension more": _values(lambda v, rng: v[np.newaxis]),
    "longer": _values(lambda v, rng: np.concatenate([v.ravel(), v.ravel()[:1]])),
    "without numbers": _values(lambda v, rng: v.ravel()[:0]),
    "another type": _values(
        lambda v, rng: v.astype(
            rng.choice([t for t in ("f2", "f8", "i4", "c8", "?", "u2") if np.dtype(t) != v.dtype])
        )
    ),
    "text": _values(lambda v, rng: v.astype("U8")),
    "the other byte order": lambda a, rng: _forged(
        npy(a.numpy().astype(">f8" if a.numpy().dtype.itemsize == 1 else _swapped(a))), a
    ),
    "truncated": lambda a, rng: _forged(a.data[: rng.integers(len(a.data))], a),
    "followed by more": lambda a, rng: _forged(a.data + rng.bytes(1 + int(rng.integers(64))), a),
    "garbage": lambda a, rng: _forged(rng.bytes(int(rng.integers(1, 400))), a),
    "no bytes": lambda a, rng: _forged(b"", a),
    "a broken header": lambda a, rng: _forged(a.data[:10] + rng.bytes(20) + a.data[30:], a),
    "pickled": lambda a, rng: _forged(npy(np.array([_Bomb()], dtype=object), allow_pickle=True), a),
    "an archive": lambda a, rng: _forged(archive(a.numpy()), a),
    "announced larger": lambda a, rng: _forged(announced(a.numpy(), (2**40,)), a),
    "announced negative": lambda a, rng: _forged(announced(a.numpy(), (-1, -a.numpy().size)), a),
    "declared in another shape": lambda a, rng: _forged(a.data, a, shape=(*a.shape, 2)),
    "declared as another type": lambda a, rng: _forged(
        a.data, a, dtype=str(rng.choice(["float16", "object", "nonsense", ""]))
    ),
    "serialised otherwise": lambda a, rng: _forged(a.data, a, stype="pickle"),
}
"""Faults of any array."""

FLOATS: dict[str, Callable[[Array, np.random.Generator], Array]] = {
    "NaN": _values(_with(np.nan)),
    "infinite": _values(_with(np.inf, -np.inf)),
    "huge": _values(_with(3e38, -3e38, 1e20, -1e16)),
}
"""Further faults of an array of weights."""


def _swapped(array: Array) -> np.dtype:
    return array.numpy().dtype.newbyteorder()


def in_array(
    record: str, change: Callable[[Array, np.random.Generator], Array], only: str | None = None
) -> Mutation:
    """Return a fault of one array of ``record``."""

    def mutation(message: Message, rng: np.random.Generator) -> None:
        arrays = message.content.array_records[record]
        full = [name for name, array in arrays.items() if 0 not in array.shape]
        name = only or str(rng.choice(full))
        arrays[name] = change(arrays[name], rng)

    return mutation


def without_record(record: str) -> Mutation:
    def mutation(message: Message, rng: np.random.Generator) -> None:
        del message.content[record]

    return mutation


def _other_record(record: str) -> Mutation:
    """Return a mutation that replaces a record by one of another type."""

    def mutation(message: Message, rng: np.random.Generator) -> None:
        del message.content[record]
        if rng.random() < 0.5:
            message.content[record] = MetricRecord({"w": 1.0})
        else:
            message.content[record] = ConfigRecord({"w": b"1"})

    return mutation


def _renamed_record(record: str) -> Mutation:
    """Return a mutation that renames a record."""

    def mutation(message: Message, rng: np.random.Generator) -> None:
        kept: Any = message.content[record]
        del message.content[record]
        message.content[record + "-"] = kept

    return mutation


def _names(record: str, how: str) -> Mutation:
    """Return a mutation that adds, removes or renames an array of a record."""

    def mutation(message: Message, rng: np.random.Generator) -> None:
        arrays = message.content.array_records[record]
        name = str(rng.choice(list(arrays)))
        if how in ("more", "renamed"):
            arrays[str(rng.choice(["", "é", "x" * 5_000, name + " ", "__class__"]))] = arrays[name]
        if how in ("fewer", "renamed"):
            del arrays[name]
        if how == "none":
            arrays.clear()

    return mutation


def of_record(record: str, *, floats: bool = True) -> dict[str, Mutation]:
    """Return all faults of a requested record of arrays."""
    changes = {**ARRAYS, **(FLOATS if floats else {})}
    return {
        **{f"array {name}": in_array(record, change) for name, change in changes.items()},
        "record missing": without_record(record),
        "record of another kind": _other_record(record),
        "record under another name": _renamed_record(record),
        **{f"{how} arrays": _names(record, how) for how in ("more", "fewer", "renamed", "none")},
    }


def metric(name: str, values: Iterable[Any]) -> Mutation:
    """Return a fault that sets a metric to one of these values."""
    options = list(values)

    def mutation(message: Message, rng: np.random.Generator) -> None:
        value = options[rng.integers(len(options))]
        where = message.content.metric_records.get(records.METRICS, MetricRecord())
        where[name] = value
        message.content[records.METRICS] = where

    return mutation


METRICS: dict[str, Mutation] = {
    "metric NaN or infinite": metric("any", [float("nan"), float("inf"), -float("inf")]),
    "metric huge": metric("any", [1e300, -1e16, 10**400]),
    "size impossible": metric(
        "num-examples", [-1, -1e9, 0.5, 2**41, 1e300, float("nan"), [1], 10**400]
    ),
}


def _set(field: str, values: Callable[[Message, np.random.Generator], Any]) -> Mutation:
    def mutation(message: Message, rng: np.random.Generator) -> None:
        message.metadata.__dict__[field] = values(message, rng)

    return mutation


def _error(message: Message, rng: np.random.Generator) -> None:
    message.__dict__["_content"] = None
    message.__dict__["_error"] = Error(code=int(rng.integers(9)), reason="x" * int(rng.integers(9)))


def _empty(message: Message, rng: np.random.Generator) -> None:
    message.__dict__["_content"] = RecordDict()


def _nothing(message: Message, rng: np.random.Generator) -> None:
    message.__dict__["_content"] = None


ENVELOPE: dict[str, Mutation] = {
    "an error": _error,
    "empty": _empty,
    "nothing": _nothing,
    "of another round": _set(
        "_group_id",
        lambda m, rng: rng.choice(["", "-1", "0x1", "9" * 40, f"{m.metadata.group_id} ", "NaN"]),
    ),
    "of another method": _set(
        "_message_type", lambda m, rng: rng.choice(["train.nobody", "query.identity", "evaluate"])
    ),
    "of a node that was not asked": _set(
        "_src_node_id", lambda m, rng: int(rng.choice([0, 1, -1, 999, 2**63 - 1]))
    ),
    "to another message": _set("_reply_to_message_id", lambda m, rng: f"{rng.integers(2**40)}-"),
}
"""Faults of any reply."""

TRAIN: dict[str, Mutation] = {**of_record(records.UPDATE), **METRICS, **ENVELOPE}
"""Faults of an upload."""

EVALUATE: dict[str, Mutation] = {
    **METRICS,
    **ENVELOPE,
    "record missing": without_record(records.METRICS),
}
"""Faults of scores."""

ANSWER: dict[str, Mutation] = {**of_record(records.ANSWER, floats=False), **ENVELOPE}
"""Faults of an answer to a question."""


def fact(name: str, values: Iterable[Any]) -> Mutation:
    """Return a fault that replaces a fact of the round; `MISSING` removes it."""
    options = list(values)

    def mutation(message: Message, rng: np.random.Generator) -> None:
        facts = message.content.config_records[records.ROUND]
        value = options[rng.integers(len(options))]
        if value is MISSING:
            del facts[name]
        else:
            facts[name] = value

    return mutation


class _Missing:
    """The absence of a value."""


MISSING = _Missing()
_NO_AMOUNT = [0, 0.0, -1.0, float("nan"), float("inf"), -float("inf"), "1", b"1", True, [1.0]]


def _training(field: str, values: Iterable[Any]) -> Mutation:
    """Return a mutation that gives a field of the local training another value."""
    options = list(values)

    def mutation(message: Message, rng: np.random.Generator) -> None:
        names = [n for n in message.content.config_records if n.startswith(records.TRAINING)]
        record = message.content.config_records[str(rng.choice(names))]
        record[field] = options[rng.integers(len(options))]

    return mutation


def _without_training(message: Message, rng: np.random.Generator) -> None:
    names = [n for n in message.content.config_records if n.startswith(records.TRAINING)]
    del message.content[str(rng.choice(names))]


def _nobody_asked(message: Message, rng: np.random.Generator) -> None:
    message.metadata.__dict__["_message_type"] = str(rng.choice(["train.nobody", "query.nobody"]))


def requests(facts: Iterable[str]) -> dict[str, Mutation]:
    """Return all faults of a request to train under a protection with these facts."""
    amounts = [name for name in facts if name.endswith(("-norm", "-stddev", "rate"))]
    model = of_record(records.MODEL)
    # Sharing fewer parameters is valid; weights of 1e16 are a bad model, but not malformed.
    left_out = ("array huge", "fewer arrays")
    return {
        **{name: change for name, change in model.items() if name not in left_out},
        **{f"{name} impossible": fact(name, _NO_AMOUNT) for name in amounts},
        **{f"{name} missing": fact(name, [MISSING]) for name in [*amounts, "seeded-noise"]},
        "seeded noise": fact("seeded-noise", [True, 1, "false", b"", 0]),
        "unknown fact": fact("noise-multiplier", [0.0, 1.0]),
        "number impossible": fact("number", [0, -3, 1.5, float("nan"), "1", MISSING, True]),
        "seed impossible": fact("seed", [-1, 0.5, float("nan"), "x", MISSING]),
        "remembered impossible": fact("remembered", [-1, 0.5, float("nan"), "1", b"", True]),
        "no facts": without_record(records.ROUND),
        "facts of another kind": _other_record(records.ROUND),
        "no training": _without_training,
        "training unknown": _training("rate", [0.1]),
        "training impossible": _training(
            "learning_rate", [0.0, -1.0, float("nan"), float("inf"), "0.1", b"1", [0.1]]
        ),
        "training endless": _training("epochs", [-1, float("nan"), float("inf"), "1"]),
        "batches impossible": _training("batch_size", [0, -5, float("nan"), "8"]),
        "empty": _empty,
        "of another method": _nobody_asked,
    }
