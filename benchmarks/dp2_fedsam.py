"""DP²-FedSAM beside its baselines: one table and one figure, over several seeds.

    python -m benchmarks dp2-fedsam --data-folder DATA --output RESULTS

The default is MNIST with 100 clients of two classes each, r = 0.1, ε = 2 (provable, released
models), δ = 1/N, which suits two CPU cores. ``--full`` has the sizes of the paper's CIFAR-10
setting, (N, S) = (1000, 2), r = 0.05, T = 200, but a provable ε, Poisson cohorts, heads that adapt
before evaluation, and random instead of ImageNet weights. Any run-config value of the app can be
overridden as ``name=value``. Finished runs in the output folder are kept, so an interrupted table
continues.
"""

from __future__ import annotations

from benchmarks.runs import Config, Experiment, overrides_of, parser_of
from flower_ext.runs import write_comparison

METHODS = (
    "dp-fedavg",
    "dp-fedsam",
    "dp-fedavg-ft",
    "dp-fedsam-ft",
    "centaur",
    "dp2-fedsam",
    "fedavg",
    "p-fedsam",
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
FULL: Config = {
    **DEFAULT,
    "dataset": "cifar10",
    "model": "cifar10-cnn",
    "clients": 1000,
    "sampling-rate": 0.05,
    "rounds": 200,
    "epsilon": 1.0,
    "momentum": 0.7,
    "head-learning-rate": 0.005,
    "evaluate-every": 20,
}


def main() -> None:
    """Run missing runs, then write the comparison."""
    parser = parser_of("dp2-fedsam", __doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--full", action="store_true", help="the sizes of the paper's CIFAR-10")
    parser.add_argument("overrides", nargs="*", help="run-config values, name=value")
    arguments = parser.parse_args()
    overrides = overrides_of(parser, "dp2-fedsam", arguments.overrides)
    scale = FULL if arguments.full else DEFAULT
    experiment = Experiment.of(arguments, "dp2-fedsam", scale | overrides)
    cases: dict[str, Config] = {method: {"method": method} for method in arguments.methods}
    groups = experiment.grouped(cases, range(1, arguments.seeds + 1), "DP²-FedSAM's table")
    title = "{dataset}, {clients} clients of {classes-per-client} classes, ε = {epsilon:g}"
    runs = [run for members in groups.values() for run in members]
    print(write_comparison(runs, experiment.folder, title=title.format_map(experiment.base)))
    print((experiment.folder / "comparison.md").read_text())


if __name__ == "__main__":
    main()
