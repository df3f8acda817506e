"""Uploads: a client's update and metrics, and a reply that builds Flower's records when it must.

An `UploadReply` carries plain arrays, which this package's strategies read. The reply builds
Flower's records only when a caller reads its ``content``: for a hundred small models, building them
takes longer than training.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, Message, Metadata, RecordDict

from flower_ext.federation import _flower_private as private
from flower_ext.federation.messages.records import (
    METRICS,
    UPDATE,
    UnsentArray,
    array_bytes,
    metrics_record,
    of_kind,
    to_record,
)


@dataclass(frozen=True, slots=True)
class Update:
    """One client's update (its difference to the global model) and its metrics."""

    arrays: Mapping[str, np.ndarray]
    metrics: Mapping[str, float]

    def content(self) -> RecordDict:
        """Return the update as Flower's records, with a record of metrics if there are any."""
        content: dict[str, object] = {UPDATE: to_record(self.arrays)}
        if self.metrics:
            content[METRICS] = metrics_record(self.metrics)
        return private.record_of(RecordDict, content)


class UploadReply(Message):
    """A reply whose content is an `Update` until a caller reads or replaces the content."""

    def __init__(self, request: Message, update: Update) -> None:
        vars(self).update(_content=update, _error=None, request=request)

    @property
    def request(self) -> Message | None:
        """The answered message; None once a caller has read the metadata and may change it."""
        request: Message | None = vars(self)["request"]
        return request

    @property
    def metadata(self) -> Metadata:
        """The metadata that Flower's engines would deliver."""
        if self.request is not None:
            # A caller may change the metadata that it gets, so do not rely on the request from
            # here on.
            vars(self).update(_metadata=private.reply_metadata(self.request), request=None)
        metadata: Metadata = vars(self)["_metadata"]
        return metadata

    @property
    def update(self) -> Update | None:
        """The update; None once a caller has read the content and may change it."""
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
    request = reply.request if isinstance(reply, UploadReply) else None
    return reply.metadata.src_node_id if request is None else request.metadata.dst_node_id


def payload_bytes(messages: Iterable[Message]) -> int:
    """Return the number of bytes of all serialised arrays in messages; other content is small."""
    total, sizes = 0, dict[int, int]()
    for message in messages:
        if isinstance(message, UploadReply) and (update := message.update) is not None:
            total += sum(array_bytes(a.shape, a.dtype) for a in update.arrays.values())
        elif message.has_content():
            content = message.content
            if id(content) not in sizes:  # many messages may share a content
                sizes[id(content)] = sum(
                    array_bytes(array.values.shape, array.values.dtype)
                    if isinstance(array, UnsentArray)
                    else len(array.data)
                    for record in of_kind(content, ArrayRecord).values()
                    for array in record.values()
                )
            total += sizes[id(content)]
    return total
