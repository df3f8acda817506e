"""Waiting for nodes: the log says in time how to start more of them."""

import pytest
from flwr.app import Error, Message
from flwr.clientapp import ClientApp

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import FederationNotReady, InProcessGrid
from flower_ext.federation.messages import roster
from tests.support.worlds import task


def test_a_simulation_with_too_few_nodes_soon_says_what_to_do(monkeypatch, caplog):
    monkeypatch.setattr(roster, "_ADVISE_AFTER", 0.1)
    monkeypatch.setattr(roster.log, "propagate", True)
    grid = InProcessGrid(ClientApp(), 2)
    with pytest.raises(FederationNotReady, match="2 of 5 nodes"):
        roster.wait_for_nodes(grid, 5, least=5, timeout=1.5)
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) == 1
    assert '--federation-config "num-supernodes=5"' in messages[0]


class Starved(InProcessGrid):
    """Nodes that no ClientApp runs on: Flower reports an error, or nothing arrives."""

    def __init__(self, error):
        super().__init__(ClientApp(), 2)
        self.error = error

    def send_and_receive(self, messages, *, timeout=None):
        return [Message(self.error, reply_to=m) for m in messages if self.error is not None]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Error(code=0, reason="ray.exceptions.ActorDiedError"), "ray.exceptions.ActorDiedError"),
        (Error(code=5, reason="the node is offline"), "the node is offline"),
        (None, "no reply within 2 s"),
    ],
    ids=["a worker that died", "a node offline", "no reply"],
)
def test_nodes_without_a_client_app_are_not_taken_for_foreign_apps(error, reason):
    with pytest.raises(FederationNotReady, match=reason):
        roster.Roster.connect(Starved(error), 2, mods=True, timeout=2.0)


class OneByOne(InProcessGrid):
    """Two nodes, then one whose ClientApp does not load, and a fourth after that one was asked."""

    def __init__(self):
        super().__init__(DPFedAvg.client_app(task()), 4)
        self.broken = 1_003
        self.asked = set()

    def get_node_ids(self):
        order = [1_002, 1_000, self.broken, 1_001]
        return [n for at, n in enumerate(order) if at < 2 or {*order[:at]} <= self.asked]

    def send_and_receive(self, messages, *, timeout=None):
        for message in messages:
            node = message.metadata.dst_node_id
            self.asked.add(node)
            if node == self.broken:
                yield Message(Error(code=1, reason="no such module"), reply_to=message)
            else:
                yield from super().send_and_receive([message], timeout=timeout)


def test_a_late_unneeded_node_whose_app_fails_ends_no_run():
    connected = roster.Roster.connect(OneByOne(), 4, absent={2, 3}, timeout=5.0)
    assert connected.known
    assert {0, 1} <= set(connected.nodes)
