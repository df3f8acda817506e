"""Tensors and settings as Flower records, and the checks on replies.

The server refuses a reply that fails a check. It counts and reports the reply, never aggregates it,
and treats its client as a dropout in the privacy plan.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from logging import getLogger
from typing import TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from flower_ext.errors import FlowerExtError, InvalidValue
from flower_ext.federation.arrays import Arrays as Arrays
from flower_ext.federation.arrays import read_array
from flower_ext.federation.arrays import to_arrays as to_arrays
from flower_ext.federation.arrays import to_params as to_params
from flower_ext.federation.arrays import to_record as to_record
from flower_ext.federation.failures import printable, said
from flower_ext.federation.uploads import METRICS as METRICS
from flower_ext.federation.uploads import UPDATE as UPDATE
from flower_ext.federation.uploads import Update as Update
from flower_ext.federation.uploads import UploadReply, sender_of
from flower_ext.federation.uploads import metrics_record as metrics_record
from flower_ext.training import LocalTraining, UnshareableModel

log = getLogger("flwr")

T = TypeVar("T")
K = TypeVar("K", ArrayRecord, ConfigRecord, MetricRecord)

MODEL = "arrays"
"""Record of a whole model (or its shared part), as every Flower app names it."""
ROUND = "round"
"""Record of the facts of a round."""
SETTINGS = "settings"
"""Record of the method's own numbers (a regularisation weight, …)."""
FROZEN = "frozen"
"""Record by which the server asks a client to confirm the frozen part of its model."""
SECURE_SUM = "secure-sum"
"""Record of a client's facts and arrays for the secure sum of a round."""
QUERY = "query"
"""Config record of a query beside the training: its name and its fields, as JSON."""
QUESTION = "question"
"""Record of a method's question to its client side, beside the rounds."""
ANSWER = "answer"
"""Record of a client's arrays, without noise, in answer to a question."""
CONFIG = "config"
"""Record of the values that the user passes to ``start``, for their own ClientApps."""
TRAINING = "training."
"""Prefix of the records that carry one ``LocalTraining`` each."""
RESERVED = frozenset({MODEL, ROUND, SETTINGS, CONFIG, SECURE_SUM, QUERY})
"""Names of records beside which a method may send groups of its own."""


_FEWEST_RANDOM = 8
"""Fewest numbers, at least half of them different, that are equal only if one is a copy."""
LARGEST_VALUE = 1e15
"""Largest accepted weight or score. Sums and squares of such numbers fit a float32."""
LARGEST_SIZE = 2**40
"""Largest number of examples that a client may report."""
LONGEST_NAME = 100
"""Most characters of a metric's name."""
LONGEST_REASON = 1_000
"""Most characters of a refusal, because a client wrote part of it."""
_NAMES_SHOWN = 3
"""Most names of arrays in a refusal."""

_WRAPPED = (
    "; if it wraps the model, as Opacus, torch.compile and DataParallel do, let it return the "
    "state_dict of the model itself"
)
"""Likely reason why a ClientApp returns arrays of other names."""

_DIVERGES = "local training diverges, or the client is hostile; try a smaller learning rate"


class RefusedReply(InvalidValue):
    """A reply that must not be aggregated; the message says why."""


def shared_arrays(record: ArrayRecord) -> Arrays:
    """Return the arrays of a model that may be shared.

    Raises
    ------
    UnshareableModel
        An array is not floating-point (a counter, an index), has half precision or is a running
        statistic; the message names it.
    """
    arrays = to_arrays(record)
    refuse_half_precision(arrays)
    remedy = (
        "leave it out of the initial arrays. In the model of a Task, compute a constant in the "
        "forward pass, or make it personal=({!r},) if the method has personal parts; a ClientApp "
        "of your own loads the model with strict=False"
    )
    for name, array in arrays.items():
        layer, _, leaf = name.rpartition(".")
        if leaf in {"running_mean", "running_var", "num_batches_tracked"}:
            raise UnshareableModel(
                f"{name!r} is a BatchNorm statistic of the clients' data; neither clipping nor "
                f"noise covers it. Use GroupNorm in layer {layer!r} "
                f"(flower_ext.training.replace_batch_norm), or {remedy.format(layer or name)}"
            )
        if not np.issubdtype(array.dtype, np.floating):
            raise UnshareableModel(
                f"{name!r} has dtype {array.dtype}; only floating-point arrays can be shared: "
                f"{remedy.format(name)}"
            )
    return arrays


