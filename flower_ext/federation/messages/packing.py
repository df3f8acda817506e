"""Pack the messages to many clients of one node into one message, and the replies into one reply.

The server packs requests (`pack`), and unpacks the node's reply (`unpack`). On the node,
`answer_packed` gives each client its request and its context, and packs the clients' replies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict

from flower_ext.errors import InvalidValue
from flower_ext.federation import _flower_private as private
from flower_ext.federation.messages.addresses import partition_of

Record = ArrayRecord | ConfigRecord | MetricRecord

_PACKED = "packed"
"""Last part of the type of a packed message, and name of the record that lists its contents."""
_PER_NODE, _SLOTS, _KINDS = "clients-per-node", "slot", "type"
"""Entries of a request: number of clients on the node, and each request's client and type."""
_CODES, _REASONS = "error-code", "error-reason"
"""Entries of a reply: each client's error; the code 0 stands for no error."""
_RECORDS = "records"
"""Entry of requests and of replies: for each client, a text. Each line of the text holds the number
and the name of one of the client's records."""


def pack(
    requests: Sequence[Message], node: int, slots: Sequence[int], clients_per_node: int
) -> Message:
    """Return one message to ``node`` that holds the ``requests`` to several of its clients.

    ``slots`` holds the number of each of these clients on the node, from 0.
    """
    kinds = [request.metadata.message_type for request in requests]
    entries = {_PER_NODE: clients_per_node, _SLOTS: list(slots), _KINDS: kinds}
    return Message(
        _joined([request.content for request in requests], entries),
        dst_node_id=node,
        message_type=f"{kinds[0].partition('.')[0]}.{_PACKED}",
        group_id=requests[0].metadata.group_id,
    )


def unpack(reply: Message, requests: Sequence[Message]) -> list[Message]:
    """Return a reply to each of the ``requests``; if the node failed, each reply is its error."""
    if reply.has_error():
        return [Message(reply.error, reply_to=request) for request in requests]
    try:
        contents, entries = _separated(reply.content)
        errors = zip(entries[_CODES], entries[_REASONS], strict=True)
        answers: list[RecordDict | Error] = [
            Error(code=code, reason=reason) if code else content
            for content, (code, reason) in zip(contents, errors, strict=True)
        ]
        return [Message(each, reply_to=m) for each, m in zip(answers, requests, strict=True)]
    except Exception as error:  # a hostile node may send anything
        unreadable = Error(code=1, reason=f"the node's reply cannot be read: {error}")
        return [Message(unreadable, reply_to=request) for request in requests]


def is_packed(message_type: str) -> bool:
    """Return True for the type of a message that `pack` made."""
    return message_type.endswith(f".{_PACKED}")


def answer_packed(
    message: Message,
    context: Context,
    answer: Callable[[Sequence[Message], Sequence[Context]], Sequence[Message]],
) -> Message:
    """Return one reply to a packed message; each client reads and writes only its own state.

    ``answer`` returns the clients' replies, given their requests and contexts. The state of the
    node's ``context`` holds the states of the node's clients.
    """
    contents, entries = _separated(message.content)
    slots, per_node = list(entries[_SLOTS]), entries[_PER_NODE]
    are_slots = all(type(slot) is int and 0 <= slot < per_node for slot in slots)
    if not are_slots or len(set(slots)) < len(slots):
        raise InvalidValue(
            f"a packed message for the clients {slots} of this node: expected distinct integers "
            f"in [0, {per_node})"
        )
    if any(map(is_packed, entries[_KINDS])):
        raise InvalidValue(
            "a packed message holds another packed message: expected one message for each client"
        )
    requests = [
        private.message_like(message, content, message_type=kind)
        for content, kind in zip(contents, entries[_KINDS], strict=True)
    ]
    states = _states(context, slots)
    clients = [_client_context(context, slot, per_node, states[str(slot)]) for slot in slots]
    replies = answer(requests, clients)
    _store(context, {str(n): client.state for n, client in zip(slots, clients, strict=True)})
    errors = {
        _CODES: [reply.error.code if reply.has_error() else 0 for reply in replies],
        _REASONS: [reply.error.reason if reply.has_error() else "" for reply in replies],
    }
    answers = [RecordDict() if reply.has_error() else reply.content for reply in replies]
    return Message(_joined(answers, errors), reply_to=message)


def _client_context(node: Context, slot: int, per_node: int, state: RecordDict) -> Context:
    """Return the context of a client, as if the client were alone on its node."""
    number = partition_of(node.node_config)
    num_nodes = int(node.node_config.get("num-partitions", number + 1))
    place = {"partition-id": number * per_node + slot, "num-partitions": num_nodes * per_node}
    return replace(
        node, node_id=node.node_id + slot, node_config={**node.node_config, **place}, state=state
    )


def _states(node: Context, slots: Sequence[int]) -> dict[str, RecordDict]:
    """Return the states that the clients in ``slots`` have in their node's state, by slot."""
    states = {str(slot): RecordDict() for slot in slots}
    for key, record in node.state.items():
        slot, _, name = key.partition("/")
        if slot in states:
            states[slot][name] = record
    return states


def _store(node: Context, states: Mapping[str, RecordDict]) -> None:
    """Replace the states of clients in the state of their node, as records ``slot/name``."""
    for key in [*node.state]:
        if key.partition("/")[0] in states:
            del node.state[key]
    for slot, state in states.items():
        for name, record in state.items():
            node.state[f"{slot}/{name}"] = record


def _joined(contents: Sequence[RecordDict], entries: Mapping[str, Any]) -> RecordDict:
    """Join ``contents`` and ``entries`` into one content, with each shared record only once."""
    numbers: dict[int, int] = {}
    joined: dict[str, Record] = {}
    names: list[str] = []
    for content in contents:
        for record in content.values():
            if id(record) not in numbers:
                numbers[id(record)] = len(numbers)
                joined[str(numbers[id(record)])] = record
        names.append("\n".join(f"{numbers[id(record)]} {name}" for name, record in content.items()))
    joined[_PACKED] = ConfigRecord({**entries, _RECORDS: names})
    return RecordDict(joined)


def _separated(content: RecordDict) -> tuple[list[RecordDict], Mapping[str, Any]]:
    """Return the contents and the entries from which `_joined` made ``content``."""
    entries: Mapping[str, Any] = content.config_records[_PACKED]
    known: dict[str, RecordDict] = {}  # contents with the same records become one object
    for names in entries[_RECORDS]:
        if names not in known:
            pairs = (line.partition(" ") for line in names.splitlines())
            known[names] = RecordDict({name: content[number] for number, _, name in pairs})
    return [known[names] for names in entries[_RECORDS]], entries
