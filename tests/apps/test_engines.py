"""The same app on Ray's simulation and on SuperLink with SuperNodes, as separate real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from flower_ext.federation import run_in_process
from flower_ext.privacy import Ledger
from flower_ext.reporting import RunDirectory
from tests.apps.app import APP, SMALL, config, parts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BIN = Path(sys.executable).parent
SETTINGS = [f"{name}={str(value).lower()}" for name, value in SMALL.items()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise TimeoutError(f"nothing listens on port {port} after {seconds} s")


class Flower:
    """Flower's processes of one test, with their own home and ports, ended by id."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir()
        self.started: list[subprocess.Popen[bytes]] = []
        self.env = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",  # Flower starts its own commands
            "FLWR_HOME": str(home),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        }

    def start(self, *command: str) -> None:
        log = (self.home / f"{len(self.started)}-{command[0]}.log").open("wb")
        self.started.append(
            subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                env=self.env,
                stdout=log,
                stderr=log,
                cwd=self.home,
                start_new_session=True,
            )
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / "flower-ext"), "run", str(APP), *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.home,
        )

    def logs(self) -> str:
        return "\n".join(f"{p.name}:\n{p.read_text()[-3000:]}" for p in self.home.glob("*.log"))

    def stop(self) -> None:
        for process in self.started:
            os.killpg(process.pid, signal.SIGTERM)
        for process in self.started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        # The local SuperLink that `flwr run` leaves behind is the one that names our home.
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


@pytest.fixture(scope="module")
def in_process(tmp_path_factory):
    """The reference: the same seeded run in this process."""
    path = tmp_path_factory.mktemp("reference") / "run"
    server, client = parts()
    changes = {name.replace("-", "_"): value for name, value in SMALL.items()}
    settings = config(run_directory=str(path), **changes)
    run_in_process(server, client, num_clients=3, run_config=settings)
    return RunDirectory.open(path)


def same_run(ours: RunDirectory, reference: RunDirectory) -> None:
    """Equal up to the order of floating-point sums."""
    assert ours.facts["status"] == "completed"
    model, expected = (load_file(run.path / "model.safetensors") for run in (ours, reference))
    assert set(model) == set(expected)
    for name in expected:
        np.testing.assert_allclose(model[name], expected[name], atol=1e-5)
    assert [g.epsilon for g in ours.guarantees()] == [g.epsilon for g in reference.guarantees()]
    for row, other in zip(ours.metrics(), reference.metrics(), strict=True):
        assert row["accuracy_mean"] == pytest.approx(other["accuracy_mean"], abs=1e-5)
        assert row["answered"] == other["answered"] == 3
        assert row["refused"] == 0
    kinds = [entry["kind"] for entry in Ledger.read(ours.ledger_path)]
    assert kinds == ["reserve", "commit"] * 2


def test_ray_simulation_equals_the_in_process_run(flower, in_process, tmp_path):
    path = tmp_path / "run"
    settings = [*SETTINGS, f"run-directory={path}"]
    done = flower.run(*(part for s in settings for part in ("--set", s)))
    assert done.returncode == 0, done.stdout + done.stderr + flower.logs()
    same_run(RunDirectory.open(path), in_process)


def test_a_failed_run_looks_failed(flower, tmp_path):
    done = flower.run("--set", "method=nonsense", "--set", f"run-directory={tmp_path / 'run'}")
    assert done.returncode == 1
    assert "method='nonsense': expected one of" in done.stderr


def test_superlink_and_three_supernodes_equal_the_simulation(flower, in_process, tmp_path):
    port = free_port()
    flower.start(
        "flower-superlink",
        "--insecure",
        *("--host", "127.0.0.1", "--port", str(port)),
        "--disable-runtime-dependency-installation",
    )
    (flower.home / "config.toml").write_text(
        '[superlink]\ndefault = "loopback"\n\n'
        f'[superlink.loopback]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    wait_for_port(port)
    for partition in range(3):
        flower.start(
            "flower-supernode",
            "--insecure",
            *("--superlink", f"127.0.0.1:{port}"),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", f"partition-id={partition} num-partitions=3"),
        )
    path = tmp_path / "run"
    settings = [*SETTINGS, f"run-directory={path}"]
    done = flower.run("loopback", *(part for s in settings for part in ("--set", s)))
    assert done.returncode == 0, done.stdout + done.stderr + flower.logs()
    same_run(RunDirectory.open(path), in_process)


def test_a_foreign_project_drops_the_strategy_in(flower, tmp_path):
    """Somebody else's ClientApp, unchanged, on Ray; only the strategy is ours."""
    output = tmp_path / "facts.json"
    done = subprocess.run(
        [
            *(str(BIN / "flwr"), "run", str(Path(__file__).parent / "foreign_project")),
            *("--stream", "--federation-config", "num-supernodes=6"),
            *("--run-config", f"output='{output}'"),
        ],
        env=flower.env,
        capture_output=True,
        text=True,
        check=False,
        cwd=flower.home,
    )
    assert output.exists(), done.stdout + done.stderr
    facts = json.loads(output.read_text())
    assert facts["refusals"] == []
    assert 0 < facts["accuracy"] <= 1
    models = next(s for s in facts["statements"] if "the released models" in s)
    assert "add-or-remove-one" in models
    assert "PLD" in models
