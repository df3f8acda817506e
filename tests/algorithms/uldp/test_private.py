"""Private weights: the result equals the plain method; nobody reads or repeats a secret."""

import json
import re
import stat
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from gmpy2 import mpz

from flower_ext.algorithms.uldp import (
    PrivateWeighting,
    UldpAvg,
    UldpSgd,
)
from flower_ext.data import SiloData
from flower_ext.federation import (
    FederationNotReady,
    InProcessGrid,
    records,
)
from flower_ext.federation.population import Cohort, UsersInSilos
from flower_ext.federation.sums import weighted_silo
from flower_ext.privacy import (
    AdversaryView,
    FullParticipation,
    Ledger,
    PoissonSampling,
    gaussian_loss,
)
from flower_ext.privacy.theorems.assumptions import HONEST_COUNTS
from flower_ext.secure.weighting import protocol as protocols
from flower_ext.secure.weighting.encoding import from_residue
from flower_ext.secure.weighting.paillier_server import PaillierServer
from flower_ext.secure.weighting.paillier_silo import PaillierOpenSum, PaillierSilo
from tests.support.grids import grid as grid_of
from tests.support.imported_anew import run_anew
from tests.support.plans import mechanism_of
from tests.support.private_silos import (
    EVERY,
    INSTALLED,
    METHOD,
    SMALL,
    FreshProcesses,
    Meddler,
    Owned,
    difference,
    make,
    make_openly,
    name_of,
    start,
    vault,
)
from tests.support.silos import (
    COMMON,
    LOCAL,
    ROUNDS,
    SEED,
    SILOS,
    USERS,
    histogram,
    plan,
    silos,
    task,
)
from tests.support.strategies import private_strategy_of
from tests.support.travelling import Recorder
from tests.support.weighting import numbers


def kept(grid, number=0):
    return weighted_silo.stored_silo(vault(grid, number))


def is_draw(message):
    return "draw" in message.content.get(records.WEIGHTED_SUM, {})


# The result --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "sampling"),
    grid_of(
        product([UldpAvg, UldpSgd], [FullParticipation(USERS), PoissonSampling(USERS, 0.4)]),
        lambda case: (case[0] is UldpAvg) == isinstance(case[1], PoissonSampling),
    ),
)
def test_the_model_is_that_of_plain_weights_over_several_rounds(method, sampling, monkeypatch):
    draw, drawn = UsersInSilos.draw, []

    def noted(self, rng):
        drawn.append(draw(self, rng))
        return drawn[-1]

    monkeypatch.setattr(UsersInSilos, "draw", noted)
    grid, model = start(strategy := make(method, sampling=sampling))
    assert strategy.refusals == []
    order = kept(grid)._order

    assert len(drawn) == ROUNDS
    rounds = iter(drawn)

    def told(self, rng):  # the users at the places that the server drew
        cohort = next(rounds)
        return replace(cohort, units=sorted(order[place] for place in cohort.units))

    monkeypatch.setattr(UsersInSilos, "draw", told)
    _, expected = start(make_openly(method, sampling=sampling))
    assert difference(model, expected) <= ROUNDS * SMALL.precision
    assert difference(model, records.to_arrays(ArrayRecord(task().initial_params(SEED)))) > 1e-3


def test_at_full_key_size_the_model_is_that_of_plain_weights():
    protocol = PrivateWeighting(max_records_per_user=60, precision=1e-6)
    assert protocol.key_bits == 3072
    _, private = start(strategy := make(protocol=protocol), rounds=1)
    assert strategy.refusals == []
    _, plain = start(make_openly(UldpAvg), rounds=1)
    assert difference(private, plain) <= protocol.precision


def test_coordinates_of_the_sum_err_by_at_most_precision_and_a_dither():
    coarse = replace(SMALL, precision=1e-3)
    sums = {}

    @dataclass(frozen=True, kw_only=True)
    class Watched(UldpAvg):
        def step(self, model, released, state):
            sums[name] = {n: np.asarray(a) * USERS for n, a in released.mean.items()}
            return super().step(model, released, state)

    runs = {"ours": make(Watched, protocol=coarse), "theirs": make_openly(Watched)}
    for name, strategy in runs.items():  # noqa: B007 - the step reads it
        start(strategy, rounds=1)
    assert 1e-5 < difference(sums["ours"], sums["theirs"]) <= coarse.precision


