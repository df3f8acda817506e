"""A client's memory and secrets between messages."""

import os
import stat

import pytest
import torch

from flower_ext.errors import InvalidValue
from flower_ext.federation import ClientMemory
from flower_ext.federation._flower_private import SimulatedContext
from flower_ext.federation.storage.folder import Damaged
from flower_ext.federation.storage.memory import ClientVault
from tests.support.client_memory import context, disk_full, params


def key_file(folder, content=b"k" * 32, mode=0o600):
    file = folder / "key"
    file.write_bytes(content)
    file.chmod(mode)
    return str(file)


def test_memory_outlives_the_context_in_a_folder_that_the_owner_names(tmp_path):
    folder = str(tmp_path / "state")
    ClientMemory(context(state_folder=folder), "one", "run").store(params(1.5), 4)
    again = ClientMemory(context(state_folder=folder), "one", "run")
    assert again.newest() == 4
    loaded = again.load()
    assert list(loaded) == ["b", "a"]
    for name, value in params(1.5).items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value)
    assert ClientMemory(context(state_folder=folder), "one", "other").load() is None
    assert ClientMemory(context(state_folder=folder), "two", "run").load() is None
    elsewhere = ClientMemory(context(state_folder=folder, partition_id=3), "one", "run")
    assert elsewhere.load() is None


def test_a_round_that_is_done_again_begins_where_it_began(tmp_path):
    memory = ClientMemory(context(state_folder=str(tmp_path)), "one", "run")
    for version in (2, 5, 6, 9):
        memory.store(params(float(version)), version)
    assert [memory.newest(before) for before in (10, 9, 7, 6, 5)] == [9, 6, 6, 5, 0]
    assert float(memory.load(9)["a"]) == 6.0
    memory.store(params(-6.0), 6)
    assert memory.newest() == 6
    assert float(memory.load()["a"]) == -6.0
    assert float(memory.load(6)["a"]) == 5.0


@pytest.mark.parametrize("kept_in", ["state", "folder"])
def test_what_an_unused_reply_left_is_forgotten_and_the_last_used_kept(tmp_path, kept_in):
    facts = {"state_folder": str(tmp_path)} if kept_in == "folder" else {}
    memory = ClientMemory(context(**facts), "one", "run")
    memory.store(params(3.0), 3, and_before=True)
    for lost in (4, 5, 7, 8):
        memory.forget(after=3)
        assert float(memory.load(lost)["a"]) == 3.0
        memory.store(params(float(lost)), lost, and_before=True)
    assert memory.newest() == 8
    memory.forget(after=8)
    assert float(memory.load()["a"]) == 8.0
    memory.forget(after=7)
    assert (memory.newest(), float(memory.load()["a"])) == (3, 3.0)
    memory.forget(after=0)
    assert (memory.newest(), memory.load()) == (0, None)


def test_a_round_that_is_done_twice_leaves_what_was_before_it():
    memory = ClientMemory(context(), "one", "run")
    for version in (3, 5, 5):
        memory.store(params(float(version)), version, and_before=True)
    memory.forget(after=4)
    assert float(memory.load()["a"]) == 3.0


def test_a_state_holds_one_version_where_none_is_ever_forgotten():
    kept = context()
    memory = ClientMemory(kept, "one", "run")
    for version in (1, 2):
        memory.store(params(float(version)), version)
    assert len(kept.state.array_records) == 1


