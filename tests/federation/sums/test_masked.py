"""Secure sums in a run: the right sum or none, whoever is lost; nothing else leaves a client."""

import multiprocessing
from collections import Counter
from copy import deepcopy
from itertools import cycle, product

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flower_ext.algorithms import DP2FedSAM, DPFedAvg, Upcycled
from flower_ext.errors import ProtocolError
from flower_ext.federation.messages import records
from flower_ext.federation.storage.memory import ClientVault
from flower_ext.federation.sums.masked import BEGIN, KEYS, MASKED_SUM, SENT, UNMASK, MaskedMember
from flower_ext.federation.sums.summation import SumMessage
from flower_ext.privacy import (
    Ledger,
)
from flower_ext.privacy.mechanisms.protections import ClipAndNoise
from flower_ext.secure.aggregation import member
from flower_ext.secure.aggregation.context import Invitation
from tests.faults.malformed import copied
from tests.support.grids import grid as grid_of
from tests.support.losing import STAGES, Losing, stage_of
from tests.support.masked_runs import assert_same, expected_model, run
from tests.support.secure_runs import CLIENTS, strategy_of
from tests.support.secure_sum import Round, round_context
from tests.support.travelling import Recorder
from tests.support.worlds import initial


def test_the_model_equals_that_of_the_plain_sum_bit_for_bit():
    _, model = run(strategy_of())
    assert_same(model, expected_model(range(CLIENTS)))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["lost", "answers"])
@pytest.mark.parametrize("partitions", [pytest.param((0,), marks=pytest.mark.full), (1, 6)])
def test_clients_lost_in_any_stage_leave_the_sum_of_the_others(stage, way, partitions):
    strategy = strategy_of()
    _, model = run(strategy, Losing, **{way: [(partition, stage) for partition in partitions]})
    gone = () if stage == UNMASK else partitions  # a client is in the sum once it has uploaded
    assert_same(model, expected_model(set(range(CLIENTS)) - set(gone)))
    assert strategy.participations.rounds == 1


def test_losses_in_every_stage_of_a_round_leave_the_others_sum():
    _, model = run(strategy_of(), Losing, lost=[(0, BEGIN), (3, KEYS)], answers=[(5, UNMASK)])
    assert_same(model, expected_model({1, 2, 4, 5, 6, 7}))


@pytest.mark.parametrize("stage", STAGES)
def test_with_too_few_left_a_round_is_discarded(stage, logged):
    strategy = strategy_of()
    grid, model = run(strategy, Losing, answers=[(p, stage) for p in range(4)])
    assert_same(model, records.to_arrays(initial()))
    assert "round 1 discarded" in logged.text
    trained = [m for m in grid.received if m.metadata.message_type.startswith("train")]
    assert bool(trained) == (stage in ("train", UNMASK))  # otherwise nobody was asked to
    assert strategy.participations.rounds == 1
    # Once clients were asked to unmask a sum, it counts as seen.
    assert bool(strategy.participations.in_sums) == (stage == UNMASK)


def test_clients_that_were_lost_take_part_in_the_next_round():
    strategy = strategy_of()
    grid, _ = run(strategy, Losing, rounds=2, answers=[(0, KEYS)])
    rounds = {
        Invitation.from_bytes(m.content[MASKED_SUM][BEGIN].numpy().tobytes()).context
        for m in grid.sent
        if stage_of(m) == BEGIN
    }
    assert len(rounds) == 2
    one, two = rounds
    assert one.run != two.run
    assert one.digest != two.digest


class Restarting(Recorder):
    """A grid in which two new processes, one after the other, receive each message."""

    folder = ()

    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.twice = []

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        copies = deepcopy(messages)
        first = self._after_a_start(messages)
        again = self._after_a_start(copies)
        self.twice += [
            (stage_of(message), *pair)
            for message, *pair in zip(messages, first, again, strict=True)
            if stage_of(message)
        ]
        return first

    def _after_a_start(self, messages):
        for context in self.contexts.values():
            context.state = RecordDict()
            (context.node_config["state-folder"],) = self.folder
        return list(super().send_and_receive(messages))


