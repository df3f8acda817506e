"""Several clients on one node act like the same clients on nodes of their own."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from flower_ext.algorithms import DP2FedSAM, DPFedAvg, FedAMP, Scaffold
from flower_ext.federation import FederatedStrategy, InProcessGrid, VirtualGrid, client_app
from flower_ext.federation.client.app import CohortApp
from flower_ext.federation.messages import records
from flower_ext.federation.messages.failures import REASON_WITHHELD
from flower_ext.privacy import FixedSizeSampling, NonPrivatePlan, ReleasePlan
from flower_ext.training import LocalTraining
from tests.support.strategies import strategy_of
from tests.support.worlds import task

SGD = LocalTraining(epochs=2, batch_size=8, learning_rate=0.05)
CLIENTS, PER_NODE = 12, 4
SAMPLING = FixedSizeSampling(CLIENTS, 7)
PRIVATE = ReleasePlan(
    sampling=SAMPLING, clipping_norm=0.5, noise_multiplier=0.3, rounds=3, delta=1e-3
)
STRATEGIES = {
    "client noise": lambda **how: strategy_of(
        DPFedAvg, plan=PRIVATE, seeded_noise=True, local=SGD, **how
    ),
    "personal head": lambda **how: strategy_of(
        DP2FedSAM,
        plan=NonPrivatePlan(sampling=SAMPLING),
        head=SGD,
        extractor=SGD,
        personal=["head"],
        **how,
    ),
    "control variates": lambda **how: strategy_of(
        Scaffold, plan=NonPrivatePlan(sampling=SAMPLING), local=SGD, **how
    ),
    "a model each": lambda **how: strategy_of(
        FedAMP, plan=NonPrivatePlan(sampling=SAMPLING), local=SGD, **how
    ),
}


def on_virtual_nodes(app: CohortApp) -> VirtualGrid:
    return VirtualGrid(InProcessGrid(app, num_clients=CLIENTS // PER_NODE), PER_NODE)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_run_equals_that_of_clients_on_separate_nodes(strategy):
    finals, scores = [], []
    for virtual in (False, True):
        run = strategy(seed=1)
        app = client_app(run.method.client, task=task(), allow_seeded_noise=True)
        grid = on_virtual_nodes(app) if virtual else InProcessGrid(app, num_clients=CLIENTS)
        result = run.start(grid, ArrayRecord(task().initial_params(1)), num_rounds=3)
        assert run.refusals == []
        finals.append(records.to_arrays(result.arrays))
        scores.append(run.run.client_metrics)
    for name, array in finals[0].items():
        np.testing.assert_allclose(finals[1][name], array, atol=1e-6)
    assert scores[1].keys() == scores[0].keys()
    for client, score in scores[0].items():
        assert scores[1][client] == pytest.approx(score, abs=1e-5)


def counting() -> CohortApp:
    """Return an app whose clients count the queries that they have seen."""
    app = CohortApp()

    @app.query()
    def _(message: Message, context: Context) -> Message:
        seen = int(context.state.config_records.get("seen", {"n": 0})["n"]) + 1
        context.state["seen"] = ConfigRecord({"n": seen})
        partition = context.node_config["partition-id"]
        if partition == message.content.config_records["ask"]["fails"]:
            raise RuntimeError("told to fail")
        node_facts = ConfigRecord({"partition": partition, "seen": seen, **context.node_config})
        return Message(RecordDict({"own": node_facts}), reply_to=message)

    return app


def ask(clients: list[int], fails: int = -1) -> list[Message]:
    content = RecordDict({"ask": ConfigRecord({"fails": fails})})
    return [Message(content, dst_node_id=c, message_type="query", group_id="5") for c in clients]


def test_each_client_has_a_separate_partition_state_and_error():
    grid = on_virtual_nodes(counting())
    clients = list(grid.get_node_ids())
    assert len(clients) == CLIENTS
    list(grid.send_and_receive(ask(clients[:5])))
    replies = list(grid.send_and_receive(ask(clients, fails=3)))
    by_client = {reply.metadata.src_node_id: reply for reply in replies}
    assert set(by_client) == set(clients)
    failed = by_client.pop(clients[3])
    assert failed.error.reason == REASON_WITHHELD
    for client, reply in by_client.items():
        facts = reply.content.config_records["own"]
        assert facts["partition"] == clients.index(client)
        assert facts["num-partitions"] == CLIENTS
        assert facts["seen"] == 1 + (client in clients[:5])
        assert reply.metadata.group_id == "5"
    # The client's effects before it failed are undone.
    (again,) = grid.send_and_receive(ask([clients[3]]))
    assert again.content.config_records["own"]["seen"] == 2


def test_two_messages_to_one_client_are_answered_one_after_the_other():
    grid = on_virtual_nodes(counting())
    clients = list(grid.get_node_ids())
    replies = list(grid.send_and_receive(ask([clients[1], clients[0], clients[1]])))
    assert [reply.content.config_records["own"]["seen"] for reply in replies] == [1, 1, 2]
    assert [reply.metadata.src_node_id for reply in replies] == [clients[1], *clients[:2]]
    replies = grid.send_and_receive(ask([clients[1], clients[1]]))
    assert [reply.content.config_records["own"]["seen"] for reply in replies] == [3, 4]


def test_entries_that_a_client_deletes_from_its_state_stay_deleted():
    app = CohortApp()

    @app.query()
    def _(message: Message, context: Context) -> Message:
        had = context.state.pop("key", None) is not None
        if not had:
            context.state["key"] = ConfigRecord({})
        return Message(RecordDict({"own": ConfigRecord({"had": had})}), reply_to=message)

    grid = on_virtual_nodes(app)
    clients = list(grid.get_node_ids())
    for had in (False, True, False):
        replies = grid.send_and_receive(ask(clients))
        assert {reply.content.config_records["own"]["had"] for reply in replies} == {had}


def test_clients_of_nodes_that_flower_could_not_reach_are_silent():
    class Lossy(InProcessGrid):
        def send_and_receive(self, messages, *, timeout=None):
            _, second, _ = super().send_and_receive(messages, timeout=timeout)
            return [second]

    grid = VirtualGrid(Lossy(counting(), num_clients=CLIENTS // PER_NODE), PER_NODE)
    clients = list(grid.get_node_ids())
    replies = grid.send_and_receive(ask(clients))
    assert [reply.metadata.src_node_id for reply in replies] == clients[4:8]


class Counting(InProcessGrid):
    """A grid that counts the messages to real nodes."""

    messages = 0

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        self.messages += len(messages)
        self.arrays = [
            sum(isinstance(record, ArrayRecord) for record in message.content.values())
            for message in messages
        ]
        return super().send_and_receive(messages, timeout=timeout)


def test_a_node_gets_one_message_and_shared_records_once():
    strategy = FederatedStrategy(
        DPFedAvg(local=SGD), NonPrivatePlan(sampling=SAMPLING), evaluate_every=0, seed=2
    )
    nodes = Counting(strategy.method.client_app(task()), num_clients=3)
    strategy.start(
        VirtualGrid(nodes, PER_NODE), ArrayRecord(task().initial_params(1)), num_rounds=2
    )
    assert nodes.messages == 3 + 2 * 3  # identities, then two rounds
    assert nodes.arrays == [1, 1, 1]


class Hostile(InProcessGrid):
    """A grid whose last node answers with arbitrary content."""

    nonsense = RecordDict()

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = super().send_and_receive(messages, timeout=timeout)
        for message, reply in zip(messages, replies, strict=True):
            if message.metadata.dst_node_id == 1_002 and message.metadata.group_id:
                yield Message(self.nonsense, reply_to=message)
            else:
                yield reply


@pytest.mark.parametrize(
    "nonsense",
    [
        RecordDict(),
        RecordDict({"packed": ConfigRecord({})}),
        RecordDict({"packed": ConfigRecord({"records": ["7 update"] * 4})}),
        RecordDict(
            {"packed": ConfigRecord({"records": [""], "error-code": [0], "error-reason": [""]})}
        ),
    ],
)
def test_nonsense_of_a_node_is_an_error_of_each_of_its_clients(nonsense):
    grid = VirtualGrid(nodes := Hostile(counting(), num_clients=3), PER_NODE)
    nodes.nonsense = nonsense
    clients = list(grid.get_node_ids())
    replies = list(grid.send_and_receive(ask(clients)))
    assert len(replies) == CLIENTS
    failed = {reply.metadata.src_node_id for reply in replies if reply.has_error()}
    assert failed == set(clients[8:])
    assert "cannot be read" in replies[-1].error.reason


def test_numbers_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="clients_per_node=0"):
        VirtualGrid(InProcessGrid(counting(), num_clients=1), 0)
    grid = on_virtual_nodes(counting())
    with pytest.raises(ValueError, match="dst_node_id=1: expected"):
        grid.send_and_receive(ask([1]))
