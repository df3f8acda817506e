"""DP²-FedSAM against its baselines: one table and one figure, over several seeds.

    python benchmarks/dp2_fedsam/table.py --data-folder DATA --output RESULTS

The default is MNIST with 100 clients of two classes each, r = 0.1, ε = 2 (provable, released
models), δ = 1/N: small enough for two CPU cores. ``--full`` is the paper's CIFAR-10 setting,
(N, S) = (1000, 2), r = 0.05, T = 200, from random instead of ImageNet weights; it wants a GPU.
Any run-config value of the app can be overridden as ``name=value``. Runs that are already in the
output folder are kept, so an interrupted table continues.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

APP = Path(__file__).parents[2] / "apps" / "dp2_fedsam"
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
DEFAULT = {
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
FULL = {
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


def run(config: dict[str, bool | float | int | str]) -> str:
    """One run of the app, in this process; returns what to print."""
    import logging

    import torch

    from flower_ext.evaluation import summarize
    from flower_ext.federation import run_in_process
    from flower_ext.reporting import RunDirectory

    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    sys.path.insert(0, str(APP))
    from dp2_fedsam_app.client_app import app as client
    from dp2_fedsam_app.server_app import app as server

    run_in_process(server, client, num_clients=int(config["clients"]), run_config=config)
    rows = RunDirectory.open(Path(str(config["run-directory"]))).client_metrics()
    accuracy = summarize([row["accuracy"] for row in rows])
    return f"{accuracy.mean:.4f}, worst tenth {accuracy.worst_decile:.4f}"


def main() -> None:
    """Run what is missing, then write the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-folder", default="", help="where the data sets are")
    parser.add_argument("--output", type=Path, required=True, help="folder for runs and results")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--full", action="store_true", help="the paper's CIFAR-10 setting")
    parser.add_argument("overrides", nargs="*", help="run-config values, name=value")
    arguments = parser.parse_args()

    app = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    app |= FULL if arguments.full else DEFAULT
    app["data-folder"] = arguments.data_folder and str(Path(arguments.data_folder).absolute())
    for override in arguments.overrides:
        name, _, value = override.partition("=")
        if name not in app:
            parser.error(f"unknown run-config name {name!r}; expected one of {', '.join(app)}")
        kind = type(app[name])
        app[name] = value == "true" if kind is bool else kind(value)

    paths = []
    with ProcessPoolExecutor(arguments.workers) as pool:
        waiting = {}
        for seed in range(1, arguments.seeds + 1):
            for method in arguments.methods:
                path = arguments.output.absolute() / f"{method}-{seed}"
                paths.append(path)
                if not (path / "clients.csv").exists():
                    config = app | {"method": method, "seed": seed, "run-directory": str(path)}
                    waiting[pool.submit(run, config)] = path.name
        for number, done in enumerate(as_completed(waiting), 1):
            print(f"[{number}/{len(waiting)}] {waiting[done]}: {done.result()}", flush=True)

    from flower_ext.reporting import RunDirectory, write_comparison

    title = "{dataset}, {clients} clients of {classes-per-client} classes, ε = {epsilon:g}"
    runs = [RunDirectory.open(path) for path in paths]
    print(write_comparison(runs, arguments.output, title=title.format_map(app)))
    print((arguments.output / "comparison.md").read_text())


if __name__ == "__main__":
    main()
