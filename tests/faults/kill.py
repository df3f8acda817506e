"""Runs that are killed at any point and resumed, compared with an independent record.

An app runs in a separate process, which gets SIGKILL at a random time, or right after one of its
files has changed. The test resumes it, kills it again, and at last lets it end. A seeded run has to
end as if nothing had happened, bit for bit. Under secure noise, the accounts must have everything
that clients really released, and no training number may be used twice. A witness, apart from the
run, records the releases.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message

from flower_ext.federation import recording, run_in_process
from flower_ext.federation.client.app import Answer, CohortApp
from flower_ext.federation.engines.run_app import load_app
from flower_ext.federation.messages import records
from flower_ext.federation.storage.folder import deserialised
from flower_ext.privacy import AdversaryView, Release, privacy_loss_of
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import num_nodes

APP = Path(__file__).parents[2] / "apps" / "dp2-fedsam"
SMALL: Mapping[str, Any] = {
    "clients": 5,
    "partition": "iid",
    "sampling": "poisson",
    "sampling-rate": 0.6,
    "rounds": 6,
    "noise-multiplier": 0.7,
    "local-epochs": 1,
    "evaluate-every": 4,
}
WATCHED = (
    "ledger.jsonl",
    "begun.jsonl",
    "metrics.jsonl",
    "*.checkpoint",
    ".*.draft",
    "*.memory",
    "guarantee.json",
    "run.json",
    "model.safetensors",
)
"""Files after whose changes the test kills a run, in addition to random times."""
_LIMIT = 600.0
_IN_A_ROW = 6
"""Largest number of kills of one run."""

_processes = multiprocessing.get_context("fork")
"""Starts a run in a fork, because a new Python would first import for seconds."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of an app in ``folder``: its directory, its clients' state and its witness."""

    app: Path
    config: Mapping[str, Any]
    folder: Path

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.folder / "run"

    @property
    def settings(self) -> dict[str, Any]:
        """The run's configuration, which resumes the run if it has begun."""
        run_settings: dict[str, Any] = {"run-directory": str(self.run), "resume": True}
        if "state-folder" in self.config:
            run_settings["state-folder"] = str(self.folder / "state")
        return {**self.config, **run_settings}

    def start(self) -> BaseProcess:
        """Start a process that begins or resumes the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        process = _processes.Process(target=play, args=(self,))
        process.start()
        return process

    def finish(self) -> None:
        """Run it to its end.

        Raises
        ------
        RuntimeError
            The run fails; the message has its last output.
        """
        process = self.start()
        process.join(_LIMIT)
        if process.exitcode != 0:
            log = (self.folder / "log").read_text()[-3000:]
            raise RuntimeError(f"the run ended with {process.exitcode}: {log}")

    def released(self) -> list[tuple[int, list[int]]]:
        """Return (training number, clients) for each time that clients trained and answered."""
        file = self.folder / "witness"
        lines = file.read_text().splitlines() if file.exists() else []
        return [tuple(json.loads(line)) for line in lines]


def play(trial: Trial) -> None:
    """Run a trial in this process, with a witness."""
    log = os.open(trial.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    torch.set_num_threads(1)
    vars(recording)["write_report"] = lambda run: run.path  # its figures take too long
    server, client = load_app(trial.app)
    assert isinstance(client, CohortApp)
    witness = os.open(trial.folder / "witness", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for kind, answer in client.cohort_answers.items():
        if kind.startswith("train."):
            client.cohort_answers[kind] = _witnessed(answer, witness)
    count = num_nodes(trial.settings)
    assert count is not None
    run_in_process(server, client, num_clients=count, run_config=trial.settings)


def _witnessed(
    answer: Callable[..., Sequence[Answer]], witness: int
) -> Callable[..., Sequence[Answer]]:
    """Return a client that notes its rounds for a witness before it answers."""

    def watched(
        messages: Sequence[Message], contexts: Sequence[Context], **options: Any
    ) -> Sequence[Answer]:
        replies = answer(messages, contexts, **options)
        number = messages[0].content.config_records[records.ROUND]["number"]
        clients = [context.node_config["partition-id"] for context in contexts]
        os.write(witness, (json.dumps([number, clients]) + "\n").encode())
        return replies

    return watched


def kill(process: BaseProcess, due: Callable[[], bool]) -> bool:
    """Send SIGKILL to a process when it is due; return True if it was still running."""
    deadline = time.monotonic() + _LIMIT
    while process.is_alive() and not due():
        if time.monotonic() > deadline:
            raise TimeoutError("the run neither ended nor came to the point")
        time.sleep(0.001)
    assert process.pid is not None
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode == -signal.SIGKILL


def after(seconds: float) -> Callable[[], bool]:
    """Return a condition that is due after so many seconds."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def changed(folder: Path, pattern: str, times: int, pause: float = 0.0) -> Callable[[], bool]:
    """Return a condition that is due shortly after so many changes of files below ``folder``."""
    seen, last, due_at = 0, frozenset(_states(folder, pattern)), None

    def due() -> bool:
        nonlocal seen, last, due_at
        if due_at is None:
            current = frozenset(_states(folder, pattern))
            seen, last = seen + (current != last), current
            if seen >= times:
                due_at = time.monotonic() + pause
        return due_at is not None and time.monotonic() >= due_at

    return due