def test_nobody_else_reads_a_clients_files(tmp_path):
    folder = tmp_path / "made" / "here"
    kept = context(state_folder=str(folder))
    ClientMemory(kept, "one", "run").store(params(1.0), 1)
    ClientVault(kept, "one").store(b"secret")
    modes = {stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*") if p.is_file()}
    assert modes == {0o600}
    folders = [folder, *(p for p in folder.rglob("*") if p.is_dir())]
    assert {stat.S_IMODE(p.stat().st_mode) for p in folders} == {0o700}
    assert len(folders) == 4


@pytest.mark.parametrize("name", ["", "../other", "a/b", "a" * 65, ".", "a b", "secrets"])
def test_a_server_names_no_paths(tmp_path, name):
    kept = context(state_folder=str(tmp_path / "state"))
    if name == "":
        ClientMemory(kept, "one", name).store(params(1.0))
    else:
        with pytest.raises(ValueError, match="in the server's message"):
            ClientMemory(kept, "one", name)
    assert list(tmp_path.iterdir()) == []


def test_only_a_simulated_client_uses_the_folder_of_the_run(tmp_path):
    run_config = {"state-folder": str(tmp_path / "state")}
    ClientMemory(context(run_config), "one", "run").store(params(1.0))
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        simulated = context(run_config, SimulatedContext)
        memory = ClientMemory(simulated, "one", "run")
        memory.store(params(1.0), 1 + memory.newest())
    assert memory.newest() == 2


@pytest.mark.parametrize("at", [0, 20, -1])
def test_a_harmed_file_is_named_and_not_used(tmp_path, at):
    memory = ClientMemory(context(state_folder=str(tmp_path)), "one", "run")
    memory.store(params(1.0), 1)
    (file,) = tmp_path.rglob("*.memory")
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    with pytest.raises(Damaged, match=r"1\.memory: torn or altered"):
        memory.load()


def test_encrypted_memory_shows_nothing_and_needs_its_key(tmp_path):
    folder, key = str(tmp_path / "state"), key_file(tmp_path)
    sealed = context(state_folder=folder, state_key_file=key)
    ClientMemory(sealed, "one", "run").store({"weight": torch.zeros(64)}, 1)
    ClientVault(sealed, "one").store(b"secret")
    assert torch.equal(ClientMemory(sealed, "one", "run").load()["weight"], torch.zeros(64))
    assert ClientVault(sealed, "one").load() == b"secret"
    for file in (tmp_path / "state").rglob("*.*"):
        content = file.read_bytes()
        assert not any(clear in content for clear in (b"weight", b"secret", bytes(16)))
    with pytest.raises(Damaged, match="is encrypted: set state-key-file to the file"):
        ClientMemory(context(state_folder=folder), "one", "run").load()
    key_file(tmp_path, b"j" * 32)
    with pytest.raises(Damaged, match="expected state-key-file to hold the key"):
        ClientMemory(sealed, "one", "run").load()


def test_an_encrypted_file_in_anothers_place_is_refused(tmp_path):
    sealed = context(state_folder=str(tmp_path), state_key_file=key_file(tmp_path))
    memory = ClientMemory(sealed, "one", "run")
    memory.store(params(1.0), 1)
    memory.store(params(2.0), 2)
    first, second = (tmp_path / f"run/one-2/{version}.memory" for version in (1, 2))
    second.write_bytes(first.read_bytes())
    with pytest.raises(Damaged, match="moved"):
        memory.load()


def test_clear_memory_is_refused_where_there_is_a_key(tmp_path):
    ClientMemory(context(state_folder=str(tmp_path)), "one", "run").store(params(1.0), 1)
    sealed = context(state_folder=str(tmp_path), state_key_file=key_file(tmp_path))
    with pytest.raises(Damaged, match="is not encrypted"):
        ClientMemory(sealed, "one", "run").load()


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (b"short", 0o600, "the file holds no key; expected 32 random bytes"),
        (b"k" * 32, 0o644, "chmod 600"),
    ],
)
def test_a_key_that_is_none_or_no_secret_is_refused(tmp_path, content, mode, message):
    file = key_file(tmp_path, content, mode)
    with pytest.raises(InvalidValue, match=f"state-key-file={file}.*{message}"):
        ClientMemory(context(state_folder=str(tmp_path), state_key_file=file), "one", "run")


def test_a_failed_write_leaves_the_earlier_memory(tmp_path, monkeypatch):
    memory = ClientMemory(context(state_folder=str(tmp_path)), "one", "run")
    memory.store(params(1.0), 1)
    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="disk is full"):
        memory.store(params(2.0), 2)
    assert memory.newest() == 1
    assert float(memory.load()["a"]) == 1.0
