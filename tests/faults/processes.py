"""Faults on a real SuperLink and real SuperNodes.

Four SuperNodes with registered keys and TLS run DP-FedAvg and take part in every round. Each round
of the plan below meets its faults while it is under way. Afterwards the test checks that

* the nodes that answered in each round are those that the faults left,
* the model equals that of a run in this process with the same clients missing, so that every
  aggregate was right,
* ε equals the ε from the ledger's entries, and from the participations.

The ledger shows when a round begins: its entry is on disk before the server asks a client.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from flwr.app import Context, Message, RecordDict
from safetensors.numpy import load_file

from flower_ext.cli.launching import launch
from flower_ext.cli.preparing import RunOptions, prepare
from flower_ext.cli.processes import LaunchFailed, signal_group
from flower_ext.federation import InProcessGrid
from flower_ext.federation.engines.run_app import load_app
from flower_ext.privacy import AdversaryView, Release, privacy_loss_of
from flower_ext.runs import RunDirectory
from flower_ext.runs.page import table
from tests.support.deployment import CONNECTION, Deployment

APP = Path(__file__).parents[2] / "apps" / "dp2-fedsam"
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
    """A running app on a deployment, observed through its run directory."""

    def __init__(
        self, deployment: Deployment, app: Path, path: Path, settings: Mapping[str, Any]
    ) -> None:
        self.path = path
        self.error: LaunchFailed | None = None
        words = {**settings, "run-directory": path}
        options = [f"{n}={str(v).lower() if isinstance(v, bool) else v}" for n, v in words.items()]

        def follow() -> None:
            try:
                run = prepare(RunOptions(app=app, superlink=CONNECTION, settings=options))
                launch(run, env=deployment.env)
            except LaunchFailed as error:
                self.error = error

        self._thread = threading.Thread(target=follow, daemon=True)
        self._thread.start()

    @property
    def rounds_begun(self) -> int:
        """Return the number of rounds with a reserved release, before or after their requests."""
        return sum(entry["kind"] == "reserve" for entry in self._ledger())

    def wait_for_round(self, number: int, *, seconds: float = 600) -> None:
        """Wait until round ``number`` is under way.

        Raises
        ------
        TimeoutError
            The round has not begun after ``seconds``, or the run has ended.
        """
        deadline = time.monotonic() + seconds
        while self.rounds_begun < number:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise TimeoutError(f"round {number} did not begin: {self.error}")
            time.sleep(0.2)

    def finish(self, seconds: float = 900) -> RunDirectory:
        """Wait for the run's end; return its results."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"the run in {self.path} has not ended after {seconds:g} s")
        return RunDirectory.open(self.path)

    def _ledger(self) -> list[dict[str, Any]]:
        path = self.path / "ledger.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@dataclass(frozen=True)
class Fault:
    """A fault of partition ``node`` in a round, or of no client (None)."""

    kind: str
    inject: Callable[[Deployment, Any], None]
    node: int | None = None


def kill_node(deployment: Deployment, node: int) -> None:
    """Send SIGKILL to a SuperNode and to its child processes."""
    process = deployment.supernodes[node]
    signal_group(process, signal.SIGKILL)
    process.wait()


def restart_node(deployment: Deployment, node: int) -> None:
    """End a SuperNode in order in the middle of a round, and start it again at once."""
    _restart(deployment, node, {})


def misconfigure(deployment: Deployment, node: int) -> None:
    """Do the same, with a node config under which the client raises from now on."""
    _restart(deployment, node, {"device": "nonsense"})


def _restart(deployment: Deployment, node: int, config: Mapping[str, str]) -> None:
    process = deployment.supernodes[node]
    signal_group(process, signal.SIGTERM)
    process.wait()
    return_node(deployment, node, config=config)


