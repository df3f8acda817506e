"""Reproduce Figures 2, 4 to 8 and 10 of the Uldp-FL paper, each by one command.

    python -m benchmarks.uldp --data-folder DATA --output RESULTS --figures 4

The default is scaled down: one allocation of records per data set, few rounds and local epochs, and
rates from a short search on another seed. It takes about a quarter of an hour on one idle core,
mostly for Figures 5 and 8. ``--full`` takes the paper's setting, with the rates of its authors'
scripts. Runs in the output folder are kept, so an interrupted figure continues.
``benchmarks.uldp.protocol`` makes Figures 11 and 12, and ``benchmarks.uldp.users`` measures the
training of users. Figure 13 is in the report of a run of the app.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace

from benchmarks.runs import Experiment, parser_of
from benchmarks.uldp.app import APP
from benchmarks.uldp.experiment import DEFAULT, FULL, Scale, base_config
from benchmarks.uldp.groups import group_conversion
from benchmarks.uldp.sampling import sampling_rates
from benchmarks.uldp.utility import PROBLEMS, utility
from benchmarks.uldp.weighting import weighting

FIGURES: Mapping[int, Callable[[Experiment, Scale], str]] = {
    2: group_conversion,
    **{figure: utility(problems) for figure, problems in PROBLEMS.items()},
    8: weighting,
    10: sampling_rates,
}


def main() -> None:
    """Run the requested figures, print their tables, and write ``results.md``."""
    parser = parser_of("benchmarks.uldp", __doc__)
    parser.add_argument("--full", action="store_true", help="the paper's setting")
    parser.add_argument("--figures", nargs="+", type=int, default=[*FIGURES], choices=FIGURES)
    parser.add_argument("--all-panels", action="store_true", help="users and distributions")
    parser.add_argument("--seeds", type=int, help="runs of each method")
    parser.add_argument("--rounds", type=int, help="of every run but those of the search")
    arguments = parser.parse_args()

    scale = FULL if arguments.full else DEFAULT
    given = {
        "seeds": arguments.seeds,
        "rounds": arguments.rounds,
        "all_panels": arguments.all_panels,
    }
    scale = replace(scale, **{name: value for name, value in given.items() if value})
    folder = arguments.output.absolute()
    experiment = Experiment(
        app=APP, folder=folder, base=base_config(arguments.data_folder), workers=arguments.workers
    )
    folder.mkdir(parents=True, exist_ok=True)
    for figure in arguments.figures:
        text = FIGURES[figure](experiment, scale)
        (folder / f"figure-{figure}.md").write_text(text + "\n")
        print(f"{text}\n")
    # Include the figures of earlier calls in this folder.
    found = [folder / f"figure-{figure}.md" for figure in FIGURES]
    machine = f"Machine: {platform.machine()}, {os.cpu_count()} cores; "
    machine += f"Python {platform.python_version()}."
    parts = [path.read_text().strip() for path in found if path.exists()]
    (folder / "results.md").write_text("\n\n".join([*parts, machine]) + "\n")
    print(f"All tables: {folder / 'results.md'}")


if __name__ == "__main__":
    main()
