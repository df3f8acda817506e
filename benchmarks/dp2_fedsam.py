"""DP²-FedSAM beside its baselines: one table and one figure, over several seeds.

    python -m benchmarks dp2-fedsam --data-folder DATA --output RESULTS

The default is MNIST with 100 clients of two classes each, r = 0.1, ε = 2 (provable, released
models), δ = 1/N, which suits two CPU cores. ``--preset dp2-table2-1000-2`` is a column of the
paper's Table II as the paper has it, but from random instead of ImageNet weights; ``--preset
dp2-table2-1000-2 calibration=provable sampling=poisson`` is the same column at an ε that holds. Any
run-config value of the app can be overridden as ``name=value``. Finished runs in the output folder
are kept, so an interrupted table continues.
"""

from benchmarks.command_line import experiment_parser, parse_overrides
from benchmarks.runs import APPS, Config, Experiment, preset_settings
from flower_ext.runs import write_comparison
from flower_ext.runs.app_settings import presets

METHODS = (
    "dp-fedavg",
    "dp-fedsam",
    "dp-fedavg-ft",
    "dp-fedsam-ft",
    "centaur",
    "dp2-fedsam",
    "fedavg",
    "p-fedsam",
    "own-head",
)
DEFAULT: Config = {
    "dataset": "mnist",
    "model": "mnist-cnn",
    "clients": 100,
    "sampling-rate": 0.1,
    "rounds": 60,
    "epsilon": 2.0,
    "clipping-norm": 0.1,
    "batch-size": 32,
    "evaluate-every": 30,
}


def main() -> None:
    """Run missing runs, then write the comparison."""
    parser = experiment_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--preset", choices=presets(APPS / "dp2-fedsam"), help="as in the paper")
    parser.add_argument("overrides", nargs="*", help="run-config values, name=value")
    arguments = parser.parse_args()
    overrides = parse_overrides(parser, "dp2-fedsam", arguments.overrides)
    base = DEFAULT
    if arguments.preset:
        base = preset_settings("dp2-fedsam", arguments.preset) | {"evaluate-every": 20}
    experiment = Experiment.of(arguments, "dp2-fedsam", base | overrides)
    cases: dict[str, Config] = {method: {"method": method} for method in arguments.methods}
    groups = experiment.grouped(cases, range(1, arguments.seeds + 1), "DP²-FedSAM's table")
    title = "{dataset}, {clients} clients of {classes-per-client} classes, ε = {epsilon:g}"
    runs = [run for members in groups.values() for run in members]
    print(write_comparison(runs, experiment.folder, title=title.format_map(experiment.base)))
    print((experiment.folder / "comparison.md").read_text())


if __name__ == "__main__":
    main()
