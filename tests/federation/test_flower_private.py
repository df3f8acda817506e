"""Messages that Flower could not send are waited for by nobody."""

import pytest
from flwr.app import Message, RecordDict

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import InProcessGrid
from flower_ext.federation._flower_private import replies
from tests.support.worlds import task


class Lossy(InProcessGrid):
    """A grid of Flower's own kind, which fails to send some messages."""

    __module__ = "flwr.superlink.grid"

    def __init__(self, unsent) -> None:
        super().__init__(DPFedAvg.client_app(task()), num_clients=3)
        self.unsent = unsent
        self.looks = 0

    def push_messages(self, messages):
        ids = list(super().push_messages(messages))
        return [self.unsent, self.unsent, ids[2]]

    def pull_messages(self, reply_to_message_ids=None, *, message_ids=None):
        self.looks += 1
        return super().pull_messages(reply_to_message_ids, message_ids=message_ids)


@pytest.mark.parametrize("unsent", [None, ""], ids=["before 1.43", "since 1.43"])
def test_messages_that_were_not_sent_are_not_waited_for(unsent):
    grid = Lossy(unsent)
    nodes = sorted(grid.get_node_ids())
    requests = [
        Message(RecordDict(), dst_node_id=node, message_type="query.identity") for node in nodes
    ]
    (reply,) = replies(grid, requests, timeout=None)  # waiting for more would not end
    assert reply.metadata.src_node_id == nodes[2]
    assert grid.looks == 1