def test_a_silo_without_records_and_users_without_any_take_part():
    data = silos()
    data[2] = SiloData(train=data[2].train.subset([]), test=data[2].test, owners=data[2].owners[:0])
    _, model = start(strategy := make(), data=data)
    _, expected = start(make_openly(UldpAvg), data=data)
    assert strategy.refusals == []
    assert difference(model, expected) <= ROUNDS * SMALL.precision


def test_users_may_be_restricted_to_a_few_totals_and_then_share_ciphertexts():
    rng = np.random.default_rng(0)

    def of(number):
        one = silos()[number]
        owners = np.repeat(np.arange(USERS), 2 if number else 6)
        rows = rng.integers(0, len(one.train), len(owners))
        return SiloData(
            train=one.train.subset(rows), test=one.test, owners=torch.from_numpy(owners)
        )

    data = [of(number) for number in range(SILOS)]
    allowed = replace(SMALL, allowed_totals=(10,))
    _, model = start(strategy := make(protocol=allowed), data=data)
    _, expected = start(make_openly(UldpAvg), data=data)
    assert difference(model, expected) <= ROUNDS * SMALL.precision
    assert strategy.run.summation.server.settings.packing.slots > 1
    with pytest.raises(FederationNotReady, match=r"one of \(7,\)"):
        start(make(protocol=replace(SMALL, allowed_totals=(7,))), data=data)


# Users whom nobody knows -------------------------------------------------------------------------


HIDDEN = replace(SMALL, draw_choices=5)


@pytest.mark.full
def test_users_drawn_by_oblivious_transfer_are_those_whom_all_silos_took(monkeypatch):
    """Only a test, which acts for all parties at once, can know who was drawn."""
    rounds, opened = {}, PaillierSilo._opened

    def watched(self, message):
        texts, size = opened(self, message), self.settings.ciphertext_bytes
        rounds.setdefault(message.round_number, set()).add(tuple(numbers(texts, size)))
        return texts

    monkeypatch.setattr(PaillierSilo, "_opened", watched)
    strategy = make(protocol=HIDDEN, sampling=PoissonSampling(USERS, 0.4))
    grid, model = start(strategy)
    assert strategy.refusals == []
    assert all(len(taken) == 1 for taken in rounds.values())
    order, key = kept(grid)._order, strategy.run.summation.server._key
    users = {
        number: sorted(order[at] for at, x in enumerate(key.decrypt(*taken)) if x)
        for number, taken in rounds.items()
    }
    places = iter(sorted(users))

    def told(self, rng):
        drawn = users[next(places)]
        return Cohort(partitions=range(self.num_nodes), units=drawn, population=USERS)

    monkeypatch.setattr(UsersInSilos, "draw", told)
    _, expected = start(make_openly(UldpAvg, sampling=PoissonSampling(USERS, 0.4)))
    assert difference(model, expected) <= ROUNDS * SMALL.precision
    assert "users" not in strategy.run.progress.row


def test_only_silo_0_answers_a_draw_and_the_server_gets_group_elements():
    strategy = make(protocol=HIDDEN, sampling=PoissonSampling(USERS, 0.4), evaluate_every=0)
    grid, _ = start(strategy, Recorder)
    asked = [m for m in grid.sent if is_draw(m)]
    assert [m.metadata.dst_node_id for m in asked] == [1_000] * ROUNDS
    told = arrays(grid.received, "answer", "draw")
    assert len(told) == ROUNDS
    pieces = [data[at : at + 32] for _, data in told for at in range(0, len(data), 32)]
    assert len(set(pieces)) == len(pieces) == ROUNDS * USERS
    sent = {data for _, data in arrays(grid.sent, records.WEIGHTED_SUM, "weights")}
    assert len(sent) == ROUNDS  # all silos received the same
    facts = strategy.run.summation.server.settings
    assert {len(data) for data in sent} == {32 + USERS * 5 * (facts.ciphertext_bytes + 16)}


