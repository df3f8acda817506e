"""Faults on a real SuperLink and real SuperNodes.

Four SuperNodes with registered keys, TLS, and runs of DP-FedAvg in which everyone is asked in every
round. Each round of the plan below meets its faults while it is under way. Afterwards

* who answered in each round is compared with whom the faults left,
* the same run is made in this process with the same clients missing: the models must be equal, so
  that every aggregate was the right one,
* ε is compared with what the ledger's entries give, and with the participations.

The ledger tells when a round begins: its entry is on disk before a client is asked.
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

from flower_ext.cli.deployment import CONNECTION, Deployment
from flower_ext.cli.ending import LaunchFailed
from flower_ext.cli.launch import launch
from flower_ext.cli.processes import signal_group
from flower_ext.federation import InProcessGrid
from flower_ext.federation.engines.run_app import load_app
from flower_ext.privacy import AdversaryView, Release, privacy_loss_of
from flower_ext.runs import RunDirectory
from flower_ext.runs.page import table

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
    """What befalls partition ``node`` in a round, or no client (None)."""

    kind: str
    inject: Callable[[Deployment, Any], None]
    node: int | None = None


def kill_node(deployment: Deployment, node: int) -> None:
    """SIGKILL to a SuperNode and to what it started."""
    process = deployment.supernodes[node]
    signal_group(process, signal.SIGKILL)
    process.wait()


def restart_node(deployment: Deployment, node: int) -> None:
    """An orderly end in the middle of a round, and a new start at once."""
    _restart(deployment, node, {})


def misconfigure(deployment: Deployment, node: int) -> None:
    """The same, with a node config under which the client raises from now on."""
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
    """Start a SuperNode again and again until it is let in, as a service manager would.

    Flower refuses a node that it believes to be online: after a crash, until the heartbeats of the
    process before are overdue (60 s).

    Raises
    ------
    TimeoutError
        It is not let in after ``seconds``.
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
    """SIGKILL to the ClientApp alone, once it has had ``at_work`` seconds of a processor."""
    _client_app(deployment.supernodes[node], at_work).kill()


def _client_app(supernode: subprocess.Popen[bytes], at_work: float) -> psutil.Process:
    """The ClientApp of a SuperNode that runs, once it has had so many seconds of a processor."""
    began, parent = time.time(), psutil.Process(supernode.pid)
    while time.time() < began + 60:
        for child in parent.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                fresh = child.create_time() >= began - 1  # not one that ends after its last reply
                busy = child.cpu_times().user >= at_work
                if fresh and busy and "flwr-clientapp" in " ".join(child.cmdline()):
                    return child
        time.sleep(0.05)
    raise TimeoutError(f"no ClientApp of SuperNode {supernode.pid} was seen")


def kill_client_at_work(deployment: Deployment, node: int) -> None:
    """As the kernel does where memory is short."""
    kill_client(deployment, node, at_work=3.0)


def freeze(deployment: Deployment, node: int) -> None:
    """SIGSTOP: the node's machine is busy with something else, beyond the time-out."""
    signal_group(deployment.supernodes[node], signal.SIGSTOP)


def thaw(deployment: Deployment, node: int) -> None:
    """SIGCONT in a later round: the reply to the earlier one comes now."""
    signal_group(deployment.supernodes[node], signal.SIGCONT)


def knock(deployment: Deployment, _: None) -> None:
    """A node whose key nobody registered; it must end by itself."""
    process = deployment.start_node(0, name="stranger")
    process.wait(120)


def restart_superlink(deployment: Deployment, _: None) -> None:
    """SIGKILL to the SuperLink while a client works; the same command on the same database again.

    Not before: a ServerApp whose question is under way then cannot send it again (flwr 1.41).
    """
    assert deployment.superlink is not None
    running = next(node for node in deployment.supernodes.values() if node.poll() is None)
    _client_app(running, at_work=3.0)
    deployment.superlink.kill()
    deployment.superlink.wait()
    deployment.start_superlink()


def nothing(deployment: Deployment, node: int) -> None:
    """What happened to the node before is the fault."""


@dataclass(frozen=True)
class Plan:
    """Faults by round; ``returns``: nodes killed in a round that their owners start again."""

    policy: str
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

