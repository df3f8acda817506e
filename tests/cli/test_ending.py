"""Runs that a signal ends, on every engine and as real processes; each is resumed to its end."""

import os
import pty
import re
import select
import shlex
import signal
import time

import psutil
import pytest

from flower_ext.runs import RunDirectory
from tests.support.apps import DP2_FEDSAM
from tests.support.commands import FOREVER, SETS, Command, call

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture
def command(tmp_path):
    return Command(tmp_path)


def named(path, words):
    """Return the words that name a run directory, of ``flower-ext run`` or of a rehearsal."""
    return ["--run", str(path)] if words[0] == "deploy" else ["--set", f"run-directory={path}"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGTERM, ["run", "--in-process"]),
        pytest.param(
            signal.SIGTERM, ["run", "--in-process", "--workers", "2"], marks=pytest.mark.full
        ),
        pytest.param(signal.SIGINT, ["run"], marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, ["deploy", "--nodes", "2"], marks=pytest.mark.slow),
    ],
    ids=["alone-TERM", "workers-TERM", "ray-INT", "deploy-TERM"],
)
def test_a_signal_ends_a_run_with_a_report_and_a_resume_command(
    number, words, command, tmp_path, forked_runs
):
    path = tmp_path / "run"
    start = [words[0], str(DP2_FEDSAM.folder), *words[1:], *FOREVER, *named(path, words)]
    status, _, errors = command.ended_by(number, path, *start)
    assert status == 128 + number, errors
    assert "Traceback" not in errors
    assert command.left() == []

    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert f"the run was interrupted by {name}" in errors
    assert f"Run directory: {path} " in errors
    run = RunDirectory.open(path)
    assert run.status == "failed"
    assert (path / "report.html").stat().st_mtime_ns >= (path / "run.json").stat().st_mtime_ns
    reserved = sum(entry["kind"] == "reserve" for entry in run.ledger())

    (again,) = re.findall(r"To continue it: flower-ext (.*)", errors)
    if words[0] == "deploy":  # whose SuperLink has ended
        again = shlex.join(start)
    done = len(run.metrics())
    further = [*shlex.split(again), "--set", f"rounds={done + 2}"]
    if words == ["run", "--in-process"]:  # a fork imports nothing; the other runs end as processes
        ended = call(*further)
        status, printed = ended.exit_code, ended.output
    else:
        process = command.start(*further)
        printed = "".join(part.decode() for part in process.communicate(timeout=300))
        status = process.returncode
    assert status == 0, printed
    assert run.status == "completed"
    if "--in-process" in words:  # a pipe gets the log without codes; Ray writes its own
        assert "\x1b" not in printed
        assert f"round {done + 2}/{done + 2}" in printed
    assert [row["round"] for row in run.metrics()] == [*range(1, done + 3)]
    assert sum(entry["kind"] == "reserve" for entry in run.ledger()) > reserved
    assert command.left() == []


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["run", "--in-process", "--workers", "2"], marks=pytest.mark.full),
        pytest.param(["run"], marks=pytest.mark.full),
        pytest.param(["deploy", "--nodes", "2"], marks=pytest.mark.slow),
    ],
    ids=["workers", "ray", "deploy"],
)
def test_a_killed_command_ends_its_run_which_can_be_resumed(words, command, tmp_path):
    path = tmp_path / "run"
    start = [words[0], str(DP2_FEDSAM.folder), *words[1:]]
    forever = [*start, *FOREVER, *named(path, words)]
    status, _, errors = command.ended_by(signal.SIGKILL, path, *forever)
    assert status == -signal.SIGKILL, errors
    assert command.left() == []
    run = RunDirectory.open(path)
    run.check_free()  # processes that inherited its lock may outlive it by a moment
    reserved = sum(entry["kind"] == "reserve" for entry in run.ledger())
    done = len(run.metrics())
    assert reserved <= done + 1  # the round under way
    again = named(path, words) if words[0] == "deploy" else ["--resume", str(path)]
    process = command.start(*start, *again, "--set", f"rounds={done + 1}")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out.decode() + err.decode()
    assert [row["round"] for row in run.metrics()] == [*range(1, done + 2)]
    assert command.left() == []


def test_a_signal_before_a_run_begins_says_that_nothing_was_used(command, tmp_path):
    words = ["run", str(DP2_FEDSAM.folder), "--in-process", *FOREVER]
    process = command.start(*words, "--set", f"run-directory={tmp_path / 'run'}")
    while not psutil.Process(process.pid).children():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert b"before it began; nobody's data were used" in errors


@pytest.mark.full
def test_a_terminal_shows_each_line_of_the_log_once(command, tmp_path):
    ours, theirs = pty.openpty()
    words = ["run", str(DP2_FEDSAM.folder), "--in-process", *SETS, "--set", "rounds=20"]
    words += ["--set", f"run-directory={tmp_path / 'run'}"]
    process = command.start(*words, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], 120)[0]:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux reports a closed terminal in this way
            break
        if not part:
            break
        shown += part
    os.close(ours)
    text = shown.decode(errors="replace")
    assert process.wait(60) == 0, text
    for number in range(1, 21):
        assert sum(f"round {number}/20" in line for line in text.splitlines()) == 1
