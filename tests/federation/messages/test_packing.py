"""Messages for many clients of one node, packed into one."""

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from flower_ext.errors import InvalidValue
from flower_ext.federation._flower_private import become_server_of
from flower_ext.federation.messages.packing import answer_packed, is_packed, pack, unpack

PER_NODE = 4
SHARED = ArrayRecord()


def requests(*texts: str) -> list[Message]:
    """Return a request for each text; all requests hold one common record."""
    become_server_of(1)
    contents = [RecordDict({"model": SHARED, "ask": ConfigRecord({"text": t})}) for t in texts]
    return [
        Message(content, dst_node_id=number, message_type="query.a", group_id="3")
        for number, content in enumerate(contents, 1_000)
    ]


def node(partition: int = 2) -> Context:
    """Return the context of a node, whose state has a record of the client in slot 0."""
    place = {"partition-id": partition, "num-partitions": 5}
    state = RecordDict({"0/seen": ConfigRecord({"text": "earlier"})})
    return Context(run_id=1, node_id=7, node_config=place, state=state, run_config={})


def remember(messages, contexts):
    """Answer with each client's place; a client remembers its request, or fails by an error."""
    replies = []
    for message, context in zip(messages, contexts, strict=True):
        ask = message.content.config_records["ask"]
        if ask["text"] == "fail":
            replies.append(Message(Error(code=5, reason="failed"), reply_to=message))
            continue
        context.state["seen"] = ask
        place = ConfigRecord({**context.node_config, "type": message.metadata.message_type})
        replies.append(Message(RecordDict({"place": place}), reply_to=message))
    return replies


def test_each_client_gets_its_request_place_and_state_and_returns_its_reply():
    requests_of_round, context = requests("one", "fail", "three"), node()
    message = pack(requests_of_round, 7, [3, 1, 0], PER_NODE)
    assert is_packed(message.metadata.message_type)
    assert not is_packed(requests_of_round[0].metadata.message_type)
    assert sum(record is SHARED for record in message.content.values()) == 1
    first, failed, third = unpack(answer_packed(message, context, remember), requests_of_round)
    assert failed.error.reason == "failed"
    for reply, partition in ((first, 2 * PER_NODE + 3), (third, 2 * PER_NODE)):
        place = {"partition-id": partition, "num-partitions": 5 * PER_NODE, "type": "query.a"}
        assert dict(reply.content.config_records["place"]) == place
    states = {name: record["text"] for name, record in context.state.config_records.items()}
    assert states == {"3/seen": "one", "0/seen": "three"}


@pytest.mark.parametrize(
    ("slots", "kind"),
    [([0, 0], "query"), ([0, 4], "query"), ([-1, 0], "query"), ([0, 1], "query.packed")],
)
def test_a_request_that_no_client_could_get_alone_is_refused(slots, kind):
    requests_of_round, context = requests("one", "two"), node()
    requests_of_round[1].metadata.message_type = kind
    message = pack(requests_of_round, 7, slots, PER_NODE)
    with pytest.raises(InvalidValue, match="a packed message"):
        answer_packed(message, context, remember)
    assert list(context.state) == ["0/seen"]


def test_an_error_of_the_node_is_an_error_of_each_client():
    requests_of_round = requests("one", "two")
    message = pack(requests_of_round, 7, [0, 1], PER_NODE)
    replies = unpack(Message(Error(code=9, reason="down"), reply_to=message), requests_of_round)
    assert [reply.error.code for reply in replies] == [9, 9]
