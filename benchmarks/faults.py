"""Faults injected into whole runs: report what breaks.

    python -m benchmarks faults [--quick] [--output RESULTS] [--seed 0]

Methods run in this process while replies are dropped, late, malformed, repeated and forged, and
clients raise. Each round's aggregate and each run's ε are recomputed from the replies that should
count. Clients get malformed requests. Noise is measured under dropout. Every message of the
personalised methods is searched for parameters that must stay on the client. Then, unless
``--quick``, processes are killed (`kill`), and a real SuperLink with real SuperNodes is disturbed
(`processes`).

``--quick`` takes a minute: a twentieth of the methods' rounds and of the malformed requests, a
fifth of the rounds with measured noise, and 3 of 8 rounds whose messages are searched. In full, the
parts in this process take some ten minutes. Each part is written down as it ends. The exit status
is 1 if a part failed or a promise was broken, and the last line names these parts.
"""

import logging
import platform
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.command_line import command_parser
from flower_ext.privacy.mechanisms.noised_sum import NoisePlacement
from flower_ext.runs.page import table
from tests.faults import kill, processes
from tests.faults.clients import Asked, everyone
from tests.faults.engine import Outcome, run_case
from tests.faults.noise import Measured, measure
from tests.faults.wire import Searched, search
from tests.faults.worlds import CASES, PERSONALISED, PRIVATE

DROPOUTS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)


