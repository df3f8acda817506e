"""The in-process engine, and every private name of Flower that it needs."""

import gc
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

from flower_ext import plugins
from flower_ext.algorithms import DP2FedSAM, DPFedAvg, FedDyn, PFedMe, Scaffold
from flower_ext.federation import (
    FederatedStrategy,
    InProcessGrid,
    Stragglers,
    VirtualGrid,
    run_in_process,
)
from flower_ext.federation import _flower_private as private
from flower_ext.federation.engines.in_process import modules_uncollected
from flower_ext.federation.messages import records
from flower_ext.federation.messages.failures import REASON_WITHHELD
from flower_ext.federation.messages.roster import FederationNotReady
from flower_ext.privacy import FixedSizeSampling, FullParticipation, NonPrivatePlan
from flower_ext.training import LocalTraining
from flower_ext.training.batched import stack
from tests.support.client_memory import context
from tests.support.strategies import strategy_of
from tests.support.worlds import client_data, task

SGD = LocalTraining(epochs=2, batch_size=8, learning_rate=0.05)


def counting_app() -> ClientApp:
    """Return an app whose clients count the queries that they have seen."""
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


def same_message(ours, theirs):
    """Compare messages except for their creation times."""
    metadata, other = vars(ours.metadata), vars(theirs.metadata)
    assert metadata.keys() == other.keys()
    assert vars(ours).keys() == vars(theirs).keys()
    for name in metadata.keys() - {"_created_at", "_ttl"}:
        assert metadata[name] == other[name], name
    for name in ("_created_at", "_ttl"):
        assert metadata[name] == pytest.approx(other[name], abs=1)
    assert ours.content is theirs.content


def test_objects_made_without_checks_equal_flowers():
    (node, *_) = InProcessGrid(counting_app(), num_clients=2).get_node_ids()
    arrays = {"w": Array(np.ones(2))}
    content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"loss": 0.5})})
    quick = private.record_of(
        RecordDict,
        {
            "arrays": private.record_of(ArrayRecord, arrays),
            "metrics": private.record_of(MetricRecord, {"loss": 0.5}),
        },
    )
    assert quick == content
    request = Message(content, dst_node_id=node, message_type="train.x", group_id="3")
    private.set_message_id(request, "17")
    same_message(private.reply_to(request, quick), Message(quick, reply_to=request))
    other = Message(quick, dst_node_id=node + 1, message_type="query.y", group_id="3")
    private.set_message_id(other, "17")
    like = private.message_like(request, quick, dst_node_id=node + 1, message_type="query.y")
    same_message(like, other)


def test_each_client_has_a_separate_state_and_identity():
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
    assert failed.error.reason == REASON_WITHHELD
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


def test_all_replies_can_be_pulled_without_their_ids():
    grid = InProcessGrid(counting_app(), num_clients=2)
    content = RecordDict({"ask": ConfigRecord({"fail": False})})
    messages = [grid.create_message(content, "query", n, "1") for n in grid.get_node_ids()]
    ids = list(grid.push_messages(messages))
    assert [reply.metadata.reply_to_message_id for reply in grid.pull_messages()] == ids
    assert list(grid.pull_messages()) == []
    grid.push_messages(messages[:1])
    assert list(grid.pull_messages([])) == []


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


class Alone(InProcessGrid):
    """Clients that never answer as a cohort."""

    def _answer_in_process(self, messages):
        return [super(Alone, self)._answer_in_process([message])[0] for message in messages]


