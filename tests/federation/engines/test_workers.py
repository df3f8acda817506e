"""Clients that several processes share are the clients of one."""

import multiprocessing
import os
import signal
from collections import Counter

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flower_ext.algorithms import DP2FedSAM, DPFedAvg, Scaffold
from flower_ext.federation import FederatedStrategy, InProcessGrid, run_in_process
from flower_ext.federation.engines import workers
from flower_ext.federation.engines.workers import WorkerLost
from flower_ext.federation.messages import records
from flower_ext.federation.messages.failures import REASON_WITHHELD
from flower_ext.privacy import FixedSizeSampling, NonPrivatePlan, SecureNoise
from flower_ext.training import LocalTraining
from tests.support.strategies import strategy_of
from tests.support.worlds import task

SGD = LocalTraining(epochs=2, batch_size=8, learning_rate=0.05)


def telling() -> ClientApp:
    """Clients that count their questions and tell which process they live in."""
    app = ClientApp()

    @app.query()
    def _(message: Message, context: Context) -> Message:
        question = message.content.config_records["ask"]
        seen = int(context.state.config_records.get("seen", {"n": 0})["n"]) + 1
        context.state["seen"] = ConfigRecord({"n": seen})
        if context.node_config["partition-id"] == question["fails"]:
            raise RuntimeError("told to fail")
        if context.node_config["partition-id"] == question["kills"]:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = {
            "n": seen,
            "process": os.getpid(),
            "partition": context.node_config["partition-id"],
        }
        answer["noise"] = SecureNoise().add_gaussian({"a": np.zeros(1)}, 1.0)["a"].tolist()
        return Message(RecordDict({"a": ConfigRecord(answer)}), reply_to=message)

    return app


def ask(grid: InProcessGrid, nodes, *, fails: int = -1, kills: int = -1) -> list[Message]:
    """Query some nodes; one may fail, and one may kill its process."""
    content = RecordDict({"ask": ConfigRecord({"fails": fails, "kills": kills})})
    return list(
        grid.send_and_receive(
            [Message(content, dst_node_id=n, message_type="query", group_id="1") for n in nodes]
        )
    )


def test_every_client_stays_in_one_of_the_processes_and_answers_in_order():
    before, grid = torch.get_num_threads(), InProcessGrid(telling(), num_clients=7, workers=3)
    nodes = list(grid.get_node_ids())
    first = [reply.content.config_records["a"] for reply in ask(grid, nodes)]
    again = [reply.content.config_records["a"] for reply in ask(grid, nodes[::-1])][::-1]
    assert [answer["partition"] for answer in first] == list(range(7))
    assert [answer["process"] for answer in first] == [answer["process"] for answer in again]
    assert len({answer["process"] for answer in first}) == 3
    assert {answer["n"] for answer in again} == {2}
    grid.workers.gather()
    assert torch.get_num_threads() == before
    assert (
        len({answer["noise"][0] for answer in [*first, *again]}) == 14
    )  # forked, but no two alike
    states = [context.state.config_records["seen"]["n"] for context in grid.contexts.values()]
    assert states == [2] * 7


def test_clients_without_a_state_are_divided_evenly_and_the_others_stay():
    app = ClientApp()

    @app.query()
    def _(message: Message, context: Context) -> Message:
        if message.content.config_records["ask"]["fails"] == 1:  # the round that leaves a state
            context.state["here"] = ConfigRecord({"process": os.getpid()})
        kept = context.state.config_records.get("here", {"process": os.getpid()})["process"]
        answer = {"process": os.getpid(), "kept": kept}
        return Message(RecordDict({"a": ConfigRecord(answer)}), reply_to=message)

    grid = InProcessGrid(app, num_clients=12, workers=3)
    nodes = list(grid.get_node_ids())

    def processes(nodes_asked, **how):
        answer = [reply.content.config_records["a"] for reply in ask(grid, nodes_asked, **how)]
        assert [one["process"] for one in answer] == [one["kept"] for one in answer]
        return [one["process"] for one in answer]

    unusual = [node for node in nodes if node % 3 == 0] + nodes[1:3]  # most of one process
    assert sorted(Counter(processes(unusual)).values()) == [2, 2, 2]
    with_state = processes(nodes[:6], fails=1)
    assert processes(nodes[:6]) == with_state  # while `unusual` says nothing of where they belong
    assert processes(nodes)[:6] == with_state
    assert len(set(processes([nodes[7]] * 4))) == 1  # one client's messages stay together
    grid.workers.gather()
    states = [context.state.config_records.get("here") for context in grid.contexts.values()]
    assert [state and state["process"] for state in states] == with_state + [None] * 6


def test_an_error_is_that_of_its_client_alone():
    grid = InProcessGrid(telling(), num_clients=4, workers=2)
    replies = ask(grid, grid.get_node_ids(), fails=3)
    assert [reply.has_error() for reply in replies] == [False, False, False, True]
    assert replies[3].error.reason == REASON_WITHHELD
    grid.workers.gather()
    assert "seen" not in grid.contexts[list(grid.get_node_ids())[3]].state


def test_a_process_that_is_killed_ends_the_run_and_leaves_none_behind():
    app, seen = ServerApp(), {}

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        nodes = list(grid.get_node_ids())
        answers = [reply.content.config_records["a"] for reply in ask(grid, nodes)]
        seen["processes"] = {one["process"] for one in answers} - {os.getpid()}
        ask(grid, nodes, kills=2)  # the first of worker-1

    with pytest.raises(WorkerLost, match=r"worker-1 of 3 .*exit code -9"):
        run_in_process(app, telling(), num_clients=6, workers=3)
    assert len(seen["processes"]) == 2
    for process in seen["processes"]:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.parametrize(
    "strategy",
    [
        lambda **how: strategy_of(DP2FedSAM, head=SGD, extractor=SGD, **how),
        lambda **how: strategy_of(Scaffold, local=SGD, **how),
    ],
    ids=["DP2-FedSAM", "SCAFFOLD"],
)
def test_a_run_in_several_processes_is_that_in_one(strategy):
    finals = []
    for count in (1, 2):
        run = strategy(plan=NonPrivatePlan(sampling=FixedSizeSampling(9, 6)), seed=1)
        grid = InProcessGrid(run.method.client_app(task()), num_clients=9, workers=count)
        result = run.start(grid, ArrayRecord(task().initial_params(1)), num_rounds=3)
        grid.workers.gather()
        assert run.refusals == []
        memories = [
            records.to_params(record)
            for context in grid.contexts.values()
            for record in context.state.array_records.values()
        ]
        finals.append([records.to_params(result.arrays), *memories])
    assert len(finals[0]) > 5
    for ours, theirs in zip(*finals, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5)


def test_processes_that_cannot_train_end_the_run_before_its_first_round(monkeypatch):
    """As where a process that sees a GPU has trained before it forks."""
    monkeypatch.setattr(workers, "_has_gradients", lambda: False)
    run = FederatedStrategy(
        DPFedAvg(local=SGD), NonPrivatePlan(sampling=FixedSizeSampling(9, 6)), seed=1
    )
    grid = InProcessGrid(DPFedAvg.client_app(task()), num_clients=9, workers=2)
    with pytest.raises(RuntimeError, match="workers=2: expected 1.*start the run in a new process"):
        run.start(grid, ArrayRecord(task().initial_params(1)), num_rounds=1)
    assert not multiprocessing.active_children()


def test_bad_numbers_of_workers_are_refused():
    with pytest.raises(ValueError, match="workers=0: expected an integer >= 1"):
        InProcessGrid(telling(), num_clients=3, workers=0)