def main() -> None:
    """Run, print and write the report."""
    parser = command_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, and no processes")
    parser.add_argument("--output", type=Path, default="runs/faults", help="folder of the report")
    parser.add_argument("--seed", type=int, default=0, help="seed of all faults")
    parser.add_argument("--points", type=int, default=100, help="points at which to kill processes")
    parser.add_argument("--only", nargs="+", action="extend", help="parts to run; all by default")
    arguments = parser.parse_args()
    quick, output, seed = arguments.quick, arguments.output, arguments.seed
    output.mkdir(parents=True, exist_ok=True)
    scale = 20 if quick else 1
    parts: dict[str, Callable[[], tuple[str, bool]]] = {
        "engine": lambda: engine(210 // scale, 36, private_rounds=60 // scale, seed=seed),
        "clients": lambda: clients(1_000 // scale, seed=seed),
        "noise": lambda: noise(12 if quick else 60, seed=seed),
        "wire": lambda: wire(3 if quick else 8),
    }
    if not quick:
        parts |= {
            "kill": lambda: killed_processes(arguments.points, seed=seed),
            **{f"processes-{plan.name}": partial(real_processes, plan) for plan in processes.PLANS},
        }
    chosen = arguments.only or [*parts]
    if unknown := [name for name in chosen if name not in parts]:
        parser.error(f"--only {unknown[0]}: expected one of {', '.join(parts)}")
    broken = run_parts({name: parts[name] for name in chosen}, output / "faults.md")
    sys.exit(1 if broken else 0)


def run_parts(parts: Mapping[str, Callable[[], tuple[str, bool]]], report: Path) -> list[str]:
    """Run all parts and write each down as it ends; return those that failed or broke a promise.

    A part that raises does not stop the others, and after an interrupt the report holds what has
    ended. The last line, printed and written, is the verdict; a report without it is unfinished.
    """
    report.write_text("", encoding="utf-8")

    def tell(text: str) -> None:
        with report.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n\n")
        print(f"\n{text}", flush=True)

    tell(f"# Faults\n\n{platform.machine()}, Python {platform.python_version()}.")
    broken = []
    for name, part in parts.items():
        started = time.monotonic()
        try:
            text, kept = part()
            verdict = "kept" if kept else "not kept"
        except Exception:
            text, verdict = f"## {name}\n\n```\n{traceback.format_exc()}```", "failed"
        tell(f"{text}\n\n{time.monotonic() - started:.0f} s, {verdict}.")
        if verdict != "kept":
            broken.append(f"{name} ({verdict})")
    print(f"\nwritten to {report}")
    tell(f"NOT ALL KEPT: {', '.join(broken)}" if broken else "all kept")
    return broken


def engine(rounds: int, flood: int, *, private_rounds: int, seed: int) -> tuple[str, bool]:
    """Run all methods under mixed faults."""
    outcomes = [run_case(case, rounds, flood=flood, seed=seed) for case in CASES]
    outcomes.append(run_case(PRIVATE, private_rounds, flood=flood, seed=seed))
    faults: Counter[str] = sum((o.faults for o in outcomes), Counter())
    flooded = sum(o.faults["malformed"] for o in outcomes)
    text = f"## Runs under faults\n\n{engine_table(outcomes)}\n\n{totals_table(faults)}"
    text += f"\n\n{len(_kinds(outcomes))} kinds of malformed replies, {flooded:,} of them."
    return text, all(kept(outcome) for outcome in outcomes)


def kept(outcome: Outcome) -> bool:
    """Return True if a run broke nothing that should hold."""
    broken = (outcome.crashes, outcome.accepted, outcome.wrong_aggregates, outcome.unexplained)
    return not any(broken) and outcome.epsilon_is_right


def engine_table(outcomes: Sequence[Outcome]) -> str:
    """Return a table with one row per method."""
    return table(
        (
            "method",
            "rounds",
            "released",
            "faults",
            "malformed",
            "crashes",
            "wrongly used",
            "wrong aggregates",
            "ε right",
        ),
        [
            (
                o.name,
                o.rounds,
                o.released,
                f"{sum(o.faults.values()) - o.faults['malformed']:,}",
                f"{o.faults['malformed']:,}",
                len(o.crashes),
                len(o.accepted),
                len(o.wrong_aggregates),
                "none stated" if not o.epsilon else "yes" if o.epsilon_is_right else "NO",
            )
            for o in outcomes
        ],
    )


def totals_table(faults: Counter[str]) -> str:
    """Return a table with one row per kind of fault, over all methods."""
    descriptions = {
        "dropped": "reply lost",
        "late": "reply of an earlier round (stale)",
        "raises": "client raises",
        "malformed": "malformed reply",
        "huge": "upload 10,000 times too large",
        "duplicated": "reply twice",
        "replayed": "reply of an earlier round again (replayed)",
        "relabelled": "the same, relabelled as of this round",
        "stranger": "reply of a node that was not asked",
    }
    return table(
        ("fault", "number"), [(text, f"{faults[name]:,}") for name, text in descriptions.items()]
    )


def _kinds(outcomes: Sequence[Outcome]) -> set[str]:
    return {kind for outcome in outcomes for kind in outcome.wrong}


def clients(count: int, *, seed: int) -> tuple[str, bool]:
    """Send malformed requests to the clients of all methods."""
    replies = everyone(count, seed=seed)
    header = ("method", "malformed requests", "kinds", "answered", "remembered", "sound", "refused")
    rows = [
        (n, a.requests, len(a.wrong), len(a.answered), len(a.remembered), a.sound, a.refused)
        for n, a in replies.items()
    ]
    return f"## Malformed requests\n\n{table(header, rows)}", all(map(_sound, replies.values()))


def _sound(client: Asked) -> bool:
    return not (client.answered or client.remembered or client.refused)


def noise(rounds: int, *, seed: int) -> tuple[str, bool]:
    """Compare measured noise with the noise accounted for."""
    placements: tuple[NoisePlacement, ...] = ("client", "server")
    measurements: list[Measured] = [
        measure(dropout, placement, rounds=rounds, seed=seed)
        for placement in placements
        for dropout in DROPOUTS
    ]
    header = ("dropout", "noise by", "rounds released", "measured / accounted", "P(as little)")
    rows = [
        (
            f"{m.dropout:.0%}",
            m.placement,
            f"{m.released} of {m.rounds}",
            f"{m.ratio:.4f}" if m.released else "–",
            f"{m.too_little:.3f}" if m.released else "–",
        )
        for m in measurements
    ]
    return f"## Noise under dropout\n\n{table(header, rows)}", all(m.enough for m in measurements)


def wire(rounds: int) -> tuple[str, bool]:
    """Search every message of every personalised method."""
    searches: list[Searched] = [
        search(name, build(), rounds=rounds) for name, build in PERSONALISED.items()
    ]
    header = ("method", "messages", "bytes on the wire", "personal bytes", "of these on the wire")
    rows = [
        (f.name, f.messages, f"{f.wire_bytes:,}", f"{f.personal_bytes:,}", f.found_bytes)
        for f in searches
    ]
    nothing_found = all(f.found_bytes == f.found_names == 0 for f in searches)
    return f"## Personal parameters on the wire\n\n{table(header, rows)}", nothing_found


def killed_processes(points: int, *, seed: int) -> tuple[str, bool]:
    """Kill processes at ``points`` points, and resume them."""
    outcomes = kill.run(points, seed=seed)
    rows = table(kill.HEADER, [outcome.row() for outcome in outcomes])
    failures = [f"* {failure}" for outcome in outcomes for failure in outcome.failures]
    where = [
        f"{outcome.kind}: " + ", ".join(f"{count} at {place}" for place, count in at)
        for outcome in outcomes
        if (at := sorted(outcome.at.items()))
    ]
    return "\n\n".join([f"## Killed processes\n\n{rows}", *where, *failures]), not failures


def real_processes(plan: processes.Plan) -> tuple[str, bool]:
    """Disturb a real SuperLink and real SuperNodes by ``plan``."""
    with tempfile.TemporaryDirectory() as folder:
        rows, outcome = processes.run(Path(folder), plan)
        # Still inside the folder, because an outcome reads its run directory on access.
        text = f"## Real processes, {plan.name}\n\n{processes.report(rows, outcome)}"
        return text, outcome.kept


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    main()
