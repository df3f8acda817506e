"""Private weighting over ring-LWE with lost silos and replies, and its guarantees."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ArrayRecord

from flower_ext.algorithms.uldp import UldpAvg
from flower_ext.errors import ProtocolError
from flower_ext.federation import InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.federation.sums.weighted import WEIGHTED_SUM
from flower_ext.federation.sums.weighted_silo import stored_silo
from flower_ext.privacy import (
    AdversaryView,
    Ledger,
    gaussian_loss,
)
from flower_ext.privacy.account_entries import RESERVE
from flower_ext.privacy.theorems.assumptions import HONEST_COUNTS
from flower_ext.runs import RunWriter
from flower_ext_lattice import LatticeWeighting
from plugins.lattice.tests.private_runs import (
    EVERYONE,
    LATTICE,
    NORM,
    SOME,
    Watch,
    lattice_of,
    requests_to,
)
from tests.support import grids
from tests.support.private_silos import (
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
from tests.support.silos import ROUNDS, SEED, SILOS, USERS, histogram, silos, task
from tests.support.travelling import Recorder
from tests.support.weighting import play


def party(strategy):
    return strategy.run.summation.server


def with_sum(change):
    """Return a fault that changes the arrays of silo 1's sum."""

    def meddle(replies, grid):
        answer = dict(records.to_arrays(replies[1].content["update"]))
        replies[1].content["update"] = records.to_record(change(answer))
        return replies

    return meddle


def stale(replies, grid):
    replies[1].content["update"] = grid.earlier[1].content["update"]
    return replies


@pytest.mark.parametrize(
    "sampling", grids.grid([EVERYONE, SOME], lambda sampling: sampling is SOME)
)
@pytest.mark.parametrize(
    ("meddle", "message"),
    [
        (lambda replies, grid: replies[:1] + replies[2:], None),
        (with_sum(lambda answer: {**answer, "sum": answer["sum"][:-1]}), "LatticeSum of"),
        (with_sum(lambda answer: {**answer, "sum": np.zeros_like(answer["sum"])}), "LatticeSum"),
        (stale, "round 1"),
    ],
)
def test_without_the_sum_of_every_silo_the_round_is_discarded(
    meddle, message, sampling, tmp_path, monkeypatch
):
    watch = Watch(monkeypatch)
    strategy = lattice_of(sampling=sampling, ledger=Ledger(tmp_path / "ledger.jsonl"))
    start(strategy, Meddler, meddle=meddle)
    entries = Ledger.read(tmp_path / "ledger.jsonl")
    kinds = [entry["kind"] for entry in entries]
    assert kinds == ["reserve", "commit", "reserve", "discard", "reserve", "commit"]
    assert "silos [1] sent nothing" in entries[3]["reason"]
    assert "nothing was decrypted" in entries[3]["reason"]
    assert [message in refusal for refusal in strategy.refusals] == (
        [] if message is None else [True]
    )
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
    for number, total in enumerate(watch.sums, start=1):
        assert np.abs(total - watch.expected(number)).max() <= 1e-7 * NORM


def test_with_a_folder_for_secrets_a_silo_outlives_its_supernode(tmp_path):
    _, model = start(strategy := lattice_of(), Owned, folder=tmp_path)
    assert strategy.refusals == []
    assert difference(model, start(make_openly(UldpAvg))[1]) <= 1e-6


def test_a_round_and_its_epoch_are_on_record_before_a_sum_leaves():
    grid, _ = start(lattice_of(sampling=SOME), rounds=2)
    for number in range(SILOS):
        silo = stored_silo(vault(grid, number))
        assert (silo.last_round, silo.last_epoch) == (2, 2)


@pytest.mark.parametrize(
    "sampling", grids.grid([EVERYONE, SOME], lambda sampling: sampling is SOME)
)
def test_a_silo_refuses_every_message_that_is_repeated(sampling):
    grid, _ = start(lattice_of(sampling=sampling, evaluate_every=0), Recorder, rounds=2)
    again = requests_to(grid, 1)
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
    message = requests_to(grid, 1)[0]
    settings = json.dumps({"kind": "pigeons", "run": "another"}).encode()
    sent = {"begin": records.to_bytes_array(settings)}
    message.content[WEIGHTED_SUM] = records.to_record(sent)
    (reply,) = InProcessGrid.send_and_receive(grid, [message])
    assert "protocol='pigeons': expected one of lattice, paillier" in reply.error.reason


def provable(strategy):
    return {g.view: g for g in strategy.guarantees() if g.basis == "provable"}


@pytest.mark.parametrize(
    "sampling", grids.grid([EVERYONE, SOME], lambda sampling: sampling is SOME)
)
def test_guarantees_name_all_that_the_protocol_rests_on(sampling):
    start(strategy := lattice_of(sampling=sampling))
    guarantees = provable(strategy)
    assert len(guarantees) == 3
    for guarantee in guarantees.values():
        text = "; ".join(guarantee.assumptions)
        assert "experimental and not externally reviewed" in text
        assert "confidential and authenticated" in text
        assert HONEST_COUNTS in guarantee.assumptions
        assert not any(one.startswith("every user has") for one in guarantee.assumptions)
    sums = "; ".join(guarantees[AdversaryView.SUM_ONLY].assumptions)
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
    assert "hint-RLWE" in "; ".join(guarantees[AdversaryView.RELEASED_MODELS].assumptions)
    assert not any(
        "no record in any silo" in shown for shown in guarantees[AdversaryView.SUM_ONLY].not_covered
    )


def test_the_accounting_covers_what_the_protocol_adds_to_sums(tmp_path):
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
    for number, total in enumerate(watch.sums, start=1):
        off = np.linalg.norm(total - watch.expected(number))
        encoding = (
            (USERS + SILOS) * math.sqrt(total.size) * strategy.run.summation.server.settings.step
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


def test_a_run_ends_before_a_round_that_its_settings_forbid(
    tmp_path,
):
    """A resumed run may have made a round more than planned, since it counts the abandoned one."""
    directory = RunWriter.create(tmp_path / "run", {})
    strategy = lattice_of(ledger=directory.open_ledger())
    start(strategy, rounds=ROUNDS + 1)
    directory.close()
    assert f"expected at most rounds={ROUNDS}" in strategy.stopped
    assert strategy.participations.rounds == ROUNDS
    assert sum(entry["kind"] == RESERVE for entry in directory.ledger()) == ROUNDS


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: LatticeWeighting(max_records_per_user=0), "max_records_per_user=0"),
        (lambda: make(protocol=LatticeWeighting(silo_record_limits=())), "silo_record_limits=()"),
        (
            lambda: make(protocol=LatticeWeighting(silo_record_limits=8)),
            "silo_record_limits=8: exp",
        ),
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
def test_settings_that_make_no_sense_are_refused_before_anybody_is_asked(bad, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
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
