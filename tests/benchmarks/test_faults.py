"""The report on faults at a small scale, and a check that its referee detects wrong rounds."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ArrayRecord

from benchmarks import faults as command
from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import ClientMethod, FederatedStrategy, LocalResult
from flower_ext.federation.messages import exchange, records
from flower_ext.federation.messages.replies import RefusedReply
from flower_ext.privacy import SecureNoise
from flower_ext.privacy.plans.release_mechanism import ReleaseMechanism
from flower_ext.training import LocalTraining
from tests.faults import clients, malformed, noise, processes, wire
from tests.faults.engine import run_case
from tests.faults.worlds import CASES, PERSONALISED, PRIVATE, nobody_private

pytestmark = pytest.mark.full  # a laboratory beside the package, whose own tests plant faults too

METHODS = {case.name: case for case in (*CASES, PRIVATE)}


@pytest.mark.parametrize("name", METHODS)
def test_runs_under_mixed_faults_complete_and_use_only_what_counts(name):
    outcome = run_case(METHODS[name], 3 if name == PRIVATE.name else 12, flood=15, seed=3)
    assert outcome.crashes == []
    assert outcome.accepted == []
    assert outcome.wrong_aggregates == []
    assert outcome.unexplained == 0
    assert outcome.epsilon_is_right
    assert outcome.faults["malformed"] >= 45
    assert outcome.faults["replayed"] + outcome.faults["relabelled"] > 0


@pytest.mark.parametrize("name", METHODS)
def test_malformed_requests_are_answered_by_errors_and_sound_ones_are_answered(name):
    outcome = clients.ask(METHODS[name], 120, seed=4)
    assert (outcome.answered, outcome.remembered, outcome.refused) == ([], [], 0)
    assert outcome.sound > 0  # cohorts are drawn from the system's randomness


@pytest.mark.parametrize("dropout", [0.05, 0.9])
def test_releases_under_dropout_have_the_accounted_noise(dropout):
    outcome = noise.measure(dropout, "client", rounds=15, seed=1)
    assert outcome.enough
    assert outcome.released == 15
    assert outcome.ratio == pytest.approx(1.0, abs=0.15)


# Under a plan for records, test_record_level_plan looks for what clients keep.
@pytest.mark.parametrize("name", PERSONALISED)
def test_no_byte_of_personal_parameters_is_in_any_message(name):
    outcome = wire.search(name, PERSONALISED[name](), rounds=2)
    assert (outcome.found_bytes, outcome.found_names) == (0, 0)
    assert outcome.personal_bytes > 0  # cohorts may be small
    assert outcome.wire_bytes > 10_000


@pytest.fixture
def run_command(capsys, monkeypatch, tmp_path):
    """Return a function that runs some parts into ``tmp_path``.

    It returns the exit status, the last printed line, and the report's lines.
    """

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["faults", "--output", str(tmp_path), *options])
        with pytest.raises(SystemExit) as ended:
            command.main()
        printed = capsys.readouterr().out.splitlines()
        written = (tmp_path / "faults.md").read_text(encoding="utf-8").splitlines()
        return ended.value.code, printed[-1], written

    return run


def test_parts_that_fail_are_named_last_and_lose_no_others(monkeypatch, run_command):
    noise, wire = command.noise, command.wire
    # As few rounds as --quick takes, which has no part of processes.
    monkeypatch.setattr(command, "noise", lambda rounds, seed: noise(12, seed=seed))
    monkeypatch.setattr(command, "wire", lambda rounds: wire(1))
    monkeypatch.setattr(command, "DROPOUTS", (0.0,))
    monkeypatch.setattr(SecureNoise, "add_gaussian", lambda self, update, stddev, **grid: update)
    monkeypatch.setattr(processes, "NODES", "no number")
    status, last, written = run_command("--only", "processes-short", "noise", "wire")
    assert status == 1
    assert last == "NOT ALL KEPT: processes-short (failed), noise (not kept)"
    assert [line for line in written if line.startswith("##")] == [
        "## processes-short",
        "## Noise under dropout",
        "## Personal parameters on the wire",
    ]
    assert any("TypeError" in line for line in written)


def test_the_report_ends_by_saying_that_all_promises_held(run_command):
    status, last, written = run_command("--only", "wire", "--quick")
    assert (status, last) == (0, "all kept")
    assert "## Personal parameters on the wire" in written


def test_real_processes_report_what_is_only_in_their_folder(monkeypatch):
    settings = {**processes.SETTINGS, "rounds": 1}

    def in_this_process(folder, plan):
        run = processes.in_process(folder / "run", settings, {1: {2}})
        return [processes.Row("left out", 1, 1)], processes.Outcome(plan, [], run, run, None)

    monkeypatch.setattr(processes, "run", in_this_process)
    text, kept = command.real_processes(processes.LONG)
    assert kept
    assert "| long | completed | 1 | 0 | 0 |" in text


def test_an_interrupt_leaves_the_parts_that_have_ended(monkeypatch, run_command, tmp_path):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_case", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_command("--only", "wire", "engine", "--quick")
    written = (tmp_path / "faults.md").read_text(encoding="utf-8")
    assert "## Personal parameters on the wire" in written
    assert "all kept" not in written


def test_the_referee_sees_a_reply_that_should_not_count(monkeypatch):
    def gullible(requests, replies, read):
        values = {requests.clients.partition_of(r): read(r) for r in replies if _reads(read, r)}
        yield from ((p, value) for p, value in values.items() if p in requests.by_partition)

    monkeypatch.setattr(exchange.Requests, "accepted", gullible)
    outcome = run_case(CASES[0], 6, flood=0, seed=3)
    assert outcome.accepted
    assert outcome.wrong_aggregates


def _reads(read, reply):
    """Return True if a reply is accepted."""
    try:
        read(reply)
    except (RefusedReply, KeyError):
        return False
    return True


def test_the_referee_sees_noise_that_is_missing_and_a_crash(monkeypatch):
    monkeypatch.setattr(ReleaseMechanism, "noise_stddev", property(lambda plan: 0.6))
    outcome = run_case(CASES[2], 3, flood=0, seed=3)
    assert len(outcome.wrong_aggregates) == 3
    monkeypatch.setattr(ReleaseMechanism, "noise_stddev", property(lambda plan: 1 / 0))
    assert "ZeroDivisionError" in run_case(CASES[2], 3, flood=0, seed=3).crashes[0]


@pytest.mark.parametrize("part", [0.0, 0.8])
def test_too_little_noise_under_dropout_is_seen(monkeypatch, part):
    add = SecureNoise.add_gaussian
    monkeypatch.setattr(
        SecureNoise,
        "add_gaussian",
        lambda self, update, stddev, *, grid=None: add(self, update, part * stddev),
    )
    assert not noise.measure(0.5, "client", rounds=15, seed=1).enough


class Leaking(DPFedAvg):
    """A method that uploads its memory."""

    @staticmethod
    def update(work):
        trained = yield work.train("local", work.received)
        personal = {name: p + 0.1 for name, p in trained.items()}
        return LocalResult(update=personal, memory=personal)

    client = ClientMethod(
        name="leaking", local_update=update.__func__, local_model=lambda work: work.received
    )


def test_memory_on_the_wire_is_found():
    strategy: FederatedStrategy = FederatedStrategy(
        Leaking(local=LocalTraining(epochs=1, batch_size=10)), nobody_private()
    )
    outcome = wire.search("leaking", strategy, rounds=1)
    assert outcome.found_bytes > 1_000


def test_a_mutation_changes_the_copy_and_not_the_message():
    case = replace(CASES[0])
    strategy = case.build()
    grid = clients.InProcessGrid(case.client_app(strategy), case.nodes)
    requests = strategy.configure_train(1, clients.initial(), clients.ConfigRecord(), grid)
    before = {n: (a.shape, a.data) for n, a in _arrays(requests[0]).items()}
    rng = np.random.default_rng(0)
    mutations = malformed.requests(dict(requests[0].content.config_records[records.ROUND]))
    for _ in range(100):
        malformed.malformed(requests[0], rng, mutations)
    assert {n: (a.shape, a.data) for n, a in _arrays(requests[0]).items()} == before


def _arrays(message) -> ArrayRecord:
    return message.content.array_records[records.MODEL]
