"""Growth of a round's cost with registered clients, cohort and parameters."""

from benchmarks.speed.contest import by_turns, contenders
from benchmarks.speed.workload import Workload
from flower_ext.runs.page import table

CLIENTS = (1_000, 3_000, 10_000)
COHORTS = (100, 300, 1_000)
HIDDEN = (10, 32, 100, 320)


def growth(rounds: int, *, turns: int, timeout: float) -> str:
    """Return a table of time and memory as each size grows alone, each the best of some turns."""
    ours, *_ = contenders(None)
    sweeps = {
        "registered clients": [Workload(clients=n, rounds=rounds) for n in CLIENTS],
        "clients a round": [Workload(clients=10_000, cohort=n, rounds=rounds) for n in COHORTS],
        "parameters": [Workload(model=f"wide-{width}", rounds=rounds) for width in HIDDEN],
    }
    rows = [
        (label, size_of(workload)[label], f"{best.milliseconds:.1f}", f"{best.megabytes:.0f}")
        for label, sweep in sweeps.items()
        for workload in sweep
        for best in by_turns([ours], workload, turns=turns, timeout=timeout).values()
    ]
    return f"## Growth\n\n{table(('what grows', 'to', 'ms a round', 'peak MB'), rows)}\n"


def size_of(workload: Workload) -> dict[str, str]:
    """Return the sizes of a workload, by their labels in the table."""
    return {
        "registered clients": f"{workload.clients:,}",
        "clients a round": f"{workload.cohort:,}",
        "parameters": f"{sum(p.numel() for p in workload.build().parameters()):,}",
    }
