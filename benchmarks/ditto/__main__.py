"""DP-Ditto against its baselines, and its λ and T: Figures 2 to 7 of its paper, one command each.

    python -m benchmarks.ditto 3 --data-folder DATA --output RESULTS
    python -m benchmarks.ditto planner --data-folder DATA --output RESULTS
    python -m benchmarks.ditto provable --data-folder DATA --output RESULTS

The default is 20 clients of two classes with 1,000 training records each, and three seeds. It takes
some minutes per figure and data set on two cores; ``--worlds cifar10-lenet`` takes half an hour.
Every method of Figures 3 and 4 runs at the best of three learning rates, the same three for all.
``planner`` compares the T* of Theorem 1, from a pilot run, with a sweep. ``provable`` is not in the
paper: its noise is in the local steps, for a provable ε of 10. ``--full`` takes the paper's
networks, 2,500 records and more T; it needs a GPU. The noise is what Eqn 8 asks for at the figure's
ε. Any other run-config value of the app can be overridden as ``name=value``. Finished runs in the
output folder are kept.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.ditto.experiment import APP, DEFAULT, FULL, WORLDS, Experiment
from benchmarks.ditto.figures import FIGURES
from benchmarks.runs import parser_of, settings, with_overrides


def main() -> None:
    """Run missing runs, print the table, and write it to ``figure<n>.md``."""
    parser = parser_of("benchmarks.ditto", __doc__)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, nargs="+", help="every T, of figures with several")
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, help="worlds of Figures 3 to 6")
    parser.add_argument("--no-search", action="store_true", help="use the paper's learning rate")
    parser.add_argument("--full", action="store_true", help="the paper's three data sets")
    parser.add_argument("overrides", nargs="*", help="name=value, right after the figure")
    arguments = parser.parse_args()

    defaults = settings(APP)
    try:
        changed = with_overrides(defaults, arguments.overrides)
    except ValueError as error:
        parser.error(str(error))
    folder, output = arguments.data_folder, arguments.output.absolute()
    scale = FULL if arguments.full else DEFAULT
    if arguments.rounds:
        T = tuple(arguments.rounds)
        scale = replace(scale, rounds=T, planned_rounds=T)
    if arguments.worlds:
        scale = replace(scale, worlds=arguments.worlds, training_worlds=arguments.worlds)
    if arguments.no_search:
        scale = replace(scale, learning_rates=())
    experiment = Experiment(
        folder=output,
        data_folder=str(Path(folder).absolute()) if folder else "",
        scale=replace(scale, seeds=tuple(range(1, arguments.seeds + 1))),
        workers=arguments.workers,
        overrides={n: changed[n] for n in (o.partition("=")[0] for o in arguments.overrides)},
    )
    (output / "figures").mkdir(parents=True, exist_ok=True)
    text = FIGURES[arguments.figure](experiment)
    name = f"figure{arguments.figure}" if arguments.figure.isdigit() else arguments.figure
    (output / f"{name}.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
