"""Upcycled-FL against the methods it wraps: Tables 1, 3 and 5 and Figures 3 and 4 of its paper.

    python -m benchmarks.upcycled --data-folder DATA --output RESULTS

The default takes 20 minutes on two cores: Table 1 on the four synthetic sets with 30 training
rounds and a small grid, Table 5, and Figures 3 and 4 for some methods. ``--full`` is the paper's
setting: 80 training rounds, Table 3, letters, the whole grid, all methods. Without a data folder
the synthetic devices are generated, with 10 classes. Finished runs in the output folder are kept,
so an interrupted benchmark continues.
"""

from __future__ import annotations

import os
import platform
from dataclasses import replace

from benchmarks.runs import Experiment, parser_of
from benchmarks.upcycled.experiment import APP, DEFAULT, DEVICES, FULL, base_config
from benchmarks.upcycled.figures import figures
from benchmarks.upcycled.table1 import accuracies
from benchmarks.upcycled.table5 import times, warm_up

PARTS = ("time", "accuracy", "figures")


def main() -> None:
    """Run the requested parts, print their tables, and write ``results.md``."""
    parser = parser_of("benchmarks.upcycled", __doc__)
    parser.add_argument("--full", action="store_true", help="the paper's setting")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument(
        "--datasets", nargs="+", choices=list(DEVICES), help="data sets of the accuracy tables"
    )
    parser.add_argument("--training-rounds", type=int, help="of the accuracy tables")
    parser.add_argument("--search-rounds", type=int, help="training rounds while searching")
    parser.add_argument(
        "--joint-search",
        action="store_true",
        help="search coefficients at every learning rate, not only at the plain method's",
    )
    parser.add_argument("--learning-rates", nargs="+", type=float, help="of the accuracy tables")
    parser.add_argument("--private-rounds", type=int, help="visible rounds of Figures 3 and 4")
    arguments = parser.parse_args()

    scale = FULL if arguments.full else DEFAULT
    given = {
        "datasets": arguments.datasets and tuple(arguments.datasets),
        "training_rounds": arguments.training_rounds,
        "search_rounds": arguments.search_rounds,
        "joint_search": arguments.joint_search,
        "learning_rates": arguments.learning_rates and tuple(arguments.learning_rates),
        "private_rounds": arguments.private_rounds,
    }
    scale = replace(scale, **{name: value for name, value in given.items() if value})
    folder = arguments.output.absolute()
    experiment = Experiment(
        app=APP, folder=folder, base=base_config(arguments.data_folder), workers=arguments.workers
    )
    folder.mkdir(parents=True, exist_ok=True)
    if "time" in arguments.parts:  # before the cores are busy
        warm_up(experiment)
        print(times(experiment, scale))
    if "accuracy" in arguments.parts:
        for ratio in scale.straggler_ratios:
            print(accuracies(experiment, scale, ratio))
    if "figures" in arguments.parts:
        print(figures(experiment, scale))
    # Includes what earlier calls left in this folder.
    found = [*folder.glob("stragglers-*/table.md"), *folder.glob("*-*.md"), *folder.glob("time.md")]
    machine = f"Machine: {platform.machine()}, {os.cpu_count()} cores; "
    machine += f"Python {platform.python_version()}."
    text = "\n\n".join([*(path.read_text().strip() for path in found), machine])
    (folder / "results.md").write_text(text + "\n")
    print(f"All tables: {folder / 'results.md'}")


if __name__ == "__main__":
    main()
