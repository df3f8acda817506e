"""The same app on Ray's simulation and on SuperLink with SuperNodes, as separate real processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from flower_ext.cli.main import app as cli
from flower_ext.cli.processes import environment
from flower_ext.cli.superlink import free_port
from flower_ext.federation import run_in_process
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import num_nodes
from tests.support.apps import (
    DP2_FEDSAM,
    DP_DITTO,
    FOREIGN,
    PRIVATE_FINETUNING,
    SERVERS,
    TEXTS,
    ULDP_FL,
    UPCYCLED_FL,
    App,
)
from tests.support.deployment import Deployment
from tests.support.grids import grid
from tests.support.pretrained import project_settings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BIN = Path(sys.executable).parent


class Flower:
    """Flower's processes of one test, with their own home and ports, ended by id."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir()
        self.deployment: Deployment | None = None
        self.env = {
            **environment(),
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        }

    def run(self, app: App, *where: str, **settings: object) -> None:
        """Run a small run of an app by ``flower-ext run``, to its end."""
        process = self.begin(app, *where, **settings)
        output, errors = process.communicate()
        assert process.returncode == 0, output + errors + self.logs()

    def begin(self, app: App, *where: str, **settings: object) -> subprocess.Popen[str]:
        """Start the same run."""
        words = {**app.small, **{n.replace("_", "-"): v for n, v in settings.items()}}
        sets = [f"{n}={str(v).lower() if isinstance(v, bool) else v}" for n, v in words.items()]
        options = (part for text in sets for part in ("--set", text))
        return self.start("flower-ext", "run", str(app.folder), *where, *options)

    def command(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.start(name, *arguments)
        output, errors = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(BIN / name), *arguments],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.home,
        )

    def kill(self, name: str) -> None:
        """Send SIGKILL to the process that runs the program ``name`` with Flower's home in ours."""
        (process,) = (
            process
            for process in psutil.process_iter(["cmdline", "environ"])
            if name in " ".join(process.info["cmdline"] or [])
            and str(self.home) in (process.info["environ"] or {}).get("FLWR_HOME", "")
        )
        process.kill()
        psutil.wait_procs([process], timeout=30)

    def deploy(self, nodes: int) -> None:
        """Start a SuperLink with SuperNodes, named ``loopback`` in Flower's configuration."""
        self.deployment = Deployment(self.home / "deployment", nodes)
        self.deployment.__enter__()
        self.env = self.deployment.env

    def logs(self) -> str:
        return "" if self.deployment is None else self.deployment.logs()

    def stop(self) -> None:
        if self.deployment is not None:
            self.deployment.stop()
        # The local SuperLink that `flwr run` leaves running is the one that names this home.
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                ours = str(self.home).encode() in entry.read_bytes()
                if ours and int(entry.parent.name) != os.getpid():
                    os.kill(int(entry.parent.name), signal.SIGTERM)
            except (FileNotFoundError, ProcessLookupError):
                continue


@pytest.fixture
def flower(tmp_path):
    processes = Flower(tmp_path / "flwr")
    yield processes
    processes.stop()


def in_process(app: App, path: Path, **overrides: object) -> RunDirectory:
    """Return the reference: the same seeded run in this process."""
    server, client = app.parts()
    settings = {**app.small_config(run_directory=str(path)), **overrides}
    run_in_process(server, client, num_clients=num_nodes(settings), run_config=settings)
    return RunDirectory.open(path)


