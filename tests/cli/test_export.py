"""Exported models equal those that clients evaluate, and come with a guarantee for that file."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from flwr.app import Context, RecordDict
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from flower_ext.cli.main import app
from flower_ext.federation import run_in_process
from flower_ext.federation.engines.run_app import load_app
from flower_ext.runs import RunDirectory
from flower_ext.runs.directory import RunWriter
from flower_ext.training import evaluate
from tests.support.apps import DP2_FEDSAM, DP_DITTO, OWN

FROZEN_AND_TIED = """
import torch
from flower_ext.training import Task
from frozen_base.own_data import data


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(5, 5).requires_grad_(False)
        self.first = torch.nn.Linear(5, 5, bias=False)
        self.last = torch.nn.Linear(5, 5, bias=False)
        self.last.weight = self.first.weight
        self.head = torch.nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.last(torch.relu(self.first(torch.relu(self.base(x))))))


task = Task(model=Net, data=data)
"""


def call(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)], env={"COLUMNS": "500"})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a small run of an app with the given settings, made once."""
    made = {}

    def make(which, **changes):
        key = (which.folder, *changes.items())
        if key not in made:
            path = tmp_path_factory.mktemp("runs") / "run"
            config = which.small_config() | {n.replace("_", "-"): v for n, v in changes.items()}
            config |= {"run-directory": str(path), "state-folder": str(path / "state")}
            run_in_process(*which.parts(), num_clients=config["clients"], run_config=config)
            made[key] = RunDirectory.open(path)
        return made[key]

    return make


def task_of(which, run):
    _, client = load_app(which.folder)
    context = Context(1, 1, {}, RecordDict(), run.config)
    return next(iter(client.sides.values())).task_of(context)


def exported(which, run, tmp_path, *more):
    file = tmp_path / "own.safetensors"
    done = call(run.path, "--app", which.folder, "--output", file, *more)
    assert done.exit_code == 0, done.output
    return load_file(file), json.loads((tmp_path / "own.guarantee.json").read_text())


METHODS = [
    (DP2_FEDSAM, {}),
    (DP2_FEDSAM, {"adapt_before_evaluation": False}),
    (DP2_FEDSAM, {"method": "dp-fedavg-ft"}),
    (DP_DITTO, {}),
    (DP_DITTO, {"method": "dp-apple", "noise": "upload", "calibration": "published"}),
]


@pytest.mark.parametrize(("which", "changes"), METHODS)
def test_an_exported_model_scores_as_its_client_did(finished, tmp_path, which, changes):
    run = finished(which, **changes)
    rows = {row["partition"]: row for row in run.client_metrics()}
    task = task_of(which, run)
    for client in (0, 2):
        (folder := tmp_path / str(client)).mkdir()
        params, _ = exported(which, run, folder, "--client", client)
        module = task.model()
        module.load_state_dict(params, strict=True)
        scores = evaluate(task, module.state_dict(), task.data(client).test)
        assert scores["accuracy"] == rows[client]["accuracy"]
        assert scores["loss"] == pytest.approx(rows[client]["loss"], rel=1e-6)


@pytest.mark.parametrize("which", [DP2_FEDSAM, DP_DITTO])
def test_no_epsilon_is_promised_for_the_records_behind_a_personal_part(finished, tmp_path, which):
    run = finished(which)
    params, beside = exported(which, run, tmp_path, "--client", 1)
    assert beside["for"] == "client 1 alone"
    first = beside["statements"][0]
    assert "parameters of client 1 that carry no noise: no ε covers the records" in first
    shared = load_file(run.path / "model.safetensors")
    personal = {n for n in params if n not in shared or not torch.equal(params[n], shared[n])}
    assert set(beside["parameters"]["personal"]) == personal
    assert personal
    assert (tmp_path / "own.safetensors").stat().st_mode & 0o077 == 0


def test_the_head_alone_is_personal_under_dp2_fedsam(finished, tmp_path):
    _, beside = exported(DP2_FEDSAM, finished(DP2_FEDSAM), tmp_path, "--client", 1)
    assert {name.partition(".")[0] for name in beside["parameters"]["personal"]} == {"head"}
    assert beside["parameters"]["shared"]


