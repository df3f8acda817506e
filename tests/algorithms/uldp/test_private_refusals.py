"""Private weighting refuses unfit settings, messages and sums."""

import re

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord

from flower_ext.algorithms.uldp import (
    UldpAvg,
)
from flower_ext.data import SiloData
from flower_ext.federation import FederationNotReady, InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.federation.sums.weighted import WEIGHTED_SUM
from flower_ext.privacy import (
    Ledger,
    PoissonSampling,
)
from flower_ext.secure.weighting.paillier_server import PaillierServer
from flower_ext.secure.weighting.paillier_silo import PaillierOpenSum
from tests.support.private_silos import (
    METHOD,
    SMALL,
    Meddler,
    difference,
    make,
    make_openly,
    start,
    vault,
)
from tests.support.private_uldp import HIDDEN
from tests.support.silos import (
    ROUNDS,
    SEED,
    SILOS,
    USERS,
    silos,
    task,
)
from tests.support.travelling import Recorder


def with_sum(change):
    """Return a fault that changes the arrays of silo 1's sum."""

    def meddle(replies, grid):
        record = replies[1].content["update"]
        answer = records.to_arrays(record)
        replies[1].content["update"] = records.to_record(change(dict(answer)))
        return replies

    return meddle


def with_first(number):
    """Return a fault that replaces the first ciphertext of silo 1's sum by a number."""

    def change(answer):
        size, sent = 128, answer["sum"].copy()
        sent[20 : 20 + size] = np.frombuffer(int(number).to_bytes(size, "big"), np.uint8)
        return {"sum": sent}

    return with_sum(change)


def numbered(at, number):
    """Change an integer of a sum's head: the first is its round, the second its silo."""

    def change(answer):
        sent = answer["sum"].copy()
        sent[8 * at - 4 : 8 * at + 4] = np.frombuffer(int(number).to_bytes(8, "big"), np.uint8)
        return {"sum": sent}

    return with_sum(change)


def stale(replies, grid):
    replies[1].content["update"] = grid.earlier[1].content["update"]
    return replies