def same_run(ours: RunDirectory, reference: RunDirectory, *, resumed: bool = False) -> None:
    """Compare two runs, up to the order of floating-point sums; a resumed one may repeat rounds."""
    assert ours.status == "completed"
    model, expected = (load_file(run.path / "model.safetensors") for run in (ours, reference))
    assert set(model) == set(expected)
    for name in expected:
        np.testing.assert_allclose(model[name], expected[name], atol=1e-5)
    assert [g.epsilon for g in ours.guarantees()] == [g.epsilon for g in reference.guarantees()]
    for row, other in zip(ours.metrics(), reference.metrics(), strict=True):
        assert row.get("accuracy_mean") == pytest.approx(other.get("accuracy_mean"), abs=1e-5)
        for count in ("cohort", "answered", "refused", "messages", "bytes_down", "bytes_up"):
            assert row.get(count) == other.get(count)
    kinds = [entry["kind"] for entry in ours.ledger() if not resumed or entry["kind"] != "repeat"]
    assert kinds == [entry["kind"] for entry in reference.ledger()]


@pytest.mark.parametrize(
    "app",
    grid([DP2_FEDSAM, PRIVATE_FINETUNING], lambda app: app is DP2_FEDSAM),
    ids=["dp2-fedsam", "private-finetuning"],
)
def test_ray_simulation_equals_the_in_process_run(app, flower, tmp_path):
    """The other apps run on Ray below: with several clients a node, as silos, or upcycled."""
    flower.run(app, run_directory=tmp_path / "run", clients_per_node=1)
    same_run(RunDirectory.open(tmp_path / "run"), in_process(app, tmp_path / "reference"))
    # Simulated clients keep their heads in the folder that the run's settings name.
    assert any((tmp_path / "run" / "state").rglob("*.memory"))


