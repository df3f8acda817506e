"""The apps under faults, on a SuperLink and four SuperNodes with TLS and registered keys."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flower_ext.privacy import Ledger
from flower_ext.runs import RunDirectory
from tests.faults.processes import (
    KILLED,
    SETTINGS,
    STOPPED,
    STRANGER,
    SUPERLINK,
    WORKING,
    Fault,
    Plan,
    WatchedRun,
    kill_client_at_work,
    kill_node,
    knock,
    restart_node,
    restart_superlink,
    under_faults,
)
from tests.support.apps import DP2_FEDSAM
from tests.support.deployment import Deployment
from tests.support.identities import write_identities

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

TIMEOUT = 90  # seconds for a round: more than any healthy one takes


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with Deployment(tmp_path_factory.mktemp("deployment") / "four", nodes=4) as running:
        yield running


def processes_naming(text: str) -> list[str]:
    """Return the commands of other processes that contain a text."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if text in command and int(entry.parent.name) != os.getpid():
            pids.append(command)
    return pids


def test_one_command_deploys_runs_reports_and_ends_what_it_started(tmp_path):
    settings = {**SETTINGS, "rounds": 2, "run-directory": tmp_path / "run"}
    options = [
        part
        for name, value in settings.items()
        for part in ("--set", f"{name}={str(value).lower() if value is True else value}")
    ]
    folder = tmp_path / "deployment"
    command = ("deploy", str(DP2_FEDSAM.folder), "--nodes", "4", "--folder", str(folder))
    flower_ext = Path(sys.executable).parent / "flower-ext"
    done = subprocess.run(
        [flower_ext, *command, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Report: {tmp_path / 'run' / 'report.html'}" in done.stdout
    run = RunDirectory.open(tmp_path / "run")
    assert run.status == "completed"
    assert [row["answered"] for row in run.metrics()] == [4, 4]
    assert run.missing() == []
    assert processes_naming(str(folder)) == []
    superlink = (folder / "logs" / "superlink.log").read_text()
    assert "https://127.0.0.1" in superlink
    assert len(re.findall("Activated node_id", superlink)) == 4
    for path in (folder / "superlink.db", folder / "keys" / "node-0"):
        assert path.stat().st_mode & 0o077 == 0


def test_a_killed_node_costs_its_round_and_returns_and_strangers_are_refused(deployment, tmp_path):
    plan = Plan(
        "killed",
        rounds=4,
        faults={
            1: [Fault(KILLED, kill_node, 1), Fault(STRANGER, knock)],
            2: [Fault(WORKING, kill_client_at_work, 2)],
        },
        returns={1: [1]},
    )
    outcome = under_faults(deployment, plan, tmp_path / "run", timeout=TIMEOUT)
    run = outcome.run
    assert outcome.error is None
    assert run.status == "completed"
    assert 1 in outcome.missing[1]
    assert 2 in outcome.missing[2]
    rows = run.metrics()
    assert [row.get("discarded", 0) for row in rows] == [0] * plan.rounds
    assert all(row["topped_up_stddev"] > 0 for row in rows[:2])  # in place of the lost shares
    assert rows[-1]["answered"] == 4  # including the killed node
    assert [e["kind"] for e in run.ledger()].count("reserve") == plan.rounds  # asked is spent
    assert outcome.wrong_aggregates == 0
    assert outcome.epsilon_right
    report = (run.path / "report.md").read_text(encoding="utf-8")
    assert "## Missing answers" in report
    assert "stranger" in (text := deployment.logs()), text
    log = (deployment.folder / "logs" / "stranger.log").read_text()
    assert "Exit Code" in log
    assert "SuperNode ID" not in log


def test_nodes_killed_in_secure_sums_cost_no_round_and_return(tmp_path):
    """With a state-folder; in round 3 a node starts again at once, between the sum's stages."""
    plan = Plan(
        "masked",
        rounds=5,
        faults={
            1: [Fault(KILLED, kill_node, 1)],
            3: [Fault(STOPPED, restart_node, 2)],
            4: [Fault(WORKING, kill_client_at_work, 0)],
        },
        returns={1: [1]},
    )
    folder = tmp_path / "state"
    config = {"state-folder": str(folder)}
    sums = {"aggregation": "secure", "colluding_share": 0.0, "dropout_share": 0.25}
    with Deployment(tmp_path / "deployment", nodes=4, node_config=config) as running:
        outcome = under_faults(running, plan, tmp_path / "run", timeout=TIMEOUT, **sums)
    run = outcome.run
    assert outcome.error is None
    assert run.status == "completed"
    assert 1 in outcome.missing[1]
    rows = run.metrics()
    assert [row.get("discarded", 0) for row in rows] == [0] * plan.rounds
    assert all(row["answered"] >= 3 for row in rows)
    assert rows[-1]["answered"] == 4
    assert outcome.wrong_aggregates == 0
    assert outcome.epsilon_right
    assert [entry["kind"] for entry in run.ledger()].count("reserve") == plan.rounds
    # A round's secrets replace the last one's.
    assert len(list(folder.glob("secrets/*-sum.secret"))) == 4


def test_nodes_with_identities_take_part_in_signed_sums_alone(tmp_path):
    write_identities(tmp_path, 4)
    config = {
        "sum-identity-key": str(tmp_path / "identity-{node}"),
        "sum-members": str(tmp_path / "members.pub"),
        "require-secure-sum": True,
        "least-sum-members": 4,
    }
    sums = {"aggregation": "secure", "colluding-share": 0.0, "dropout-share": 0.0}
    settings = {**SETTINGS, **sums, "rounds": 2, "round-timeout": TIMEOUT, "seeded-noise": False}
    with Deployment(tmp_path / "deployment", nodes=4, node_config=config) as running:
        signed = {**settings, "signed-sums": True}
        run = WatchedRun(running, DP2_FEDSAM.folder, tmp_path / "signed", signed).finish()
        refused = WatchedRun(running, DP2_FEDSAM.folder, tmp_path / "unsigned", settings)
        refused.finish()
    assert run.status == "completed"
    assert [row["answered"] for row in run.metrics()] == [4, 4]
    assert "the server may lie" in (run.path / "report.md").read_text(encoding="utf-8")
    assert "this round is not signed" in str(refused.error)


def test_a_run_outlives_the_superlink_on_the_same_database(deployment, tmp_path):
    plan = Plan(
        "superlink", rounds=3, faults={2: [Fault(SUPERLINK, restart_superlink)]}, returns={}
    )
    outcome = under_faults(deployment, plan, tmp_path / "run", timeout=TIMEOUT)
    assert outcome.error is None
    assert outcome.run.status == "completed"
    assert [row["answered"] for row in outcome.run.metrics()] == [4, 4, 4]
    assert outcome.wrong_aggregates == 0
    assert outcome.epsilon_right


def test_a_killed_server_app_leaves_a_failed_run_and_no_spend_uncounted(deployment, tmp_path):
    settings = {**SETTINGS, "rounds": 5}
    watched = WatchedRun(deployment, DP2_FEDSAM.folder, tmp_path / "run", settings)
    watched.wait_for_round(2)
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes()
        except OSError:
            continue
        if b"flwr-serverapp" in words and str(deployment.port).encode() in words:
            os.kill(int(command.parent.name), signal.SIGKILL)
    run = watched.finish()
    assert watched.error is not None
    assert "finished:failed" in str(watched.error)
    assert run.status == "failed"
    assert "finished:failed" in run.metadata["reason"]
    report = (run.path / "report.md").read_text(encoding="utf-8")
    assert "This run is failed" in report
    assert "No guarantee was recorded" in report
    assert [e["kind"] for e in Ledger.read(run.ledger_path)] == ["reserve", "commit", "reserve"]
