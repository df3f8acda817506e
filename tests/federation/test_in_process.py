"""The engine, and with it every private name of Flower that it needs."""

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flower_ext.federation import InProcessGrid, run_in_process


def counting_app() -> ClientApp:
    app = ClientApp()

    @app.query()
    def _(message: Message, context: Context) -> Message:
        seen = int(context.state.config_records.get("seen", {"n": 0})["n"]) + 1
        context.state["seen"] = ConfigRecord({"n": seen})
        if message.content.config_records["ask"]["fail"]:
            raise RuntimeError("told to fail")
        partition = context.node_config["partition-id"]
        return Message(
            RecordDict({"a": ConfigRecord({"n": seen, "partition": partition})}), reply_to=message
        )

    return app


def ask(grid: InProcessGrid, node: int, *, fail: bool = False) -> Message:
    content = RecordDict({"ask": ConfigRecord({"fail": fail})})
    message = Message(content, dst_node_id=node, message_type="query", group_id="3")
    (reply,) = grid.send_and_receive([message])
    return reply


def test_each_client_has_its_own_state_and_identity():
    grid = InProcessGrid(counting_app(), num_clients=3)
    first, second, _ = grid.get_node_ids()
    ask(grid, first)
    assert ask(grid, first).content.config_records["a"]["n"] == 2
    answer = ask(grid, second)
    assert dict(answer.content.config_records["a"]) == {"n": 1, "partition": 1}
    assert answer.metadata.src_node_id == second
    assert answer.metadata.group_id == "3"


def test_a_client_that_raises_answers_with_an_error_and_forgets():
    grid = InProcessGrid(counting_app(), num_clients=1)
    (node,) = grid.get_node_ids()
    failed = ask(grid, node, fail=True)
    assert failed.has_error()
    assert "told to fail" in failed.error.reason
    assert ask(grid, node).content.config_records["a"]["n"] == 1


def test_a_reply_is_handed_out_once_and_names_its_question():
    grid = InProcessGrid(counting_app(), num_clients=1)
    (node,) = grid.get_node_ids()
    content = RecordDict({"ask": ConfigRecord({"fail": False})})
    message = grid.create_message(content, "query", node, "1")
    (message_id,) = grid.push_messages([message])
    (reply,) = grid.pull_messages([message_id])
    assert reply.metadata.reply_to_message_id == message_id
    assert list(grid.pull_messages([message_id])) == []


def test_a_whole_app_runs_with_its_run_config():
    app = ServerApp()
    seen = {}

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        seen["nodes"] = len(list(grid.get_node_ids()))
        seen["rounds"] = context.run_config["rounds"]

    grid = run_in_process(app, counting_app(), num_clients=4, run_config={"rounds": 7})
    assert seen == {"nodes": 4, "rounds": 7}
    assert {c.run_config["rounds"] for c in grid.contexts.values()} == {7}


def test_a_population_below_one_is_refused():
    with pytest.raises(ValueError, match="num_clients=0"):
        InProcessGrid(counting_app(), num_clients=0)
