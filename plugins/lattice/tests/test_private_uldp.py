"""Private weights over ring-LWE in runs: correct sums, lost messages and forged messages."""

import dataclasses
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ArrayRecord

from flower_ext.algorithms.uldp import UldpAvg, UldpSgd
from flower_ext.errors import ProtocolError
from flower_ext.federation import InProcessGrid, records
from flower_ext.federation.sums.weighted_silo import stored_silo
from flower_ext.privacy import (
    AdversaryView,
    FullParticipation,
    Ledger,
    PoissonSampling,
    gaussian_loss,
)
from flower_ext.privacy.theorems.assumptions import HONEST_COUNTS
from flower_ext_lattice import LatticeWeighting, columns
from flower_ext_lattice.messages import LatticeSum
from flower_ext_lattice.server import LatticeServer
from flower_ext_lattice.silo import LatticeSilo
from tests.support import grids
from tests.support.plans import mechanism_of
from tests.support.private_silos import (
    METHOD,
    SMALL,
    FreshProcesses,
    Meddler,
    Owned,
    difference,
    make,
    make_openly,
    start,
    vault,
)
from tests.support.silos import ROUNDS, SEED, SILOS, USERS, histogram, plan, silos, task
from tests.support.travelling import Recorder
from tests.support.weighting import play

NORM = 0.3
LATTICE = LatticeWeighting(silo_record_limits=(8, 8, 8))
EVERYONE, SOME = FullParticipation(USERS), PoissonSampling(USERS, 0.4)


def lattice_of(method=UldpAvg, **options):
    return make(method, **{"protocol": LATTICE, **options})


def party(strategy):
    return strategy.run.summation.server


# The result --------------------------------------------------------------------------------------


class Watch:
    """Record everything that enters a run's sums, and the sums."""

    def __init__(self, monkeypatch):
        self.added, self.drawn, self.sums = [], [], []
        begun, opened, closed = (
            LatticeSilo.open_sum,
            LatticeServer.begin_round,
            LatticeServer.close_round,
        )

        def silo_begins(silo, number, weights):
            opened = begun(silo, number, weights)
            add, finish, updates = opened.add, opened.finish, {}

            def watched(noise):
                self.added.append((number, silo.index, updates, noise, silo._order))
                return finish(noise)

            opened.add = lambda some: (updates.update(some), add(some))
            opened.finish = watched
            return opened

        def server_opens(server, number, places):
            self.drawn.append(range(USERS) if places is None else list(places))
            return opened(server, number, places)

        def server_closes(server):
            self.sums.append(closed(server))
            return self.sums[-1]

        monkeypatch.setattr(LatticeSilo, "open_sum", silo_begins)
        monkeypatch.setattr(LatticeServer, "begin_round", server_opens)
        monkeypatch.setattr(LatticeServer, "close_round", server_closes)

    def expected(self, number):
        counts = histogram(silos(), USERS)
        weights = counts / np.maximum(counts.sum(axis=0), 1)
        total = 0.0
        for round_, silo, updates, noise, order in self.added:
            if round_ != number:
                continue
            users = {order[place] for place in self.drawn[number - 1]}
            total = total + noise
            for user in users & set(updates):
                total = total + weights[silo, user] * updates[user]
        return total


@pytest.mark.parametrize(
    "sampling", grids.grid([EVERYONE, SOME], lambda sampling: sampling is SOME)
)
@pytest.mark.parametrize("method", grids.grid([UldpAvg, UldpSgd], lambda method: method is UldpAvg))
def test_every_coordinate_of_a_sum_is_that_of_plain_weights(method, sampling, monkeypatch):
    watch = Watch(monkeypatch)
    start(strategy := lattice_of(method, sampling=sampling))
    assert strategy.refusals == []
    assert len(watch.sums) == ROUNDS
    for number, found in enumerate(watch.sums, start=1):
        assert np.abs(found - watch.expected(number)).max() <= 1e-7 * NORM
    if sampling is SOME:
        assert any(len(places) < USERS for places in watch.drawn)
        assert strategy.run.progress.row["users"] == len(watch.drawn[-1])