@pytest.mark.timeout(1500)  # on SuperLink every message starts a process
@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize(
    "where",
    [
        pytest.param("ray", marks=pytest.mark.full),
        pytest.param("superlink", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_remembers_earlier_rounds_is_killed_and_repeats_none(
    where, name, flower, tmp_path
):
    rounds, path = 5, tmp_path / "run"
    settings = {"method": "dp-fedavg", "clients": 2, "rounds": rounds, "evaluate-every": rounds}
    settings |= SERVERS[name]
    place, process, options = [], "flwr-simulation", {"clients_per_node": 1}
    if where == "superlink":
        flower.deploy(nodes=2)
        place, process, options = ["loopback"], "flwr-serverapp", {}
    begun = flower.begin(DP2_FEDSAM, *place, run_directory=path, **settings, **options)
    while not (path / "metrics.jsonl").exists() or not RunDirectory.open(path).metrics():
        assert begun.poll() is None, begun.communicate()
        time.sleep(0.05)
    flower.kill(process)
    begun.communicate(timeout=120)
    assert begun.returncode != 0
    killed = RunDirectory.open(path)
    assert killed.status == "failed"
    assert 1 <= len(killed.metrics()) < rounds

    command = ("run", str(DP2_FEDSAM.folder), *place, "--resume", str(path))
    done = flower.command("flower-ext", *command)
    assert done.returncode == 0, done.stdout + done.stderr + flower.logs()
    run, whole = RunDirectory.open(path), in_process(DP2_FEDSAM, tmp_path / "whole", **settings)
    assert [row["round"] for row in run.metrics()] == [*range(1, rounds + 1)]
    same_run(run, whole, resumed=True)
    if name == "adaptive":
        norms = [[row["adaptive_norm"] for row in each.metrics()] for each in (run, whole)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert len(set(norms[0])) == rounds


@pytest.mark.full
def test_several_clients_on_a_node_of_ray_are_the_same_run(flower, tmp_path):
    flower.run(DP_DITTO, run_directory=tmp_path / "run")
    assert RunDirectory.open(tmp_path / "run").config["clients-per-node"] > 1
    same_run(RunDirectory.open(tmp_path / "run"), in_process(DP_DITTO, tmp_path / "reference"))


@pytest.mark.full
def test_an_ended_run_resumes_in_a_new_simulation_with_client_memory(flower, tmp_path):
    state = {"state_folder": tmp_path / "state"}
    flower.run(DP2_FEDSAM, run_directory=tmp_path / "run", **{**state, "rounds": 1})
    assert len(list((tmp_path / "state").rglob("*.memory"))) == 3
    command = ("run", str(DP2_FEDSAM.folder), "--resume", str(tmp_path / "run"))
    done = flower.command("flower-ext", *command, "--set", "rounds=3")
    assert done.returncode == 0, done.stdout + done.stderr + flower.logs()
    run = RunDirectory.open(tmp_path / "run")
    assert [start.get("after_round") for start in run.metadata["starts"]] == [None, 1]
    same_run(run, in_process(DP2_FEDSAM, tmp_path / "whole", rounds=3))


@pytest.mark.full
def test_a_run_in_one_process_is_the_same_and_fails_alike(flower, tmp_path):
    settings = {**UPCYCLED_FL.small, "run-directory": tmp_path / "run"}
    words = [f"{n}={str(v).lower() if isinstance(v, bool) else v}" for n, v in settings.items()]
    options = [part for word in words for part in ("--set", word)]
    command = ("run", str(UPCYCLED_FL.folder), "--in-process", "--workers", "2", *options)
    done = flower.command("flower-ext", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    same_run(RunDirectory.open(tmp_path / "run"), in_process(UPCYCLED_FL, tmp_path / "reference"))
    again = CliRunner().invoke(cli, [str(word) for word in command])
    assert again.exit_code == 1
    output = again.stderr
    assert "is not empty; name a new one" in output
    assert "Traceback" not in output


@pytest.mark.full
def test_silos_on_ray_run_dp_sgd_as_in_one_process(flower, tmp_path):
    flower.run(ULDP_FL, method="uldp-group", run_directory=tmp_path / "run")
    reference = in_process(ULDP_FL, tmp_path / "reference", method="uldp-group")
    same_run(RunDirectory.open(tmp_path / "run"), reference)


@pytest.mark.full
def test_a_failed_run_looks_failed(flower, tmp_path):
    settings = ("--set", "method=nonsense", "--set", f"run-directory={tmp_path / 'run'}")
    done = flower.command("flower-ext", "run", str(DP2_FEDSAM.folder), *settings)
    assert done.returncode == 2
    assert "method='nonsense': expected one of" in done.stderr


@pytest.mark.full
def test_superlink_and_three_supernodes_equal_the_simulation(flower, tmp_path):
    flower.deploy(nodes=3)
    flower.run(DP2_FEDSAM, "loopback", run_directory=tmp_path / "run")
    same_run(RunDirectory.open(tmp_path / "run"), in_process(DP2_FEDSAM, tmp_path / "reference"))


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("ray", marks=pytest.mark.full),
        pytest.param("superlink", marks=pytest.mark.slow),
    ],
)
def test_a_pretrained_text_model_with_adapters_is_the_same_run(where, flower, tmp_path):
    """The user's project of `test_text_project`; every process loads the model itself."""
    settings = {"seeded-noise": True, "rounds": 1, **project_settings(tmp_path)}
    app = replace(TEXTS, small=settings)
    if where == "superlink":
        flower.deploy(nodes=3)
    places = ["loopback"] if where == "superlink" else []
    flower.run(app, *places, run_directory=tmp_path / "run", personal_head=True)
    reference = in_process(app, tmp_path / "reference", **{"personal-head": True})
    same_run(RunDirectory.open(tmp_path / "run"), reference)


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("workers", marks=pytest.mark.full),
        pytest.param("superlink", marks=pytest.mark.slow),
    ],
)
def test_secure_sums_are_the_same_run_wherever_clients_keep_their_secrets(where, flower, tmp_path):
    """On SuperNodes each message has a new process. Scores in secure sums, below, run on Ray."""
    settings = {"aggregation": "secure", "clients": 4, "colluding-share": 0.0}
    places = {"workers": ["--in-process", "--workers", "2"], "superlink": ["loopback"]}
    if where == "superlink":
        flower.deploy(nodes=4)
    flower.run(DP2_FEDSAM, *places.get(where, []), run_directory=tmp_path / "run", **settings)
    ours = RunDirectory.open(tmp_path / "run")
    same_run(ours, in_process(DP2_FEDSAM, tmp_path / "reference", **settings))
    assert [row["answered"] for row in ours.metrics()] == [4, 4]
    plain = in_process(DP2_FEDSAM, tmp_path / "plain", clients=4)
    sums = [next(g for g in run.guarantees() if g.view == "sum-only") for run in (ours, plain)]
    assert sums[0].epsilon == sums[1].epsilon


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("ray", marks=pytest.mark.full),
        pytest.param("superlink", marks=pytest.mark.slow),
    ],
)
def test_secure_sums_of_silos_are_the_same_run_everywhere(where, flower, tmp_path):
    settings = {"aggregation": "secure"}
    places = {"workers": ["--in-process", "--workers", "2"], "superlink": ["loopback"]}
    if where == "superlink":
        flower.deploy(nodes=3)
    flower.run(ULDP_FL, *places.get(where, []), run_directory=tmp_path / "run", **settings)
    ours = RunDirectory.open(tmp_path / "run")
    same_run(ours, in_process(ULDP_FL, tmp_path / "reference", **settings))
    assert [row["answered"] for row in ours.metrics()] == [3, 3]


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("ray", marks=pytest.mark.full),
        pytest.param("superlink", marks=pytest.mark.slow),
    ],
)
def test_scores_in_secure_sums_are_the_same_means_everywhere(where, flower, tmp_path):
    """On Ray and SuperLink each of two nodes answers for two clients."""
    settings = {
        "aggregation": "secure",
        "evaluation": "secure",
        "evaluation-noise-multiplier": 0.5,
        "evaluation-loss-bound": 4.0,
        "clients": 4,
        "colluding-share": 0.0,
    }
    places = {"workers": ["--in-process", "--workers", "2"], "superlink": ["loopback"]}
    if where == "superlink":
        flower.deploy(nodes=2)
    together = {} if where == "workers" else {"clients-per-node": 2}
    path = tmp_path / "run"
    flower.run(DP2_FEDSAM, *places.get(where, []), run_directory=path, **settings, **together)
    ours = RunDirectory.open(path)
    reference = in_process(DP2_FEDSAM, tmp_path / "reference", **settings)
    for row, other in zip(ours.metrics(), reference.metrics(), strict=True):
        for name in ("scored_clients", "loss_mean", "accuracy_mean", "accuracy_mean_error"):
            assert row[name] == pytest.approx(other[name], abs=1e-5)
    same_run(ours, reference)
    assert ours.client_metrics() == []