def test_a_client_that_restarts_after_each_message_answers_nothing_twice(
    tmp_path,
):
    grid, model = run(strategy_of(), Restarting, folder=[str(tmp_path)])
    assert_same(model, expected_model(range(CLIENTS)))
    assert Counter(stage for stage, *_ in grid.twice) == dict.fromkeys(STAGES, CLIENTS)
    for stage, first, again in grid.twice:
        assert not first.has_error()
        if stage == UNMASK:  # another answer to the same question could reveal both secrets
            one, two = (reply.content[records.ANSWER][UNMASK].numpy() for reply in (first, again))
            np.testing.assert_array_equal(one, two)
        else:
            assert again.has_error()


class Forgetting(Recorder):
    """A grid in which one client has a new process for every message, and no state folder."""

    def send_and_receive(self, messages, *, timeout=None):
        self.contexts[1_003].state = RecordDict()
        return super().send_and_receive(messages)


def test_without_a_folder_a_client_that_forgot_the_round_leaves_it():
    strategy = strategy_of()
    _, model = run(strategy, Forgetting)
    assert_same(model, expected_model(set(range(CLIENTS)) - {3}))
    assert any("name a state-folder in the node config" in one for one in strategy.refusals)


def _mask_at_once(folder, question, value, both_loaded, outcomes):
    """Answer a training message in a process that has loaded its state when the other one has."""
    load = ClientVault.load

    def load_and_wait(vault):
        state = load(vault)
        both_loaded.wait(timeout=60)
        return state

    ClientVault.load = load_and_wait
    facts = {"partition-id": 0, "state-folder": folder}
    context = Context(run_id=7, node_id=3, node_config=facts, state=RecordDict(), run_config={})
    try:
        cells = ClipAndNoise(clipping_norm=1.0, noise_stddev=0.5, cell=2.0**-16)
        member = MaskedMember(question, context, "one")
        member.seal({"w": np.full(50, value, np.int64)}, cells)
        outcomes.put("masked")
    except ProtocolError as error:
        outcomes.put(str(error))


def test_of_two_processes_with_one_training_message_only_one_masks(tmp_path):
    one = Round(round_context())
    deliveries = one.share(one.advertise())
    facts = {"partition-id": 0, "state-folder": str(tmp_path)}
    context = Context(run_id=7, node_id=3, node_config=facts, state=RecordDict(), run_config={})
    question = SumMessage("delivery", deliveries[0].to_bytes())
    processes = multiprocessing.get_context("fork")
    for _ in range(10):
        vault = ClientVault(context, "one-sum")
        vault.store(one.members[0].to_bytes())
        both_loaded, outcomes = processes.Barrier(2), processes.Queue()
        twins = [
            processes.Process(
                target=_mask_at_once, args=(str(tmp_path), question, v, both_loaded, outcomes)
            )
            for v in (1, 2)
        ]
        for twin in twins:
            twin.start()
        first, second = sorted(outcomes.get(timeout=60) for _ in twins)
        for twin in twins:
            twin.join()
        assert first == "masked"
        assert "one answer to each message" in second


class Crafting(Recorder):
    """A grid on which client 3 sends crafted bytes in one stage."""

    stage, craft = (), ()

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        stages = {m.metadata.dst_node_id: stage_of(m) for m in messages}
        replies = list(super().send_and_receive(messages, timeout=timeout))
        for reply in replies:
            node = reply.metadata.src_node_id
            if node == 1_003 and stages[node] in self.stage and reply.has_content():
                name = records.UPDATE if stages[node] == "train" else records.ANSWER
                ((array_name, array),) = reply.content[name].items()
                (craft,) = self.craft
                crafted = craft(array.numpy().tobytes())
                reply.content[name] = records.bytes_record(array_name, crafted)
        return replies


