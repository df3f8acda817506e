"""Somebody else's project, recorded by one line: in this process, and on Ray under ``flwr run``."""

import re
import time

import psutil
import pytest

from flower_ext.federation import run_in_process
from flower_ext.runs import RunDirectory
from tests.apps.test_engines import Flower
from tests.support.apps import FOREIGN

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CLIENTS = 6


@pytest.fixture
def flower(tmp_path):
    processes = Flower(tmp_path / "flwr")
    processes.env["FLOWER_EXT_RUNS"] = str(tmp_path / "runs")
    yield processes
    processes.stop()


def holds_all(run: RunDirectory, rounds: int) -> None:
    assert run.facts["status"] == "completed"
    assert [row["round"] for row in run.metrics()] == [*range(1, rounds + 1)]
    assert {g.basis for g in run.guarantees()} == {"provable", "published"}
    assert len(run.client_metrics()) == CLIENTS
    for name in ("ledger.jsonl", "model.safetensors", "checkpoints/asked.jsonl"):
        assert (run.path / name).is_file()


def test_a_foreign_project_is_recorded_by_one_line(tmp_path):
    server, client = FOREIGN.parts()
    settings = FOREIGN.config(record=str(tmp_path / "run"))
    run_in_process(server, client, num_clients=CLIENTS, run_config=settings)
    holds_all(RunDirectory.open(tmp_path / "run"), rounds=3)


def start(flower: Flower, *options: str, rounds: int):
    settings = ("--run-config", f"record='mine' rounds={rounds}")
    nodes = ("--federation-config", f"num-supernodes={CLIENTS}")
    return flower.command("flwr", "run", str(FOREIGN.folder), *nodes, *settings, *options)


@pytest.mark.full
def test_a_foreign_project_that_was_killed_on_ray_goes_on_when_it_is_started_again(
    flower, tmp_path
):
    rounds = 12
    done = start(flower, rounds=rounds)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "runs" / "mine"
    patience = time.monotonic() + 240
    while not (path / "metrics.jsonl").exists() or len(RunDirectory.open(path).metrics()) < 3:
        assert time.monotonic() < patience
        time.sleep(0.05)
    (engine,) = (
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if "flwr-simulation" in " ".join(process.info["cmdline"] or [])
        and (process.info["environ"] or {}).get("FLWR_HOME") == str(flower.home)
    )
    engine.kill()
    psutil.wait_procs([engine], timeout=30)
    killed = RunDirectory.open(path)
    assert killed.facts["status"] == "running"
    before = len(killed.metrics())
    assert 3 <= before < rounds

    again = start(flower, "--stream", rounds=rounds)
    run = RunDirectory.open(path)
    holds_all(run, rounds)
    assert len(run.facts["starts"]) == 2
    reserved = sum(entry["kind"] == "reserve" for entry in run.ledger())
    assert rounds <= reserved <= rounds + 1
    told = {int(n) for g in run.guarantees() for n in re.findall(r"(\d+) rounds?\)", g.statement())}
    assert told == {reserved}  # the round that was given up counts
    assert (path / "report.html").is_file()

    said = again.stdout + again.stderr
    assert f"Run directory: {path}" in said
    assert "resumed after round" in said
    assert "Traceback" not in said
    assert "ERROR" not in said
    assert len(said.splitlines()) < 40 + 5 * rounds

    third = start(flower, "--stream", rounds=rounds)
    assert "holds a run that is complete, after 12 rounds" in third.stdout + third.stderr
    assert RunDirectory.open(path).facts == run.facts
