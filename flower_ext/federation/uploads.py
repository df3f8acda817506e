"""Uploads of clients in the server's process, as rows of arrays in place of Flower's records.

For a hundred small models, records cost more than training. `Rows` stores each update in one row,
and an `UploadReply` carries this row. The reply builds Flower's records as soon as a caller reads
its ``content``. The strategies of this package read the row itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeGuard

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, Metadata, MetricRecord, RecordDict

from flower_ext.federation import _flower_private as private
from flower_ext.federation.arrays import array_bytes, record_bytes, to_record
from flower_ext.privacy.mechanisms.plan import RoundMechanism
from flower_ext.privacy.mechanisms.updates import Layout, Row, Summed, Update, layout_of
from flower_ext.training import Params, difference
from flower_ext.training.params import FlatParams

UPDATE = "update"
"""Record of a difference, bounded and noised if the plan asks the client to do so."""
METRICS = "metrics"
_BLOCK = 4 * 2**20
"""Bytes of rows that are allocated and freed together."""


class Upload:
    """One client's update as it leaves the client, with its metrics.

    Parameters
    ----------
    arrays : Row
    metrics : Mapping[str, float]
    payload : int
        Bytes of the arrays as Flower would serialise them.
    """

    __slots__ = ("arrays", "metrics", "payload")

    def __init__(self, arrays: Row, metrics: Mapping[str, float], payload: int) -> None:
        self.arrays, self.metrics, self.payload = arrays, metrics, payload

    def content(self) -> RecordDict:
        """Return the upload as Flower's records."""
        return content_of(to_record(self.arrays), self.metrics)


def content_of(update: ArrayRecord, metrics: Mapping[str, float]) -> RecordDict:
    """Return the content of a reply to a training, with a record of metrics if there are any."""
    content: dict[str, object] = {UPDATE: update}
    if metrics:
        content[METRICS] = metrics_record(metrics)
    return private.record_of(RecordDict, content)


def metrics_record(values: Mapping[str, float]) -> MetricRecord:
    """Return plain numbers as a MetricRecord, which takes no NumPy scalars."""
    return private.record_of(MetricRecord, {name: float(value) for name, value in values.items()})


class Elsewhere:
    """Updates that another process of this machine holds, and their sum.

    Parameters
    ----------
    fetch : Callable[[], Sequence[ndarray]]
        Fetches the arrays of all updates from the other process, in order.
    summed : Summed, optional
        Their sum; None if the process could not compute it.
    count : int
    """

    def __init__(
        self, fetch: Callable[[], Sequence[np.ndarray]], summed: Summed | None, count: int
    ) -> None:
        self._fetch, self.summed, self.count = fetch, summed, count
        self._rows: Sequence[np.ndarray] | None = None

    def rows(self) -> Sequence[np.ndarray]:
        """Return the numbers of each update; fetch them at the first call."""
        if self._rows is None:
            self._rows = self._fetch()
        return self._rows


class RowElsewhere(Row):
    """One update of `Elsewhere`, whose numbers are fetched when a caller reads them.

    Parameters
    ----------
    elsewhere : Elsewhere
    index : int
        Its number among these updates.
    layout, dtype, square, norm
        As for `Row`, reported by the other process.
    """

    __slots__ = ("_facts", "elsewhere", "index")

    def __init__(
        self,
        elsewhere: Elsewhere,
        index: int,
        layout: Layout,
        dtype: np.dtype,
        square: float,
        norm: float,
    ) -> None:
        self.elsewhere, self.index, self.layout = elsewhere, index, layout
        self._facts = (dtype, square, norm)

    @property
    def dtype(self) -> np.dtype:
        """Type of the numbers, as `Row.dtype`."""
        return self._facts[0]

    @property
    def square(self) -> float:
        """Sum of squares, as `Row.square`."""
        return self._facts[1]

    @property
    def norm(self) -> float:
        """L2 norm, as `Row.norm`."""
        return self._facts[2]

    @property
    def numbers(self) -> np.ndarray:  # type: ignore[override]
        """All numbers."""
        return self.elsewhere.rows()[self.index]


def in_parts(updates: Iterable[Update]) -> Iterator[Update | Summed]:
    """Yield updates, with sums in place of updates that other processes have added up.

    A sum takes the place of its updates only if all of them are in ``updates``. Otherwise each of
    them is fetched.
    """
    noted: dict[Elsewhere, list[Update]] = {}
    for update in updates:
        if not isinstance(update, RowElsewhere) or update.elsewhere.summed is None:
            yield update
            continue
        there, summed = update.elsewhere, update.elsewhere.summed
        noted.setdefault(there, []).append(update)
        if len(noted[there]) == there.count:  # each update occurs once
            del noted[there]
            yield summed
    for rows in noted.values():
        yield from rows


class RequestsToSum(list[Message]):
    """Messages whose replies the caller will only add up by a plan.

    Parameters
    ----------
    messages : Iterable[Message]
    plan : RoundMechanism
    """

    def __init__(self, messages: Iterable[Message], plan: RoundMechanism) -> None:
        super().__init__(messages)
        self.plan = plan


