"""Faults on a real SuperLink and real SuperNodes: ``python -m benchmarks.faults.processes``.

Four SuperNodes with registered keys, TLS, and runs of DP-FedAvg in which everyone is asked in every
round. Each round of the plan below meets its faults while it is under way. Afterwards

* who answered in each round is compared with whom the faults left,
* the same run is made in this process with the same clients missing: the models must be equal, so
  that every aggregate was the right one,
* ε is compared with what the ledger's entries give, and with the participations.

The ledger tells when a round begins: its entry is on disk before a client is asked.
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from safetensors.numpy import load_file

from flower_ext.federation import InProcessGrid
from flower_ext.federation.run_app import load_app
from flower_ext.privacy import Release, privacy_loss_of
from flower_ext.reporting import RunDirectory
from flower_ext.reporting.deployment import CONNECTION, Deployment, signal_group
from flower_ext.reporting.launch import LaunchFailed, launch

APP = Path(__file__).parents[2] / "apps" / "dp2_fedsam"
NODES = 4
SETTINGS: dict[str, Any] = {
    "method": "dp-fedavg",
    "clients": NODES,
    "sampling": "everyone",
    "partition": "iid",
    "local-epochs": 1,
    "evaluate-every": 0,
    "noise-multiplier": 2.0,
    "seeded-noise": True,
}


class WatchedRun:
    """An app's run on a deployment, watched through its run directory while it is under way."""

    def __init__(
        self, deployment: Deployment, app: Path, path: Path, settings: Mapping[str, Any]
    ) -> None:
        self.path = path
        self.error: LaunchFailed | None = None
        words = {**settings, "run-directory": path}
        options = [f"{n}={str(v).lower() if isinstance(v, bool) else v}" for n, v in words.items()]

        def follow() -> None:
            try:
                launch(app, superlink=CONNECTION, settings=options, env=deployment.env)
            except LaunchFailed as error:
                self.error = error

        self._thread = threading.Thread(target=follow, daemon=True)
        self._thread.start()

    @property
    def rounds_begun(self) -> int:
        """Rounds whose release is reserved, whether or not their clients were asked yet."""
        return sum(entry["kind"] == "reserve" for entry in self._ledger())

    def wait_for_round(self, number: int, *, seconds: float = 600) -> None:
        """Wait until round ``number`` is under way.

        Raises
        ------
        TimeoutError
            It is not after ``seconds``, or the run has ended.
        """
        deadline = time.monotonic() + seconds
        while self.rounds_begun < number:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise TimeoutError(f"round {number} did not begin: {self.error}")
            time.sleep(0.2)

    def finish(self, seconds: float = 900) -> RunDirectory:
        """Wait for the run's end; what it left behind."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"the run in {self.path} has not ended after {seconds:g} s")
        return RunDirectory.open(self.path)

    def _ledger(self) -> list[dict[str, Any]]:
        path = self.path / "ledger.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


# Faults ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Something that happens to partition ``node`` (or to none) while a round is under way.

    ``silent`` says whether that client's part of the round is lost.
    """

    kind: str
    inject: Callable[[Deployment, int], None]
    silent: bool
    node: int = 0


def kill(deployment: Deployment, node: int) -> None:
    """SIGKILL to a SuperNode and to what it started."""
    process = deployment.supernodes[node]
    signal_group(process, signal.SIGKILL)
    process.wait()


def kill_and_restart(deployment: Deployment, node: int, **config: str | int) -> None:
    """A crash, after which the node's owner starts it again at once."""
    kill(deployment, node)
    deployment.start_node(node, config=config)


def break_node(deployment: Deployment, node: int) -> None:
    """A crash, after which the node comes back with a setting under which its client raises."""
    kill_and_restart(deployment, node, device="nonsense")


def kill_client(deployment: Deployment, node: int) -> None:
    """SIGKILL to the ClientApp alone: as the kernel does where memory is short."""
    supernode, deadline = psutil.Process(deployment.supernodes[node].pid), time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in supernode.children(recursive=True):
            if "flwr-clientapp" in " ".join(child.cmdline()):
                child.kill()
                return
        time.sleep(0.1)
    raise TimeoutError(f"no ClientApp of node {node} was seen")


def freeze(deployment: Deployment, node: int) -> None:
    """SIGSTOP: the node's machine is busy with something else."""
    signal_group(deployment.supernodes[node], signal.SIGSTOP)


def thaw(deployment: Deployment, node: int) -> None:
    """SIGCONT: the reply to an earlier round comes now, if it comes."""
    signal_group(deployment.supernodes[node], signal.SIGCONT)


def stranger(deployment: Deployment, node: int) -> None:
    """A node whose key nobody registered knocks."""
    deployment.start_node(node, name="stranger")


def restart_superlink(deployment: Deployment, _: int) -> None:
    """SIGKILL to the SuperLink; the same command on the same database again."""
    assert deployment.superlink is not None
    deployment.superlink.kill()
    deployment.superlink.wait()
    deployment.start_superlink()


KILLED = Fault("SuperNode killed, started again", kill_and_restart, silent=True)
DOWN = Fault("SuperNode killed, stays down", kill, silent=True)