@pytest.mark.parametrize(
    "protocol",
    grid_of(INSTALLED, lambda protocol: name_of(protocol) == "paillier"),
    ids=lambda protocol: name_of(protocol),
)
def test_a_draw_that_silo_0_does_not_answer_discards_the_round(protocol, tmp_path):
    class Silent(InProcessGrid):
        draws = 0

        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            if messages and is_draw(messages[0]):
                self.draws += 1
                if self.draws == 2:
                    return []
            return super().send_and_receive(messages, timeout=timeout)

    ledger = Ledger(tmp_path / "ledger.jsonl")
    hidden = replace(protocol, draw_choices=5)
    strategy = make(protocol=hidden, sampling=PoissonSampling(USERS, 0.4), ledger=ledger)
    start(strategy, Silent)
    entries = Ledger.read(tmp_path / "ledger.jsonl")
    kinds = [entry["kind"] for entry in entries]
    assert kinds == ["reserve", "commit", "reserve", "discard", "reserve", "commit"]
    assert "a silo gave no valid answer: partitions [0] cannot take part" in entries[3]["reason"]
    assert strategy.participations.rounds == ROUNDS


@EVERY
def test_drawing_that_the_server_does_not_see_amplifies_against_it_as_well(protocol):
    views = {}
    for name, own in (("known", protocol), ("hidden", replace(protocol, draw_choices=5))):
        loud = {"noise_multiplier": 5.0}
        strategy = make(protocol=own, sampling=PoissonSampling(USERS, 0.4), plan=loud)
        strategy.participations.record(range(USERS), SILOS, requests=SILOS)
        views[name] = {g.view: g for g in strategy.guarantees() if g.basis == "provable"}
    known, hidden = views["known"], views["hidden"]
    models, sums = AdversaryView.RELEASED_MODELS, AdversaryView.SUM_ONLY
    assert hidden[models].epsilon == known[models].epsilon
    assert hidden[sums].epsilon == hidden[models].epsilon < 0.7 * known[sums].epsilon
    assert any("oblivious transfer" in text for text in hidden[sums].assumptions)
    assert not any("drawn: the server" in text for text in hidden[sums].not_covered)
    assert any("drawn: the server" in text for text in known[sums].not_covered)
    each = AdversaryView.EACH_UPLOAD
    assert hidden[sums].epsilon < hidden[each].epsilon < known[each].epsilon


# What travels ------------------------------------------------------------------------------------


def raw(message):
    """Return all bytes and strings of a message."""
    content = message.content
    parts = [a.data for r in content.array_records.values() for a in r.values()]
    for config in content.config_records.values():
        parts += [v if isinstance(v, bytes) else json.dumps(v).encode() for v in config.values()]
    return b"|".join(parts)


HEADS = {"weights": 12, "sum": 20}
"""Bytes of a message before its first field of bytes."""


def arrays(messages, record, name):
    """Return the named arrays of messages, without their heads, by message."""
    found = []
    for message in messages:
        sent = message.content.array_records.get(record)
        if sent is not None and name in sent:
            found.append((message, records.to_arrays(sent)[name].tobytes()[HEADS.get(name, 0) :]))
    return found


@pytest.fixture(scope="module")
def transcript():
    strategy = make(sampling=PoissonSampling(USERS, 0.5), evaluate_every=0)
    grid, _ = start(strategy, Recorder)
    return strategy, grid


def test_the_server_gets_only_keys_seeds_blinded_counts_and_masked_sums(transcript):
    strategy, grid = transcript
    facts = strategy.run.summation.server.settings
    sizes = {
        "begin": 32,
        "keys": 60 * (SILOS - 1),
        "count": USERS * facts.count_bytes,
        "sum": 20 + facts.ciphertexts * facts.ciphertext_bytes,
    }
    seen = set()
    for reply in grid.received:
        if reply.metadata.message_type == "query.identity":
            continue
        assert set(reply.content.keys()) <= {"answer", "update"}
        for record in reply.content.array_records.values():
            for name, array in records.to_arrays(record).items():
                if name == "one-by-one":
                    assert array.shape == ()
                    assert int(array) in (0, 1)
                    continue
                is_empty = name == "keys" and reply.metadata.src_node_id != 1_000
                assert array.dtype == np.uint8
                assert array.shape == (0 if is_empty else sizes[name],)
                seen.add(name)
    assert seen == set(sizes)


