"""Replies as the server receives them."""

from flwr.app import Error, Message, RecordDict

from flower_ext.federation._flower_private import become_server_of
from flower_ext.federation.messages.exchange import Clients, Requests
from flower_ext.federation.progress import Progress


def training_message(node: int = 7) -> Message:
    """Return a training message of round 1 to a node."""
    become_server_of(1)
    return Message(RecordDict(), dst_node_id=node, message_type="train", group_id="1")


def requests_of(*questions: Message) -> Requests:
    """Return the messages of a training round to clients 0, 1, … as `Clients.request` does."""
    clients = Clients("test", Progress(), timeout=1.0)
    clients.nodes = {p: message.metadata.dst_node_id for p, message in enumerate(questions)}
    clients._partitions = {node: partition for partition, node in clients.nodes.items()}
    return Requests(
        clients, "train", int(questions[0].metadata.group_id), dict(enumerate(questions))
    )


def reply(content: RecordDict | Error) -> Message:
    return Message(content, reply_to=training_message())
