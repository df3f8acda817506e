"""Growth of a round's cost with registered clients, cohort and parameters."""

from __future__ import annotations

from benchmarks.speed.contest import Contender, contenders
from benchmarks.speed.turns import Measured
from benchmarks.speed.workload import Workload
from flower_ext.runs.page import table

CLIENTS = (1_000, 3_000, 10_000)
COHORTS = (100, 300, 1_000)
HIDDEN = (10, 32, 100, 320)


def growth(rounds: int) -> str:
    """Return a table of time and memory as each size grows alone."""
    ours = contenders(None)[0]
    sweeps = {
        "registered clients": [Workload(clients=n, rounds=rounds) for n in CLIENTS],
        "clients a round": [Workload(clients=10_000, cohort=n, rounds=rounds) for n in COHORTS],
        "parameters": [Workload(model=f"wide-{width}", rounds=rounds) for width in HIDDEN],
    }
    rows = [
        (label, f"{size:,}", f"{measured.milliseconds:.1f}", f"{measured.megabytes:.0f}")
        for label, sweep in sweeps.items()
        for size, measured in _measured(ours, label, sweep)
    ]
    return f"## Growth\n\n{table(('what grows', 'to', 'ms a round', 'peak MB'), rows)}\n"


def _measured(ours: Contender, label: str, sweep: list[Workload]) -> list[tuple[int, Measured]]:
    points = []
    for workload in sweep:
        size = {
            "registered clients": workload.clients,
            "clients a round": workload.cohort,
            "parameters": sum(p.numel() for p in workload.build().parameters()),
        }[label]
        if (measured := ours.run(workload, timeout=900)) is not None:
            points.append((size, measured))
    return points