def test_no_secret_of_a_silo_is_in_any_message(transcript):
    _, grid = transcript
    everything = b"||".join(raw(m) for m in [*grid.sent, *grid.received])
    for number in range(SILOS):
        held = kept(grid, number)
        secret = [held.seed, held.private, *held._pairs._keys.values()]
        secret += [int(b).to_bytes(held.settings.count_bytes, "big") for b in held._blinds]
        for value in secret:
            assert value not in everything
            assert value.hex().encode() not in everything
        assert vault(grid, number).load() not in everything


def test_every_number_that_is_sent_is_fresh(transcript):
    strategy, grid = transcript
    facts = strategy.run.summation.server.settings
    sent = []
    for _, data in arrays(grid.received, "answer", "count"):
        sent += numbers(data, facts.count_bytes)
    uploads = arrays(grid.received, "update", "sum")
    assert len(uploads) == SILOS * ROUNDS
    for _, data in uploads:
        sent += numbers(data, facts.ciphertext_bytes)
    weights = arrays(grid.sent, records.WEIGHTED_SUM, "weights")
    assert len(weights) == SILOS * ROUNDS
    for data in {data for _, data in weights}:  # one list per round, for all silos
        sent += numbers(data, facts.ciphertext_bytes)
    assert len(sent) == USERS * SILOS + SILOS * ROUNDS * facts.ciphertexts + USERS * ROUNDS
    assert len(set(sent)) == len(sent)