TOPPED_UP = Plan(
    "top-up",
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
DISCARDED = Plan(
    "discard",
    rounds=4,
    faults={
        1: [Fault(WORKING, kill_client_at_work, 1), Fault(STRANGER, knock)],
        2: [Fault(KILLED, kill_node, 2), Fault(SUPERLINK, restart_superlink)],
        3: [Fault(STARTING, kill_client, 3), Fault(STRANGER, knock)],
    },
    returns={2: [2]},
)
PLANS = (TOPPED_UP, DISCARDED)


# The runs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A run under faults, and what became of it."""

    plan: Plan
    injected: Sequence[tuple[int, Fault]]
    run: RunDirectory
    reference: RunDirectory
    error: str | None

    @property
    def missing(self) -> dict[int, set[int]]:
        """By round, who was asked to train and gave no usable answer."""
        return missing_in(self.run)

    @property
    def discarded(self) -> int:
        """Rounds that changed nothing."""
        return sum(row.get("discarded", 0) == 1 for row in self.run.metrics())

    @property
    def wrong_aggregates(self) -> int:
        """0 if the model is that of the same run in one process, with the same clients missing."""
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
        """ε for released models: as published by the run, and by what its ledger holds."""
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
        """Whether it is what the ledger gives, and what the reference's participations give."""
        stated, by_ledger = self.epsilons.values()
        theirs = [g.epsilon for g in self.reference.guarantees()]
        ours = [g.epsilon for g in self.run.guarantees()]
        return ours == theirs and abs(stated - by_ledger) <= 1e-9 * by_ledger

    @property
    def kept(self) -> bool:
        """Whether the run completed, every aggregate was right, and ε is."""
        completed = self.error is None and self.run.facts["status"] == "completed"
        return completed and self.wrong_aggregates == 0 and self.epsilon_right


def missing_in(run: RunDirectory) -> dict[int, set[int]]:
    """By round, partitions without a usable answer to a training message."""
    rows = [row for row in run.missing() if row["kind"] == "train"]
    return {row["round"]: set(row["partitions"]) for row in rows}


def under_faults(
    deployment: Deployment, plan: Plan, path: Path, *, timeout: int, **more: object
) -> Outcome:
    """A run that meets the faults of ``plan``, and the same run in this process.

    ``more`` are settings of both, with ``_`` in place of ``-``.
    """
    settings = {
        **SETTINGS,
        **{name.replace("_", "-"): value for name, value in more.items()},
        "dropout-policy": plan.policy,
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
                except TimeoutError as missed:  # the round was too quick: no fault to count
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
    """The same run in this process; ``missing`` says who does not answer in which round."""
    server, client = load_app(APP)
    project = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    config = {**project["config"], **settings, "run-directory": str(path)}
    grid = GridWithGaps(client, NODES, config)
    grid.missing = missing
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    server(grid, context)
    return RunDirectory.open(path)


class GridWithGaps(InProcessGrid):
    """The in-process engine, with clients that do not answer to training in given rounds."""

    missing: Mapping[int, set[int]] = {}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Replies of those who answer."""
        return super().send_and_receive([m for m in messages if self._answers_to(m)])

    def _answers_to(self, message: Message) -> bool:
        if not message.metadata.message_type.startswith("train"):
            return True
        partition = self.contexts[message.metadata.dst_node_id].node_config["partition-id"]
        return partition not in self.missing.get(int(message.metadata.group_id), set())


@dataclass(frozen=True)
class Row:
    """Faults of one kind: how many, and how many of them cost their client the round."""

    kind: str
    injected: int
    client_missed_round: int

    @property
    def nothing_lost(self) -> int:
        """Faults after which the round had all its answers from that client."""
        return self.injected - self.client_missed_round


def run(folder: Path, plan: Plan, *, timeout: int = 75) -> tuple[list[Row], Outcome]:
    """A run on a deployment below ``folder``; faults by kind, and what became of it."""
    with Deployment(folder / "deployment", NODES) as deployment:
        outcome = under_faults(deployment, plan, folder / plan.policy, timeout=timeout)
    met = [
        (fault.kind, fault.node in outcome.missing.get(number, set()))
        for number, fault in outcome.injected
    ]
    total, missed = Counter(kind for kind, _ in met), Counter(kind for kind, lost in met if lost)
    return [Row(kind, total[kind], missed[kind]) for kind in total], outcome


def report(rows: Sequence[Row], outcome: Outcome) -> str:
    """Both tables, in Markdown."""
    faults = table(
        ("fault", "injected", "client missed the round", "nothing lost"),
        [(r.kind, r.injected, r.client_missed_round, r.nothing_lost) for r in rows],
    )
    run = table(
        ("policy", "run", "rounds", "discarded", "wrong aggregates", "ε stated", "ε by the ledger"),
        [
            (
                outcome.plan.policy,
                outcome.run.facts["status"],
                len(outcome.run.metrics()),
                outcome.discarded,
                outcome.wrong_aggregates,
                *(f"{epsilon:.4f}" for epsilon in outcome.epsilons.values()),
            )
        ],
    )
    return f"{sum(r.injected for r in rows)} faults\n\n{faults}\n\n{run}\n"
