"""The search over T and λ, by small real runs of apps/dp-ditto."""

import pytest
from typer.testing import CliRunner

from flower_ext.cli.ditto_search import search_by_runs
from flower_ext.cli.ending import LaunchFailed
from flower_ext.cli.main import app
from flower_ext.errors import InvalidValue
from flower_ext.privacy import Ledger
from flower_ext.privacy.shared_ledger import spent_by_run, total_spent
from flower_ext.runs import RunDirectory
from tests.support.apps import DP_DITTO

SMALL = ["clients=3", "partition=iid", "examples-per-client=20", "model=digits-logistic"]


@pytest.mark.full
def test_each_pair_that_the_turns_ask_for_is_a_run_and_the_best_of_them_is_the_answer(tmp_path):
    found = search_by_runs(
        DP_DITTO.folder,
        rounds=[1, 4],
        global_weights=[0.0, 2.0],
        seeds=[1],
        settings=[*SMALL, "epsilon=0.01", "noise=upload", "calibration=published"],
        folder=tmp_path,
    )
    runs = {path.name: RunDirectory.open(path) for path in tmp_path.iterdir()}
    assert len(runs) == len(found.outcomes) >= 3
    for (T, weight), outcome in found.outcomes.items():
        run = runs[f"T-{T}-weight-{weight:g}-seed-1"]
        assert (run.config["rounds"], run.config["global-weight"]) == (T, weight)
        assert run.metrics()[-1]["training_loss_mean"] == outcome.loss
        assert run.metrics()[-1]["training_loss_std"] == outcome.unfairness
        # The noise is calibrated for this number of rounds.
        assert run.guarantees()[0].epsilon == pytest.approx(0.01)
    # Personal models without a global part see no noise, so more rounds make them better.
    assert (found.rounds, found.global_weight, found.settled) == (4, 0.0, True)


def test_the_command_says_what_it_found_or_what_to_change(tmp_path):
    def call(*more):
        words = ["search", str(DP_DITTO.folder), "--runs", str(tmp_path / "runs"), *more]
        return CliRunner().invoke(app, words, env={"COLUMNS": "200"})

    bad = call("--rounds", "2", "--global-weight", "3")
    assert bad.exit_code == 2
    assert "global_weight=3.0: expected λ, a number in [0, 2]" in bad.output
    assert call("--rounds", "0", "--global-weight", "1").exit_code == 2
    given = [word for setting in SMALL for word in ("--set", setting)]
    done = call("--rounds", "1", "--global-weight", "1", *given)
    assert done.exit_code == 0, done.output
    assert "T* = 1, λ* = 1 (both stay)" in done.output
    again = call("--rounds", "1", "--global-weight", "1", *given)
    assert again.exit_code == 1


@pytest.mark.full
def test_searched_runs_spend_from_one_account_and_the_search_ends_with_its_budget(tmp_path):
    account = tmp_path / "people.jsonl"
    settings = [*SMALL, "calibration=provable", "epsilon=4", "delta=0.001"]
    shared = [f"budget-ledger={account}", "population-epsilon=9"]

    def search(weights, delta):
        return search_by_runs(
            DP_DITTO.folder,
            rounds=[1],
            global_weights=weights,
            seeds=[1],
            settings=[*settings, *shared, f"population-delta={delta}"],
            folder=tmp_path / "runs",
        )

    search([0.0, 0.5], 0.003)
    entries = Ledger.read(account)
    assert len(spent_by_run(entries)) == 2
    assert total_spent(entries, 0.003) == pytest.approx(8, rel=0.01)
    with pytest.raises(LaunchFailed, match="above the budget of 9"):
        search([2.0], 0.003)
    with pytest.raises(LaunchFailed, match="account adds up each run's δ"):
        search([1.0], 0.001)


def test_a_run_that_fails_ends_the_search(tmp_path):
    with pytest.raises(InvalidValue, match="expected name=value"):
        search_by_runs(
            DP_DITTO.folder,
            rounds=[1],
            global_weights=[0.0],
            seeds=[1],
            settings=["clientz=3"],
            folder=tmp_path,
        )
    with pytest.raises(ValueError, match="seeds"):
        search_by_runs(DP_DITTO.folder, rounds=[1], global_weights=[0.0], seeds=[], folder=tmp_path)