def _states(folder: Path, pattern: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, size and time of every file that matches a pattern."""
    for file in folder.rglob(pattern):
        try:
            facts = file.stat()
        except FileNotFoundError:
            continue
        yield str(file), facts.st_size, facts.st_mtime_ns


def differences(one: Path, other: Path) -> list[str]:
    """Return the differences of two run directories, except for times."""
    differing = [
        name
        for name in ("model.safetensors", "guarantee.json", "clients.csv")
        if _content(one / name) != _content(other / name)
    ]
    rows = [
        [
            {name: value for name, value in row.items() if not name.endswith("seconds")}
            for row in RunDirectory.open(path).metrics()
        ]
        for path in (one, other)
    ]
    if rows[0] != rows[1]:
        differing.append("metrics.jsonl")
    if reserved(one) != reserved(other):
        differing.append("ledger.jsonl")
    return differing


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def reserved(run: Path) -> Counter[Release]:
    """Return the releases that the ledger counts."""
    entries = RunDirectory(run).ledger() if run.exists() else []
    return Counter(Release.from_dict(e["release"]) for e in entries if e["kind"] == "reserve")


def short_of(trial: Trial, *, ended: bool) -> list[str]:
    """Return the gaps between the accounts and the witness; for a finished run, in all accounts."""
    released, shortfalls = trial.released(), []
    spent = reserved(trial.run)
    numbers = [number for number, _ in released]
    if sum(spent.values()) < len(set(numbers)):
        shortfalls.append(f"ledger: {sum(spent.values())} of {len(set(numbers))} releases")
    if not ended:
        return shortfalls
    if len(set(numbers)) < len(numbers):
        shortfalls.append("a training number was used twice")
    last = max((trial.run / "checkpoints").glob("*.checkpoint"), key=lambda f: int(f.stem))
    counted = Participations.from_dict(deserialised(last.read_bytes()).values["participations"])
    truth = Counter(client for _, clients in released for client in clients)
    shortfalls += [f"client {c}" for c, times in truth.items() if counted.uploads[c] < times]
    (release,) = spent
    for claim in RunDirectory(trial.run).guarantees():
        if claim.basis == "provable" and claim.view is AdversaryView.RELEASED_MODELS:
            true = privacy_loss_of({release: len(released)}, delta=claim.delta).epsilon
            if claim.epsilon < true * (1 - 1e-9):
                shortfalls.append(f"guarantee: ε = {claim.epsilon:.4g}, {true:.4g} was spent")
    return shortfalls


@dataclass
class Outcome:
    """The results of all kill points of one kind of run."""

    kind: str
    points: int = 0
    exact: int | None = None
    under_counted: int = 0
    at: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def row(self) -> tuple[str, ...]:
        """The results as a row of the table."""
        exact = "–" if self.exact is None else f"{self.exact} of {self.points}"
        return self.kind, str(self.points), exact, str(self.under_counted)


HEADER = ("run", "kill −9 points", "resumed bit for bit", "under-counted spends")


def run(points: int, *, seed: int = 0) -> list[Outcome]:
    """Kill seeded and secure runs at ``points`` points in total, resume them, and compare."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        config = {**_defaults(APP), **SMALL}
        seeded = Trial(app=APP, config={**config, "seeded-noise": True}, folder=place / "whole")
        started = time.monotonic()
        seeded.finish()
        duration = time.monotonic() - started
        outcomes = [
            Outcome("seeded, client memory", exact=0),
            Outcome("secure noise, client memory"),
        ]
        drawn, number = random.Random(seed), 0
        while (left := points - sum(outcome.points for outcome in outcomes)) > 0:
            outcome = outcomes[number % 2]
            trial_config = {**config, "seeded-noise": outcome.exact is not None}
            trial = replace(seeded, config=trial_config, folder=place / f"{number}")
            killed = _kill_and_resume(trial, outcome, drawn, duration, most=min(left, _IN_A_ROW))
            short: list[str] = []
            if outcome.exact is None:
                short = short_of(trial, ended=True)
                outcome.under_counted += bool(short)
            else:
                short = differences(seeded.run, trial.run)
                outcome.exact += 0 if short else killed
            _note(outcome, number, short)
            number += 1
            print(f"{points - left + killed} of {points} points", file=sys.stderr)
    return outcomes


def _kill_and_resume(
    trial: Trial, outcome: Outcome, drawn: random.Random, duration: float, *, most: int
) -> int:
    """Kill a run at random points, up to ``most`` times, then let it end; return the kills."""
    killed = 0
    while killed < most:
        where, due = _point(trial, drawn, duration)
        if not kill(trial.start(), due):
            break
        killed += 1
        outcome.points += 1
        outcome.at[where] += 1
        short = short_of(trial, ended=False)
        outcome.under_counted += bool(short)
        _note(outcome, trial.folder.name, short)
    trial.finish()
    return killed


def _point(trial: Trial, drawn: random.Random, duration: float) -> tuple[str, Callable[[], bool]]:
    """Draw the point at which to kill: its name, and a function that waits for it."""
    if drawn.random() < 0.4:
        return "random time", after(drawn.uniform(0, duration))
    pattern = drawn.choice(WATCHED)
    times = 1 + drawn.randrange(3)
    pause = drawn.choice((0.0, drawn.uniform(0, 0.005)))
    return pattern, changed(trial.folder, pattern, times, pause)


def _note(outcome: Outcome, number: object, what: list[str]) -> None:
    if what:
        outcome.failures.append(f"run {number}: {', '.join(what)}")


def _defaults(app: Path) -> dict[str, Any]:
    project = tomllib.loads((app / "pyproject.toml").read_text())
    config: dict[str, Any] = project["tool"]["flwr"]["app"]["config"]
    return config
