"""The client that a message is for: a node's partition, and a check of it on the client."""

from collections.abc import Mapping

from flwr.app import ConfigRecord, Context, Message, RecordDict

from flower_ext.errors import InvalidValue
from flower_ext.federation._flower_private import record_of
from flower_ext.federation.messages.records import ADDRESS

PARTITION = "partition-id"
"""Key, in the node config, of the node's number among all nodes, from 0."""
IDENTITY = "query.identity"
"""Message type of the question "which partition are you?"."""
IDENTITY_RECORD = "identity"
"""Record of the answer to the question `IDENTITY`."""
NO_PARTITION = str(None)
"""Answer of a node without a partition in its node config."""


def identity(node_config: Mapping[str, object]) -> RecordDict:
    """Return a client's answer to ``query.identity``; the server rejects invalid partition ids."""
    partition = node_config.get(PARTITION)
    known = partition if isinstance(partition, int) else str(partition)
    return record_of(RecordDict, {IDENTITY_RECORD: ConfigRecord({"partition": known})})


def addressed(content: RecordDict, partition: int) -> RecordDict:
    """Return a message's content with the receiver's partition added (see `check_addressee`)."""
    address = ConfigRecord({"partition": partition})
    return record_of(RecordDict, {**content, ADDRESS: address})


def check_addressee(message: Message, context: Context) -> None:
    """Refuse a message for a partition that the node does not hold.

    Flower identifies a restarted SuperNode by its key, even if its node config changed. Without
    this check, two nodes could train on the data of one client, which the accounting counts once.
    """
    if not isinstance(address := message.content.get(ADDRESS), ConfigRecord):
        return
    if address["partition"] != (partition := partition_of(context.node_config)):
        raise InvalidValue.tellable(
            f"node config partition-id={partition}: expected {address['partition']!r}, the "
            "partition that this node held when the run asked; start the node again with the "
            "expected partition-id, or stop the run"
        )


def partition_of(node_config: Mapping[str, object]) -> int:
    """Return the partition of a node; refuse a node config without ``partition-id``."""
    partition = node_config.get(PARTITION)
    if not isinstance(partition, int):
        raise InvalidValue.tellable(
            f"node config partition-id={partition!r}: expected an integer from 0 to N-1, different "
            "for each of the N SuperNodes; start the first SuperNode with --node-config "
            '"partition-id=0 num-partitions=N", the next with partition-id=1, and so on'
        )
    return partition
