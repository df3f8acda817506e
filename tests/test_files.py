"""Files that several processes write at once, or that a killed process left; locks that name their
holder; tables that become dataclasses."""

import multiprocessing
import os
import socket
import subprocess
import sys
from dataclasses import dataclass

import pytest

from flower_ext.errors import InvalidValue
from flower_ext.files import InUse, from_table, lock, read_key, whole_file, write_whole

HOLD = """
import os, sys, time
from pathlib import Path
from flower_ext.files import lock
held = lock(Path(sys.argv[1]))
if "fork" in sys.argv and not os.fork():
    print(os.getpid(), flush=True)
    time.sleep(300)
if "fork" in sys.argv:
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(300)
"""


def holding(path, *words):
    """Start a process that takes the lock; return it and the pid of the process that holds it."""
    command = [sys.executable, "-c", HOLD, str(path), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    return process, int(process.stdout.readline())


def test_a_lock_in_use_names_its_process_and_ends_with_it(tmp_path):
    process, pid = holding(tmp_path / ".lock")
    with pytest.raises(InUse, match=rf"in use by process {pid} on {socket.gethostname()} since"):
        lock(tmp_path / ".lock", seconds=0.2)
    process.kill()
    process.wait()
    lock(tmp_path / ".lock", seconds=0).close()
    assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()
    assert f"process {pid} on" not in (tmp_path / ".lock").read_text()


def test_a_lock_that_a_forked_child_holds_waits_for_the_child(tmp_path):
    process, child = holding(tmp_path / ".lock", "fork")
    process.wait()
    with pytest.raises(InUse, match="or by a process that it started"):
        lock(tmp_path / ".lock", seconds=0.2)
    os.kill(child, 9)
    lock(tmp_path / ".lock", seconds=60).close()


def _write(path, content, times, begin, errors):
    begin.wait(timeout=60)
    try:
        for _ in range(times):
            write_whole(path, content, sync=False)
    except OSError as error:
        errors.put(str(error))


def test_concurrent_writers_leave_one_writers_content_and_no_draft(tmp_path):
    processes = multiprocessing.get_context("fork")
    begin, errors = processes.Barrier(3), processes.Queue()
    path, contents = tmp_path / "file", [bytes([65 + n]) * 50_000 for n in range(3)]
    writers = [
        processes.Process(target=_write, args=(path, content, 200, begin, errors))
        for content in contents
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert errors.empty()
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


def test_a_draft_of_another_machine_stays_whatever_its_process_id(tmp_path, monkeypatch):
    """Machines may share a folder: a process that runs on one may be unknown on the other."""
    path, dead = tmp_path / "file", subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    monkeypatch.setattr(os, "getpid", lambda: dead.pid)
    monkeypatch.setattr(socket, "gethostname", lambda: "silo-2.example")
    with whole_file(path) as stream:
        stream.write(b"of the other machine")
        (draft,) = tmp_path.iterdir()
        for host in ("silo-1.example", "example", "*"):
            monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
            write_whole(path, b"of this machine")
            assert draft.exists()
    assert path.read_bytes() == b"of the other machine"


def test_a_draft_of_a_killed_process_of_this_machine_is_removed(tmp_path, monkeypatch):
    path, dead = tmp_path / "file.json", subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    monkeypatch.setattr(socket, "gethostname", lambda: "silo-2.example")
    (tmp_path / f".file.json.{dead.pid}-00@silo-2.example.draft").write_bytes(b"half a secr")
    write_whole(path, b"whole")
    assert [*tmp_path.iterdir()] == [path]


@dataclass(frozen=True, kw_only=True)
class Box:
    max_size: int
    name: str = ""


def test_a_table_becomes_a_dataclass():
    assert from_table(Box, {"max-size": 3}, "[box]") == Box(max_size=3)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"max-size": 3, "colour": 1}, r"^\[box\] has 'colour': expected max-size, name$"),
        ({"max_size": 3}, r"^\[box\] has 'max_size': expected max-size, name$"),
        ({}, r"^\[box\]: missing 1 required keyword-only argument: 'max_size'$"),
        (3, r"^\[box\]=3: expected a table of max-size, name$"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_with_its_place(table, message):
    with pytest.raises(InvalidValue, match=message):
        from_table(Box, table, "[box]")


KEY = bytes(range(32))


def key_file(tmp_path, content, mode=0o600):
    path = tmp_path / "secret.key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("content", "is_text"),
    [(KEY, False), (KEY.hex().encode(), True), (KEY.hex().encode() + b"\n", True)],
)
def test_a_key_is_read_as_bytes_or_as_digits(tmp_path, content, is_text):
    assert read_key(key_file(tmp_path, content), "key", "a key", is_text=is_text) == KEY


@pytest.mark.parametrize(
    ("content", "is_text"),
    [
        (b"", False),
        (KEY[:31], False),
        (KEY + b"\n", False),
        (KEY.hex().encode(), False),
        (KEY, True),
        (KEY[:31].hex().encode(), True),
        (KEY.hex(" ").encode(), True),
        (KEY.hex().upper().encode(), True),
        ("０".encode() * 64, True),
    ],
)
def test_a_file_without_a_key_is_named_with_how_to_make_one(tmp_path, content, is_text):
    path = key_file(tmp_path, content)
    with pytest.raises(InvalidValue, match=f"^key={path}: the file holds no key; expected a key$"):
        read_key(path, "key", "a key", is_text=is_text)


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o610, 0o604, 0o602, 0o601])
def test_a_key_that_others_may_use_is_refused_whatever_it_holds(tmp_path, mode):
    for content in (KEY, b"no key"):
        path = key_file(tmp_path, content, mode)
        with pytest.raises(InvalidValue, match=f"^key={path}: .*; run chmod 600 {path}$"):
            read_key(path, "key", "a key")


def test_a_missing_key_file_is_named_with_how_to_make_one(tmp_path):
    with pytest.raises(InvalidValue, match=r"none: No such file or directory; expected a key$"):
        read_key(tmp_path / "none", "key", "a key")
    with pytest.raises(InvalidValue, match="Is a directory; expected a key"):
        read_key(tmp_path, "key", "a key")
