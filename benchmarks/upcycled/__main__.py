"""Upcycled-FL beside the methods it wraps: Tables 1, 3 and 5 and Figures 3 and 4 of its paper.

    python -m benchmarks upcycled-fl --data-folder DATA --output RESULTS

By default, the benchmark makes Table 1 on the four synthetic sets with 30 training rounds and a
small grid, Table 5, and Figures 3 and 4 for some methods. This takes 20 minutes on two cores.
``--full`` takes the paper's setting: 80 training rounds, Table 3, the whole grid and all methods.
``--datasets letters`` takes a data set of this project in place of FEMNIST. Without a data folder,
the synthetic devices are generated, with 10 classes. Finished runs in the output folder are kept,
so an interrupted benchmark continues.
"""

import argparse

from benchmarks.command_line import changed_scale, experiment_parser
from benchmarks.runs import Experiment
from benchmarks.upcycled.experiment import DEFAULT, DEVICES, FULL, METHODS, SETTINGS
from benchmarks.upcycled.figures import figures
from benchmarks.upcycled.table1 import accuracies
from benchmarks.upcycled.table5 import times, warm_up

PARTS = ("time", "accuracy", "figures")


def main() -> None:
    """Run the requested parts; print and write their tables."""
    parser = experiment_parser(__doc__)
    parser.add_argument("--full", action="store_true", help="the paper's setting")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument(
        "--datasets", nargs="+", choices=list(DEVICES), help="data sets of the accuracy tables"
    )
    parser.add_argument("--training-rounds", type=int, help="of the accuracy tables")
    parser.add_argument("--search-rounds", type=int, help="training rounds while searching")
    parser.add_argument(
        "--joint-search",
        action=argparse.BooleanOptionalAction,
        help="search coefficients at every learning rate, not only at the plain method's",
    )
    parser.add_argument(
        "--method-parameters",
        action=argparse.BooleanOptionalAction,
        help="search each method's own parameter, too",
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="of tables and figures")
    parser.add_argument(
        "--straggler-ratios", nargs="+", type=float, help="0.9 for Table 1, 0.3 for Table 3"
    )
    parser.add_argument("--learning-rates", nargs="+", type=float, help="of the accuracy tables")
    parser.add_argument("--private-rounds", type=int, help="visible rounds of Figures 3 and 4")
    arguments = parser.parse_args()
    scale = changed_scale(
        FULL if arguments.full else DEFAULT, arguments, private_methods=arguments.methods
    )
    experiment = Experiment.of(arguments, "upcycled-fl", SETTINGS)
    if "time" in arguments.parts:  # before the cores are busy
        warm_up(experiment)
        times(experiment, scale)
    if "accuracy" in arguments.parts:
        for ratio in scale.straggler_ratios:
            accuracies(experiment, scale, ratio)
    if "figures" in arguments.parts:
        figures(experiment, scale)


if __name__ == "__main__":
    main()