CRAFTED = {
    "nothing": lambda data: b"",
    "a header": lambda data: data[:33],
    "a length of 2^64 - 1": lambda data: data[:37] + b"\xff" * 8 + data[45:],
    "a member of 2^32 - 1": lambda data: data[:33] + b"\xff" * 4 + data[37:],
    "cut off": lambda data: data[:-1],
    "more": lambda data: data + b"\0",
    "ones": lambda data: data[:37] + b"\xff" * (len(data) - 37),
    "zeros": lambda data: data[:37] + bytes(len(data) - 37),
}


@pytest.mark.parametrize(
    ("craft", "stage"),
    grid_of(product(CRAFTED, STAGES), [*zip(CRAFTED, cycle(STAGES), strict=False)].__contains__),
)
def test_crafted_bytes_of_one_client_never_end_a_run(stage, craft):
    strategy = strategy_of()
    run(strategy, Crafting, stage=[stage], craft=[CRAFTED[craft]])
    assert strategy.participations.rounds == 1
    if not (stage == "train" and craft in ("a length of 2^64 - 1", "ones", "zeros")):
        assert strategy.refusals  # such a vector is as uniform as any


def far_off(data):
    """Add a quarter of the ring to the last number, so that its sum is wrong for sure."""
    return data[:-1] + bytes([(data[-1] + 64) % 256])