def return_node(
    deployment: Deployment,
    node: int,
    *,
    config: Mapping[str, str] | None = None,
    seconds: float = 150,
) -> None:
    """Start a SuperNode repeatedly until the SuperLink accepts it, as a service manager would.

    Flower refuses a node that it believes to be online. After a crash, that lasts until the
    heartbeats of the earlier process are overdue (60 s).

    Raises
    ------
    TimeoutError
        The SuperLink has not accepted it after ``seconds``.
    """
    log = deployment.folder / "logs" / f"node-{node}.log"
    deadline = time.monotonic() + seconds
    while True:
        before = log.stat().st_size
        process = deployment.start_node(node, config=config)
        while process.poll() is None:
            if b"SuperNode ID:" in log.read_bytes()[before:]:
                return
            time.sleep(0.2)
        signal_group(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"node {node} was not let in after {seconds:g} s")
        time.sleep(3)


def kill_client(deployment: Deployment, node: int, *, at_work: float = 0.0) -> None:
    """Send SIGKILL to the ClientApp only, once it has used ``at_work`` seconds of a processor."""
    _client_app(deployment.supernodes[node], at_work).kill()


def _client_app(supernode: subprocess.Popen[bytes], at_work: float) -> psutil.Process:
    """Return the ClientApp of a SuperNode, once it has used so many seconds of a processor."""
    began, parent = time.time(), psutil.Process(supernode.pid)
    while time.time() < began + 60:
        for child in parent.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                fresh = child.create_time() >= began - 1  # an older one is about to end
                busy = child.cpu_times().user >= at_work
                if fresh and busy and "flwr-clientapp" in " ".join(child.cmdline()):
                    return child
        time.sleep(0.05)
    raise TimeoutError(f"no ClientApp of SuperNode {supernode.pid} was seen")


def kill_client_at_work(deployment: Deployment, node: int) -> None:
    """Kill the ClientApp at work, as the kernel does when memory is short."""
    kill_client(deployment, node, at_work=3.0)


def freeze(deployment: Deployment, node: int) -> None:
    """Send SIGSTOP, as if the node's machine were busy beyond the time-out."""
    signal_group(deployment.supernodes[node], signal.SIGSTOP)


def thaw(deployment: Deployment, node: int) -> None:
    """Send SIGCONT in a later round, so that the reply to the earlier one arrives now."""
    signal_group(deployment.supernodes[node], signal.SIGCONT)


def knock(deployment: Deployment, _: None) -> None:
    """Start a node with an unregistered key; it must end by itself."""
    process = deployment.start_node(0, name="stranger")
    process.wait(120)


def restart_superlink(deployment: Deployment, _: None) -> None:
    """Send SIGKILL to the SuperLink while a client works; start it again on the same database.

    The fault waits until a client works, because a ServerApp cannot repeat a request that was under
    way (flwr 1.41).
    """
    assert deployment.superlink is not None
    running = next(node for node in deployment.supernodes.values() if node.poll() is None)
    _client_app(running, at_work=3.0)
    deployment.superlink.kill()
    deployment.superlink.wait()
    deployment.start_superlink()


def nothing(deployment: Deployment, node: int) -> None:
    """Do nothing; the fault is what happened to the node before."""


@dataclass(frozen=True)
class Plan:
    """Faults by round; ``returns`` has killed nodes that their owners start again."""

    name: str
    rounds: int
    faults: Mapping[int, Sequence[Fault]]
    returns: Mapping[int, Sequence[int]]


KILLED = "SuperNode killed (SIGKILL)"
STOPPED = "SuperNode stopped (SIGTERM), started again"
STARTING = "ClientApp killed as it starts (SIGKILL)"
WORKING = "ClientApp killed at work (SIGKILL)"
RAISES = "client raises (its node config is wrong)"
SLOW = "SuperNode frozen beyond the time-out (SIGSTOP)"
LATE = "late reply to an earlier round (SIGCONT)"
STRANGER = "unregistered node joins"
SUPERLINK = "SuperLink killed and restarted"