@pytest.mark.parametrize(
    "strategy",
    [
        lambda **how: strategy_of(DPFedAvg, local=SGD, fine_tuning=SGD, **how),
        lambda **how: strategy_of(
            DP2FedSAM, head=SGD, extractor=replace(SGD, sam_radius=0.1), **how
        ),
        lambda **how: strategy_of(Scaffold, local=SGD, **how),
        lambda **how: strategy_of(FedDyn, local=SGD, **how),
        lambda **how: strategy_of(PFedMe, local=SGD, **how),
    ],
    ids=["DP-FedAvg-FT", "DP2-FedSAM", "SCAFFOLD", "FedDyn", "pFedMe"],
)
def test_a_cohort_trained_at_once_equals_its_clients_one_by_one(strategy):
    finals, scores, memories = [], [], []
    for engine in (InProcessGrid, Alone):
        plan = NonPrivatePlan(sampling=FixedSizeSampling(9, 7))
        run = strategy(plan=plan, seed=1, stragglers=Stragglers(ratio=0.3))
        grid = engine(run.method.client_app(task()), num_clients=9)
        result = run.start(grid, ArrayRecord(task().initial_params(1)), num_rounds=3)
        assert run.refusals == []
        finals.append(records.to_params(result.arrays))
        scores.append([dict(m) for m in result.evaluate_metrics_clientapp.values()])
        memories.append(
            [
                records.to_params(record)
                for context in grid.contexts.values()
                for record in context.state.array_records.values()
            ]
        )
    for ours, theirs in zip([finals[0], *memories[0]], [finals[1], *memories[1]], strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5)
    for one, other in zip(*scores, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_one_failing_client_answers_with_its_error_and_others_normally():
    def data(client):
        if client == 3:
            raise RuntimeError("the disk of client 3 is gone")
        return client_data(client)

    strategy = FederatedStrategy(
        DPFedAvg(local=SGD), NonPrivatePlan(sampling=FullParticipation(7)), evaluate_every=0
    )
    app = DPFedAvg.client_app(replace(task(), data=data))
    strategy.start(InProcessGrid(app, 7), ArrayRecord(task().initial_params(0)), num_rounds=1)
    (refusal,) = strategy.refusals
    assert refusal == f"round 1, node 1003: {REASON_WITHHELD}"
    assert sorted(strategy.run.num_examples) == [0, 1, 2, 4, 5, 6]


def test_a_cohort_trains_in_batches(monkeypatch):
    held = []
    build = stack.Stack.__init__
    monkeypatch.setattr(plugins, "offered", lambda group: ())
    monkeypatch.setattr(
        stack.Stack,
        "__init__",
        lambda self, task, jobs, *more: (
            held.append(len(jobs)),
            build(self, task, jobs, *more),
        )[1],
    )
    strategy = FederatedStrategy(
        DPFedAvg(local=SGD), NonPrivatePlan(sampling=FullParticipation(7)), evaluate_every=0
    )
    grid = InProcessGrid(DPFedAvg.client_app(task()), num_clients=7)
    strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=2)
    assert held[-2:] == [7, 7]  # a trial of two may come before them


def test_a_task_that_is_built_for_one_client_is_refused_by_name():
    def task_of_one_client(context):
        client = context.node_config["partition-id"]
        return replace(task(), data=lambda _: task().data(client))

    grid = InProcessGrid(DPFedAvg.client_app(task_of_one_client), num_clients=3)
    plan = NonPrivatePlan(sampling=FullParticipation(3))
    with pytest.raises(FederationNotReady, match="the task reads the node's 'partition-id'"):
        FederatedStrategy(DPFedAvg(local=SGD), plan).start(
            grid, ArrayRecord(task().initial_params(0)), num_rounds=1
        )


def test_flowers_simulation_is_known_while_ray_is_still_being_imported(monkeypatch):
    """The ServerApp runs beside the thread that imports Ray."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    assert not private.is_simulated(context())
    assert private.simulates(InMemoryGrid.__new__(InMemoryGrid))


def test_a_simulation_before_a_deployment_leaves_it_a_deployment():
    grid = InProcessGrid(DPFedAvg.client_app(task()), num_clients=2)
    assert all(map(private.is_simulated, grid.contexts.values()))
    assert not private.is_simulated(context())
    for simulated, nodes in (
        (True, grid),
        (True, InMemoryGrid.__new__(InMemoryGrid)),
        (False, HttpGrid.__new__(HttpGrid)),
    ):
        assert private.simulates(nodes) is simulated
        assert private.simulates(VirtualGrid(nodes, 2)) is simulated


def test_a_run_leaves_the_garbage_collector_as_it_was():
    frozen, usual, inside = gc.get_freeze_count(), gc.get_threshold(), []
    gc.unfreeze()  # other tests may have frozen objects
    gc.set_threshold(700, 10, 10)
    try:
        with modules_uncollected():
            inside.append(gc.get_threshold())
            with modules_uncollected():  # in a run in a run
                inside.append(gc.get_threshold())
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
        assert gc.get_threshold() == (700, 10, 10) != inside[0] == inside[1]
    finally:
        gc.set_threshold(*usual)
        if frozen:
            gc.freeze()