@pytest.mark.slow
def test_somebody_elses_project_on_superlink_equals_the_simulation(flower, tmp_path):
    flower.deploy(nodes=3)
    same_upcycling(foreign(flower, tmp_path, "upcycled", "loopback"), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1500)  # four projects, one after another on the same nodes
def test_the_other_apps_on_superlink_equal_the_simulation(flower, tmp_path):
    flower.deploy(nodes=3)
    for app in (UPCYCLED_FL, ULDP_FL, DP_DITTO, PRIVATE_FINETUNING):
        name = app.folder.name
        flower.run(app, "loopback", run_directory=tmp_path / name)
        same_run(RunDirectory.open(tmp_path / name), in_process(app, tmp_path / f"{name}-0"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "protocol",
    [
        {"protocol": "paillier", "key-bits": 512, "allow-insecure-keys": True, "precision": 1e-7},
        {"protocol": "lattice"},
    ],
    ids=["paillier", "lattice"],
)
def test_private_weighting_on_superlink_equals_plain_weights(protocol, flower, tmp_path):
    """Each message has a new process; secrets are in the nodes' contexts."""
    flower.deploy(nodes=3)
    settings = {"method": "uldp-avg-private", "max-records-per-user": 200, **protocol}
    settings |= {"user-sampling-rate": 1.0}
    path = tmp_path / "run"
    flower.run(ULDP_FL, "loopback", run_directory=path, **settings)
    ours = RunDirectory.open(path)
    plain = {"method": "uldp-avg-w", "user-sampling-rate": 1.0}
    reference = in_process(ULDP_FL, tmp_path / "plain", **plain)
    model, expected = (load_file(run.path / "model.safetensors") for run in (ours, reference))
    for name in expected:
        np.testing.assert_allclose(model[name], expected[name], atol=1e-5)
    assert [row["answered"] for row in ours.metrics()] == [3, 3]
    assert [row["refused"] for row in ours.metrics() if "refused" in row] in ([], [0, 0])
    same_run(ours, in_process(ULDP_FL, tmp_path / "reference", **settings))


def test_a_foreign_project_drops_the_strategy_in(tmp_path):
    server, client = FOREIGN.parts()
    settings = FOREIGN.config(strategy="dp-fedavg", output=str(tmp_path / "facts.json"))
    run_in_process(server, client, num_clients=6, run_config=settings)
    protected(json.loads((tmp_path / "facts.json").read_text()))


def protected(facts: dict[str, Any]) -> None:
    """Check that a run with privacy learned and states its guarantee."""
    assert facts["refusals"] == []
    assert 0 < facts["accuracy"] <= 1
    models = next(s for s in facts["statements"] if "the released models" in s)
    assert "add-or-remove-one" in models
    assert "PLD" in models


@pytest.mark.full
def test_a_foreign_project_is_upcycled_with_a_strategy_of_flower(flower, tmp_path):
    """The ClientApp is foreign, the strategy Flower's FedAvgM, and the wrapper this package's."""
    facts = foreign(flower, tmp_path, "upcycled", "--federation-config", "num-supernodes=3")
    same_upcycling(facts, tmp_path)


def foreign(
    flower: Flower, tmp_path: Path, strategy: str, *where: str, project: Path = FOREIGN.folder
) -> dict[str, Any]:
    """Run the foreign project by Flower's own command, and return its results."""
    output = tmp_path / "facts.json"
    settings = ("--run-config", f"strategy='{strategy}' output='{output}'")
    done = flower.command("flwr", "run", str(project), *where, "--stream", *settings)
    assert output.exists(), done.stdout + done.stderr + flower.logs()
    return dict(json.loads(output.read_text()))


def with_mod(tmp_path: Path, clients: int) -> Path:
    """Run the foreign project with this package's mod and a plan whose clients add the noise."""
    folder = shutil.copytree(FOREIGN.folder, tmp_path / "with-mod")
    for name, edits in {
        "client_app.py": {
            "app = ClientApp()": "app = ClientApp(mods=[client_level_dp_mod()])",
            "import torch\n": "import torch\n"
            "from flower_ext.federation import client_level_dp_mod\n",
        },
        "server_app.py": {
            'noise_placement="server"': 'noise_placement="client"',
            "population=6": f"population={clients}",
        },
    }.items():
        file = folder / "foreign" / name
        text = file.read_text()
        for old, new in edits.items():
            assert old in text
            text = text.replace(old, new)
        file.write_text(text)
    return folder


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("ray", marks=pytest.mark.full),
        pytest.param("superlink", marks=pytest.mark.slow),
    ],
)
def test_a_foreign_project_with_our_mod_noises_on_its_clients(where, flower, tmp_path):
    if where == "superlink":
        flower.deploy(nodes=3)
        place = ["loopback"]
    else:
        place = ["--federation-config", "num-supernodes=3"]
    project = with_mod(tmp_path, 3)
    facts = foreign(flower, tmp_path, "dp-fedavg", *place, project=project)
    protected(facts)
    (uploads,) = [s for s in facts["statements"] if "every upload and who" in s and "provable" in s]
    assert "clients clip and add their share of noise" in uploads