def test_the_model_is_that_of_plain_weights_and_of_paillier():
    models = [start(make_openly(UldpAvg))[1]]
    models += [start(make(protocol=protocol))[1] for protocol in (SMALL, LATTICE)]
    assert difference(models[2], models[0]) <= 1e-6
    assert difference(models[2], models[1]) <= 1e-5
    assert difference(models[2], records.to_arrays(ArrayRecord(task().initial_params(SEED)))) > 1e-3


def test_by_name_a_protocol_has_its_default_settings():
    protocol = make(protocol="lattice").run.summation.protocol
    assert protocol == LatticeWeighting()
    mechanism = mechanism_of(plan(EVERYONE), silos=3)
    settings = protocol.settings_of(mechanism, silos=3, coordinates=5)
    assert settings.silo_record_limits == (2000, 2000, 2000)


# What travels ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transcript():
    strategy = lattice_of(sampling=SOME, evaluate_every=0)
    grid, _ = start(strategy, Recorder)
    return strategy, grid


def arrays(messages):
    for message in messages:
        for record in message.content.array_records.values():
            for name, array in records.to_arrays(record).items():
                yield message, name, array


def test_the_server_receives_messages_of_the_protocol_and_nothing_else(transcript):
    strategy, grid = transcript
    facts = strategy.run.summation.server.settings
    sizes = {"begin": {32}, "keys": {2 * 60, 0}, "count": {(4 + 32) * USERS, 4 * USERS}}
    sizes["sum"] = {LatticeSum.size(facts)}
    seen = {}
    for _, name, array in arrays(m for m in grid.received if "query.id" not in str(m.metadata)):
        if name == "one-by-one":
            assert array.shape == ()
            continue
        assert (array.dtype, array.ndim) == (np.uint8, 1)
        seen.setdefault(name, set()).add(array.size)
    assert seen == sizes


def test_no_secret_of_a_silo_is_in_any_message(transcript):
    _, grid = transcript
    told = b"||".join(array.tobytes() for _, _, array in arrays([*grid.sent, *grid.received]))
    for number in range(SILOS):
        silo = stored_silo(vault(grid, number))
        for secret in (silo.seed, silo.private, *silo._pairs._keys.values()):
            assert len(secret) == 32
            assert secret not in told
        assert vault(grid, number).load() not in told


def test_weights_and_uploads_of_every_round_are_fresh(transcript):
    _, grid = transcript
    sent = {array.tobytes() for _, name, array in arrays(grid.sent) if name == "weights"}
    assert len(sent) == ROUNDS
    assert len({data[:12] for data in sent}) == ROUNDS  # epochs
    sums = [array[20:].tobytes() for _, name, array in arrays(grid.received) if name == "sum"]
    assert len(set(sums)) == SILOS * ROUNDS
    words = {data[at : at + 6] for data in sums for at in range(0, 240, 6)}
    assert len(words) == 40 * len(sums)


def test_while_nobody_is_drawn_one_epoch_lasts_for_the_run():
    grid, _ = start(lattice_of(evaluate_every=0), Recorder)
    weights = [array for _, name, array in arrays(grid.sent) if name == "weights"]
    assert len({array.tobytes() for array in weights}) == 1


# Users whom nobody knows -------------------------------------------------------------------------


HIDDEN = replace(LATTICE, draw_choices=5)


def hidden_lattice(**options):
    return lattice_of(protocol=HIDDEN, sampling=SOME, **options)


def test_sums_hold_the_users_that_all_silos_took_by_oblivious_transfer(monkeypatch):
    """Only a test, which acts for all parties at once, can know who was drawn."""
    watch, made, taken = Watch(monkeypatch), [], []
    of_server, of_silo = columns.draw_columns, columns.open_columns

    def server_makes(settings):
        made.append(of_server(settings).drawn)
        return dataclasses.replace(of_server(settings), drawn=made[-1])

    def silo_takes(*arguments):
        found = of_silo(*arguments)
        taken.append([column for column, _ in found])
        return found

    monkeypatch.setattr(columns, "draw_columns", server_makes)
    monkeypatch.setattr(columns, "open_columns", silo_takes)
    start(strategy := hidden_lattice())
    assert strategy.refusals == []
    assert len(taken) == ROUNDS * SILOS
    drawn = [
        [at for at, (own, column) in enumerate(zip(made[number], row, strict=True)) if own[column]]
        for number, row in enumerate(taken[::SILOS])
    ]
    watch.drawn[:] = drawn
    for number, found in enumerate(watch.sums, start=1):
        assert np.abs(found - watch.expected(number)).max() <= 1e-7 * NORM
    assert "users" not in strategy.run.progress.row
    assert taken == [row for row in taken[::SILOS] for _ in range(SILOS)]


