"""A round of federated averaging: milliseconds and memory, beside pfl-research and Flower.

    python -m benchmarks speed [--pfl PYTHON] [--full] [--only lr] [--contender pfl] [--turns 2]

A round draws 100 of 1,000 clients. Each client holds 50 images (28×28) and trains for one epoch of
SGD in batches of 10 on one thread. All contenders run with and without central DP. ``--full`` adds
rounds of 1,000 of 10,000 clients. Two workers and the contenders on Ray may use every core.
``--device cuda`` trains on a GPU; the examples are on it before the clock starts.

pfl-research needs another environment: run ``python -m venv pfl; pfl/bin/pip install pfl torch``,
then name its Python by ``--pfl pfl/bin/python``.

The tables are those of ``docs/speed.md``, for one processor.
"""

import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

from benchmarks.command_line import command_parser
from benchmarks.speed.contest import HERE, Contender, by_turns, contenders
from benchmarks.speed.growth import growth
from benchmarks.speed.turns import Measured
from benchmarks.speed.workload import MODELS, Workload
from flower_ext.runs.page import table

OURS = "vectorised, in process"
NAMES = {
    "lr": "logistic regression, 7,850",
    "mlp": "perceptron, 50,890",
    "cnn": "convolutional, 147,146",
    "resnet": "ResNet-18, 11,173,962",
}
Contests = dict[str, list[dict[str, Measured]]]
"""For each model, the contenders' measurements without and with central DP."""


def main() -> None:
    """Print the tables, and write them."""
    parser = command_parser(__doc__)
    parser.add_argument("--pfl", type=Path, help="Python with pfl installed")
    parser.add_argument("--full", action="store_true", help="10,000 clients as well")
    parser.add_argument(
        "--only",
        nargs="+",
        action="extend",
        choices=MODELS,
        help="models; the first three by default",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--contender",
        nargs="+",
        action="extend",
        help="parts of names; ours and all others by default",
    )
    parser.add_argument("--turns", type=int, default=2, help="runs of each contender")
    parser.add_argument("--rounds", type=int, default=8, help="of a run; the first is not counted")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a run may take")
    parser.add_argument("--output", type=Path, default="runs/speed", help="folder of the tables")
    arguments = parser.parse_args()
    models = arguments.only or [*NAMES][:3]
    arguments.output.mkdir(parents=True, exist_ok=True)
    chosen_contenders = [
        candidate
        for candidate in contenders(arguments.pfl)
        if not arguments.contender
        or candidate.name == OURS
        or any(part in candidate.name for part in arguments.contender)
    ]
    parts = [
        f"{machine()} The smallest time and the largest memory of {arguments.turns} turns of "
        f"{arguments.rounds} rounds."
    ]
    best = partial(by_turns, turns=arguments.turns, timeout=arguments.timeout)
    sized = partial(Workload, rounds=arguments.rounds, device=arguments.device)

    def write(part: str) -> None:
        parts.append(part)
        (arguments.output / "speed.md").write_text("\n\n".join(parts) + "\n")
        print(f"{part}\n", flush=True)

    print(f"{parts[0]}\n", flush=True)
    small: Contests = {}
    for name in models:
        workloads = [sized(model=name, private=private) for private in (False, True)]
        small[name] = [best(chosen_contenders, workload) for workload in workloads]
    write(f"{title(100, 1_000)}, without and with central DP:\n\n{times(chosen_contenders, small)}")
    write(f"Peak memory in MB, without and with central DP:\n\n{memory(chosen_contenders, small)}")
    if arguments.full:
        # Flower's FedAvg alone stands for Ray here.
        large_contenders = [
            candidate
            for candidate in chosen_contenders
            if "Ray" not in candidate.name or "Flower" in candidate.name
        ]
        large: Contests = {}
        for name in models:
            workload = sized(model=name, clients=10_000, cohort=1_000)
            large[name] = [best(large_contenders, workload)]
        write(f"{title(1_000, 10_000)}, without privacy:\n\n{times(large_contenders, large)}")
        write(f"Peak memory in MB:\n\n{memory(large_contenders, large)}")
    if arguments.device == "cpu":
        write(growth(arguments.rounds, turns=arguments.turns, timeout=arguments.timeout))
    print(f"written to {arguments.output}")


def title(cohort: int, clients: int) -> str:
    """Name a table by the size of its rounds."""
    return f"{cohort:,} of {clients:,} clients a round; milliseconds a round (times ours)"


def times(chosen: Sequence[Contender], contests: Contests) -> str:
    """Return a table of milliseconds a round, and how many times ours they are."""

    def cell(measured: Measured, ours: Measured | None) -> str:
        took = f"{measured.milliseconds:,.{1 if measured.milliseconds < 1_000 else 0}f}"
        return f"{took} ({measured.milliseconds / ours.milliseconds:.2f})" if ours else took

    return _table(chosen, contests, cell)


def memory(chosen: Sequence[Contender], contests: Contests) -> str:
    """Return a table of megabytes at the peak."""
    return _table(chosen, contests, lambda measured, ours: f"{measured.megabytes:,.0f}")


def _table(chosen: Sequence[Contender], contests: Contests, cell: Callable[..., str]) -> str:
    """Return a row for each contender, with a cell for each model and privacy."""

    def cells(name: str, contests: Sequence[Mapping[str, Measured]]) -> str:
        return " / ".join(
            cell(measured[name], measured.get(OURS)) if name in measured else "–"
            for measured in contests
        )

    rows = [
        (contender.name, *(cells(contender.name, contest) for contest in contests.values()))
        for contender in chosen
    ]
    return table((processor(), *(NAMES[name] for name in contests)), rows)


def processor() -> str:
    """Return the processor's name from ``/proc/cpuinfo``, or a less exact one from Python."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def machine() -> str:
    """Describe the measured versions, the machine, and its other work."""
    others = psutil.cpu_percent(interval=2.0)
    return (
        f"flower-ext {version('flower-ext')}{_commit()} on {processor()}, {psutil.cpu_count()} "
        f"cores of which other work took {others:.0f} % before the run, Python "
        f"{platform.python_version()}, torch {torch.__version__}."
    )


def _commit() -> str:
    """Return the commit of the measured code; empty outside of a repository."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f" ({described.stdout.strip()})"


if __name__ == "__main__":
    main()
