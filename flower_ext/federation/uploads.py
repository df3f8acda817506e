"""Uploads in the server's process, which become Flower's records only when a caller reads them.

For a hundred small models, making Flower's records takes longer than training. An `UploadReply`
carries plain arrays, and builds Flower's records as soon as a caller reads its ``content``. The
strategies of this package read the arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, Message, Metadata, MetricRecord, RecordDict

from flower_ext.federation import _flower_private as private
from flower_ext.federation.arrays import array_bytes, record_bytes, to_record

UPDATE = "update"
"""Record of a client's update, bounded and noised if the plan asks the client to do so."""
METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class Update:
    """One client's update, a difference to the global model, and its metrics."""

    arrays: Mapping[str, np.ndarray]
    metrics: Mapping[str, float]

    @property
    def payload(self) -> int:
        """Number of bytes that the arrays take as Flower would serialise them."""
        return sum(array_bytes(array.shape, array.dtype) for array in self.arrays.values())

    def content(self) -> RecordDict:
        """Return the update as Flower's records, with a record of metrics if there are any."""
        content: dict[str, object] = {UPDATE: to_record(self.arrays)}
        if self.metrics:
            content[METRICS] = metrics_record(self.metrics)
        return private.record_of(RecordDict, content)


def metrics_record(values: Mapping[str, float]) -> MetricRecord:
    """Return plain numbers as a MetricRecord, which takes no NumPy scalars."""
    return private.record_of(MetricRecord, {name: float(value) for name, value in values.items()})


class UploadReply(Message):
    """A reply whose content is an `Update` until a caller reads or replaces it.

    Parameters
    ----------
    question : Message
        The answered message.
    update : Update
    """

    def __init__(self, question: Message, update: Update) -> None:
        vars(self).update(_content=update, _error=None, question=question)

    @property
    def question(self) -> Message | None:
        """The answered message; None once a caller may have changed the metadata."""
        question: Message | None = vars(self)["question"]
        return question

    @property
    def metadata(self) -> Metadata:
        """The metadata that Flower's engines would deliver."""
        if self.question is not None:
            # A caller may change the metadata that it gets, so do not rely on the question from
            # here on.
            vars(self).update(_metadata=private.answering(self.question), question=None)
        metadata: Metadata = vars(self)["_metadata"]
        return metadata

    @property
    def update(self) -> Update | None:
        """The update; None once a caller may have changed the content."""
        content = vars(self)["_content"]
        return content if isinstance(content, Update) else None

    @property
    def content(self) -> RecordDict:
        """The records that Flower's engines would deliver."""
        if (update := self.update) is not None:
            vars(self)["_content"] = update.content()
        return super().content

    @content.setter
    def content(self, value: RecordDict) -> None:
        vars(self)["_content"] = value


def sender_of(reply: Message) -> int:
    """Return the node that sent a reply, without building the metadata of an `UploadReply`."""
    question = reply.question if isinstance(reply, UploadReply) else None
    return reply.metadata.src_node_id if question is None else question.metadata.dst_node_id


def payload_bytes(messages: Iterable[Message]) -> int:
    """Return the number of bytes of all serialised arrays in messages; other content is small."""
    total, sizes = 0, dict[int, int]()
    for message in messages:
        if isinstance(message, UploadReply) and (update := message.update) is not None:
            total += update.payload
        elif message.has_content():
            content = message.content
            if id(content) not in sizes:  # many messages may share a content
                records = (part for part in content.values() if isinstance(part, ArrayRecord))
                sizes[id(content)] = sum(map(record_bytes, records))
            total += sizes[id(content)]
    return total