def test_a_sum_that_a_member_spoiled_is_discarded_with_a_reason(logged, tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    strategy = strategy_of(ledger=ledger)
    _, model = run(strategy, Crafting, stage=["train"], craft=[far_off])
    assert_same(model, records.to_arrays(initial()))
    assert "round 1 discarded: the noised sum has a norm of" in logged.text
    assert "a member spoiled it" in logged.text
    (entry,) = [e for e in Ledger.read(tmp_path / "ledger.jsonl") if e["kind"] == "discard"]
    assert "a member spoiled it" in entry["reason"]
    assert strategy.participations.rounds == 1  # and it is spent


class Garbling(Recorder):
    """A grid on which client 3 gets a message of one stage with one array changed."""

    stage, garble = (), ()

    def send_and_receive(self, messages, *, timeout=None):
        messages = [copied(message) for message in messages]
        for message in messages:
            if message.metadata.dst_node_id == 1_003 and stage_of(message) in self.stage:
                question = records.to_arrays(message.content[MASKED_SUM])
                (garble,) = self.garble
                changed = {name: garble(array) for name, array in question.items()}
                message.content[MASKED_SUM] = records.to_record(changed)
        return super().send_and_receive(messages, timeout=timeout)


GARBLED = {
    "of no bytes": lambda array: array[..., :0] if array.ndim else array[None][:0],
    "of floats": lambda array: array.astype(np.float64) + 0.5,
    "of no real numbers": lambda array: array.astype(np.complex64),
    "in two dimensions": lambda array: np.stack([array, array]),
    "of ones": lambda array: np.full_like(array, -1 if array.dtype == np.int64 else 255),
}


@pytest.mark.parametrize(
    ("garble", "stage"),
    grid_of(product(GARBLED, STAGES), [*zip(GARBLED, cycle(STAGES), strict=False)].__contains__),
)
def test_an_odd_server_message_is_one_clients_error_only(stage, garble):
    strategy = strategy_of()
    _, model = run(strategy, Garbling, stage=[stage], garble=[GARBLED[garble]])
    gone = {3} if stage != UNMASK else set()
    assert_same(model, expected_model(set(range(CLIENTS)) - gone))
    assert "node 1003" in strategy.refusals[0]


def test_a_client_that_reveals_wrong_shares_is_named_and_the_sum_right(logged):
    def wrong(data):  # the last byte of the first share
        return data[:74] + bytes([data[74] ^ 1]) + data[75:]

    strategy = strategy_of()
    _, model = run(strategy, Crafting, stage=[UNMASK], craft=[wrong])
    assert_same(model, expected_model(range(CLIENTS)))
    (refusal,) = strategy.refusals
    assert "client 3: it revealed wrong shares" in refusal
    assert refusal in logged.text


def test_a_client_whose_shares_cannot_be_opened_is_named(logged):
    def wrong(data):  # in the tag of the last sealed share, before its two hashes
        return data[:-65] + bytes([data[-65] ^ 1]) + data[-64:]

    strategy = strategy_of()
    _, model = run(strategy, Crafting, stage=[KEYS], craft=[wrong])
    assert_same(model, expected_model(range(CLIENTS)))
    (refusal,) = strategy.refusals
    assert "client 3: its sealed shares could not be opened by clients" in refusal
    assert refusal in logged.text


def test_a_client_that_deals_shares_of_another_secret_discards_the_round(logged, monkeypatch):
    right, dealt = member.split_secret, []

    def split(secret, *facts):
        dealt.append(secret)
        wrong = len(dealt) == 7  # the seed of the fourth client, each of which deals two secrets
        return right(bytes(32) if wrong else secret, *facts)

    monkeypatch.setattr(member, "split_secret", split)
    strategy = strategy_of()
    _, model = run(strategy)
    assert_same(model, records.to_arrays(initial()))
    (refusal,) = strategy.refusals
    assert "client 3: no secret fits both its shares and what it sent before" in refusal
    assert refusal in logged.text


class Replacing(Crafting):
    """A grid on which client 3 sends other arrays in one stage."""

    arrays = ()

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        stages = {m.metadata.dst_node_id: stage_of(m) for m in messages}
        replies = list(Recorder.send_and_receive(self, messages, timeout=timeout))
        for reply in replies:
            node = reply.metadata.src_node_id
            if node == 1_003 and stages[node] in self.stage:
                name = records.UPDATE if stages[node] == "train" else records.ANSWER
                ((array_name, array),) = reply.content[name].items()
                (replaced,) = self.arrays
                reply.content[name] = records.to_record(replaced(array_name, array.numpy()))
        return replies


@pytest.mark.parametrize("stage", ["train", UNMASK])
@pytest.mark.parametrize(
    "replaced",
    [
        lambda name, sent: {"other": sent},
        lambda name, sent: {name: sent, "more": sent},
        lambda name, sent: {name: sent.view(np.int8)},
        lambda name, sent: {"other": sent.view(np.int8)},
    ],
    ids=["another name", "one more", "another type", "both"],
)
def test_an_answer_of_other_arrays_is_refused_and_the_others_go_on(stage, replaced):
    strategy = strategy_of()
    _, model = run(strategy, Replacing, stage=[stage], arrays=[replaced])
    gone = {3} if stage == "train" else set()
    assert_same(model, expected_model(set(range(CLIENTS)) - gone))
    (refusal,) = strategy.refusals
    name = SENT if stage == "train" else stage
    assert f"expected one array of bytes (uint8) with a name in ('{name}',)" in refusal


@pytest.mark.parametrize("method", [DPFedAvg, DP2FedSAM])
def test_methods_whose_updates_are_summed_run_by_the_same_setting(method):
    strategy = strategy_of(method)
    grid, model = run(strategy, rounds=2)
    assert strategy.refusals == []
    assert any(np.any(array != records.to_arrays(initial())[n]) for n, array in model.items())
    assert strategy.participations.rounds == 2
    assert sum(stage_of(message) == UNMASK for message in grid.sent) == 2 * CLIENTS


def test_upcycling_asks_for_keys_in_the_rounds_that_train_alone():
    grid, _ = run(Upcycled(strategy_of(), coefficient=0.5), rounds=4)
    assert sum(stage_of(message) == BEGIN for message in grid.sent) == 2 * CLIENTS