def test_only_silo_0_draws_and_the_server_sees_group_elements():
    grid, _ = start(hidden_lattice(evaluate_every=0), Recorder)
    asked = [m for m, name, _ in arrays(grid.sent) if name == "draw"]
    assert [m.metadata.dst_node_id for m in asked] == [1_000] * ROUNDS
    told = [a.tobytes() for _, name, a in arrays(grid.received) if name == "draw"]
    pieces = [data[at : at + 32] for data in told for at in range(0, len(data), 32)]
    assert len(set(pieces)) == len(pieces) == ROUNDS * USERS


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda: LatticeWeighting(draw_choices=1), "draw_choices=1: expected an integer >= 2"),
        (
            lambda: lattice_of(protocol=HIDDEN),
            "users are drawn at the rate 1; expected a multiple of 1/5",
        ),
        (
            lambda: lattice_of(protocol=HIDDEN, sampling=PoissonSampling(USERS, 0.5)),
            "draw_choices=5: users are drawn at the rate 0.5; expected a multiple",
        ),
    ],
)
def test_a_draw_that_does_not_fit_the_plan_is_refused(bad, said):
    with pytest.raises(ValueError, match=said):
        bad()


# Losses ------------------------------------------------------------------------------------------


def with_sum(change):
    def meddle(replies, grid):
        told = dict(records.to_arrays(replies[1].content["update"]))
        replies[1].content["update"] = records.to_record(change(told))
        return replies

    return meddle


def stale(replies, grid):
    replies[1].content["update"] = grid.earlier[1].content["update"]
    return replies


@pytest.mark.parametrize(
    "sampling", grids.grid([EVERYONE, SOME], lambda sampling: sampling is SOME)
)
@pytest.mark.parametrize(
    ("meddle", "said"),
    [
        (lambda replies, grid: replies[:1] + replies[2:], None),
        (with_sum(lambda told: {**told, "sum": told["sum"][:-1]}), "LatticeSum of"),
        (with_sum(lambda told: {**told, "sum": np.zeros_like(told["sum"])}), "LatticeSum"),
        (stale, "round 1"),
    ],
)
def test_without_the_sum_of_every_silo_the_round_is_discarded(
    meddle, said, sampling, tmp_path, monkeypatch
):
    watch = Watch(monkeypatch)
    strategy = lattice_of(sampling=sampling, ledger=Ledger(tmp_path / "ledger.jsonl"))
    start(strategy, Meddler, meddle=meddle)
    entries = Ledger.read(tmp_path / "ledger.jsonl")
    kinds = [entry["kind"] for entry in entries]
    assert kinds == ["reserve", "commit", "reserve", "discard", "reserve", "commit"]
    assert "silos [1] sent nothing" in entries[3]["reason"]
    assert "nothing was decrypted" in entries[3]["reason"]
    assert [said in refusal for refusal in strategy.refusals] == ([] if said is None else [True])
    assert len(watch.sums) == 2
    assert np.abs(watch.sums[1] - watch.expected(3)).max() <= 1e-7 * NORM
    assert strategy.participations.rounds == ROUNDS
    if sampling is EVERYONE:  # else no user need be in all of them
        assert strategy.participations.in_sums == ROUNDS


@pytest.mark.parametrize(
    "sampling", grids.grid([EVERYONE, SOME], lambda sampling: sampling is SOME)
)
def test_every_message_may_reach_a_fresh_process(sampling, monkeypatch):
    watch = Watch(monkeypatch)
    start(strategy := lattice_of(sampling=sampling), FreshProcesses)
    assert strategy.refusals == []
    for number, found in enumerate(watch.sums, start=1):
        assert np.abs(found - watch.expected(number)).max() <= 1e-7 * NORM