def test_the_exported_shared_model_is_the_runs_with_its_guarantees(finished, tmp_path):
    run = finished(DP2_FEDSAM)
    file = tmp_path / "shared.safetensors"
    assert call(run.path, "--output", file).exit_code == 0  # works without an app
    saved, exported_model = load_file(run.path / "model.safetensors"), load_file(file)
    assert set(exported_model) == set(saved)
    torch.testing.assert_close(exported_model, saved, rtol=0, atol=0)
    beside = json.loads((tmp_path / "shared.guarantee.json").read_text())
    assert beside["for"] == "everyone who may have the run's models"
    assert beside["parameters"]["personal"] == []
    promised = [g.to_dict() for g in run.guarantees() if g.view == "released-models"]
    assert promised
    assert beside["guarantees"] == json.loads(json.dumps(promised))
    with safe_open(file, "pt") as stream:
        assert stream.metadata() == {"run": run.id, "frozen": ""}


def test_if_all_guarantees_are_of_uploads_the_shared_model_carries_them(finished, tmp_path):
    run = finished(DP_DITTO)
    _, beside = exported(DP_DITTO, run, tmp_path)
    assert len(beside["guarantees"]) == len(run.guarantees()) > 0


def test_a_run_without_privacy_promises_nothing_of_any_file(finished, tmp_path):
    run = finished(DP_DITTO, method="ditto")
    for number, more in enumerate([(), ("--client", 0)]):
        (folder := tmp_path / str(number)).mkdir()
        _, beside = exported(DP_DITTO, run, folder, *more)
        assert beside["guarantees"] == []
        assert "no ε covers anybody's records" in beside["statements"][-1]


def test_a_client_that_uses_the_shared_model_is_informed(finished, tmp_path):
    run = finished(DP2_FEDSAM, method="dp-fedavg")
    params, beside = exported(DP2_FEDSAM, run, tmp_path, "--client", 1)
    shared = load_file(run.path / "model.safetensors")
    torch.testing.assert_close(params, shared, rtol=0, atol=0)
    assert "which client 1 uses as it is" in beside["statements"][0]
    assert beside["parameters"]["personal"] == []


def test_a_client_never_drawn_has_an_initial_secret_head(finished, tmp_path):
    few = replace(
        DP2_FEDSAM,
        small={
            **DP2_FEDSAM.small,
            "clients": 4,
            "rounds": 1,
            "sampling": "fixed-size",
            "sampling-rate": 0.25,
        },
    )
    run = finished(few, seed=5, adapt_before_evaluation=False)
    remembered = run.use()["remembered"]
    client = next(c for c in range(4) if str(c) not in remembered)
    params, beside = exported(few, run, tmp_path, "--client", client)
    initial = task_of(few, run).initial_params(run.config["seed"])
    personal = beside["parameters"]["personal"]
    assert personal
    assert all(torch.equal(params[name], initial[name]) for name in personal)
    assert beside["for"] == f"client {client} alone"
    assert f"whether and when client {client} took part" in beside["statements"][1]


def test_a_lost_memory_does_not_count_as_never_drawn(finished, tmp_path):
    path = shutil.copytree(finished(DP2_FEDSAM).path, tmp_path / "moved")
    arguments = (path, "--app", DP2_FEDSAM.folder, "--client", 1, "--output")
    assert call(*arguments, tmp_path / "moved.safetensors").exit_code == 0
    folder = next((path / "state").iterdir())
    shutil.rmtree(folder / "dp2_fedsam-1")
    done = call(*arguments, tmp_path / "lost.safetensors")
    assert done.exit_code == 2
    assert "expected the memory that client 1 wrote in round 2" in done.output
    assert not (tmp_path / "lost.safetensors").exists()
    assert not (tmp_path / "lost.guarantee.json").exists()