def refuse_tied(record: ArrayRecord) -> None:
    """Refuse initial arrays in which one parameter has two names, as a ``state_dict`` has it.

    Noise would drive the two apart, and norms would count them twice. Arrays show no tie, but equal
    random numbers do. Layers that begin as copies of one layer, as in ``nn.TransformerEncoder``,
    have names that differ in numbers only; for them a warning has to do.

    Raises
    ------
    UnshareableModel
        The message names both.
    """
    first: dict[tuple[str, tuple[int, ...], bytes], str] = {}
    for name, array in to_arrays(record).items():
        if 2 * len(np.unique(array)) <= max(array.size, _FEWEST_RANDOM):
            continue  # constants, such as zeros and ones, may be equal by chance
        content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
        other = first.setdefault((str(array.dtype), array.shape, content), name)
        if other == name:
            continue
        tie = f"{name!r} begins with the numbers of {other!r}, as if tied to it"
        fix = (
            f"leave {name!r} out of the initial arrays, and let the ClientApp load the model with "
            "strict=False, which fills both; parameters that are not tied must begin apart"
        )
        if re.sub(r"\d+", "", name) == re.sub(r"\d+", "", other):
            log.warning("%s. If they are tied, noise drives them apart: %s", tie, fix)
            continue
        raise UnshareableModel(f"{tie}; noise would drive the two apart: {fix}")


