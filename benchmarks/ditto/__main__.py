"""DP-Ditto beside its baselines, and its λ and T: Figures 2 to 7 of its paper.

    python -m benchmarks dp-ditto 3 --data-folder DATA --output RESULTS
    python -m benchmarks dp-ditto planner --data-folder DATA --output RESULTS
    python -m benchmarks dp-ditto provable --data-folder DATA --output RESULTS

The default is 20 clients of two classes with 1,000 training records each, and three seeds. A figure
takes some minutes per data set on two cores; ``--worlds cifar10-lenet`` takes half an hour. Every
method of Figures 3 and 4 runs at the best of the same three learning rates. The noise is what Eqn 8
requires for the figure's ε. ``--full`` takes the paper's networks, 2,500 records and more T.

``planner`` compares the T* of Theorem 1, from a pilot run, with a sweep over T. ``provable`` is not
in the paper: clients noise their local steps, for a provable ε of 10.

Any other run-config value of the app can be overridden as ``name=value``. Finished runs in the
output folder are kept.
"""

from benchmarks.command_line import changed_scale, experiment_parser, parse_overrides
from benchmarks.ditto.experiment import DEFAULT, FULL, SETTINGS, WORLDS
from benchmarks.ditto.figures import FIGURES
from benchmarks.runs import Experiment


def main() -> None:
    """Run missing runs, print the table, and write it to ``figure-<n>.md``."""
    parser = experiment_parser(__doc__)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, nargs="+", help="every T, of figures with several")
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, help="worlds of Figures 3 to 6")
    parser.add_argument(
        "--no-search",
        dest="learning_rates",
        action="store_const",
        const=(),
        help="use the paper's learning rate",
    )
    parser.add_argument("--full", action="store_true", help="the paper's three data sets")
    parser.add_argument("overrides", nargs="*", help="name=value, right after the figure")
    arguments = parser.parse_args()
    overrides = parse_overrides(parser, "dp-ditto", arguments.overrides)
    scale = changed_scale(
        FULL if arguments.full else DEFAULT,
        arguments,
        planned_rounds=arguments.rounds,
        training_worlds=arguments.worlds,
        seeds=range(1, arguments.seeds + 1),
    )
    changes = SETTINGS | {"examples-per-client": scale.examples} | overrides
    experiment = Experiment.of(arguments, "dp-ditto", changes)
    figure = arguments.figure
    name = f"figure-{figure}" if figure.isdigit() else figure
    experiment.write(name, FIGURES[figure](experiment, scale))


if __name__ == "__main__":
    main()
