"""A consortium's study: time to link a million rows and to query, and a survival curve.

    python -m benchmarks study --data-folder DATA [--rows 1000000] [--output figures]

`flower-ext link users` reads a CSV file of invented people in a process of its own, whose time and
largest memory are printed. The query asks for a mean, a variance, a histogram and quartiles of
10,000 users in five silos, under a secure sum. The figure has Kaplan–Meier's curve of TcgaBrca's
patients at ε = 1 beside the exact curve.
"""

import csv
import logging
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from benchmarks.command_line import command_parser
from benchmarks.released_statistics import rounds_of, terms_of
from flower_ext.data import find_files
from flower_ext.privacy import ReleasePlan, SecureSum
from flower_ext.runs.figures import Chart, draw_lines
from flower_ext_consortium.linkage import write_key
from flower_ext_consortium.statistics import read_statistics

USERS, SILOS, DAYS, INTERVALS = 10_000, 5, 3600, 12


def main() -> None:
    """Print the times, and the largest difference between both curves."""
    parser = command_parser(__doc__)
    parser.add_argument("--data-folder", type=Path, help="folder of the data sets")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the file to link")
    parser.add_argument("--output", type=Path, default="figures", help="folder of the figure")
    arguments = parser.parse_args()
    seconds, processor, megabytes = time_link(arguments.rows)
    print(f"link of {arguments.rows:,} rows: {seconds:.0f} s", end="")
    print(f" ({processor:.0f} s of a processor), {megabytes:.0f} MB")
    seconds, processor = time_query()
    print(f"query of {USERS:,} users in {SILOS} silos: {seconds:.1f} s ({processor:.1f} s)")
    figure, gap, error = draw_survival(arguments.data_folder, arguments.output)
    print(f"{figure}: curves differ by up to {gap:.3f}, with standard errors up to {error:.3f}")


def time_link(rows: int) -> tuple[float, float, float]:
    """Return seconds, a processor's seconds and megabytes of linking a file with ``rows`` rows."""
    with TemporaryDirectory() as folder:
        table, key = Path(folder) / "people.csv", Path(folder) / "study.key"
        write_key(key)
        with table.open("w", encoding="utf-8") as stream:
            stream.write("surname,given,born,age\n")
            for row in range(rows):
                person = row % (rows // 2)  # everybody twice
                born = f"{1920 + person % 90}-{1 + person % 12:02}-{1 + person % 28:02}"
                stream.write(f"Müller-{person},Anna {person % 977},{born},{person % 90}.5\n")
        command = [sys.executable, "-m", "flower_ext.cli.main", "link", "users", str(table)]
        command += ["--by", "surname", "--by", "given", "--by-date", "born", "--key", str(key)]
        command += ["--buckets", "10000000", "-o", str(Path(folder) / "linked.csv")]
        began = time.perf_counter()
        process = os.posix_spawn(sys.executable, command, os.environ)
        _, status, used = os.wait4(process, 0)
        assert status == 0
        seconds = time.perf_counter() - began
        return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6


def time_query() -> tuple[float, float]:
    """Return seconds, and a processor's, of one query of `USERS` users under a secure sum."""
    rng = np.random.default_rng(0)
    owners, silo = rng.integers(USERS, size=3 * USERS), rng.integers(SILOS, size=3 * USERS)
    owners[0] = USERS - 1
    age = rng.uniform(18, 95, 3 * USERS)
    silos = [({"age": age[silo == s]}, owners[silo == s]) for s in range(SILOS)]
    joint = read_statistics("variance age 18:95; histogram age 20:90:7; quantiles age 20:90")
    users, released = rounds_of(silos, joint)
    sums = SecureSum(colluding=0.2, dropouts=0.0)
    plan = ReleasePlan.for_target(epsilon=0.5, noise_placement=sums, **terms_of(users))
    began, began_work = time.perf_counter(), time.process_time()
    released(plan)
    return time.perf_counter() - began, time.process_time() - began_work


def draw_survival(folder: Path | None, output: Path) -> tuple[Path, float, float]:
    """Draw both curves; return the figure, their largest difference, and the standard error."""
    path, _ = find_files("tcga-brca", [("tcga_brca/brca.csv", "tcga_brca/centers.csv")], folder)
    with path.open(encoding="utf-8", newline="") as stream:
        patients = [(float(row["T"]), float(row["E"])) for row in csv.DictReader(stream)]
    days, events = np.array(patients).T
    joint = read_statistics(f"survival days event 0:{DAYS}:{INTERVALS}")
    columns = {"days": days, "event": events}
    users, released = rounds_of([(columns, np.arange(len(days)))], joint)
    (curve,) = released(ReleasePlan.for_target(epsilon=1.0, **terms_of(users))).values()
    ends = np.linspace(0, DAYS, INTERVALS + 1)[1:]
    exact, places = kaplan_meier(days, events, ends), ends.tolist()
    lines = {
        "ε = 1": [(places, [each.value for each in curve])],
        "exact": [(places, exact)],
        "95 % interval, lower": [(places, [each.lower for each in curve])],
        "95 % interval, upper": [(places, [each.upper for each in curve])],
    }
    title = "Kaplan–Meier curve of TcgaBrca"
    chart = Chart(title=title, xlabel="days", ylabel="share alive", lines=lines)
    figure = draw_lines(output, "survival", chart)
    gap = max(abs(each.value - truth) for each, truth in zip(curve, exact, strict=True))
    return figure, gap, max(each.standard_error for each in curve)


def kaplan_meier(
    days: NDArray[np.float64], events: NDArray[np.float64], ends: NDArray[np.float64]
) -> list[float]:
    """Return the exact share of people without an event at each end."""
    times, deaths = np.unique(days[events == 1], return_counts=True)
    at_risk = np.sum(days >= times[:, np.newaxis], axis=1)
    shares = np.cumprod(1 - deaths / at_risk)
    return [float(shares[times <= end][-1]) if times[0] <= end else 1.0 for end in ends]


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    main()