def test_no_count_and_no_weight_is_in_what_the_server_receives(transcript):
    strategy, grid = transcript
    server, facts = (
        strategy.run.summation.server,
        strategy.run.summation.server.settings,
    )
    n, held = server._key.public.n, histogram(silos(), USERS)
    blinds = kept(grid)._blinds
    secret = {mpz(int(x)) for x in np.unique([*held.ravel(), *held.sum(axis=0)])}
    for user, blind in enumerate(blinds):
        secret |= {blind * int(own) % n for own in held[:, user]}
        for own in held[:, user]:
            if own:
                weight = mpz(int(own) * facts.common_multiple // int(held[:, user].sum()))
                secret |= {weight, -weight % n}
    received = []
    for _, data in arrays(grid.received, "answer", "count"):
        received += numbers(data, facts.count_bytes)
    for _, data in arrays(grid.received, "update", "sum"):
        ciphertexts = numbers(data, facts.ciphertext_bytes)
        received += ciphertexts + server._key.decrypt(ciphertexts)
    assert not secret & set(received)


def test_no_upload_and_no_partial_sum_shows_anything_with_the_secret_key(transcript):
    strategy, grid = transcript
    server, facts = (
        strategy.run.summation.server,
        strategy.run.summation.server.settings,
    )
    public = server._key.public
    for number in map(str, range(1, ROUNDS + 1)):
        sums = [
            numbers(data, facts.ciphertext_bytes)
            for message, data in arrays(grid.received, "update", "sum")
            if message.metadata.group_id == number
        ]
        for some in ([0], [1], [2], [0, 1], [0, 2], [1, 2]):
            for at in range(facts.ciphertexts):
                product = mpz(1)
                for one in some:
                    product = product * sums[one][at] % public.n_squared
                (shown,) = server._key.decrypt([product])
                assert abs(from_residue(shown, public.n)).bit_length() > 450
        product = mpz(1)
        for one in sums:
            product = product * one[0] % public.n_squared
        (shown,) = server._key.decrypt([product])
        assert abs(from_residue(shown, public.n)) <= facts.packing.largest


def test_bytes_of_the_protocol_are_counted(transcript):
    strategy, _ = transcript
    facts, row = strategy.run.summation.server.settings, strategy.run.progress.row
    assert row["bytes_up"] >= SILOS * facts.ciphertexts * facts.ciphertext_bytes
    assert row["bytes_down"] >= SILOS * USERS * facts.ciphertext_bytes


# Refusals ----------------------------------------------------------------------------------------


def with_sum(change):
    def meddle(replies, grid):
        record = replies[1].content["update"]
        told = records.to_arrays(record)
        replies[1].content["update"] = records.to_record(change(dict(told)))
        return replies

    return meddle


def with_first(number):
    def change(told):
        size, sent = 128, told["sum"].copy()
        sent[20 : 20 + size] = np.frombuffer(int(number).to_bytes(size, "big"), np.uint8)
        return {"sum": sent}

    return with_sum(change)


def numbered(at, number):
    """Change an integer of a sum's head: the first is its round, the second its silo."""

    def change(told):
        sent = told["sum"].copy()
        sent[8 * at - 4 : 8 * at + 4] = np.frombuffer(int(number).to_bytes(8, "big"), np.uint8)
        return {"sum": sent}

    return with_sum(change)


def stale(replies, grid):
    replies[1].content["update"] = grid.earlier[1].content["update"]
    return replies


@pytest.mark.parametrize(
    ("meddle", "said"),
    [
        (lambda replies, grid: replies[:1] + replies[2:], None),
        (with_sum(lambda told: {**told, "sum": told["sum"][:-1]}), "PaillierSum of"),
        (
            with_sum(lambda told: {**told, "sum": told["sum"].astype(np.int16)}),
            "expected one array of bytes",
        ),
        pytest.param(
            with_sum(lambda told: {**told, "more": told["sum"]}),
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
def test_without_the_sum_of_every_silo_nothing_is_decrypted(meddle, said, tmp_path, monkeypatch):
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
    assert [said in refusal for refusal in strategy.refusals] == ([] if said is None else [True])


def test_a_second_reply_of_a_silo_is_refused_and_the_first_counts():
    def twice(replies, grid):
        return [*replies, replies[1]]

    _, model = start(strategy := make(), Meddler, meddle=twice)
    _, expected = start(make_openly(UldpAvg))
    assert difference(model, expected) <= ROUNDS * SMALL.precision
    assert "answered already" in strategy.refusals[0]


@pytest.mark.parametrize(
    ("step", "asked"), [("one-by-one", 1), ("begin", 2), ("keys", 3), ("count", 4)]
)
@pytest.mark.parametrize("lose", ["silent", "malformed"])
def test_a_silo_lost_in_the_set_up_ends_the_run_by_number(step, asked, lose):
    count = []

    def drop(replies, grid):
        count.append(1)
        if len(count) != asked:
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
    assert len(count) == asked
    assert strategy.participations.rounds == 0


def test_counts_that_are_no_residues_end_the_run():
    def forge(replies, grid):
        told = records.to_arrays(replies[1].content["answer"])
        if "count" in told:
            forged = told["count"].copy()
            forged[:] = 255
            replies[1].content["answer"] = records.to_record({"count": forged})
        return replies

    said = "a silo's answer breaks the protocol: counts of silo 1: expected integers below"
    with pytest.raises(FederationNotReady, match=said):
        start(make(), Meddler, meddle=forge, kind=f"query.{METHOD}", groups=("0",))


def test_a_silos_key_of_low_order_ends_the_set_up_by_number():
    def forge(replies, grid):
        told = records.to_arrays(replies[1].content["answer"])
        if "begin" in told:
            forged = told["begin"].copy()
            forged[:] = 0
            replies[1].content["answer"] = records.to_record({"begin": forged})
        return replies

    with pytest.raises(FederationNotReady, match="silo 1: public key: expected .* low order"):
        start(make(), Meddler, meddle=forge, kind=f"query.{METHOD}", groups=("0",))


def test_an_invalid_answer_to_a_draw_discards_the_round_only(logged):
    forged = []

    def forge(replies, grid):
        told = records.to_arrays(replies[0].content["answer"])
        if "draw" in told and not forged:
            forged.append(1)
            nothing = records.to_record({"draw": np.zeros_like(told["draw"])})
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
        and step in m.content.get(records.WEIGHTED_SUM, {})
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


# State -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [FullParticipation(USERS), PoissonSampling(USERS, 0.4)])
def test_every_message_may_reach_a_fresh_process(sampling):
    _, model = start(strategy := make(sampling=sampling), FreshProcesses)
    assert strategy.refusals == []
    if isinstance(sampling, FullParticipation):
        _, expected = start(make_openly(UldpAvg))
        assert difference(model, expected) <= ROUNDS * SMALL.precision


def test_with_a_folder_for_secrets_a_silo_outlives_its_supernode(tmp_path):
    _, model = start(strategy := make(), Owned, folder=tmp_path)
    _, expected = start(make_openly(UldpAvg))
    assert strategy.refusals == []
    assert difference(model, expected) <= ROUNDS * SMALL.precision
    for number in range(SILOS):
        (file,) = (tmp_path / str(1_000 + number)).rglob("*.secret")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_round_is_on_record_before_its_sum_leaves():
    grid, _ = start(make(), rounds=2)
    for number in range(SILOS):
        facts = json.loads(vault(grid, number).load())
        assert facts["last_round"] == 2


def test_a_failing_client_does_not_use_up_the_round_of_the_others(monkeypatch):
    finish = PaillierOpenSum.finish

    def full(self, noise):
        if self._silo.index == 1:
            raise OSError("no space left on device")
        return finish(self, noise)

    monkeypatch.setattr(PaillierOpenSum, "finish", full)
    start(strategy := make())
    assert len(strategy.refusals) == ROUNDS  # from silo 1 in every round, and from nobody else
    assert all("node 1001" in refusal for refusal in strategy.refusals)


# Settings and claims -----------------------------------------------------------------------------


def test_what_encoding_and_dither_add_to_the_sensitivity_is_paid_for(tmp_path):
    coarse = replace(SMALL, precision=0.05)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    start(strategy := make(protocol=coarse, ledger=ledger))
    bound = strategy.run.summation.server.settings.sensitivity
    assert strategy.run.mechanism.sensitivity == bound > 1.05
    assert strategy.run.plan.mechanism().sensitivity == 1.0  # the given plan is unchanged
    views = {g.view: g.epsilon for g in strategy.guarantees() if g.basis == "provable"}
    expected = gaussian_loss(0.4 / bound, releases=ROUNDS, delta=1e-5).epsilon
    assert views[AdversaryView.SUM_ONLY] == pytest.approx(expected)
    assert views[AdversaryView.RELEASED_MODELS] == pytest.approx(expected)
    assert ledger.spent(1e-5).epsilon == pytest.approx(expected)


def test_a_resumed_run_counts_the_larger_sensitivity_of_both_set_ups():
    def after(before, anew):
        earlier, strategy = make(), make()
        sums, earlier_sums = strategy.run.summation, earlier.run.summation
        earlier_sums.mechanism = replace(earlier_sums.mechanism, sensitivity=before)
        sums.mechanism = replace(sums.mechanism, sensitivity=anew)
        sums.restore(earlier_sums.state())
        return strategy.run.mechanism.sensitivity

    assert after(before=1.1, anew=1.2) == after(before=1.2, anew=1.1) == 1.2


def test_guarantees_say_what_the_protocol_shows_and_what_it_rests_on():
    start(strategy := make(sampling=PoissonSampling(USERS, 0.5)))
    sums = next(g for g in strategy.guarantees() if g.view is AdversaryView.SUM_ONLY)
    assert any("Paillier" in text for text in sums.assumptions)
    for guarantee in strategy.guarantees():
        if guarantee.basis == "provable":
            assert HONEST_COUNTS in guarantee.assumptions
    shown = " ".join(sums.not_covered)
    assert "how many users have no record" in shown
    assert "how many records each user has" not in shown


def test_a_user_with_too_many_records_ends_the_run_after_three_sums():
    held = histogram(silos(), USERS)
    most = int(held.max())
    assert most < held.sum(axis=0).max()
    with pytest.raises(FederationNotReady, match=f"max_records_per_user={most}"):
        start(strategy := make(protocol=replace(SMALL, max_records_per_user=most)))
    assert strategy.participations.rounds == ROUNDS


@pytest.mark.parametrize("users", [2, USERS])
@pytest.mark.parametrize("silos", [2, 100])
def test_steps_of_the_encoding_are_at_most_a_quarter_of_silo_noise(users, silos):
    """Larger steps would round the noise of every silo to zero, and leave the sum without noise."""
    sampling, local = FullParticipation(users), {"num_silos": silos}
    stddev = mechanism_of(plan(sampling), silos=silos).client_noise_stddev(silos)
    coarsest = stddev / 4 * (users + 2 * silos) / 2
    make(protocol=replace(SMALL, precision=0.999 * coarsest), sampling=sampling, **local)
    with pytest.raises(ValueError, match=f"expected at most about {coarsest:.3g}"):
        make(protocol=replace(SMALL, precision=1.001 * coarsest), sampling=sampling, **local)


@pytest.mark.parametrize(
    ("changes", "assumed"),
    [
        ({}, "every user has at most 60 records over all silos: otherwise the run ends"),
        ({"silo_record_limits": (20, 20, 20)}, None),
        ({"allowed_totals": (5, 10)}, "every user has 5 or 10 records over all silos, or none"),
        (
            {"allowed_totals": (5, 10), "silo_record_limits": (20, 20, 20)},
            "every user has 5 or 10 records over all silos, or none",
        ),
    ],
)
def test_guarantees_name_the_totals_that_no_silo_can_check(changes, assumed):
    strategy = make(protocol=replace(SMALL, **changes))
    strategy.participations.record(range(USERS), SILOS, requests=SILOS)
    guarantees = [g for g in strategy.guarantees() if g.basis == "provable"]
    assert len(guarantees) == 3
    for guarantee in guarantees:
        named = [text for text in guarantee.assumptions if text.startswith("every user has")]
        assert len(named) == (assumed is not None)
        assert all(text.startswith(str(assumed)) for text in named)
        assert all("the server may find" in text for text in named)


def test_small_keys_are_refused_by_clients_that_do_not_simulate():
    app = UldpAvg.client_app(task())
    grid = InProcessGrid(app, num_clients=SILOS)
    with pytest.raises(FederationNotReady, match="keys of 512 bits that may be insecure"):
        make(seeded_noise=False).start(grid, ArrayRecord(task().initial_params(SEED)))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda: PrivateWeighting(key_bits=1024), "key_bits=1024: expected at least 3072"),
        (lambda: PrivateWeighting(precision=0.0), r"precision=0\.0"),
        (lambda: PrivateWeighting(max_records_per_user=0), "max_records_per_user=0"),
        (lambda: PrivateWeighting(allowed_totals=(10, 9999)), r"allowed_totals=\(10, 9999\)"),
        (lambda: PrivateWeighting(silo_record_limits=(2000, 1)), "silo_record_limits"),
        (lambda: PrivateWeighting(max_records_per_user=2200), "does not fit a plaintext"),
        (lambda: make(protocol=replace(SMALL, precision=1e-20)), r"above 2\*\*61"),
        (lambda: make(num_silos=1), "silos=1"),
        (
            lambda: make(protocol=replace(SMALL, precision=10.0)),
            r"precision=10\.0: expected at most",
        ),
        (
            lambda: make(protocol=HIDDEN),
            "users are drawn at the rate 1; expected a multiple",
        ),
        (
            lambda: make(protocol=HIDDEN, sampling=PoissonSampling(USERS, 0.5)),
            "draw_choices=5: users are drawn at the rate 0.5; expected a multiple",
        ),
        (lambda: make(diagnostics=True), "diagnostics=True"),
        (lambda: make(weighting="equal"), "with weighting='equal': expected UldpAvg"),
        (
            lambda: private_strategy_of(UldpSgd, plan=plan(), local=LOCAL, **COMMON),
            "ULDP-SGD has no local training",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_encrypted(bad, said):
    with pytest.raises(ValueError, match=said):
        bad()


def test_a_protocol_that_is_not_installed_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(protocols.plugins, "points", lambda group: ())
    protocols.protocols.cache_clear()
    said = "protocol='lattice': expected one of paillier; .*: pip install flower-ext-lattice"
    with pytest.raises(ValueError, match=said):
        make(protocol="lattice")
    protocols.protocols.cache_clear()


def test_by_name_a_protocol_has_its_default_settings():
    assert make(protocol="paillier").run.summation.protocol == PrivateWeighting()


def test_without_the_extra_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['phe'] = None\n"
        "from flower_ext.algorithms import uldp\n"
        "print(uldp.UldpAvg)\n"
        "uldp.weighted_sum()\n"
    )
    done = run_anew(code, "phe")
    assert done.returncode == 1
    assert "UldpAvg" in done.stdout  # the other sums work without it
    assert "pip install 'flower-ext[weighting]'" in done.stderr
