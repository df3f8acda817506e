"""A client's vault keeps its state in sealed files."""

import os
import socket
import subprocess
import sys

import pytest
from flwr.app import Context, RecordDict

from flower_ext.errors import ProtocolError
from flower_ext.federation import ClientMemory
from flower_ext.federation.storage.folder import Damaged
from flower_ext.federation.storage.memory import ClientVault, forget_client
from tests.support.client_memory import context, disk_full, params


def test_a_vault_holds_what_was_stored_last_for_one_method():
    kept = context()
    assert ClientVault(kept, "one").load() is None
    ClientVault(kept, "one").store(b"first")
    ClientVault(kept, "one").store(b"second")
    assert ClientVault(kept, "one").load() == b"second"
    assert ClientVault(kept, "other").load() is None


def test_with_a_folder_a_vault_outlives_the_context(tmp_path):
    folder = str(tmp_path / "made" / "here")
    ClientVault(context(state_folder=folder), "one").store(b"secret")
    assert ClientVault(context(state_folder=folder), "one").load() == b"secret"


def test_a_folder_is_ahead_of_a_context_that_was_not_handed_on(tmp_path):
    kept = context(state_folder=str(tmp_path))
    ClientVault(kept, "one").store(b"round 1")
    ClientVault(context(state_folder=str(tmp_path)), "one").store(b"round 2")
    assert ClientVault(kept, "one").load() == b"round 2"


def test_a_failed_write_leaves_the_context_unchanged(tmp_path, monkeypatch):
    kept = context(state_folder=str(tmp_path))
    ClientVault(kept, "one").store(b"round 1")
    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="disk is full"):
        ClientVault(kept, "one").store(b"round 2")
    assert ClientVault(kept, "one").load() == b"round 1"
    assert ClientVault(context(), "one").load() is None


def test_of_two_outcomes_of_one_stored_state_the_second_is_refused(tmp_path):
    folder = str(tmp_path)
    ClientVault(context(state_folder=folder), "one").store(b"shared")
    first, second = (ClientVault(context(state_folder=folder), "one") for _ in range(2))
    assert first.load() == second.load() == b"shared"
    first.store(b"masked by the first")
    with pytest.raises(ProtocolError, match="state changed while it answered"):
        second.store(b"masked by the second")
    first.store(b"unmasked by the first")
    assert second.load() == b"unmasked by the first"
    second.store(b"the next")


def test_of_two_first_outcomes_the_second_is_refused(tmp_path):
    first, second = (ClientVault(context(state_folder=str(tmp_path)), "one") for _ in range(2))
    assert first.load() is second.load() is None
    first.store(b"keys of the first")
    with pytest.raises(ProtocolError, match="state changed"):
        second.store(b"keys of the second")


def test_a_harmed_file_of_secrets_is_named_and_not_used(tmp_path):
    ClientVault(context(state_folder=str(tmp_path)), "one").store(b"secret")
    (file,) = tmp_path.rglob("*.secret")
    file.write_bytes(file.read_bytes().replace(b"secret", b"s3cret"))
    with pytest.raises(Damaged, match=r"7-2-one\.secret: torn or altered"):
        ClientVault(context(state_folder=str(tmp_path)), "one").load()


def test_secrets_are_in_a_separate_folder_that_backups_can_omit(tmp_path):
    kept = context(state_folder=str(tmp_path))
    ClientMemory(kept, "one", "run").store(params(1.0), 1)
    ClientVault(kept, "one").store(b"secret")
    holding = [p for p in tmp_path.rglob("*") if p.is_file() and b"secret" in p.read_bytes()]
    assert {file.parent for file in holding} == {tmp_path / "secrets"}


def test_secrets_of_runs_that_ended_long_ago_are_removed_when_another_begins(tmp_path):
    old, under_way = (
        Context(run_id=n, node_id=3, node_config=facts, state=RecordDict(), run_config={})
        for n, facts in ((1, {"state-folder": str(tmp_path)}), (2, {"state-folder": str(tmp_path)}))
    )
    for kept in (old, under_way):
        ClientVault(kept, "one").store(b"secret")
    (file,) = (tmp_path / "secrets").glob("1-*.secret")
    os.utime(file, (0, 0))
    new = ClientVault(context(state_folder=str(tmp_path)), "one")
    new.store(b"keys")
    # Nor does its context have a copy, which could be older than the file and use a mask twice.
    assert ClientVault(old, "one").load() is None
    assert not old.state
    assert sorted(f.name[:2] for f in (tmp_path / "secrets").glob("*.secret")) == ["2-", "7-"]


def test_a_client_that_forgets_leaves_no_keys_of_masked_sums(tmp_path):
    methods = ("fedavg-sum", "uldp_avg")

    def of(run_id, partition):
        node_config = {"partition-id": partition, "state-folder": str(tmp_path)}
        # In each run, the server gives the client's node another id.
        return Context(run_id, 1_000 * run_id + partition, node_config, RecordDict(), {})

    for run_id, partition in ((1, 3), (7, 3), (7, 33), (3, 4)):
        for method in methods:
            ClientVault(of(run_id, partition), method).store(b"keys")
    ClientVault(of(1, 3), "uldp_avg-draws", is_permanent=True).store(b"drawn")
    (tmp_path / "secrets" / ".1-3-fedavg-sum.secret.99-00@other.draft").write_bytes(b"half")
    forget_client(of(7, 3), ["study"], vaults="-sum")
    left = {file.name for file in (tmp_path / "secrets").iterdir()} - {".lock"}
    others = {f"{client}-{method}.secret" for client in ("7-33", "3-4") for method in methods}
    # Of earlier runs, a silo's keys of weighted sums stay: no silo is asked to forget.
    assert left == {*others, "1-3-uldp_avg.secret", "1-3-uldp_avg-draws.permanent"}


def test_a_node_without_a_partition_has_a_vault_under_its_id(tmp_path):
    one, other = (
        Context(7, node_id, {"state-folder": str(tmp_path)}, RecordDict(), {}) for node_id in (3, 4)
    )
    ClientVault(one, "one").store(b"keys")
    assert ClientVault(one, "one").load() == b"keys"
    assert ClientVault(other, "one").load() is None


def test_half_written_files_of_a_killed_process_are_removed(tmp_path):
    kept = context(state_folder=str(tmp_path))
    ClientVault(kept, "one").store(b"first")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for writer, content in ((dead.pid, b"half a secr"), (os.getpid(), b"at work")):
        name = f".7-2-one.secret.{writer}-00@{socket.gethostname()}.draft"
        (tmp_path / "secrets" / name).write_bytes(content)
    ClientVault(kept, "one").store(b"second")
    (left,) = (tmp_path / "secrets").glob(".*.draft")
    assert left.read_bytes() == b"at work"