LONG = Plan(
    "long",
    rounds=6,
    faults={
        1: [Fault(STARTING, kill_client, 0), Fault(STRANGER, knock)],
        2: [
            Fault(KILLED, kill_node, 1),
            Fault(SLOW, freeze, 2),
            Fault(WORKING, kill_client_at_work, 3),
        ],
        3: [Fault(LATE, thaw, 2), Fault(STOPPED, misconfigure, 3)],
        4: [
            Fault(RAISES, nothing, 3),
            Fault(STARTING, kill_client, 0),
            Fault(SUPERLINK, restart_superlink),
        ],
        5: [
            Fault(KILLED, kill_node, 0),
            Fault(SLOW, freeze, 1),
            Fault(STOPPED, restart_node, 3),
        ],
        6: [
            Fault(LATE, thaw, 1),
            Fault(WORKING, kill_client_at_work, 2),
            Fault(STRANGER, knock),
        ],
    },
    returns={2: [1], 5: [0]},
)
SHORT = Plan(
    "short",
    rounds=4,
    faults={
        1: [Fault(WORKING, kill_client_at_work, 1), Fault(STRANGER, knock)],
        2: [Fault(KILLED, kill_node, 2), Fault(SUPERLINK, restart_superlink)],
        3: [Fault(STARTING, kill_client, 3), Fault(STRANGER, knock)],
    },
    returns={2: [2]},
)
PLANS = (LONG, SHORT)


@dataclass(frozen=True)
class Outcome:
    """A run under faults, and its results."""

    plan: Plan
    injected: Sequence[tuple[int, Fault]]
    run: RunDirectory
    reference: RunDirectory
    error: str | None

    @property
    def missing(self) -> dict[int, set[int]]:
        """Return, by round, the partitions that gave no usable answer to a request to train."""
        return missing_in(self.run)

    @property
    def discarded(self) -> int:
        """Return the number of rounds that changed nothing."""
        return sum(row.get("discarded", 0) == 1 for row in self.run.metrics())

    @property
    def wrong_aggregates(self) -> int:
        """Return 0 if the model equals that of an in-process run with the same clients missing."""
        ours, other = (load_file(r.path / "model.safetensors") for r in (self.run, self.reference))
        same = all(bool(np.allclose(ours[n], other[n], atol=1e-5)) for n in other)
        counts = [
            [(row["answered"], row.get("discarded", 0)) for row in r.metrics()]
            for r in (self.run, self.reference)
        ]
        differing: int = sum(a != b for a, b in zip(*counts, strict=True))
        return differing + (not same)

    @property
    def epsilons(self) -> dict[str, float]:
        """Return ε for released models, as published by the run and as computed from its ledger."""
        stated = next(
            g
            for g in self.run.guarantees()
            if g.basis == "provable" and g.view is AdversaryView.RELEASED_MODELS
        )
        spent = Counter(
            Release.from_dict(entry["release"])
            for entry in self.run.ledger()
            if entry["kind"] == "reserve"
        )
        by_ledger = privacy_loss_of(spent, delta=stated.delta).epsilon
        return {"stated": stated.epsilon, "by the ledger": by_ledger}

    @property
    def epsilon_right(self) -> bool:
        """Return True if ε equals that of the ledger and of the reference's participations."""
        stated, by_ledger = self.epsilons.values()
        theirs = [g.epsilon for g in self.reference.guarantees()]
        ours = [g.epsilon for g in self.run.guarantees()]
        return ours == theirs and abs(stated - by_ledger) <= 1e-9 * by_ledger

    @property
    def kept(self) -> bool:
        """Return True if the run completed, every aggregate was right, and ε is right."""
        completed = self.error is None and self.run.status == "completed"
        return completed and self.wrong_aggregates == 0 and self.epsilon_right


def missing_in(run: RunDirectory) -> dict[int, set[int]]:
    """Return, by round, the partitions without a usable answer to a training message."""
    rows = [row for row in run.missing() if row["kind"] == "train"]
    return {row["round"]: set(row["partitions"]) for row in rows}


