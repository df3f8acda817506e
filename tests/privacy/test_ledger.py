"""A ledger records each release before it is made, and stops at its budget."""

import dataclasses
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from flower_ext.files import InUse
from flower_ext.privacy import (
    Budget,
    BudgetExhausted,
    Ledger,
    LedgerCorrupt,
    NeighboringRelation,
    PoissonSampling,
    Release,
)
from tests.support.grids import grid
from tests.support.losses import most_rounds

SAMPLING = PoissonSampling(100, 0.1)
RELEASE = Release(
    sampling=SAMPLING, noise_multiplier=1.0, relation=NeighboringRelation.ADD_OR_REMOVE_ONE
)


def filled(path, rounds=3) -> bytes:
    """Write a ledger with some releases, and return its bytes."""
    ledger = Ledger(path)
    for number in range(rounds):
        with ledger.reserve(RELEASE, server_round=number) as entry:
            entry.note(answered=number)
    ledger.close()
    return path.read_bytes()


@pytest.fixture
def fast_path(tmp_path):
    """Return a path in memory, where the machine has such a folder: disks take long to sync."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path / "ledger.jsonl"
        return
    with TemporaryDirectory(dir=memory) as folder:
        yield Path(folder, "ledger.jsonl")


def reserved(path) -> int:
    """Return the number of releases in a ledger."""
    ledger = Ledger(path)
    try:
        return ledger.releases
    finally:
        ledger.close()


def kinds(path):
    return [entry["kind"] for entry in Ledger.read(path)]


def test_a_release_is_reserved_before_and_committed_after_its_body(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    with ledger.reserve(RELEASE, server_round=1) as entry:
        assert kinds(path) == ["reserve"]  # already durable while the body runs
        entry.note(answered=9)
    assert kinds(path) == ["reserve", "commit"]
    assert Ledger.read(path)[1]["notes"] == {"answered": 9}


def test_a_reserved_release_is_spent_whatever_follows(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    with pytest.raises(KeyError), ledger.reserve(RELEASE, server_round=1):
        raise KeyError("lost")
    with ledger.reserve(RELEASE, server_round=2) as entry:
        entry.discard("too few answered")
    assert kinds(path) == ["reserve", "discard", "reserve", "discard"]
    assert ledger.releases == 2
    assert "too few answered" in path.read_text()


def test_the_budget_stops_before_anything_is_written(tmp_path):
    path = tmp_path / "ledger.jsonl"
    fitting = most_rounds(epsilon=0.6, delta=1e-2, sampling=SAMPLING, noise_multiplier=1.0)
    ledger = Ledger(path, budget=Budget(epsilon=0.6, delta=1e-2))
    for number in range(fitting):
        with ledger.reserve(RELEASE, server_round=number):
            pass
    before = path.read_bytes()
    with pytest.raises(BudgetExhausted, match=f"above the budget of 0.6; {fitting} releases"):
        ledger.reserve(RELEASE, server_round=fitting).__enter__()
    assert path.read_bytes() == before
    assert fitting > 3
    assert ledger.spent(1e-2).epsilon <= 0.6


def test_a_resumed_ledger_counts_what_was_spent_before(tmp_path):
    path = tmp_path / "ledger.jsonl"
    filled(path, rounds=3)
    ledger = Ledger(path)
    assert ledger.releases == 3
    with ledger.reserve(RELEASE, server_round=3):
        pass
    assert ledger.releases == 4
    assert len(Ledger.read(path)) == 8


def again(path, *, round=1, identity=7, release=RELEASE):
    """Return the number of counted releases after one more, on a newly opened ledger."""
    ledger = Ledger(path)
    with ledger.reserve(release, server_round=round, identity=identity):
        pass
    ledger.close()
    return ledger.releases


def test_a_repeated_release_counts_once_only_if_it_is_the_same(tmp_path):
    path = tmp_path / "ledger.jsonl"
    other = dataclasses.replace(RELEASE, noise_multiplier=2.0)
    assert [again(path) for _ in range(3)] == [1, 1, 1]
    assert kinds(path) == ["reserve", "commit"] + 2 * ["repeat", "commit"]
    assert again(path, identity=8) == 2
    assert again(path, identity=None) == again(path, round=2) - 1 == 3
    assert again(path, release=other) == 5
    assert again(path, identity=None) == 6
    assert again(path, release=other) == again(path) == 6


def test_no_two_releases_of_one_open_ledger_are_the_same(tmp_path):
    path = tmp_path / "ledger.jsonl"
    for expected in ([1, 2], [2, 3], [3, 4]):  # one release is repeated, the other is new
        ledger = Ledger(path)
        for releases in expected:
            with ledger.reserve(RELEASE, server_round=1, identity=7):
                assert ledger.releases == releases
        ledger.close()


def test_releases_without_identity_count_and_never_repeat(tmp_path):
    path = tmp_path / "ledger.jsonl"
    filled(path)
    assert "identity" not in path.read_text()
    assert again(path, round=1) == 4
    assert again(path, round=1) == 4


def test_two_runs_cannot_share_a_ledger(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    with pytest.raises(InUse, match="in use by another run"):
        Ledger(path)
    code = f"from flower_ext.privacy import Ledger; Ledger({str(path)!r})"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "InUse" in other.stderr
    ledger.close()
    Ledger(path).close()


def test_a_changed_byte_anywhere_is_detected(fast_path):
    path = fast_path
    content = filled(path)
    for position in range(len(content) - 1):
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(bytes(changed))
        with pytest.raises(LedgerCorrupt, match="line \\d"):
            Ledger.read(path)


def test_removed_or_swapped_lines_are_detected(tmp_path):
    path = tmp_path / "ledger.jsonl"
    lines = filled(path).splitlines(keepends=True)
    for broken in (lines[1:], lines[:2] + lines[3:], [lines[1], lines[0], *lines[2:]]):
        path.write_bytes(b"".join(broken))
        with pytest.raises(LedgerCorrupt):
            Ledger(path)


def test_a_forged_line_with_a_valid_hash_breaks_the_chain(tmp_path):
    import hashlib

    path = tmp_path / "ledger.jsonl"
    lines = filled(path).splitlines()
    forged = json.loads(lines[2])
    forged["release"]["noise_multiplier"] = 100.0
    body = {k: v for k, v in forged.items() if k != "hash"}
    forged["hash"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    lines[2] = json.dumps(forged, sort_keys=True).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(LedgerCorrupt, match="line 4"):
        Ledger(path)


def test_truncation_at_any_byte_keeps_every_whole_reservation(fast_path):
    path = fast_path
    content = filled(path)
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        whole = content[:length].decode().count('"kind": "reserve"')
        torn = not content[:length].endswith(b"\n") and length > 0
        assert reserved(path) in ({whole, whole - 1} if torn else {whole})
        assert path.read_bytes() == content[: content[:length].rfind(b"\n") + 1]


def test_the_ledger_is_private_to_its_owner(tmp_path):
    path = tmp_path / "ledger.jsonl"
    filled(path)
    assert path.stat().st_mode & 0o077 == 0


def _release_for_ever(ledger_path, witness_path):
    """Reserve, release (a durable line elsewhere) and commit, until the process is killed."""
    witness = os.open(witness_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ledger = Ledger(ledger_path)
    number = 0
    while True:
        with ledger.reserve(RELEASE, server_round=number):
            os.write(witness, b"released\n")
            os.fsync(witness)
        number += 1


def _lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _last_kind(path):
    return json.loads(path.read_bytes().split(b"\n")[-2])["kind"]


@pytest.mark.parametrize("kills", grid([24, 60], lambda kills: kills == 24))
def test_kill_9_at_any_moment_never_undercounts_what_was_released(tmp_path, kills):
    """One kill in three is at any moment, one after a release, one between reserve and commit."""
    ledger_path, witness_path = tmp_path / "ledger.jsonl", tmp_path / "witness"
    context = multiprocessing.get_context("fork")
    moments = random.Random(0)
    released = 0
    for kill in range(kills):
        worker = context.Process(target=_release_for_ever, args=(ledger_path, witness_path))
        worker.start()
        while True:
            time.sleep(moments.uniform(0.001, 0.01))
            os.kill(worker.pid, signal.SIGSTOP)
            os.waitpid(worker.pid, os.WUNTRACED)
            has_released = _lines(witness_path) > released
            is_releasing = has_released and _last_kind(ledger_path) == "reserve"
            if (True, has_released, is_releasing)[kill % 3]:
                break
            assert _lines(witness_path) < released + 10_000  # no reservation was ever seen open
            os.kill(worker.pid, signal.SIGCONT)
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        released = _lines(witness_path)
        spent = reserved(ledger_path) if ledger_path.exists() else 0
        assert spent >= released
    entries = kinds(ledger_path)
    assert entries.count("reserve") - entries.count("commit") >= kills // 3


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.1), (-1.0, 0.1), (1.0, -0.1), (1.0, 1.0)])
def test_unfit_budgets_are_refused(epsilon, delta):
    with pytest.raises(ValueError, match="epsilon|delta"):
        Budget(epsilon=epsilon, delta=delta)


def test_a_closed_or_unwritable_ledger_reserves_nothing(tmp_path):
    closed = Ledger(tmp_path / "closed.jsonl")
    closed.close()
    broken = Ledger(tmp_path / "broken.jsonl")
    readable = os.open(tmp_path / "broken.jsonl", os.O_RDONLY)
    os.dup2(readable, broken._file)
    with pytest.raises(OSError, match="Bad file"):
        broken.reserve(RELEASE, server_round=1).__enter__()
    for ledger, reason in ((closed, "was closed"), (broken, "could not be written")):
        with pytest.raises(RuntimeError, match=f"{reason}; open it again"):
            ledger.reserve(RELEASE, server_round=1).__enter__()
    broken.close()  # a failed file is closed like any other, and nothing can be closed twice
    for ledger in (closed, broken):
        with pytest.raises(RuntimeError, match="was closed; open it again"):
            ledger.close()


def test_notes_of_any_name_leave_a_line_as_it_is(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    notes = {"kind": "reserve", "seq": 7, "prev": "", "hash": "", "round": 9}
    with ledger.reserve(RELEASE, server_round=1) as entry:
        entry.note(**notes)
    assert kinds(ledger.path) == ["reserve", "commit"]
    assert Ledger.read(ledger.path)[1]["notes"] == notes


@pytest.mark.parametrize("first", grid(range(8), lambda first: first == 0))
def test_no_flipped_bit_changes_what_a_ledger_says(fast_path, first):
    """Every eighth byte; `make test-all` covers all of them."""
    path = fast_path
    content = filled(path)
    entries = Ledger.read(path)
    for position in range(first, len(content), 8):
        for bit in range(8):
            changed = bytearray(content)
            changed[position] ^= 1 << bit
            path.write_bytes(bytes(changed))
            try:
                read = Ledger.read(path)
            except LedgerCorrupt:
                continue
            # "1.0" may become "1e0", which is the same; the last newline makes its line torn.
            assert read == (entries if position < len(content) - 1 else entries[:-1])


def test_a_reservation_and_a_new_file_are_synced_before_the_body(tmp_path, monkeypatch):
    events = []
    real_write, real_sync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda f, b: events.append("write") or real_write(f, b))

    def sync(descriptor):
        kind = "directory" if os.path.samestat(os.fstat(descriptor), tmp_path.stat()) else "file"
        events.append(kind)
        real_sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    assert events == ["directory"]
    with ledger.reserve(RELEASE, server_round=0):
        events.append("body")
    assert events == ["directory", "write", "file", "body", "write", "file"]


@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_no_body_runs_when_the_reservation_cannot_be_written(tmp_path, monkeypatch, failing):
    def fail(*_):
        raise OSError("disk full")

    ledger = Ledger(tmp_path / "ledger.jsonl")
    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="disk full"), ledger.reserve(RELEASE, server_round=0):
        pytest.fail("released without a reservation")
