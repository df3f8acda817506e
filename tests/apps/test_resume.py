"""Every method with state: its app is killed by SIGKILL, resumed, and compared."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import psutil
import pytest

from flower_ext.runs import RunDirectory, write_report
from tests.faults.kill import Trial, changed, differences, kill, short_of
from tests.support.apps import DP2_FEDSAM, DP_DITTO, SERVERS, ULDP_FL, UPCYCLED_FL
from tests.support.grids import grid

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

RUNS = [
    (DP2_FEDSAM, {"method": "dp2-fedsam", "sampling": "poisson", "sampling-rate": 0.7}),
    (
        DP2_FEDSAM,
        {"method": "centaur", "aggregation": "secure", "colluding-share": 0, "dropout-share": 0},
    ),
    *((DP2_FEDSAM, {"method": "dp-fedavg", **server}) for server in SERVERS.values()),
    (DP_DITTO, {"method": "dp-ditto"}),
    (DP_DITTO, {"method": "dp-apple", "noise": "upload", "calibration": "published"}),
    (UPCYCLED_FL, {"method": "fedyogi"}),
    (UPCYCLED_FL, {"method": "scaffold", "perturbation": "none", "seeded-noise": False}),
    (ULDP_FL, {"method": "uldp-avg-w"}),
]
"""Methods with heads of clients, masks, the moments of Adam, a norm that adapts, personal models, a
server's models for each client, the state of an optimizer or of a control, and users in silos."""

DAILY = "dp2-fedsam"
"""By SIGKILL one method dies in `make test`; in tests of state, others die inside this process."""


def trial(app, folder, **settings):
    return Trial(app=app.folder, folder=folder, config={**app.small_config(), **settings})


@pytest.mark.parametrize(
    ("app", "app_options"),
    grid(RUNS, lambda run: run[1]["method"] == DAILY),
    ids=[app_options["method"] for _, app_options in RUNS],
)
def test_a_seeded_run_killed_twice_ends_as_if_uninterrupted(tmp_path, app, app_options):
    whole = trial(app, tmp_path / "whole", **{**app_options, "rounds": 4})
    whole.finish()
    parts = replace(whole, folder=tmp_path / "parts")
    assert kill(parts.start(), changed(parts.folder, "metrics.jsonl", 1))
    assert kill(parts.start(), changed(parts.folder, "*.checkpoint", 2))
    parts.finish()
    assert differences(whole.run, parts.run) == []


@pytest.mark.full
def test_private_weights_are_set_up_anew_and_no_release_is_missed(tmp_path):
    settings = {"method": "uldp-sgd-private", "key-bits": 512, "allow-insecure-keys": True}
    one = trial(ULDP_FL, tmp_path, **{**settings, "rounds": 3, "max-records-per-user": 200})
    assert kill(one.start(), changed(one.folder, "begun.jsonl", 2))
    one.finish()
    released = {number for number, _ in one.released()}
    assert len(released) >= 3
    assert short_of(one, ended=False) == []


@pytest.mark.full
@pytest.mark.parametrize("interrupted", [True, False], ids=["Ctrl-C", "killed"])
def test_a_run_that_is_ended_says_what_its_guarantee_covers(tmp_path, interrupted):
    path = tmp_path / "run"
    settings = ["rounds=100000", "evaluate-every=5", "noise-multiplier=5", f"run-directory={path}"]
    command = [sys.executable, "-m", "flower_ext.cli.main", "run", str(DP2_FEDSAM.folder)]
    chosen = [word for setting in settings for word in ("--set", setting)]
    shell = subprocess.Popen(
        [*command, "--in-process", *chosen],
        start_new_session=True,
        # A shell makes background processes ignore Ctrl-C; a terminal does not.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    while not (path / "guarantee.json").exists():
        assert shell.poll() is None
        time.sleep(0.1)
    if interrupted:
        os.killpg(shell.pid, signal.SIGINT)
    else:
        (engine,) = (
            child
            for child in psutil.Process(shell.pid).children()
            if "flower_ext.federation.engines.run_app" in child.cmdline()
        )
        engine.kill()
    assert shell.wait(120) != 0
    run = RunDirectory.open(path)
    assert run.status == "failed"
    write_report(run)
    text = (path / "report.md").read_text(encoding="utf-8")
    assert ("covers what clients had been asked for until then" in text) == interrupted
    assert ("the lines below were written after round" in text) != interrupted
    if interrupted:  # SIGINT may come between a reservation and its requests
        reserved = sum(entry["kind"] == "reserve" for entry in run.ledger())
        rounds_stated = {
            int(n) for g in run.guarantees() for n in re.findall(r"(\d+) rounds?\)", g.statement())
        }
        assert len(rounds_stated) == 1
        beyond = reserved - rounds_stated.pop()
        assert beyond in (0, 1)
        assert ("The ledger holds more than this table" in text) == (beyond == 1)
