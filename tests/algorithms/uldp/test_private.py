"""Private weights: the result equals the plain method; nobody reads or repeats a secret."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from flower_ext.algorithms.uldp import (
    PrivateWeighting,
    UldpAvg,
    UldpSgd,
)
from flower_ext.data import SiloData
from flower_ext.federation import FederationNotReady, InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.federation.population import Cohort, UsersInSilos
from flower_ext.federation.sums.weighted import WEIGHTED_SUM
from flower_ext.privacy import (
    AdversaryView,
    FullParticipation,
    Ledger,
    PoissonSampling,
)
from flower_ext.secure.weighting.paillier_silo import PaillierSilo
from tests.support.grids import grid as grid_of
from tests.support.private_silos import (
    EVERY,
    INSTALLED,
    SMALL,
    difference,
    make,
    make_openly,
    name_of,
    start,
)
from tests.support.private_uldp import HIDDEN, arrays, kept
from tests.support.silos import (
    ROUNDS,
    SEED,
    SILOS,
    USERS,
    silos,
    task,
)
from tests.support.travelling import Recorder
from tests.support.weighting import numbers


def is_draw(message):
    return "draw" in message.content.get(WEIGHTED_SUM, {})


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

    def draw_the_same_users(self, rng):  # the users at the places that the server drew
        cohort = next(rounds)
        return replace(cohort, units=sorted(order[place] for place in cohort.units))

    monkeypatch.setattr(UsersInSilos, "draw", draw_the_same_users)
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

    def draw_the_same_users(self, rng):
        drawn = users[next(places)]
        return Cohort(partitions=range(self.num_nodes), units=drawn, population=USERS)

    monkeypatch.setattr(UsersInSilos, "draw", draw_the_same_users)
    _, expected = start(make_openly(UldpAvg, sampling=PoissonSampling(USERS, 0.4)))
    assert difference(model, expected) <= ROUNDS * SMALL.precision
    assert "users" not in strategy.run.progress.row


def test_only_silo_0_answers_a_draw_and_the_server_gets_group_elements():
    strategy = make(protocol=HIDDEN, sampling=PoissonSampling(USERS, 0.4), evaluate_every=0)
    grid, _ = start(strategy, Recorder)
    requests = [m for m in grid.sent if is_draw(m)]
    assert [m.metadata.dst_node_id for m in requests] == [1_000] * ROUNDS
    answers = arrays(grid.received, "answer", "draw")
    assert len(answers) == ROUNDS
    pieces = [data[at : at + 32] for _, data in answers for at in range(0, len(data), 32)]
    assert len(set(pieces)) == len(pieces) == ROUNDS * USERS
    sent = {data for _, data in arrays(grid.sent, WEIGHTED_SUM, "weights")}
    assert len(sent) == ROUNDS  # all silos received the same
    facts = strategy.run.summation.server.settings
    assert {len(data) for data in sent} == {32 + USERS * 5 * (facts.ciphertext_bytes + 16)}


@pytest.mark.parametrize(
    "protocol",
    grid_of(INSTALLED, lambda protocol: name_of(protocol) == "paillier"),
    ids=name_of,
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
    for name, options in (("known", protocol), ("hidden", replace(protocol, draw_choices=5))):
        loud = {"noise_multiplier": 5.0}
        strategy = make(protocol=options, sampling=PoissonSampling(USERS, 0.4), plan=loud)
        strategy.participations.record(range(USERS), SILOS, needed=SILOS)
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
