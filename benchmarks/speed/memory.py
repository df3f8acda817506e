"""Memory and time of a round by cohort and parameters, with synthetic updates.

    python -m benchmarks memory

Each point is a process: one round in which every client's update is clipped and added, and the
server noises the sum.
"""

import sys

from benchmarks.command_line import command_parser
from benchmarks.speed.contest import Contender
from benchmarks.speed.workload import Workload
from flower_ext.runs.page import table

MILLIONS, COHORTS = (0.11, 1.1, 11.0), (10, 100, 1_000)


def main() -> None:
    """Measure a round at each point, and print the table."""
    command_parser(__doc__).parse_args()
    point = Contender("a round", (sys.executable, "-m", "benchmarks.speed.synthetic_updates"))
    rows = []
    for millions in MILLIONS:
        for cohort in COHORTS:
            model = f"synthetic-{int(millions * 1e6)}"
            workload = Workload(model=model, clients=cohort, cohort=cohort)
            if (measured := point.run(workload, timeout=900)) is not None:
                rows.append(
                    (
                        f"{millions:g}",
                        f"{cohort:,}",
                        f"{measured.megabytes:.0f}",
                        f"{measured.milliseconds / 1e3:.1f}",
                        f"{4 * millions * cohort:,.0f}",
                    )
                )
    header = ("parameters, millions", "clients a round", "peak MB", "seconds", "MB of all updates")
    print(table(header, rows))


if __name__ == "__main__":
    main()
