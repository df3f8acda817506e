"""Simulations on a Ray cluster of two raylets on this machine, which the test starts and ends."""

import subprocess
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from flower_ext.cli.processes import environment, executable
from flower_ext.cli.superlink import HOST, free_port, simulation_superlink
from flower_ext.runs import RunDirectory
from tests.support.apps import DP2_FEDSAM
from tests.support.commands import SETS, Command

NODES = ["--set", "clients-per-node=1"]


class Cluster:
    """Two raylets with a core each."""

    def __init__(self) -> None:
        self.address = f"{HOST}:{free_port()}"
        # Ray puts its sockets below this folder, and the path of a socket must be short.
        self._files = TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
        port = self.address.rpartition(":")[2]
        head = ["--head", "--port", port, "--include-dashboard", "false"]
        self.raylets = [self._start(*head, "--temp-dir", self._files.name)]
        self._wait(self._answers)
        self.raylets.append(self._start("--address", self.address))
        self._wait(lambda: all(map(self._has_raylet, self.raylets)))

    def workers(self) -> list[int]:
        """Return the number of actors that each raylet has started."""
        return [
            sum("ClientAppActor" in name for name in self._below(each)) for each in self.raylets
        ]

    def stop(self) -> None:
        started = [psutil.Process(each.pid) for each in self.raylets]
        family = [*started, *(child for each in started for child in each.children(True))]
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        for each in self.raylets:
            each.wait()
        self._files.cleanup()

    def _start(self, *words: str) -> subprocess.Popen:
        options = ["--block", "--node-ip-address", HOST, "--num-cpus", "1", "--disable-usage-stats"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([executable("ray"), "start", *words, *options], **quiet)

    def _answers(self) -> bool:
        words = [executable("ray"), "health-check", "--address", self.address]
        return subprocess.run(words, capture_output=True, timeout=15, check=False).returncode == 0

    def _has_raylet(self, process: subprocess.Popen) -> bool:
        return any("raylet" in name for name in self._below(process))

    @staticmethod
    def _below(process: subprocess.Popen) -> list[str]:
        names = []
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                names.append(" ".join(child.cmdline()))
            except psutil.Error:
                continue
        return names

    @staticmethod
    def _wait(ready) -> None:
        deadline = time.monotonic() + 90
        while not ready():
            assert time.monotonic() < deadline
            time.sleep(0.5)


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.timeout(600)
def test_both_raylets_of_a_cluster_that_the_environment_names_work(tmp_path):
    command, cluster = Command(tmp_path), Cluster()
    command.env["RAY_ADDRESS"] = cluster.address
    path, seen = tmp_path / "run", [0, 0]
    words = ["run", str(DP2_FEDSAM.folder), *SETS, *NODES, "--set", "rounds=8"]
    try:
        process = command.start(*words, "--set", f"run-directory={path}")
        while process.poll() is None:
            seen = [max(pair) for pair in zip(seen, cluster.workers(), strict=True)]
            time.sleep(0.2)
        out, errors = process.communicate()
        assert process.returncode == 0, out.decode() + errors.decode()
        assert RunDirectory.open(path).status == "completed"
        assert seen == [1, 1]
    finally:
        cluster.stop()
    assert command.left() == []


@pytest.mark.engine
def test_files_of_a_simulation_are_where_flower_s_are():
    """Machines of a cluster read an app below FLWR_HOME (docs/cluster.md)."""
    with TemporaryDirectory() as home:
        with simulation_superlink({**environment(), "FLWR_HOME": home}) as env:
            assert Path(env["FLWR_HOME"]).parent == Path(home)
        assert list(Path(home).glob("simulation-*")) == []
