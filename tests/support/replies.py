"""Replies as the server receives them."""

from flwr.app import Error, Message, RecordDict

from flower_ext.federation._flower_private import become_server_of


def reply(content: RecordDict | Error) -> Message:
    become_server_of(1)
    question = Message(RecordDict(), dst_node_id=7, message_type="train", group_id="1")
    return Message(content, reply_to=question)