def refuse_half_precision(arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse arrays in which noised uploads do not add up on a common grid.

    Raises
    ------
    UnshareableModel
        An array has less than single precision; the message names it.
    """
    for name, array in arrays.items():
        if np.issubdtype(array.dtype, np.floating) and array.dtype.itemsize < 4:
            raise UnshareableModel(
                f"{name!r} has dtype {array.dtype}, which cannot be sent under noise: expected "
                "float32 or float64; build the model in float32 (model.float())"
            )


def of_kind(content: RecordDict, kind: type[K]) -> dict[str, K]:
    """Return the records of one kind, as a copy; Flower's properties check and write each again."""
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
    """Return bytes as an array, which is sent and counted like any other."""
    return np.frombuffer(data, dtype=np.uint8)


def read_bytes(arrays: Mapping[str, np.ndarray], name: str, length: int) -> bytes:
    """Undo `to_bytes_array`.

    Raises
    ------
    RefusedReply
        ``name`` is missing or does not hold ``length`` bytes.
    """
    array = arrays.get(name)
    if array is None or array.dtype != np.uint8 or array.shape != (length,):
        kind = "nothing" if array is None else f"{array.dtype}{array.shape}"
        raise RefusedReply(f"{name!r}: expected {length} bytes, got {kind}")
    return array.tobytes()


def accept(
    replies: Iterable[Message],
    *,
    asked: Mapping[int, int],
    server_round: int,
    read: Callable[[Message], T],
    refuse: Callable[[str], None],
    questions: Mapping[int, Message] | None = None,
) -> Iterator[tuple[int, T]]:
    """Yield one well-formed reply of this round from each node that was asked.

    Replies are read as they arrive, and yielded in the order of ``asked``, so that sums over them
    do not depend on who answers first. An early reply waits for those before it, as long as they
    may still arrive.

    Parameters
    ----------
    asked : Mapping[int, int]
        Node ids by partition.
    questions : Mapping[int, Message], optional
        The message to each node. A reply must have the same type and refer to this message.
    read : Callable[[Message], T]
        Reads one reply, or raises `RefusedReply`. Any other error refuses the reply as well: bytes
        from outside may provoke each of them, and one message must not end a run.
    refuse : Callable[[str], None]
        Called with the reason for each refusal.
    """
    waiting = {node: partition for partition, node in asked.items()}
    early: dict[int, T] = {}
    due, refused = deque(asked), set[int]()
    for reply in replies:
        node = sender_of(reply)
        try:
            if node not in waiting:
                if reply.has_error():  # from the SuperLink, for a node
                    raise RefusedReply(f"an error came in place of a reply: {said(reply.error)}")
                raise RefusedReply("not asked in this round, or answered already")
            _check_origin(reply, questions.get(node) if questions else None, str(server_round))
            value = read(reply)
        except Exception as error:
            reason = printable(_reason(error)[:LONGEST_REASON])
            refuse(f"round {server_round}, node {node}: {reason}"[:LONGEST_REASON])
            if node in waiting:  # stop waiting for it, though it may answer again
                refused.add(waiting[node])
        else:
            early[waiting.pop(node)] = value
        # In the order of ``asked`` a sum has the same bits, whoever answers first.
        while due and (due[0] in early or due[0] in refused):
            if (first := due.popleft()) in early:
                yield first, early.pop(first)
    for partition in sorted(early):
        yield partition, early.pop(partition)


def _reason(error: Exception) -> str:
    if isinstance(error, FlowerExtError):
        return str(error)
    log.debug("a reply cannot be read", exc_info=error)
    return f"the reply cannot be read: {type(error).__name__}: {error}"


def _check_origin(reply: Message, question: Message | None, number: str) -> None:
    """Refuse a reply of another round, or to another message than ``question``, if one is known."""
    if question is not None and isinstance(reply, UploadReply) and reply.question is question:
        return  # made in this process, for this message
    received = reply.metadata
    if received.group_id != number:
        raise RefusedReply(f"answers round {received.group_id}")
    if question is None:
        return
    expected = question.metadata
    if received.message_type != expected.message_type:
        raise RefusedReply(f"answers {received.message_type!r}, expected {expected.message_type!r}")
    if expected.message_id and received.reply_to_message_id != expected.message_id:
        raise RefusedReply("answers another message of this round")


def read_update(reply: Message, *, base: Mapping[str, np.ndarray], trust_models: bool) -> Update:
    """Return the update in a training reply.

    Parameters
    ----------
    reply : Message
    base : Mapping[str, np.ndarray]
        The global model that was sent. The update must have its names, shapes and dtypes.
    trust_models : bool
        True to accept a whole model (record ``arrays``) in place of an update, so that any
        ClientApp can take part. Use it only if the server bounds and noises.

    Raises
    ------
    RefusedReply
        The reply is an error or lacks the record; names, shapes or dtypes are wrong; or values are
        unreadable, not finite or beyond `LARGEST_VALUE`.
    """
    if isinstance(reply, UploadReply) and (update := reply.update) is not None:
        return Update(_checked(update.arrays, base), _checked_metrics(update.metrics.items()))
    content = _content(reply)
    if isinstance(record := content.get(UPDATE), ArrayRecord):
        arrays = _checked(record, base)
    elif trust_models and isinstance(model := content.get(MODEL), ArrayRecord):
        arrays = moved_by(model, base)
    else:
        expected = f"{UPDATE!r} or {MODEL!r}" if trust_models else f"{UPDATE!r}"
        raise RefusedReply(f"no array record {expected}; it has {sorted(content.keys())}")
    return Update(arrays, _metrics(content))


def moved_by(model: ArrayRecord, base: Mapping[str, np.ndarray]) -> Arrays:
    """Return a trained model minus the ``base`` that its ClientApp received.

    Raises
    ------
    RefusedReply
        The model lacks an array of ``base``, or its arrays are not like those. It may have more.
    """
    if missing := sorted(base.keys() - model.keys()):
        raise RefusedReply(
            f"the ClientApp returned {_names_in(model)}, but no {missing[0]!r}: expected every "
            f"array that it received{_WRAPPED}"
        )
    trained = _checked({name: model[name] for name in base}, base)
    return {name: np.asarray(trained[name] - base[name]) for name in base}


def _names_in(arrays: Iterable[str]) -> str:
    """Return the first names of a model's arrays, for a message."""
    names = sorted(arrays)
    shown = [repr(name[:LONGEST_NAME]) for name in names[:_NAMES_SHOWN]]
    return ", ".join(shown + ["…"] * (len(names) > _NAMES_SHOWN)) or "no arrays"


def read_metrics(reply: Message) -> dict[str, float]:
    """Return the finite scalar metrics of a reply; lists of numbers are left out.

    Raises
    ------
    RefusedReply
        The reply is an error; a name is not printable or is longer than `LONGEST_NAME`; a value is
        not a finite number or is beyond `LARGEST_VALUE`; or ``num-examples`` is not a whole number.
    """
    return _metrics(_content(reply))


def _metrics(content: RecordDict) -> dict[str, float]:
    records = (record for record in content.values() if isinstance(record, MetricRecord))
    return _checked_metrics(item for record in records for item in record.items())


def _checked_metrics(items: Iterable[tuple[str, object]]) -> dict[str, float]:
    merged: dict[str, float] = {}
    for name, value in items:
        if not (name.isprintable() and 0 < len(name) <= LONGEST_NAME):
            raise RefusedReply(
                f"metric {name!r}: expected a name of 1 … {LONGEST_NAME} printable characters"
            )
        # Flower's own strategies average lists. They are no scores, so no reply is lost for one.
        if isinstance(value, list) and name != "num-examples":
            continue
        # Compare, because neither NumPy nor float() accepts every integer.
        if not isinstance(value, int | float) or not -math.inf < value < math.inf:
            raise RefusedReply(f"metric {name!r} is {value!r}: expected a finite number")
        if abs(value) > LARGEST_VALUE:
            raise RefusedReply(f"metric {name!r} is above {LARGEST_VALUE:g}")
        merged[name] = float(value)
    size = merged.get("num-examples", 0.0)
    if not (0 <= size <= LARGEST_SIZE and size.is_integer()):
        raise RefusedReply(f"num-examples={size!r}: expected an integer, 0 … {LARGEST_SIZE}")
    return merged


def read_scores(reply: Message) -> dict[str, float]:
    """Return the metrics of an evaluation.

    Raises
    ------
    RefusedReply
        As `read_metrics`, or the reply has no metric.
    """
    scores = read_metrics(reply)
    if not scores:
        raise RefusedReply("the reply has no metric: expected at least one")
    return scores


def read_answer(reply: Message, record: str = ANSWER) -> Arrays:
    """Return the arrays in a client's answer to a question, or in another record of a reply.

    Raises
    ------
    RefusedReply
        The reply is an error, lacks the record or holds unreadable data.
    """
    answered = _content(reply).get(record)
    if not isinstance(answered, ArrayRecord):
        raise RefusedReply(f"no array record {record!r}")
    try:
        return to_arrays(answered)
    except Exception as error:  # a hostile payload may provoke any error
        raise RefusedReply(f"the answer cannot be read: {error}") from error


def _content(reply: Message) -> RecordDict:
    if reply.has_error():
        raise RefusedReply(said(reply.error))
    if not reply.has_content():
        raise RefusedReply("the reply is empty")
    return reply.content


def _checked(
    record: Mapping[str, Array] | Mapping[str, np.ndarray], base: Mapping[str, np.ndarray]
) -> Arrays:
    if record.keys() != base.keys():
        missing, extra = sorted(set(base) - set(record)), sorted(set(record) - set(base))
        raise RefusedReply(f"array names differ: missing {missing}, unexpected {extra}")
    arrays: Arrays = {}
    for name, expected in base.items():
        try:
            sent = record[name]
            array = sent if isinstance(sent, np.ndarray) else read_array(sent)
        except Exception as error:  # a hostile payload may provoke any error
            raise RefusedReply(f"{name!r} cannot be read: {error}") from error
        if array.shape != expected.shape or array.dtype != expected.dtype:
            raise RefusedReply(
                f"{name!r} is {array.dtype}{array.shape}, expected {expected.dtype}{expected.shape}"
            )
        _check_values(name, array)
        arrays[name] = array
    return arrays


def _check_values(name: str, array: np.ndarray) -> None:
    most = _largest(array.dtype)
    if float(np.vdot(array, array)) <= most**2:  # then each value is; this takes half the time
        return
    largest = float(max(array.max(), -array.min()))
    if not math.isfinite(largest):
        raise RefusedReply(f"{name!r} holds NaN or infinite values: {_DIVERGES}")
    if largest > most:
        raise RefusedReply(f"{name!r} holds values above {most:g}: {_DIVERGES}")


@lru_cache(maxsize=64)
def _largest(dtype: np.dtype) -> float:
    return min(LARGEST_VALUE, float(np.finfo(dtype).max) / 16)