def test_nothing_is_overwritten(finished, tmp_path):
    run = finished(DP2_FEDSAM)
    for name in ("own.safetensors", "own.guarantee.json"):
        (tmp_path / name).write_text("precious")
        done = call(run.path, "--output", tmp_path / "own.safetensors")
        assert done.exit_code == 2
        assert (tmp_path / name).read_text() == "precious"
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--client", 3], "client=3: expected a client's number, 0 … 2"),
        (["--client", -1], "client=-1: expected a client's number, 0 … 2"),
        (["--client", 0, "--app", DP_DITTO.folder], "knows no method 'dp2_fedsam'"),
        (["--client", 0, "--app", None], "name its folder by --app"),
        (["--output", "own.bin"], "expected a name that ends with .safetensors"),
    ],
)
def test_runs_that_cannot_be_exported_are_refused_with_a_remedy(
    finished, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    if "--app" not in arguments:
        arguments = [*arguments, "--app", DP2_FEDSAM.folder]
    if None in arguments:
        arguments = arguments[:-2]
    done = call(finished(DP2_FEDSAM).path, *arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_has_not_ended_is_refused(finished, tmp_path):
    path = shutil.copytree(finished(DP2_FEDSAM).path, tmp_path / "run")
    RunWriter.open(path).note(status="failed")
    done = call(path, "--output", tmp_path / "own.safetensors")
    assert done.exit_code == 2
    assert "but its status is 'failed'; continue it with" in done.output
    assert "--resume" in done.output


def test_an_ended_run_without_its_model_is_refused_by_the_files_name(finished, tmp_path):
    path = shutil.copytree(finished(DP2_FEDSAM).path, tmp_path / "run")
    (path / "model.safetensors").unlink()
    done = call(path, "--output", tmp_path / "own.safetensors")
    assert done.exit_code == 2
    assert "but it lacks model.safetensors; continue it with" in done.output
    assert not (tmp_path / "own.safetensors").exists()


def test_a_client_without_its_data_is_one_message_that_names_the_folder(finished, tmp_path):
    path = shutil.copytree(finished(DP2_FEDSAM).path, tmp_path / "run")
    metadata = json.loads((path / "run.json").read_text())
    absent = {"dataset": "mnist", "data-folder": str(tmp_path / "nowhere")}
    metadata["config"] |= {**absent, "model": "digits-mlp"}
    (path / "run.json").write_text(json.dumps(metadata))
    file = tmp_path / "own.safetensors"
    done = call(path, "--app", DP2_FEDSAM.folder, "--client", 1, "--output", file)
    assert isinstance(done.exception, SystemExit)  # no traceback
    assert done.exit_code == 1, done.output
    assert f"Failed: data-folder='{tmp_path / 'nowhere'}'" in done.output
    assert not file.exists()


@pytest.mark.full
def test_frozen_parameters_stay_with_the_base_model(tmp_path):
    folder = shutil.copytree(OWN.folder, tmp_path / "app")
    package = (folder / "own").rename(folder / "frozen_base")
    (package / "task.py").rename(package / "own_data.py")
    (package / "task.py").write_text(FROZEN_AND_TIED)
    local = "local=configured.training(settings)"
    tuned = {local: f"{local}, fine_tuning=configured.training(settings)"}
    names = {'"own.': '"frozen_base.', "from own.": "from frozen_base.", **tuned}
    for file in (folder / "pyproject.toml", *package.glob("*_app.py")):
        text = file.read_text()
        for name, other in names.items():
            text = text.replace(name, other)
        file.write_text(text)
    words = ["run", str(folder), "--in-process", "--clients", "2", "--runs", str(tmp_path / "runs")]
    for setting in ("rounds=1", "sampling=everyone"):
        words += ["--set", setting]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    (path,) = (tmp_path / "runs").iterdir()
    part = tmp_path / "part.safetensors"
    done = call(path, "--output", part, "--client", 1)  # the run recorded its app
    assert done.exit_code == 0, done.output
    _, client = load_app(folder)
    task = next(iter(client.sides.values())).task
    with safe_open(part, "pt") as stream:
        assert stream.metadata() == {
            "frozen": task.fingerprint,
            "run": RunDirectory.open(path).id,
        }
    module = task.model()
    missing, unexpected = module.load_state_dict(load_file(part), strict=False)
    assert set(missing) == {"base.weight", "base.bias", "last.weight"}
    assert unexpected == []
    beside = json.loads((tmp_path / "part.guarantee.json").read_text())
    assert beside["parameters"] == {
        "shared": [],
        "personal": ["first.weight", "head.bias", "head.weight"],
    }

    source = (package / "task.py").read_text()
    (package / "task.py").write_text(source.replace("(5, 5).req", "(5, 5, bias=False).req"))
    words = ["export", str(path), "--client", "1", "--output", str(tmp_path / "other.safetensors")]
    command = [sys.executable, "-m", "flower_ext.cli.main", *words]
    other = subprocess.run(command, capture_output=True, text=True, check=False)
    assert other.returncode == 2
    assert task.fingerprint in other.stderr
