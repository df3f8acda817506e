"""The files of every app's run: a run directory, an outcome and a report, after failures too."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, RecordDict
from safetensors.numpy import load_file

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import (
    FederatedStrategy,
    InProcessGrid,
    node_settings,
    record,
    recorded_run,
)
from flower_ext.federation._flower_private import sent_with_app
from flower_ext.privacy import Budget, FullParticipation, Ledger, NonPrivatePlan
from flower_ext.runs import NotARun, RunDirectory
from flower_ext.runs.shared_settings import RunSettings
from flower_ext.training import LocalTraining
from tests.support.plans import release_plan
from tests.support.worlds import task

CLIENTS = 3


def config_of(path: Path, **more):
    return {"run-directory": str(path), "method": "dp-fedavg", "dataset": "toy", **more}


private_plan = partial(release_plan, CLIENTS, noise_multiplier=3.0, rounds=4)


def recorded(path: Path, plan, *, rounds: int = 2, budget: Budget | None = None, **config):
    """Record a whole small run, as an app does."""
    with recorded_run(config_of(path, **config), "toy") as run:
        ledger = None if budget is None else Ledger(run.ledger_path, budget=budget)
        strategy = FederatedStrategy(
            DPFedAvg(local=LocalTraining(epochs=1)), plan, ledger=ledger, directory=run, timeout=5.0
        )
        grid = InProcessGrid(DPFedAvg.client_app(task()), num_clients=CLIENTS)
        start = ArrayRecord(task().initial_params(0))
        result = record(run, strategy, grid, start, num_rounds=rounds)
    return run, strategy, result


@pytest.mark.report
@pytest.mark.figures
def test_a_run_leaves_its_configuration_rounds_model_guarantees_clients_and_report(tmp_path):
    run, strategy, result = recorded(tmp_path / "deep" / "run", private_plan(), lr=0.5)
    assert run.path == tmp_path / "deep" / "run"
    assert run.config["lr"] == 0.5
    assert run.status == "completed"
    assert run.metadata["reason"] is None
    assert run.metadata["summary"] == {"refused": 0}
    assert [row["round"] for row in run.metrics()] == [1, 2]
    assert run.guarantees() == strategy.guarantees() != []
    saved = load_file(run.path / "model.safetensors")
    assert set(saved) == set(result.arrays)
    for name, array in saved.items():
        np.testing.assert_array_equal(array, result.arrays[name].numpy())
    rows = run.client_metrics()
    assert [row["partition"] for row in rows] == [0, 1, 2]
    assert [row["accuracy"] for row in rows] == [
        strategy.run.client_metrics[partition]["accuracy"] for partition in range(CLIENTS)
    ]
    for name in ("report.md", "report.html"):
        assert "dp-fedavg on toy" in (run.path / name).read_text()


@pytest.mark.report
def test_the_report_is_named_where_the_user_looks_once_it_is_there(tmp_path, capsys):
    recorded(tmp_path / "run", NonPrivatePlan(sampling=FullParticipation(CLIENTS)), rounds=1)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Report:"))
    assert Path(line.removeprefix("Report: ")).is_file()


def test_a_run_without_privacy_saves_no_guarantee(tmp_path):
    run, *_ = recorded(tmp_path / "run", NonPrivatePlan(sampling=FullParticipation(CLIENTS)))
    assert run.guarantees() == []
    assert run.status == "completed"


@pytest.mark.report
def test_a_run_ended_by_its_budget_says_so_and_saves_everything(tmp_path):
    run, strategy, _ = recorded(
        tmp_path / "run", private_plan(), rounds=9, budget=Budget(epsilon=0.6, delta=0.1)
    )
    assert 1 <= len(run.metrics()) < 9
    assert run.status == "budget-exhausted"
    assert run.metadata["reason"] == strategy.stopped
    assert "above the budget" in run.metadata["reason"]
    assert (run.path / "model.safetensors").is_file()
    assert "budget-exhausted" in (run.path / "report.md").read_text(encoding="utf-8")


def test_refused_replies_are_in_the_summary(tmp_path):
    with recorded_run(config_of(tmp_path / "run"), "toy") as run:
        strategy = FederatedStrategy(
            DPFedAvg(local=LocalTraining(epochs=1)),
            private_plan(),
            seed=1,
            seeded_noise=True,
            evaluate_every=0,
            directory=run,
        )
        app = DPFedAvg.client_app(task(), allow_seeded_noise=True)
        grid = InProcessGrid(app, num_clients=CLIENTS)
        grid.contexts[1_000].node_config["require-secure-noise"] = True
        start = ArrayRecord(task().initial_params(0))
        record(run, strategy, grid, start, num_rounds=2)
    assert run.metadata["summary"] == {"refused": 2}
    assert run.client_metrics() == []


@pytest.mark.report
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("bad luck"), "ValueError: bad luck"),
        (KeyboardInterrupt("bad luck"), "the run was interrupted by bad luck"),
        (SystemExit("bad luck"), "the run was stopped"),
    ],
)
@pytest.mark.parametrize("rounds", [0, 1])
def test_a_failure_is_recorded_then_raised_with_a_report_so_far(
    tmp_path, error, reason, rounds, capsys
):
    def fail():
        with recorded_run(config_of(tmp_path / "run"), "toy") as run:
            for number in range(rounds):
                run.log(number + 1, loss=2.0)
            raise error

    with pytest.raises(type(error), match="bad luck"):
        fail()
    reopened = RunDirectory.open(tmp_path / "run")
    assert reopened.status == "failed"
    assert reopened.metadata["reason"] == reason
    assert len(reopened.metrics()) == rounds
    assert (reopened.path / "report.html").exists() == bool(rounds)
    assert ("Report:" in capsys.readouterr().out) == bool(rounds)
    if rounds:
        assert reason in (reopened.path / "report.md").read_text(encoding="utf-8")


def test_a_named_directory_may_start_at_home_and_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with recorded_run(config_of(Path("~/run")), "toy") as run:
        assert run.path == tmp_path / "home" / "run"
    with recorded_run(config_of(Path("here")), "toy") as run:
        assert run.path == tmp_path / "here"


APP = "[tool.flwr.app]\n"
APPS = [path.parent for path in Path(__file__).parents[2].glob("apps/*/pyproject.toml")]


@pytest.mark.parametrize(
    ("project", "ignored", "warns"),
    [
        (APP, "", True),
        (APP, "*.log\n", True),
        (APP, "/runs/\n", False),
        (APP + 'fab-exclude = ["runs/**"]\n', "", False),
        ("[tool.other]\n", "", False),
        ("not TOML", "", False),
        ("tool = 3\n", "", False),
    ],
)
def test_a_run_that_flower_would_send_to_nodes_warns(tmp_path, caplog, project, ignored, warns):
    (tmp_path / "pyproject.toml").write_text(project)
    (tmp_path / ".gitignore").write_text(ignored)
    with recorded_run(config_of(tmp_path / "runs" / "one"), "toy"):
        pass
    assert ("would send its ledger" in caplog.text) == warns
    assert (f"Add the line /runs/ to {tmp_path / '.gitignore'}" in caplog.text) == warns


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.name)
def test_flower_sends_no_ledger_with_an_app_of_this_package(app):
    assert not sent_with_app(app, app / "runs" / "one" / "ledger.jsonl", [])
    assert sent_with_app(app, app / "pyproject.toml", [])


def test_a_named_directory_is_never_overwritten(tmp_path):
    (tmp_path / "precious").write_text("x")
    with (
        pytest.raises(NotARun, match="not empty"),
        recorded_run(config_of(tmp_path), "toy"),
    ):
        raise AssertionError
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("config", [{}, {"run-directory": ""}])
def test_an_unnamed_run_gets_a_new_name_below_the_runs_folder(tmp_path, monkeypatch, config):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLOWER_EXT_RUNS", raising=False)
    paths = []
    for _ in range(2):
        with recorded_run(config, "fedavg-toy") as run:
            paths.append(run.path)
    assert len(set(paths)) == 2
    for path in paths:
        assert path.parent == tmp_path / "runs"
        assert "fedavg-toy" in path.name
    monkeypatch.setenv("FLOWER_EXT_RUNS", str(tmp_path / "elsewhere"))
    with recorded_run(config, "fedavg-toy") as run:
        assert run.path.parent == tmp_path / "elsewhere"
    assert list((tmp_path / "elsewhere").iterdir()) == [run.path]


def test_a_node_s_owner_says_where_its_data_are_and_nothing_else():
    run_config = {"data-folder": "/of/the/server", "rounds": 3}
    node = {"partition-id": 0, "data-folder": "/srv/data", "rounds": 99}

    def settings(node_config):
        return node_settings(
            RunSettings,
            Context(
                run_id=1,
                node_id=2,
                node_config=node_config,
                state=RecordDict(),
                run_config=run_config,
            ),
        )

    assert (settings(node).data_folder, settings(node).rounds) == ("/srv/data", 3)
    assert settings({"partition-id": 0}).data_folder == "/of/the/server"


@pytest.mark.report
def test_a_missing_device_is_reported_as_a_failure_of_its_client(tmp_path):
    with recorded_run(config_of(tmp_path / "run"), "toy") as run:
        strategy = FederatedStrategy(
            DPFedAvg(local=LocalTraining(epochs=1)), private_plan(), directory=run, evaluate_every=0
        )
        grid = InProcessGrid(DPFedAvg.client_app(task()), num_clients=CLIENTS)
        grid.contexts[1000].node_config["device"] = "nonsense"
        strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=2)
    assert [row["answered"] for row in run.metrics()] == [2, 2]
    assert [(row["round"], row["kind"], row["partitions"]) for row in run.missing()] == [
        (1, "train", [0]),
        (2, "train", [0]),
    ]
    assert all("nonsense" in row["refusals"][0] for row in run.missing())
    report = (run.path / "report.md").read_text(encoding="utf-8")
    assert "## Missing answers" in report
    assert "nonsense" in report


def test_a_setting_added_to_the_app_later_is_off_in_old_runs(tmp_path):
    path = tmp_path / "run"
    recorded(path, private_plan(), rounds=1)
    run, *_ = recorded(path, private_plan(), rounds=2, resume=True, **{"budget-ledger": ""})
    assert [row["round"] for row in run.metrics()] == [1, 2]
    with pytest.raises(ValueError, match=r"budget-ledger='/people' \(it began with None\)"):
        recorded(path, private_plan(), rounds=3, resume=True, **{"budget-ledger": "/people"})
