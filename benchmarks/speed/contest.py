"""Run contenders in turn, each in its own process: time of a round, and peak memory."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from benchmarks.speed.turns import Measured, best_of
from benchmarks.speed.workload import Workload

HERE = Path(__file__).parent
POLL = 0.2
"""Seconds between two measurements of memory."""


@dataclass(frozen=True)
class Contender:
    """A program that runs a workload in ``workers`` processes and prints what a round took."""

    name: str
    command: tuple[str, ...]
    workers: int = 1

    def run(self, workload: Workload, *, timeout: float) -> Measured | None:
        """Measure a round, the median of those after the first, and the memory of all processes.

        If the workload fails or exceeds ``timeout``, print why and return None.
        """
        workload = replace(workload, workers=self.workers)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(workload.threads),
            "MKL_NUM_THREADS": str(workload.threads),
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PFL_PYTORCH_DEVICE": workload.device,
        }
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                [*self.command, *workload.arguments()], stdout=out, stderr=log, env=environment
            )
            peak = _watch(process, timeout)
            out.seek(0)
            log.seek(0)
            lines = [line for line in out.read().splitlines() if line.startswith('{"ms"')]
            if process.returncode or not lines:
                reason = log.read()[-500:] if peak is not None else f"more than {timeout:.0f} s"
                print(f"{self.name}, {workload}: {reason}", file=sys.stderr)
                return None
        assert peak is not None
        return Measured(json.loads(lines[-1])["ms"], peak)


def contenders(pfl_python: Path | None) -> list[Contender]:
    """Return all contenders; pfl-research only where it is installed."""

    def module(name: str, *more: str) -> tuple[str, ...]:
        return (sys.executable, "-m", f"benchmarks.speed.{name}", *more)

    known = [
        Contender("vectorised, in process", module("ours", "--engine", "vectorised")),
        Contender("the same with two workers", module("ours", "--engine", "vectorised"), workers=2),
        Contender("loop, in process", module("ours", "--engine", "loop")),
        Contender("bare PyTorch loop", module("plain_pytorch")),
        Contender("ours on Ray", module("ours", "--engine", "ray")),
        Contender("ours on Ray, 4 nodes", module("ours", "--engine", "ray-nodes")),
        Contender("Flower's FedAvg on Ray", module("flower_fedavg")),
    ]
    if pfl_python is not None:
        pfl = Contender("pfl-research", (str(pfl_python), str(HERE / "pfl_research.py")))
        known.insert(3, pfl)
    return known


def by_turns(
    chosen: Sequence[Contender], workload: Workload, *, turns: int, timeout: float
) -> dict[str, Measured]:
    """Return each contender's smallest time and largest memory in any of several turns."""
    runs = {one.name: partial(one.run, workload, timeout=timeout) for one in chosen}
    return best_of(turns, runs)


def _watch(process: subprocess.Popen[bytes], timeout: float) -> float | None:
    """Wait for a process; return the peak memory of its family, or None after ``timeout`` seconds.

    Pages that several processes share count once.
    """
    deadline, peak = time.monotonic() + timeout, 0.0
    while process.poll() is None:
        if time.monotonic() > deadline:
            for member in _family(process.pid):
                member.kill()
            process.wait()
            return None
        peak = max(peak, sum(map(_megabytes, _family(process.pid))))
        time.sleep(POLL)
    return peak


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []


def _megabytes(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().pss) / 1e6
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0.0