def test_with_a_folder_for_secrets_a_silo_outlives_its_supernode(tmp_path):
    _, model = start(strategy := lattice_of(), Owned, folder=tmp_path)
    assert strategy.refusals == []
    assert difference(model, start(make_openly(UldpAvg))[1]) <= 1e-6


def test_a_round_and_its_epoch_are_on_record_before_a_sum_leaves():
    grid, _ = start(lattice_of(sampling=SOME), rounds=2)
    for number in range(SILOS):
        silo = stored_silo(vault(grid, number))
        assert (silo.last_round, silo.last_epoch) == (2, 2)


def asked(grid, number):
    return [
        m
        for m in grid.sent
        if m.metadata.dst_node_id == 1_000 + number
        and m.metadata.message_type in (f"query.{METHOD}", f"train.{METHOD}")
        and "histogram" not in m.content.config_records.get("question", {})
    ]


@pytest.mark.parametrize(
    "sampling", grids.grid([EVERYONE, SOME], lambda sampling: sampling is SOME)
)
def test_a_silo_refuses_every_message_that_is_repeated(sampling):
    grid, _ = start(lattice_of(sampling=sampling, evaluate_every=0), Recorder, rounds=2)
    again = asked(grid, 1)
    assert len(again) == 3 + 2
    before = vault(grid, 1).load()
    for message in again:
        (reply,) = InProcessGrid.send_and_receive(grid, [message])
        assert reply.has_error()
    assert vault(grid, 1).load() == before


def test_a_silo_refuses_other_weights_of_a_known_epoch():
    """Two sets of weights of one epoch would show a silo N_u exactly."""
    grid, _ = start(strategy := lattice_of(sampling=SOME, evaluate_every=0), Recorder, rounds=2)
    server = party(strategy)
    server._last_round -= 1
    sent = play(server.begin_round(2, [0]), [], [], [], [])
    before = vault(grid, 1).load()
    with pytest.raises(ProtocolError, match="epoch 2: expected a number above 2"):
        stored_silo(vault(grid, 1)).open_sum(3, sent)
    assert vault(grid, 1).load() == before


def test_silos_go_on_from_one_protocol_to_the_other():
    """The silos start a new run while their vaults hold the state of another protocol."""
    grid, _ = start(make(protocol=SMALL))
    initial = ArrayRecord(task().initial_params(SEED))
    for protocol in (LATTICE, SMALL):
        strategy = make(protocol=protocol)
        strategy.start(grid, initial, num_rounds=1)
        assert strategy.refusals == []


def test_a_silo_refuses_a_protocol_that_it_does_not_know():
    grid, _ = start(lattice_of(evaluate_every=0), Recorder, rounds=1)
    message = asked(grid, 1)[0]
    settings = json.dumps({"kind": "pigeons", "run": "another"}).encode()
    sent = {"begin": records.to_bytes_array(settings)}
    message.content[records.WEIGHTED_SUM] = records.to_record(sent)
    (reply,) = InProcessGrid.send_and_receive(grid, [message])
    assert "protocol='pigeons': expected one of lattice, paillier" in reply.error.reason


# Claims ------------------------------------------------------------------------------------------


def provable(strategy):
    return {g.view: g for g in strategy.guarantees() if g.basis == "provable"}


@pytest.mark.parametrize(
    "sampling", grids.grid([EVERYONE, SOME], lambda sampling: sampling is SOME)
)
def test_guarantees_name_all_that_the_protocol_rests_on(sampling):
    start(strategy := lattice_of(sampling=sampling))
    found = provable(strategy)
    assert len(found) == 3
    for guarantee in found.values():
        text = "; ".join(guarantee.assumptions)
        assert "experimental and not externally reviewed" in text
        assert "confidential and authenticated" in text
        assert HONEST_COUNTS in guarantee.assumptions
        assert not any(one.startswith("every user has") for one in guarantee.assumptions)
    sums = "; ".join(found[AdversaryView.SUM_ONLY].assumptions)
    for needed in (
        "ring-LWE is hard in Z_q[X]/(X^4096 + 1) for q of 96 bits",
        "Diffie-Hellman",
        "random oracle",
        "ChaCha20",
        "no silo colludes with the server",
        "in every word of a sum one silo's noise and dither",
    ):
        assert needed in sums
    assert "Paillier" not in sums
    assert "hint-RLWE" in "; ".join(found[AdversaryView.RELEASED_MODELS].assumptions)
    assert not any(
        "no record in any silo" in shown for shown in found[AdversaryView.SUM_ONLY].not_covered
    )


