"""Requests and replies: their content, the accepted replies, and the counts of both."""

import logging

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_ext.federation import FederationNotReady, InProcessGrid
from flower_ext.federation.messages.addresses import identity, partition_of
from flower_ext.federation.messages.exchange import Clients
from flower_ext.federation.messages.failures import unlogged
from flower_ext.federation.messages.replies import RefusedReply
from flower_ext.federation.progress import Progress

CLIENTS = 4
DOWN = ArrayRecord({"w": Array(np.zeros(1_000, np.float32)), "b": Array(np.zeros(200))})
UP = ArrayRecord({"w": Array(np.ones(300))})
# Sizes as they travel, including NumPy's header of each array.
DOWN_BYTES = sum(len(array.data) for array in DOWN.values())
UP_BYTES = sum(len(array.data) for array in UP.values())


def client_app(method: str | None = "meth", fails: tuple[int, ...] = ()) -> ClientApp:
    """Return an app that answers its partition's square; with ``method`` None, a foreign app."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        partition = partition_of(context.node_config)
        if partition in fails:
            raise RuntimeError("out of memory")
        square = MetricRecord({"square": partition**2})
        return Message(RecordDict({"up": UP, "metrics": square}), reply_to=message)

    if method is None:
        app.train()(answer)
        app.evaluate()(answer)
        return app

    @app.query("identity")
    def _(message: Message, context: Context) -> Message:
        return Message(identity(context.node_config), reply_to=message)

    app.train(method)(answer)
    app.evaluate(method)(answer)
    return app


def square_of(reply: Message) -> int:
    if reply.has_error():
        raise RefusedReply("the client failed")
    return int(reply.content.metric_records["metrics"]["square"])


def connected(app: ClientApp | None = None) -> tuple[Clients, InProcessGrid]:
    """Return the clients after they have connected, and their grid."""
    clients, grid = (
        Clients("meth", Progress(), timeout=1.0),
        InProcessGrid(app or client_app(), CLIENTS),
    )
    clients.progress.begin()
    clients.connect(grid, CLIENTS)
    return clients, grid


def listen(clients, grid, kind, partitions, server_round=1):
    """Ask and accept answers; return the values by partition."""
    requests = clients.request(kind, {p: {"down": DOWN} for p in partitions}, server_round)
    return dict(requests.accepted(grid.send_and_receive(requests.messages), square_of))


def test_nobody_is_known_before_the_connection_and_everybody_by_partition_after_it():
    assert Clients("meth", Progress(), timeout=1.0).nodes == {}
    clients, _ = connected()
    assert list(clients.nodes) == list(range(CLIENTS))
    assert len(set(clients.nodes.values())) == CLIENTS


def test_nodes_report_their_identity_only_once():
    clients, _ = connected()
    roster = clients.roster
    other = InProcessGrid(client_app(), CLIENTS + 1)  # it would be refused
    assert clients.connect(other, CLIENTS) is roster
    with pytest.raises(FederationNotReady):
        Clients("meth", Progress(), timeout=0.1).connect(other, CLIENTS)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_each_partition_gets_its_content_in_the_rounds_message(kind):
    clients, _ = connected()
    contents = {p: {"mine": ConfigRecord({"partition": p})} for p in (3, 1)}
    messages = clients.request(kind, contents, server_round=7).messages
    assert len(messages) == 2
    for message in messages:
        partition = message.content.config_records["mine"]["partition"]
        assert message.metadata.dst_node_id == clients.nodes[partition]
        assert message.metadata.message_type == f"{kind}.meth"
        assert message.metadata.group_id == "7"


def test_foreign_apps_get_flowers_message_types():
    clients, grid = connected(client_app(method=None))
    (message,) = clients.request("train", {0: {}}, 1).messages
    assert message.metadata.message_type == "train"
    assert listen(clients, grid, "train", [0, 2]) == {0: 0, 2: 4}


def test_answers_come_back_by_partition_in_order():
    clients, grid = connected()
    assert list(listen(clients, grid, "train", [3, 0, 2]).items()) == [(0, 0), (2, 4), (3, 9)]
    assert clients.refusals == []


def test_messages_and_bytes_are_counted_both_ways_and_apart_by_kind():
    clients, grid = connected()
    listen(clients, grid, "train", [0, 1, 2])
    listen(clients, grid, "evaluate", [0, 1, 2, 3])
    listen(clients, grid, "evaluate", [0])
    row = clients.progress.row
    assert {name: row[name] for name in ("messages", "bytes_down", "bytes_up")} == {
        "messages": 6,
        "bytes_down": 3 * DOWN_BYTES,
        "bytes_up": 3 * UP_BYTES,
    }
    assert row["evaluation_messages"] == 10
    assert row["evaluation_bytes_down"] == 5 * DOWN_BYTES
    assert row["evaluation_bytes_up"] == 5 * UP_BYTES


def test_bytes_count_the_arrays_and_a_small_header():
    assert 4 * 1_000 + 8 * 200 <= DOWN_BYTES < 1.1 * (4 * 1_000 + 8 * 200)
    clients, _ = connected()
    clients.request("train", {0: {"down": DOWN, "more": DOWN, "facts": ConfigRecord({"a": 1})}}, 1)
    assert clients.progress.row["bytes_down"] == 2 * DOWN_BYTES


def test_refusals_are_listed_counted_and_logged_and_their_bytes_count(logged):
    clients, grid = connected(client_app(fails=(1, 2)))
    assert listen(clients, grid, "train", [0, 1, 2]) == {0: 0}
    nodes = clients.nodes
    assert clients.refusals == [
        f"round 1, node {nodes[1]}: the client failed",
        f"round 1, node {nodes[2]}: the client failed",
    ]
    row = clients.progress.row
    assert row["refused"] == 2
    assert row["messages"] == 6
    assert row["bytes_up"] == UP_BYTES  # an error carries no arrays
    warned = [r.getMessage() for r in logged.records if r.levelname == "WARNING"]
    assert warned == [
        *(f"refused reply: {refusal}" for refusal in clients.refusals),
        "round 1, train: no usable answer from [1, 2]",
    ]


def test_refusals_add_up_over_rounds_and_kinds():
    clients, grid = connected(client_app(fails=(1,)))
    listen(clients, grid, "train", [0, 1])
    listen(clients, grid, "evaluate", [1], server_round=2)
    assert [refusal.partition(",")[0] for refusal in clients.refusals] == ["round 1", "round 2"]


def test_replies_of_others_of_other_rounds_or_sent_twice_are_refused():
    clients, grid = connected()
    others = clients.request("train", {0: {}, 3: {}}, 1)
    requests = clients.request("train", {0: {}, 1: {}, 2: {}}, 2)
    old = list(grid.send_and_receive(others.messages))
    new = list(grid.send_and_receive(requests.messages[1:]))
    accepted = dict(requests.accepted([*old, *new, new[0]], square_of))
    assert accepted == {1: 1, 2: 4}
    reasons = [refusal.partition(": ")[2] for refusal in clients.refusals]
    assert reasons == [
        "answers round 1, expected 2",
        "the node was not asked in this round, or has answered already",
        "the node was not asked in this round, or has answered already",
    ]


def test_replies_are_read_by_partition_whichever_arrives_first():
    clients, grid = connected()
    everyone = range(CLIENTS)
    requests = clients.request("train", {p: {} for p in everyone}, 1)
    replies = list(grid.send_and_receive(requests.messages))
    accepted = requests.accepted([replies[i] for i in (2, 3, 0, 1)], square_of)
    assert list(accepted) == [(0, 0), (1, 1), (2, 4), (3, 9)]


def test_a_reply_is_read_once_those_before_it_are_read_or_refused():
    clients, grid = connected(client_app(fails=(1,)))
    everyone, come = range(CLIENTS), []
    requests = clients.request("train", {p: {} for p in everyone}, 1)
    replies = grid.send_and_receive(requests.messages)

    def coming():
        for reply in replies:
            come.append(reply.metadata.src_node_id)
            yield reply

    accepted = requests.accepted(coming(), square_of)
    assert [(next(accepted), len(come)) for _ in range(3)] == [
        ((0, 0), 1),
        ((2, 4), 3),
        ((3, 9), 4),
    ]
    assert next(accepted, None) is None
    assert len(clients.refusals) == 1


def test_no_requests_count_as_no_traffic():
    clients, grid = connected()
    assert listen(clients, grid, "train", []) == {}
    assert set(clients.progress.row.values()) == {0}


def test_expected_errors_stay_out_of_the_log_while_expected(caplog):
    log = logging.getLogger("flwr")
    with caplog.at_level(logging.INFO, logger="flwr"):
        with unlogged("no such query", "by the engine"):
            log.error(ValueError("no such query"))
            log.error("raised by the engine")
            log.error("another error")
            log.warning("a warning: no such query")
        log.error("no such query")
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["another error", "a warning: no such query", "no such query"]
