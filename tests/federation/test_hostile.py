"""Attacks by hostile servers and clients, one by one; none of them harms anybody else."""

import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import (
    FederatedStrategy,
    FederationNotReady,
    InProcessGrid,
    RefusedReply,
    VirtualGrid,
)
from flower_ext.federation.messages import records
from flower_ext.federation.messages.packing import pack
from flower_ext.federation.messages.replies import read_answer, read_metrics, read_update
from flower_ext.federation.messages.roster import Roster
from flower_ext.federation.progress import Progress
from flower_ext.privacy import (
    FullParticipation,
    NonPrivatePlan,
)
from tests.faults.malformed import announced, archive, copied
from tests.support.hostile import CLIENTS, FAST, plan
from tests.support.replies import reply, requests_of, training_message
from tests.support.worlds import initial, task

BASE = {"w": np.ones((2, 3), np.float32)}


def forged(data: bytes) -> RecordDict:
    array = Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=data)
    return RecordDict({"update": ArrayRecord({"w": array}), "answer": ArrayRecord({"w": array})})


@pytest.mark.parametrize(
    "data",
    [
        archive(BASE["w"]),  # numpy.load opens it as an archive, which has no shape
        announced(BASE["w"], (2**38,)),  # a terabyte, of which 24 bytes are sent
        announced(BASE["w"], (2, 3)) + b"more",
    ],
)
def test_only_an_array_that_is_there_is_read_as_one(data):
    with pytest.raises(RefusedReply, match="cannot be read"):
        read_update(reply(forged(data)), base=BASE, trust_models=False)
    with pytest.raises(RefusedReply, match="cannot be read"):
        read_answer(reply(forged(data)))


@pytest.mark.parametrize("value", [10**400, -(10**400), 1e300])
def test_numbers_that_no_float_holds_or_whose_sum_overflows_are_refused(value):
    with pytest.raises(RefusedReply, match="metric 'loss'"):
        read_metrics(reply(RecordDict({"metrics": MetricRecord({"loss": value})})))


@pytest.mark.parametrize("name", ["", "a\nb", "a\x00", "\x1b[2J", "a\u202eb", "x" * 101])
def test_names_of_metrics_are_short_and_printable(name):
    with pytest.raises(RefusedReply, match="expected a name of 1 … 100 printable characters"):
        read_metrics(reply(RecordDict({"metrics": MetricRecord({name: 1.0})})))


@pytest.mark.parametrize("name", ["f1/macro", "top 5", "größe", "<b>|"])
def test_other_names_of_metrics_are_the_clients_choice(name):
    metrics = read_metrics(reply(RecordDict({"metrics": MetricRecord({name: 1.0})})))
    assert metrics == {name: 1.0}


@pytest.mark.parametrize("size", [-1, 0.5, 2**41])
def test_sizes_are_whole_numbers_of_examples(size):
    with pytest.raises(RefusedReply, match="num-examples"):
        read_metrics(reply(RecordDict({"metrics": MetricRecord({"num-examples": size})})))


def test_one_client_cannot_remove_a_score_of_others_or_add_one():
    scores = [{"accuracy": 0.5, "loss": 1.0}, {"accuracy": 0.7, "loss": 2.0}, {"mine": 1.0}]
    summary = Progress().scores(scores)
    assert summary["accuracy_mean"] == pytest.approx(0.6)
    assert summary["loss_mean"] == pytest.approx(1.5)
    assert not any(name.startswith("mine") for name in summary)


def test_a_reason_is_kept_short_whatever_a_client_writes_in_it():
    grid = InProcessGrid(DPFedAvg.client_app(task()), CLIENTS)
    strategy = FederatedStrategy(DPFedAvg(local=FAST), plan())
    requests = strategy.configure_train(1, initial(), ConfigRecord(), grid)
    replies = list(grid.send_and_receive(requests))
    replies[0].content["update"] = ArrayRecord({"x" * 10**6: Array(np.ones(1))})
    strategy.aggregate_train(1, replies)
    assert len(strategy.refusals) == 1
    assert len(strategy.refusals[0]) <= 1_000


@pytest.mark.parametrize("error", [True, False])
def test_a_clients_text_cannot_steer_a_terminal_or_forge_a_line(error):
    text = "\x1b[2J\x1b]0;x\x07\x9b1A\x00\u202eround 9/9 · ε 0.1"

    def read(message):
        raise RefusedReply("the answer cannot be read: " + text + "\nround 9/9 · ε 0.1")

    requests = requests_of(question := training_message())
    content = Error(code=100, reason=text) if error else RecordDict()
    sent = Message(content, reply_to=question)
    assert not list(requests.accepted([sent], read_metrics if error else read))
    (refusal,) = requests.clients.refusals
    assert refusal.isprintable()
    assert r"\x1b[2J" in refusal  # an operator may still see what came


def test_an_old_upload_stays_refused_when_it_claims_the_current_round():
    grid = InProcessGrid(DPFedAvg.client_app(task()), CLIENTS)
    strategy = FederatedStrategy(DPFedAvg(local=FAST), plan())
    kept = list(grid.send_and_receive(strategy.configure_train(1, initial(), ConfigRecord(), grid)))
    strategy.aggregate_train(1, kept)
    requests = strategy.configure_train(2, initial(), ConfigRecord(), grid)
    fresh = list(grid.send_and_receive(requests))
    for old in kept:
        old.metadata.__dict__["_group_id"] = "2"
    strategy.aggregate_train(2, [*kept, *fresh])
    assert len(strategy.refusals) == CLIENTS
    assert all("a different message" in refusal for refusal in strategy.refusals)
    assert strategy.run.progress.row["answered"] == CLIENTS