class UploadReply(Message):
    """A reply whose content is an `Upload` until a caller reads or replaces it.

    Parameters
    ----------
    question : Message
        The answered message.
    upload : Upload
    """

    def __init__(self, question: Message, upload: Upload) -> None:
        vars(self).update(_content=upload, _error=None, question=question)

    @property
    def question(self) -> Message | None:
        """The answered message; None once a caller may have changed the metadata."""
        found: Message | None = vars(self)["question"]
        return found

    @property
    def metadata(self) -> Metadata:
        """The metadata that Flower's engines would deliver."""
        if self.question is not None:
            vars(self).update(_metadata=private.answering(self.question), question=None)
        found: Metadata = vars(self)["_metadata"]
        return found

    @property
    def upload(self) -> Upload | None:
        """The upload; None once a caller may have changed the content."""
        content = vars(self)["_content"]
        return content if isinstance(content, Upload) else None

    @property
    def content(self) -> RecordDict:
        """The records that Flower's engines would deliver."""
        if (upload := self.upload) is not None:
            vars(self)["_content"] = upload.content()
        return super().content

    @content.setter
    def content(self, value: RecordDict) -> None:
        vars(self)["_content"] = value


class Rows:
    """Memory for the updates of a cohort, one row per update.

    Parameters
    ----------
    received : Mapping[str, Tensor]
        The model that the cohort received, with the names, shapes and types of the updates.
    count : int
        Largest number of rows that the cohort needs.
    """

    def __init__(self, received: Params, count: int) -> None:
        self._received, self._layout, self._left = received, layout_of(received), count
        self._kinds = {name: (value.shape, value.dtype) for name, value in received.items()}
        self._payload = sum(array_bytes(tuple(v.shape), _numpy_type(v)) for v in received.values())
        kinds = {(value.dtype, value.is_cpu) for value in received.values()}
        one_kind = kinds in ({(torch.float32, True)}, {(torch.float64, True)})
        self._size = sum(map(torch.numel, received.values()))
        self._usable = one_kind and self._size > 0
        self._free: list[FlatParams] = []
        self._next: FlatParams | None = None

    def difference(self, after: Params, before: Params, *, spare: bool) -> Params:
        """Return ``after − before`` as `training.difference` does, in the next row if it fits.

        The row stays the next one until `take` is called. If ``after`` is ``spare``, so that nobody
        will read it afterwards, its own memory may become the row.
        """
        if spare and before is self._received and self._fits(after):
            torch.sub(after.numbers, self._numbers, out=after.numbers)
            self._next = after
            return after
        if before.keys() != self._kinds.keys() or (room := self._room(after)) is None:
            return difference(after, before)
        for name, into in room.items():
            torch.sub(after[name], before[name], out=into)
        return room

    def take(self, update: Mapping[str, Any], metrics: Mapping[str, float]) -> Upload | None:
        """Return an upload of the next row, which holds ``update`` or a copy of it.

        Return None if the update differs from the rows.
        """
        if update is not self._next:
            if (room := self._room(update)) is None:
                return None
            for name, into in room.items():
                if (value := update[name]) is not into:
                    into.copy_(value)
        row, self._next = self._next, None
        assert row is not None
        if self._free and row is self._free[-1]:
            self._free.pop()
        return Upload(Row(row.numbers.numpy(), self._layout), metrics, self._payload)

    @cached_property
    def _numbers(self) -> torch.Tensor:
        """All numbers of the received model, in the order of the rows."""
        return torch.cat([value.flatten() for value in self._received.values()])

    def _fits(self, model: Params) -> TypeGuard[FlatParams]:
        """Return True for a model whose numbers lie like a row."""
        if not (self._usable and isinstance(model, FlatParams) and model.lies_by(self._layout)):
            return False
        return model.numbers.dtype == self._numbers.dtype and model.numbers.is_cpu

    def _room(self, like: Mapping[str, Any]) -> Params | None:
        """Return the arrays of the next row; None if ``like`` differs from the rows."""
        if not self._usable or like.keys() != self._kinds.keys():
            return None
        for name, (shape, dtype) in self._kinds.items():
            value = like[name]
            if not isinstance(value, torch.Tensor) or not value.is_cpu or value.requires_grad:
                return None
            if value.shape != shape or value.dtype != dtype:
                return None
        if not self._free:
            self._allocate()
        self._next = self._free[-1]
        return self._next

    def _allocate(self) -> None:
        like = next(iter(self._received.values()))
        most = max(1, _BLOCK // (self._size * like.element_size()))
        block = like.new_empty(min(most, max(1, self._left)), self._size)
        self._left -= len(block)
        self._free = FlatParams(block, self._layout).models()[::-1]


def _numpy_type(value: torch.Tensor) -> np.dtype:
    return np.dtype(str(value.dtype).removeprefix("torch."))


def payload_bytes(messages: Iterable[Message]) -> int:
    """Return the bytes of all serialised arrays in messages; the rest of a message is small."""
    sizes: dict[int, int] = {}  # many messages may share a content
    return sum(_payload(message, sizes) for message in messages)


def payload_of(message: Message) -> int:
    """Return the bytes of all serialised arrays in one message."""
    return _payload(message, {})


def _payload(message: Message, sizes: dict[int, int]) -> int:
    if isinstance(message, UploadReply) and (upload := message.upload) is not None:
        return upload.payload
    if not message.has_content():
        return 0
    content = message.content
    if (size := sizes.get(id(content))) is None:
        records = (record for record in content.values() if isinstance(record, ArrayRecord))
        size = sizes[id(content)] = sum(map(record_bytes, records))
    return size