@pytest.mark.parametrize(
    ("meddle", "message"),
    [
        (lambda replies, grid: replies[:1] + replies[2:], None),
        (with_sum(lambda answer: {**answer, "sum": answer["sum"][:-1]}), "PaillierSum of"),
        (
            with_sum(lambda answer: {**answer, "sum": answer["sum"].astype(np.int16)}),
            "expected one array of bytes",
        ),
        pytest.param(
            with_sum(lambda answer: {**answer, "more": answer["sum"]}),
            "expected one array of bytes",
            marks=pytest.mark.full,
        ),
        pytest.param(numbered(1, 3), "sum of round 3: expected round 2", marks=pytest.mark.full),
        (numbered(2, 0), "PaillierSum of silo 0: expected silo 1, its sender"),
        (with_first(0), "unit modulo"),
        pytest.param(with_first(2**1024 - 1), "unit modulo", marks=pytest.mark.full),
        (stale, "sum of round 1: expected round 2"),
    ],
)
def test_without_the_sum_of_every_silo_nothing_is_decrypted(meddle, message, tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    strategy = make(ledger=ledger)
    decrypted = []
    close = PaillierServer.close_round

    def watched(self, *args, **options):
        result = close(self, *args, **options)
        decrypted.append(self._last_round)
        return result

    monkeypatch.setattr(PaillierServer, "close_round", watched)
    start(strategy, Meddler, meddle=meddle)
    assert decrypted == [1, 3]
    entries = Ledger.read(tmp_path / "ledger.jsonl")
    kinds = [entry["kind"] for entry in entries]
    assert kinds == ["reserve", "commit", "reserve", "discard", "reserve", "commit"]
    assert "silos [1] sent nothing" in entries[3]["reason"]
    assert "nothing was decrypted" in entries[3]["reason"]
    assert strategy.participations.in_sums == strategy.participations.rounds == ROUNDS
    assert [message in refusal for refusal in strategy.refusals] == (
        [] if message is None else [True]
    )


def test_a_second_reply_of_a_silo_is_refused_and_the_first_counts():
    def twice(replies, grid):
        return [*replies, replies[1]]

    _, model = start(strategy := make(), Meddler, meddle=twice)
    _, expected = start(make_openly(UldpAvg))
    assert difference(model, expected) <= ROUNDS * SMALL.precision
    assert "answered already" in strategy.refusals[0]


@pytest.mark.parametrize("question", [1, 2, 3, 4], ids=["one-by-one", "begin", "keys", "count"])
@pytest.mark.parametrize("lose", ["silent", "malformed"])
def test_a_silo_lost_in_the_set_up_ends_the_run_by_number(question, lose):
    count = []

    def drop(replies, grid):
        count.append(1)
        if len(count) != question:
            return replies
        if lose == "silent":
            return replies[1:]
        replies[0].content["answer"] = records.to_record({"begin": np.zeros(3, np.uint8)})
        return replies

    strategy = make()
    with pytest.raises(
        FederationNotReady, match=r"partitions \[0\] cannot take part|silo 0: public key"
    ):
        start(strategy, Meddler, meddle=drop, kind=f"query.{METHOD}", groups=("0",))
    assert len(count) == question
    assert strategy.participations.rounds == 0


def test_counts_that_are_no_residues_end_the_run():
    def forge(replies, grid):
        answer = records.to_arrays(replies[1].content["answer"])
        if "count" in answer:
            forged = answer["count"].copy()
            forged[:] = 255
            replies[1].content["answer"] = records.to_record({"count": forged})
        return replies

    message = "a silo's answer breaks the protocol: counts of silo 1: expected integers below"
    with pytest.raises(FederationNotReady, match=message):
        start(make(), Meddler, meddle=forge, kind=f"query.{METHOD}", groups=("0",))


def test_a_silos_key_of_low_order_ends_the_set_up_by_number():
    def forge(replies, grid):
        answer = records.to_arrays(replies[1].content["answer"])
        if "begin" in answer:
            forged = answer["begin"].copy()
            forged[:] = 0
            replies[1].content["answer"] = records.to_record({"begin": forged})
        return replies

    with pytest.raises(FederationNotReady, match="silo 1: public key: expected .* low order"):
        start(make(), Meddler, meddle=forge, kind=f"query.{METHOD}", groups=("0",))


def test_an_invalid_answer_to_a_draw_discards_the_round_only(logged):
    forged = []

    def forge(replies, grid):
        answer = records.to_arrays(replies[0].content["answer"])
        if "draw" in answer and not forged:
            forged.append(1)
            nothing = records.to_record({"draw": np.zeros_like(answer["draw"])})
            replies[0].content["answer"] = nothing
        return replies

    strategy = make(protocol=HIDDEN, sampling=PoissonSampling(USERS, 0.4), evaluate_every=0)
    start(strategy, Meddler, meddle=forge, kind=f"query.{METHOD}", groups=("0",), rounds=2)
    assert "round 1 discarded: the secret draw of users failed" in logged.text
    assert "round 2 discarded" not in logged.text


def test_a_silos_fingerprint_is_a_warning_of_256_bits_once(logged):
    start(make(evaluate_every=0), rounds=1)
    shown = [r for r in logged.records if "fingerprint of all silos' keys" in r.getMessage()]
    assert len(shown) == SILOS
    assert {record.levelname for record in shown} == {"WARNING"}
    assert len({re.search("[0-9a-f]{64}", record.getMessage()).group() for record in shown}) == 1


@pytest.mark.parametrize("step", ["begin", "keys", "count"])
def test_a_silo_refuses_a_step_of_the_set_up_that_is_repeated(step):
    grid, _ = start(make(evaluate_every=0), Recorder, rounds=1)
    (again,) = (
        m
        for m in grid.sent
        if m.metadata.dst_node_id == 1_001
        and m.metadata.message_type == f"query.{METHOD}"
        and step in m.content.get(WEIGHTED_SUM, {})
    )
    before = vault(grid, 1).load()
    (reply,) = InProcessGrid.send_and_receive(grid, [again])
    assert reply.has_error()
    assert vault(grid, 1).load() == before


def test_a_silo_refuses_a_round_that_is_repeated():
    grid, _ = start(make(evaluate_every=0), Recorder, rounds=2)
    rounds = [m for m in grid.sent if m.metadata.message_type == f"train.{METHOD}"]
    for message in rounds:
        (reply,) = InProcessGrid.send_and_receive(grid, [message])
        assert "expected a number above 2" in reply.error.reason


def test_a_round_that_is_configured_twice_has_another_number_the_second_time():
    """No mask of the abandoned round hides a second sum."""
    strategy = make()
    grid, _ = start(strategy, rounds=1)
    initial = ArrayRecord(task().initial_params(SEED))
    for expected in (2, 3):
        strategy.configure_train(2, initial, ConfigRecord(), grid)
        assert strategy.newest_round.training_round == expected
    assert strategy.participations.rounds == 2


def test_why_a_silo_cannot_encrypt_stays_with_the_silo(monkeypatch):
    def finish(self, noise):
        raise ValueError("updates reach a magnitude of 3.14159")

    monkeypatch.setattr(PaillierOpenSum, "finish", finish)
    strategy = make()
    with pytest.raises(FederationNotReady, match="the reason is in its own log"):
        start(strategy)
    assert len(strategy.refusals) == SILOS  # no silo ever answers, so the run ends early
    for refusal in strategy.refusals:
        assert "the reason is in its own log" in refusal
        assert "3.14" not in refusal


def beyond_the_plan():
    """User 12 of 12, counted from zero."""
    one = silos()[1]
    return SiloData(train=one.train, test=one.test, owners=one.owners.clone().fill_(USERS))


@pytest.mark.parametrize(
    ("protocol", "data"),
    [
        (SMALL, lambda: [silos()[0], beyond_the_plan(), silos()[2]]),
    ],
)
def test_errors_in_a_silos_data_stay_in_the_silo(protocol, data):
    replies = []

    def watch(received, grid):
        replies.extend(received)
        return received

    kind = f"query.{METHOD}"
    with pytest.raises(FederationNotReady, match="the reason is in its own log") as error:
        start(make(protocol=protocol), Meddler, data(), meddle=watch, kind=kind, groups=("0",))
    failed = [reply.error.reason for reply in replies if reply.has_error()]
    assert failed
    for text in (str(error.value), *failed):
        assert "expected 0 to" not in text
        assert "owners: found user" not in text