def same_upcycling(facts: dict[str, Any], tmp_path: Path) -> None:
    """Check that the foreign run equals the project's run here, with half its rounds silent."""
    server, client = FOREIGN.parts()
    settings = FOREIGN.config(strategy="upcycled", output=str(tmp_path / "reference.json"))
    run_in_process(server, client, num_clients=3, run_config=settings)
    expected = json.loads((tmp_path / "reference.json").read_text())
    # In each round a message to train and one to evaluate for each of three clients.
    assert facts["messages"] == expected["messages"] == [3, 3, 0, 3, 3, 3, 0, 3]
    assert set(facts["accuracy"]) == {"1", "2", "3", "4"}  # silent rounds are evaluated as well
    for name, value in expected["model"].items():
        np.testing.assert_allclose(facts["model"][name], value, atol=1e-5)
        assert not np.allclose(facts["model"][name], facts["initial"][name], atol=1e-3)


FOREIGN_CLIENTS = 6


def holds_all(run: RunDirectory, rounds: int) -> None:
    """Check that a complete run directory has all rounds, guarantees, scores and files."""
    assert run.status == "completed"
    assert [row["round"] for row in run.metrics()] == [*range(1, rounds + 1)]
    assert {g.basis for g in run.guarantees()} == {"provable", "published"}
    assert len(run.client_metrics()) == FOREIGN_CLIENTS
    for name in ("ledger.jsonl", "model.safetensors", "checkpoints/begun.jsonl"):
        assert (run.path / name).is_file()