def test_an_upload_is_no_answer_to_an_evaluation_of_the_same_round():
    grid = InProcessGrid(DPFedAvg.client_app(task()), CLIENTS)
    strategy = FederatedStrategy(
        DPFedAvg(local=FAST), NonPrivatePlan(sampling=FullParticipation(CLIENTS))
    )
    requests = strategy.configure_train(1, initial(), ConfigRecord(), grid)
    uploads = list(grid.send_and_receive(requests))
    strategy.configure_evaluate(1, initial(), ConfigRecord(), grid)
    assert uploads[0].content.metric_records  # metrics with sizes, as scores have them
    assert strategy.aggregate_evaluate(1, uploads) is None


class Identities(InProcessGrid):
    """A grid that changes the identities that nodes report."""

    def __init__(self, change):
        super().__init__(DPFedAvg.client_app(task()), CLIENTS)
        self.change = change

    def send_and_receive(self, messages, *, timeout=None):
        return self.change([copied(r) for r in super().send_and_receive(messages)])


def naming_partition(value):
    """Return a change after which client 0 names ``value`` as its partition."""

    def change(replies):
        replies[0].content["identity"] = ConfigRecord({"partition": value})
        return replies

    return change


def naming_nothing(replies):
    replies[0].__dict__["_content"] = RecordDict()
    return replies


@pytest.mark.parametrize(
    "change",
    [
        naming_partition(True),
        naming_partition(-1),
        naming_partition("1"),
        naming_partition(1.0),
        naming_nothing,
    ],
)
def test_a_node_that_does_not_say_its_partition_is_named(change):
    with pytest.raises(FederationNotReady, match="node 1000 says it holds partition"):
        Roster.connect(Identities(change), CLIENTS, timeout=1.0)


def test_identities_sent_twice_or_by_strangers_change_nothing():
    def change(replies):
        stranger = copied(replies[0])
        stranger.metadata.__dict__["_src_node_id"] = 3
        return [stranger, *replies, *replies]

    roster = Roster.connect(Identities(change), CLIENTS, timeout=1.0)
    assert roster.nodes == {number: 1_000 + number for number in range(CLIENTS)}


class PackedAndRepeated(InProcessGrid):
    """A grid that repeats every reply in the next round, before the replies of that round."""

    earlier: list = []
    relabel = False

    def send_and_receive(self, messages, *, timeout=None):
        replies = list(super().send_and_receive(messages, timeout=timeout))
        if not replies[0].metadata.message_type.startswith("train"):
            return replies
        before, self.earlier = [copied(early) for early in self.earlier], replies
        for early in before if self.relabel else ():
            early.metadata.__dict__["_group_id"] = replies[0].metadata.group_id
        return [*before, *replies, *replies]


@pytest.mark.parametrize("relabel", [False, True])
def test_replies_for_several_clients_are_of_this_round_and_count_once(relabel, logged):
    finals = []
    for below in (InProcessGrid, PackedAndRepeated):
        strategy = FederatedStrategy(
            DPFedAvg(local=FAST), plan(), seed=1, seeded_noise=True, evaluate_every=0
        )
        grid = below(DPFedAvg.client_app(task(), allow_seeded_noise=True), 2)
        grid.relabel = relabel
        result = strategy.start(VirtualGrid(grid, 2), initial(), num_rounds=3)
        finals.append(records.to_arrays(result.arrays))
        assert strategy.run.progress.row["answered"] == CLIENTS
    for name, array in finals[0].items():
        np.testing.assert_array_equal(finals[1][name], array)
    ignored = [r.name for r in logged.records if "the server ignores a reply" in r.getMessage()]
    assert {*ignored} == {"flwr"}  # the log that users of Flower see


@pytest.mark.parametrize(
    "facts",
    [
        {"slot": [0, 0]},
        {"slot": [-1, 0]},
        {"slot": [0, 2]},
        {"slot": [0]},
        {"slot": ["0", "1"]},
        {"clients-per-node": 0},
        {"clients-per-node": math.nan},
        {"type": ["train.packed", "train.packed"]},
        {"type": ["query.identity"]},
        {"records": ["packed packed", "packed packed"]},
        {"records": []},
        {"records": ["9 arrays", "9 arrays"]},
    ],
)
def test_a_message_to_several_clients_names_its_receivers_once_and_correctly(facts):
    grid = InProcessGrid(DPFedAvg.client_app(task()), 2)
    virtual = VirtualGrid(grid, 2)
    strategy = FederatedStrategy(DPFedAvg(local=FAST), plan())
    requests = strategy.configure_train(1, initial(), ConfigRecord(), virtual)
    packed = pack(requests[:2], 1_000, [0, 1], clients_per_node=2)
    told_facts = packed.content.config_records["packed"]
    for name, value in facts.items():
        told_facts[name] = value
    (answer,) = grid.send_and_receive([packed])
    if not answer.has_error():  # the node answers with an error for each client
        codes = answer.content.config_records["packed"]["error-code"]
        assert codes == [] or all(codes)
    assert dict(grid.contexts[1_000].state) == {}
