"""A client withdraws from a study on SuperLink and SuperNodes, and its heads vanish there."""

import json

import pytest

from flower_ext.privacy import Ledger
from tests.faults.processes import WatchedRun
from tests.support.apps import DP2_FEDSAM
from tests.support.commands import call
from tests.support.deployment import Deployment

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

NODES, LEAVING = 3, 1


def heads(folder):
    """Return the partitions with heads, by run."""
    kept = {}
    for memory in folder.glob("*/*-*/*.memory"):
        run, place = memory.parent.parent.name, int(memory.parent.name.rpartition("-")[2])
        kept.setdefault(run, set()).add(place)
    return kept


def test_the_heads_of_a_client_that_withdrew_vanish_from_its_supernode(tmp_path):
    account, state = tmp_path / "study.jsonl", tmp_path / "state"
    settings = {
        **DP2_FEDSAM.small,
        "budget-ledger": account,
        "population-epsilon": 1e6,
        "population-delta": 0.9,
    }
    with Deployment(tmp_path / "flower", NODES, {"state-folder": str(state)}) as deployment:

        def run(name):
            watched = WatchedRun(deployment, DP2_FEDSAM.folder, tmp_path / name, settings)
            finished = watched.finish(900)
            assert watched.error is None, deployment.logs()
            return finished

        first = run("first")
        assert heads(state) == {first.id: {0, 1, 2}}
        statement = tmp_path / "statement.json"
        words = ["--client", str(LEAVING), "--ledger", str(account), "-o", str(statement)]
        assert call("withdraw", *words).exit_code == 0
        assert "not confirmed yet" in json.loads(statement.read_text())["memory of clients"]
        second = run("second")
        assert heads(state) == {first.id: {0, 2}, second.id: {0, 2}}
        assert call("withdraw", *words).exit_code == 0
    assert "deleted the memory" in json.loads(statement.read_text())["memory of clients"]
    begun = (second.path / "checkpoints" / "begun.jsonl").exists()
    assert begun
    assert all(row["cohort"] == NODES - 1 for row in second.metrics())
    assert [entry["kind"] for entry in Ledger.read(account)].count("forgotten") == 1
    assert {entry["partition"] for entry in second.client_metrics()} == {0.0, 2.0}