def test_a_foreign_project_is_recorded_by_one_line(tmp_path):
    server, client = FOREIGN.parts()
    settings = FOREIGN.config(record=str(tmp_path / "run"))
    run_in_process(server, client, num_clients=FOREIGN_CLIENTS, run_config=settings)
    holds_all(RunDirectory.open(tmp_path / "run"), rounds=3)


def record_foreign(flower: Flower, *options: str, rounds: int) -> subprocess.CompletedProcess[str]:
    settings = ("--run-config", f"record='mine' rounds={rounds}")
    nodes = ("--federation-config", f"num-supernodes={FOREIGN_CLIENTS}")
    return flower.command("flwr", "run", str(FOREIGN.folder), *nodes, *settings, *options)


@pytest.mark.full
def test_a_foreign_project_killed_on_ray_resumes_when_started_again(flower, tmp_path):
    rounds = 12
    flower.env["FLOWER_EXT_RUNS"] = str(tmp_path / "runs")
    done = record_foreign(flower, rounds=rounds)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "runs" / "mine"
    patience = time.monotonic() + 240
    while not (path / "metrics.jsonl").exists() or len(RunDirectory.open(path).metrics()) < 3:
        assert time.monotonic() < patience
        time.sleep(0.05)
    flower.kill("flwr-simulation")
    killed = RunDirectory.open(path)
    assert killed.status == "running"
    before = len(killed.metrics())
    assert 3 <= before < rounds

    again = record_foreign(flower, "--stream", rounds=rounds)
    run = RunDirectory.open(path)
    holds_all(run, rounds)
    assert len(run.metadata["starts"]) == 2
    reserved = sum(entry["kind"] == "reserve" for entry in run.ledger())
    assert rounds <= reserved <= rounds + 1
    rounds_stated = {
        int(n) for g in run.guarantees() for n in re.findall(r"(\d+) rounds?\)", g.statement())
    }
    # The abandoned round counts, unless the process was killed before the round asked a client.
    lines = (path / "checkpoints" / "begun.jsonl").read_text().splitlines()
    begun = [entry for entry in map(json.loads, lines) if "units" in entry]
    assert rounds_stated == {len(begun)}
    assert len(begun) <= reserved
    assert (path / "report.html").is_file()

    output = again.stdout + again.stderr
    assert f"Run directory: {path}" in output
    assert "resumed after round" in output
    assert "Traceback" not in output
    assert "ERROR" not in output
    assert len(output.splitlines()) < 40 + 5 * rounds

    third = record_foreign(flower, "--stream", rounds=rounds)
    assert "holds a run that is complete, after 12 rounds" in third.stdout + third.stderr
    assert RunDirectory.open(path).metadata == run.metadata
