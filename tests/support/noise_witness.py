"""Runs with correlated noise in processes that are killed, and an independent record of them.

A run gets SIGKILL right before or right after one of its durable writes, or at any time. The
witness, a file apart from the run, has every noise that was drawn, every sum that was noised, and
every message to clients.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from flower_ext import runs
from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import (
    FederatedStrategy,
    InProcessGrid,
    first_config,
    record,
    recorded_run,
)
from flower_ext.federation.messages import records
from flower_ext.federation.storage.noise_stream import NoiseStream
from flower_ext.privacy import CorrelatedNoise, ReleasePlan, SpacedSampling, gaussian_loss
from flower_ext.privacy.mechanisms.correlated_noise import PreparedNoise
from flower_ext.runs import RunDirectory
from flower_ext.training import LocalTraining
from tests.support.worlds import task

CLIENTS, ROUNDS, SIGMA = 4, 6, 1.5
SAMPLING = SpacedSampling(population=CLIENTS, size=1, rounds_apart=2, participations=3)
NOISES = {"buffers": CorrelatedNoise(), "bands": CorrelatedNoise(bands=3)}

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    ["flower_ext.algorithms", "dp_accounting", "scipy.optimize", "scipy.signal"]
)


@dataclass(frozen=True)
class Trial:
    """One run in ``folder``, with a plan of correlated noise."""

    folder: Path
    noise: str = "buffers"
    seeded: bool = False
    fault: str = ""

    @property
    def plan(self) -> ReleasePlan:
        return ReleasePlan(
            sampling=SAMPLING,
            correlation=NOISES[self.noise],
            clipping_norm=0.5,
            noise_multiplier=SIGMA,
            rounds=ROUNDS,
            delta=0.01,
            noise_placement="server",
        )

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.folder / "run")

    def start(self, *, write: int = 0, after: bool = False) -> BaseProcess:
        """Begin or resume the run; it kills itself at its durable write ``write``, from 1 on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        process = _processes.Process(target=_play, args=(self, write, after))
        process.start()
        return process

    def play(self, *, write: int = 0, after: bool = False) -> bool:
        """Begin or resume the run and wait; return True if it was killed."""
        process = self.start(write=write, after=after)
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), (self.folder / "log").read_text()[-3000:]
        return process.exitcode != 0

    def witnessed(self, event: str) -> list[dict[str, Any]]:
        lines = (self.folder / "witness").read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if entry["event"] == event]


