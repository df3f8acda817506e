"""The base class of this package's grids, and a limit on the replies that wait in memory."""

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from flower_ext.federation.messages.upload_reply import payload_bytes

_SHARE_OF_REPLIES = 4
"""Waiting replies may take the memory limit of trainings divided by this number."""


class ClientGrid(Grid):
    """Base class of this package's grids, whose nodes are clients."""

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message of this run."""
        return Message(
            content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl
        )


def replies_in_memory(message: Message, memory_limit: int) -> int:
    """Return the number of replies, each as large as ``message``, that fit into memory."""
    return max(1, memory_limit // _SHARE_OF_REPLIES // max(1, payload_bytes([message])))
