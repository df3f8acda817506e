"""Uldp-FL's methods for whole users: Figures 2, 4 to 8 and 10 of its paper.

    python -m benchmarks uldp-fl --data-folder DATA --output RESULTS --figures 4

The default is scaled down: one allocation of records per data set, few rounds and local epochs, and
rates from a short search on another seed. It takes about a quarter of an hour on one idle core,
mostly for Figures 5 and 8. ``--full`` takes the paper's setting, with the rates of its authors'
scripts. Runs in the output folder are kept, so an interrupted figure continues.
The experiment ``weighting-figures`` makes Figures 11 and 12. Figure 13 is in the report of a run of
the app.
"""

from collections.abc import Callable, Mapping

from benchmarks.command_line import changed_scale, experiment_parser
from benchmarks.runs import Experiment
from benchmarks.uldp.budgets import budgets
from benchmarks.uldp.experiment import DEFAULT, FIGURE_OF, FULL, METHODS, SETTINGS, Scale
from benchmarks.uldp.groups import group_conversion
from benchmarks.uldp.problems import PROBLEMS, all_panels
from benchmarks.uldp.sampling import sampling_rates
from benchmarks.uldp.utility import utility
from benchmarks.uldp.weighting import weighting

FIGURES: Mapping[int, Callable[[Experiment, Scale], str]] = {
    2: group_conversion,
    **{figure: utility(problems) for figure, problems in PROBLEMS.items()},
    8: weighting,
    10: sampling_rates,
}


def main() -> None:
    """Run the requested figures; print and write their tables."""
    parser = experiment_parser(__doc__)
    parser.add_argument("--full", action="store_true", help="the paper's setting")
    parser.add_argument("--figures", nargs="+", type=int, default=[*FIGURES], choices=FIGURES)
    parser.add_argument(
        "--all-panels", action="store_true", default=None, help="users and distributions"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="of Figures 4 to 7")
    parser.add_argument(
        "--datasets", nargs="+", choices=FIGURE_OF, help="of figures with several data sets"
    )
    parser.add_argument(
        "--budgets", action="store_true", help="the ε of all panels; nothing is trained"
    )
    parser.add_argument("--seeds", type=int, help="runs of each method")
    parser.add_argument("--rounds", type=int, help="of every run but those of the search")
    arguments = parser.parse_args()
    scale = changed_scale(FULL if arguments.full else DEFAULT, arguments)
    experiment = Experiment.of(arguments, "uldp-fl", SETTINGS)
    if arguments.budgets:
        for figure in filter(PROBLEMS.__contains__, arguments.figures):
            text = budgets(experiment, figure, all_panels(PROBLEMS[figure]))
            experiment.write(f"budgets-{figure}", text)
        return
    for figure in arguments.figures:
        experiment.write(f"figure-{figure}", FIGURES[figure](experiment, scale))


if __name__ == "__main__":
    main()
