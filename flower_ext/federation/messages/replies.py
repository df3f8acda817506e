"""Read the contents of clients' replies, and refuse what is malformed or out of range.

`records` reads only NumPy's format, so no reply can run code.
"""

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from flower_ext.errors import InvalidValue
from flower_ext.federation.messages import records
from flower_ext.federation.messages.failures import public_reason
from flower_ext.federation.messages.records import Arrays, read_array
from flower_ext.federation.messages.upload_reply import Update, UploadReply
from flower_ext.privacy.mechanisms.updates import check_like

LARGEST_VALUE = 1e15
"""Largest accepted weight or score. Sums and squares of such numbers fit a float32."""
LARGEST_SIZE = 2**40
"""Largest number of examples that a client may report; a reply with more is refused."""
LONGEST_NAME = 100
"""Largest number of characters in a metric's name."""
LONGEST_REASON = 1_000
"""Largest number of characters in a refusal's text, because a client wrote part of the text."""


class RefusedReply(InvalidValue):
    """A reply that the server does not aggregate; the message says why."""


def read_update(reply: Message, *, base: Mapping[str, np.ndarray], trust_models: bool) -> Update:
    """Return the update in a training reply.

    Refuse an update whose arrays differ from those of ``base`` in names, shapes or dtypes.

    If ``trust_models`` is True, accept a whole model (record ``arrays``) in place of an update, so
    that any ClientApp can take part. Set it only if the plan asks no client to protect its upload.
    """
    if isinstance(reply, UploadReply) and (update := reply.update) is not None:
        return Update(_checked(update.arrays, base), _checked_metrics(update.metrics.items()))
    content = _content(reply)
    if isinstance(record := content.get(records.UPDATE), ArrayRecord):
        arrays = _checked(record, base)
    elif trust_models and isinstance(model := content.get(records.MODEL), ArrayRecord):
        arrays = moved_by(model, base)
    else:
        expected = (
            f"{records.UPDATE!r} or {records.MODEL!r}" if trust_models else f"{records.UPDATE!r}"
        )
        raise RefusedReply(
            f"the reply has no array record {expected}: it has the records {sorted(content.keys())}"
        )
    return Update(arrays, _metrics(content))


def moved_by(model: ArrayRecord, base: Mapping[str, np.ndarray]) -> Arrays:
    """Return a trained model minus ``base``, the model that the client received.

    Arrays that ``base`` lacks are ignored.
    """
    if missing := sorted(base.keys() - model.keys()):
        names = [repr(name[:LONGEST_NAME]) for name in sorted(model)]
        shown = names[:3] + ["…"] * (len(names) > 3)
        raise RefusedReply(
            f"the ClientApp returned {', '.join(shown) or 'no arrays'}, but no {missing[0]!r}: "
            "expected every array that it received; if the ClientApp wraps the model, as with "
            "Opacus, torch.compile or DataParallel, let it return the state_dict of the model "
            "itself"
        )
    trained = _checked({name: model[name] for name in base}, base)
    return {name: np.asarray(trained[name] - base[name]) for name in base}


def read_metrics(reply: Message) -> dict[str, float]:
    """Return the finite scalar metrics of a reply; lists of numbers are left out."""
    return _metrics(_content(reply))


def _metrics(content: RecordDict) -> dict[str, float]:
    numbers = records.of_kind(content, MetricRecord).values()
    return _checked_metrics(item for record in numbers for item in record.items())


def _checked_metrics(items: Iterable[tuple[str, object]]) -> dict[str, float]:
    merged: dict[str, float] = {}
    for name, value in items:
        if not (name.isprintable() and 0 < len(name) <= LONGEST_NAME):
            raise RefusedReply(
                f"metric {name!r}: expected a name of 1 … {LONGEST_NAME} printable characters"
            )
        # Flower's own strategies average lists. A list is no score, so skip it and keep the reply.
        if isinstance(value, list) and name != "num-examples":
            continue
        # Compare, because neither NumPy nor float() accepts every integer.
        if not isinstance(value, int | float) or not -math.inf < value < math.inf:
            raise RefusedReply(f"metric {name!r} is {value!r}: expected a finite number")
        if abs(value) > LARGEST_VALUE:
            raise RefusedReply(
                f"metric {name!r} is {value!r}: expected a number from -{LARGEST_VALUE:g} to "
                f"{LARGEST_VALUE:g}"
            )
        merged[name] = float(value)
    size = merged.get("num-examples", 0.0)
    if not (0 <= size <= LARGEST_SIZE and size.is_integer()):
        raise RefusedReply(f"num-examples={size!r}: expected an integer, 0 … {LARGEST_SIZE}")
    return merged


def read_scores(reply: Message) -> dict[str, float]:
    """Return the metrics of an evaluation; refuse a reply without any."""
    scores = read_metrics(reply)
    if not scores:
        raise RefusedReply("the reply has no metric: expected at least one")
    return scores


def read_answer(reply: Message, record: str = records.ANSWER) -> Arrays:
    """Return the arrays in a record of a reply; by default, those of a client's answer."""
    answered = _content(reply).get(record)
    if not isinstance(answered, ArrayRecord):
        raise RefusedReply(f"the reply has no array record {record!r}")
    try:
        return records.to_arrays(answered)
    except Exception as error:  # a hostile payload may provoke any error
        raise RefusedReply(f"the answer cannot be read: {error}") from error


def read_message(reply: Message, *names: str, record: str = records.ANSWER) -> tuple[str, bytes]:
    """Return the name and the bytes of the only array in a record of a reply.

    Refuse any other content, and a name that is not in ``names``.
    """
    return records.single_message(read_answer(reply, record), *names)


def read_count(reply: Message, name: str) -> int:
    """Return the number ``name`` of a client's answer; refuse anything but 0 … `LARGEST_SIZE`."""
    count = read_answer(reply).get(name)
    if count is None or count.shape or count.dtype.kind not in "iu":
        raise RefusedReply(f"the array {name!r} of the answer: expected a single integer")
    if not 0 <= count <= LARGEST_SIZE:
        raise RefusedReply(f"{name}={int(count)}: expected an integer, 0 … {LARGEST_SIZE}")
    return int(count)


def _content(reply: Message) -> RecordDict:
    if reply.has_error():
        raise RefusedReply(public_reason(reply.error))
    if not reply.has_content():
        raise RefusedReply("the reply is empty")
    return reply.content


def _checked(
    record: Mapping[str, Array] | Mapping[str, np.ndarray], base: Mapping[str, np.ndarray]
) -> Arrays:
    try:
        arrays = {
            name: sent if isinstance(sent, np.ndarray) else read_array(sent)
            for name, sent in record.items()
        }
        check_like(arrays, base, types=True)
    except Exception as error:  # a hostile payload may provoke any error
        raise RefusedReply(f"the arrays cannot be read: {error}") from error
    for name, array in arrays.items():
        most = _largest(array.dtype)
        if float(np.vdot(array, array)) <= most**2:  # then all values are in range; a faster test
            continue
        if not max(array.max(), -array.min()) <= most:  # true also for NaN
            raise RefusedReply(
                f"{name!r} holds NaN or infinite values, or values above {most:g}: local training "
                "diverges, or the client is hostile; try a smaller learning rate"
            )
    return {name: arrays[name] for name in base}


@lru_cache(maxsize=64)
def _largest(dtype: np.dtype) -> float:
    return min(LARGEST_VALUE, float(np.finfo(dtype).max) / 16)
