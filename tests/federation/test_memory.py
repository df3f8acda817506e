"""What a client keeps between messages."""

import os
import stat

import pytest
from flwr.app import Context, RecordDict

from flower_ext.federation import ClientVault


def context(**node_config) -> Context:
    return Context(run_id=7, node_id=3, node_config=node_config, state=RecordDict(), run_config={})


def test_a_vault_holds_what_was_stored_last_for_one_method():
    kept = context()
    assert ClientVault(kept, "one").load() is None
    ClientVault(kept, "one").store(b"first")
    ClientVault(kept, "one").store(b"second")
    assert ClientVault(kept, "one").load() == b"second"
    assert ClientVault(kept, "other").load() is None


def test_with_a_folder_a_vault_outlives_the_context_and_nobody_else_reads_it(tmp_path):
    folder = tmp_path / "made" / "here"
    ClientVault(context(**{"secrets-folder": str(folder)}), "one").store(b"secret")
    again = ClientVault(context(**{"secrets-folder": str(folder)}), "one")
    assert again.load() == b"secret"
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_is_ahead_of_a_context_that_was_not_handed_on(tmp_path):
    kept = context(**{"secrets-folder": str(tmp_path)})
    ClientVault(kept, "one").store(b"round 1")
    ClientVault(context(**{"secrets-folder": str(tmp_path)}), "one").store(b"round 2")
    assert ClientVault(kept, "one").load() == b"round 2"


def test_what_cannot_be_written_is_not_kept_in_the_context_either(tmp_path, monkeypatch):
    kept = context(**{"secrets-folder": str(tmp_path)})
    ClientVault(kept, "one").store(b"round 1")

    def full(descriptor):
        raise OSError("disk is full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk is full"):
        ClientVault(kept, "one").store(b"round 2")
    assert ClientVault(kept, "one").load() == b"round 1"
    assert ClientVault(context(), "one").load() is None