def test_what_the_protocol_adds_to_a_sum_is_paid_for(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    start(strategy := lattice_of(ledger=ledger, plan={"noise_multiplier": 5.0}))
    server = strategy.run.summation.server.settings
    assert strategy.run.mechanism.sensitivity == server.sensitivity > 1
    assert strategy.run.mechanism.approximation_error == server.approximation_error > 0
    exact = gaussian_loss(5.0 / server.sensitivity, releases=ROUNDS, delta=1e-5).epsilon
    for view in (AdversaryView.SUM_ONLY, AdversaryView.RELEASED_MODELS):
        guarantee = provable(strategy)[view]
        assert guarantee.delta == 1e-5
        assert exact < guarantee.epsilon < 1.001 * exact
    entry = Ledger.read(tmp_path / "ledger.jsonl")[0]
    assert entry["release"]["approximation_error"] == pytest.approx(
        server.approximation_error / 5.0
    )
    assert ledger.spent(1e-5).epsilon == pytest.approx(guarantee.epsilon)


def test_the_residue_covers_what_a_sum_differs_by_from_the_exact_one(monkeypatch):
    """Without the parts for re-randomising and for errors e_u, the bound would be too small."""
    watch = Watch(monkeypatch)
    start(strategy := lattice_of(sampling=SOME))
    approximation_error = strategy.run.summation.server.settings.approximation_error * NORM
    for number, found in enumerate(watch.sums, start=1):
        off = np.linalg.norm(found - watch.expected(number))
        encoding = (
            (USERS + SILOS) * math.sqrt(found.size) * strategy.run.summation.server.settings.step
        )
        assert off <= approximation_error + encoding


def test_a_resumed_run_counts_the_larger_costs_of_both_set_ups():
    strategy = lattice_of()
    earlier, sums = lattice_of().run.summation, strategy.run.summation
    costly = {"sensitivity": 1.1, "approximation_error": 1e-7}
    earlier.mechanism = replace(earlier.mechanism, **costly)
    sums.mechanism = replace(sums.mechanism, sensitivity=1.2, approximation_error=1e-8)
    sums.restore(earlier.state())
    assert strategy.run.mechanism.sensitivity == 1.2
    assert strategy.run.mechanism.approximation_error == 1e-7


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda: LatticeWeighting(max_records_per_user=0), "max_records_per_user=0"),
        (lambda: make(protocol=LatticeWeighting(silo_record_limits=())), "silo_record_limits=()"),
        (
            lambda: make(protocol=LatticeWeighting(silo_record_limits=(8, 8))),
            "expected 3 integers >= 0",
        ),
        (
            lambda: make(protocol=LatticeWeighting(silo_record_limits=(8, -1, 8))),
            "expected 3 integers >= 0",
        ),
        (
            lambda: make(protocol=LatticeWeighting(max_records_per_user=2**15)),
            "expected a sum from 1",
        ),
        (lambda: lattice_of(plan={"noise_multiplier": 1e-6}), "noise_multiplier=1e-06 of the plan"),
        (lambda: lattice_of(num_silos=1), "silos=1"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anybody_is_asked(bad, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")):
        bad()


def test_noise_too_small_for_the_model_is_refused_with_what_to_change():
    strategy = lattice_of(plan={"noise_multiplier": 0.4})
    huge = replace(strategy.run.mechanism, noise_multiplier=2e-3, rounds=100_000)
    with pytest.raises(ValueError, match=r"noise_multiplier=0.002 of the plan.*more noise"):
        LATTICE.settings_of(huge, silos=3, coordinates=10**6)


def test_a_user_unknown_to_all_silos_changes_nothing_that_the_server_uses():
    """N_u = 0 looks like any other number: x_u is uniform over [0, M)."""
    start(strategy := lattice_of(), rounds=1)
    shifted = party(strategy)._shifted
    assert len(shifted) == USERS
    assert all(0 <= x < strategy.run.summation.server.settings.table_size for x in shifted)
    assert json.dumps(shifted) != json.dumps(histogram(silos(), USERS).sum(axis=0).tolist())