def under_faults(
    deployment: Deployment, plan: Plan, path: Path, *, timeout: int, **more: object
) -> Outcome:
    """Run under the faults of ``plan``, and run the same in this process.

    ``more`` are settings of both, with ``_`` in place of ``-``.
    """
    settings = {
        **SETTINGS,
        **{name.replace("_", "-"): value for name, value in more.items()},
        "rounds": plan.rounds,
        "round-timeout": timeout,
    }
    watched = WatchedRun(deployment, APP, path, settings)
    injected: list[tuple[int, Fault]] = []
    with ThreadPoolExecutor() as owners:
        returning = []
        for number in range(1, plan.rounds + 1):
            watched.wait_for_round(number)
            for fault in plan.faults.get(number, ()):
                try:
                    fault.inject(deployment, fault.node)
                except TimeoutError as missed:  # the round ended too quickly for the fault
                    print(f"round {number}: not injected: {missed}", flush=True)
                    continue
                print(f"round {number}: {fault.kind}, node {fault.node}", flush=True)
                injected.append((number, fault))
            for node in plan.returns.get(number, ()):
                returning.append(owners.submit(return_node, deployment, node))
        for owner in returning:
            owner.result()
    run = watched.finish()
    reference = in_process(path.with_name(f"{path.name}-reference"), settings, missing_in(run))
    error = None if watched.error is None else str(watched.error)
    return Outcome(plan, injected, run, reference, error)


def in_process(
    path: Path, settings: Mapping[str, Any], missing: Mapping[int, set[int]]
) -> RunDirectory:
    """Run the same in this process; ``missing`` has the clients without an answer in each round."""
    server, client = load_app(APP)
    project = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    config = {**project["config"], **settings, "run-directory": str(path)}
    grid = GridWithGaps(client, NODES, config)
    grid.missing = missing
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    server(grid, context)
    return RunDirectory.open(path)


class GridWithGaps(InProcessGrid):
    """The in-process engine with clients that do not answer training requests in given rounds."""

    missing: Mapping[int, set[int]] = {}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the replies of the clients that answer."""
        return super().send_and_receive([m for m in messages if self._answers_to(m)])

    def _answers_to(self, message: Message) -> bool:
        if not message.metadata.message_type.startswith("train"):
            return True
        partition = self.contexts[message.metadata.dst_node_id].node_config["partition-id"]
        return partition not in self.missing.get(int(message.metadata.group_id), set())


@dataclass(frozen=True)
class Row:
    """Number of faults of one kind, and of those that cost their client the round."""

    kind: str
    injected: int
    client_missed_round: int

    @property
    def nothing_lost(self) -> int:
        """Number of faults after which the round still had all answers of that client."""
        return self.injected - self.client_missed_round


def run(folder: Path, plan: Plan, *, timeout: int = 75) -> tuple[list[Row], Outcome]:
    """Run on a deployment below ``folder``; return faults by kind, and their results."""
    with Deployment(folder / "deployment", NODES) as deployment:
        outcome = under_faults(deployment, plan, folder / plan.name, timeout=timeout)
    met = [
        (fault.kind, fault.node in outcome.missing.get(number, set()))
        for number, fault in outcome.injected
    ]
    total, missed = Counter(kind for kind, _ in met), Counter(kind for kind, lost in met if lost)
    return [Row(kind, total[kind], missed[kind]) for kind in total], outcome


def report(rows: Sequence[Row], outcome: Outcome) -> str:
    """Return both tables in Markdown."""
    faults = table(
        ("fault", "injected", "client missed the round", "nothing lost"),
        [(r.kind, r.injected, r.client_missed_round, r.nothing_lost) for r in rows],
    )
    run = table(
        ("plan", "run", "rounds", "discarded", "wrong aggregates", "ε stated", "ε by the ledger"),
        [
            (
                outcome.plan.name,
                outcome.run.status,
                len(outcome.run.metrics()),
                outcome.discarded,
                outcome.wrong_aggregates,
                *(f"{epsilon:.4f}" for epsilon in outcome.epsilons.values()),
            )
        ],
    )
    return f"{sum(r.injected for r in rows)} faults\n\n{faults}\n\n{run}\n"