def _play(trial: Trial, write: int, after: bool) -> None:
    """Run a trial in this process; die after ``write`` writes to disk."""
    log = os.open(trial.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    runs.write_report = lambda run: run.path  # its figures take too long
    witness = os.open(trial.folder / "witness", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(event: str, **values: Any) -> None:
        os.write(witness, (json.dumps({"event": event, **values}) + "\n").encode())

    _plant(trial.fault)
    _watch_noise(note)
    _watch_disk(note, write, after)

    class Watched(InProcessGrid):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            for message in messages:
                if message.metadata.message_type.startswith("train"):
                    number = message.content.config_records[records.ROUND]["number"]
                    (partition,) = [
                        p for p, n in nodes().items() if n == message.metadata.dst_node_id
                    ]
                    note("asked", number=number, client=partition)
            return super().send_and_receive(messages, timeout=timeout)

    config = {"run-directory": str(trial.run.path), "resume": True, "rounds": ROUNDS}
    with recorded_run({**config, "rounds": first_config(config)["rounds"]}, "toy") as run:
        strategy = FederatedStrategy(
            DPFedAvg(local=LocalTraining(epochs=1, batch_size=8, learning_rate=0.05)),
            trial.plan,
            seed=1,
            seeded_noise=trial.seeded,
            evaluate_every=0,
            directory=run,
            ledger=run.open_ledger(),
        )

        def nodes():
            return strategy.run.clients.nodes

        grid = Watched(DPFedAvg.client_app(task(), allow_seeded_noise=True), CLIENTS)
        record(run, strategy, grid, ArrayRecord(task().initial_params(0)), num_rounds=ROUNDS)


def _plant(fault: str) -> None:
    """Plant a fault in how a resumed noise stream continues."""
    restore = NoiseStream._restore

    def forgetting(self: NoiseStream, kept: Any) -> None:
        restore(self, kept)
        self._past = self.matrix.next({n: 0 * a for n, a in self._past.latest.items()}, None)

    def staying(self: NoiseStream, kept: Any) -> None:
        restore(self, kept)
        self._drawn = lambda like, source: self._past

    if fault == "earlier noise is forgotten":
        NoiseStream._restore = forgetting
    elif fault == "the last noise is used again":
        NoiseStream._restore = staying
    else:
        assert not fault


def _flat(arrays: Any) -> list[float]:
    return np.concatenate([np.asarray(arrays[name]).ravel() for name in sorted(arrays)]).tolist()


def _watch_noise(note: Any) -> None:
    """Note every noise that is drawn and every release."""
    draw, add = NoiseStream._drawn, PreparedNoise.add_gaussian

    def drawn(self: NoiseStream, like: Any, source: Any) -> Any:
        class Seen:
            def __init__(self, place: int) -> None:
                self.source = source(place)

            def gaussian(self, like: Any, stddev: float) -> Any:
                self.drawn = self.source.gaussian(like, stddev)
                return self.drawn

        made: list[Seen] = []
        past = draw(self, like, lambda place: made.append(Seen(place)) or made[-1])
        y = _flat(past.latest)
        note("drawn", place=self._training_round + 1, fresh=_flat(made[0].drawn), noise=y)
        return past

    def added(self: PreparedNoise, update: Any, stddev: float, *, grid: Any = None) -> Any:
        noise = _flat(self._left)
        noised = add(self, update, stddev, grid=grid)
        note("released", noise=noise, sum=_flat(update), stddev=stddev)
        return noised

    NoiseStream._drawn, PreparedNoise.add_gaussian = drawn, added


def _watch_disk(note: Any, write: int, after: bool) -> None:
    """Kill this process at a write to disk, before or after it."""
    sync, count = os.fsync, 0

    def killing(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count == write and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)
        if count == write:
            os.kill(os.getpid(), signal.SIGKILL)
        note("synced", count=count)

    os.fsync = killing


def faults_of(trial: Trial) -> list[str]:
    """Return every way in which the run's noise or its accounts break the guarantee; empty if none.

    Releases are matched with places by their noise. All that was noised counts as released.
    """
    faults: list[str] = []
    drawn, released = trial.witnessed("drawn"), trial.witnessed("released")
    places = {tuple(entry["noise"]): entry["place"] for entry in drawn}
    by_place = defaultdict(set)
    if len(places) < len(drawn):
        faults.append("noise was drawn twice")
    for entry in released:
        noise = tuple(entry["noise"])
        if noise in places:
            by_place[places[noise]].add((noise, tuple(entry["sum"])))
        else:
            faults.append("a release has noise that was never drawn")
    faults += [f"place {p} has {len(r)} releases" for p, r in by_place.items() if len(r) > 1]
    faults += _broken_correlation(trial, drawn, by_place)
    # Participations, from the messages that were sent.
    invited = sorted({(entry["number"], entry["client"]) for entry in trial.witnessed("asked")})
    if len({number for number, _ in invited}) < len(invited):
        faults.append("a training number was used twice")
    for client in range(CLIENTS):
        numbers = [number for number, partition in invited if partition == client]
        if len(numbers) > SAMPLING.participations:
            faults.append(f"client {client} took part {len(numbers)} times")
        if any(b - a < SAMPLING.rounds_apart for a, b in itertools.pairwise(numbers)):
            faults.append(f"client {client} took part too soon")
    # The guarantee covers all that was asked for.
    matrix = trial.plan.mechanism().strategy
    limits = {"rounds_apart": 2, "participations": 3}
    moves = matrix.row_moves(max([number for number, _ in invited], default=1), **limits)
    mu = float(np.linalg.norm(moves)) / (SIGMA * matrix.sensitivity(**limits))
    true = gaussian_loss(1 / mu, releases=1, delta=0.01).epsilon
    claims = trial.run.guarantees()
    if claims and claims[0].epsilon < true * (1 - 1e-9):
        faults.append(f"ε = {claims[0].epsilon:.6g} is reported, {true:.6g} was spent")
    return faults


def _broken_correlation(trial: Trial, drawn: list[dict[str, Any]], by_place: Any) -> list[str]:
    """Check C y = z over the noise that was released, and the last drawn where nothing was."""
    last = {entry["place"]: entry for entry in drawn}
    matrix = trial.plan.mechanism().strategy
    column, breaks = matrix.coefficients(len(last) + 1), []
    noise = {
        place: np.asarray(next(iter(by_place[place]))[0] if place in by_place else entry["noise"])
        for place, entry in last.items()
    }
    if sorted(noise) != [*range(1, len(noise) + 1)]:
        breaks.append(f"places {sorted(noise)}")
        return breaks
    for place, entry in last.items():
        fresh = sum(column[j] * noise[place - j] for j in range(place))
        if not np.allclose(fresh, entry["fresh"], rtol=0, atol=1e-12):
            breaks.append(f"the noise of place {place} does not go on with that before it")
    return breaks


@dataclass
class Outcome:
    """Results of many kills."""

    points: int = 0
    killed: int = 0
    faults: list[str] = field(default_factory=list)


def kill_everywhere(folder: Path, *, noise: str = "buffers") -> Outcome:
    """Kill runs before and after each of their durable writes; resume each and check it."""
    whole, outcome = Trial(folder / "whole", noise), Outcome()
    assert not whole.play()
    outcome.faults += faults_of(whole)
    writes = max(entry["count"] for entry in whole.witnessed("synced"))
    for write in range(1, writes + 1):
        for after in (False, True):
            trial = Trial(folder / f"{write}{after}", noise)
            outcome.points += 1
            outcome.killed += trial.play(write=write, after=after)
            assert not trial.play()
            outcome.faults += [f"write {write}, after={after}: {f}" for f in faults_of(trial)]
    return outcome


def kill_by_the_clock(folder: Path, points: int, *, noise: str = "bands") -> Outcome:
    """Kill processes from outside at times spread over a run; resume each, up to three times."""
    started, outcome = time.monotonic(), Outcome()
    assert not Trial(folder / "whole", noise).play()
    duration = time.monotonic() - started
    rng, number = np.random.default_rng(1), 0
    while outcome.killed < points:
        trial, number = Trial(folder / f"{number}", noise), number + 1
        for _ in range(3):
            process = trial.start()
            process.join(rng.uniform(0, duration))
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
            outcome.points += 1
            outcome.killed += process.exitcode != 0
        assert not trial.play()
        outcome.faults += [f"run {number}: {f}" for f in faults_of(trial)]
    return outcome


if __name__ == "__main__":
    import tempfile

    for name in NOISES:
        with tempfile.TemporaryDirectory() as made:
            print(name, "every durable write", kill_everywhere(Path(made), noise=name), flush=True)
    with tempfile.TemporaryDirectory() as made:
        print("by the clock", kill_by_the_clock(Path(made), 100), flush=True)
