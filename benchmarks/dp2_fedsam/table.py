"""DP²-FedSAM against its baselines: one table and one figure, over several seeds.

    python -m benchmarks.dp2_fedsam.table --data-folder DATA --output RESULTS

The default is MNIST with 100 clients of two classes each, r = 0.1, ε = 2 (provable, released
models), δ = 1/N, which suits two CPU cores. ``--full`` is the paper's CIFAR-10 setting, (N, S)
= (1000, 2), r = 0.05, T = 200, from random instead of ImageNet weights; it needs a GPU. Any
run-config value of the app can be overridden as ``name=value``. Finished runs in the output
folder are kept, so an interrupted table continues.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.runs import Config, parser_of, run_all, settings, with_overrides
from flower_ext.runs import write_comparison

APP = Path(__file__).parents[2] / "apps" / "dp2-fedsam"
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
    parser = parser_of("benchmarks.dp2_fedsam.table", __doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--full", action="store_true", help="the paper's CIFAR-10 setting")
    parser.add_argument("overrides", nargs="*", help="run-config values, name=value")
    arguments = parser.parse_args()

    config = settings(APP) | (FULL if arguments.full else DEFAULT)
    config["data-folder"] = arguments.data_folder and str(Path(arguments.data_folder).absolute())
    try:
        config = with_overrides(config, arguments.overrides)
    except ValueError as error:
        parser.error(str(error))
    output = arguments.output.absolute()
    configs = [
        config | {"method": method, "seed": seed, "run-directory": str(output / f"{method}-{seed}")}
        for seed in range(1, arguments.seeds + 1)
        for method in arguments.methods
    ]
    runs = run_all(APP, configs, workers=arguments.workers, title="DP²-FedSAM's table")
    title = "{dataset}, {clients} clients of {classes-per-client} classes, ε = {epsilon:g}"
    print(write_comparison(runs, output, title=title.format_map(config)))
    print((output / "comparison.md").read_text())


if __name__ == "__main__":
    main()
