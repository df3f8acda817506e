"""Private weights beside plain ones: seconds of a run's set-up, encryption, silos and decryption.

    python -m benchmarks private-weighting heart-disease --data-folder DATA --output RESULTS
    python -m benchmarks private-weighting mnist protocol=lattice rounds=1 --data-folder …

``apps/uldp-fl`` runs twice in one process: with ``uldp-avg-private``, over Paillier with 3072-bit
keys and N_max = 2000 or over ring-LWE, and with ``uldp-avg-w`` under the same seeded noise. Any
run-config value of the app can be overridden as ``name=value``. For times between real processes
run the app on a SuperLink; its ``metrics.jsonl`` has the same columns.
"""

import numpy as np
from safetensors.numpy import load_file

from benchmarks.command_line import experiment_parser, parse_overrides
from benchmarks.runs import Config, Experiment, app_module
from flower_ext.runs import RunDirectory
from flower_ext.runs.page import table

PARTS = {
    "set-up": "setup_seconds",
    "server encrypts": "encryption_seconds",
    "server decrypts": "decryption_seconds",
}


def main() -> None:
    """Print a table of rounds, and compare the models."""
    parser = experiment_parser(__doc__)
    parser.add_argument("dataset")
    parser.add_argument("overrides", nargs="*", help="run-config values, right after the data set")
    arguments = parser.parse_args()
    overrides = parse_overrides(parser, "uldp-fl", arguments.overrides)
    silos = app_module("uldp-fl", "silos").describe_silos(arguments.dataset)
    changes: Config = {
        "dataset": arguments.dataset,
        "num-silos": silos.num_silos,
        "rounds": 3,
        "evaluate-every": 0,
        "seeded-noise": True,
        **overrides,
    }
    experiment = Experiment.of(arguments, "uldp-fl", changes)
    cases = {"private": "uldp-avg-private", "plain": "uldp-avg-w"}
    configs = [experiment.config(name, {"method": method}) for name, method in cases.items()]
    private, plain = experiment.run(configs, "private weighting")
    first, second = (load_file(run.path / "model.safetensors") for run in (private, plain))
    apart = max(float(np.abs(first[name] - second[name]).max()) for name in second)
    parameters = sum(array.size for array in second.values())
    experiment.write(
        arguments.dataset,
        f"# {arguments.dataset}: {parameters} parameters, {private.config['protocol']}",
        rounds(private, plain),
        f"Largest difference to the model of plain weights (float32): {apart:.1e}",
    )


def rounds(private: RunDirectory, plain: RunDirectory) -> str:
    """Return seconds and megabytes by round; the silos take what the parts of the server leave."""
    rows = []
    for number, (row, other) in enumerate(zip(private.metrics(), plain.metrics(), strict=True), 1):
        parts = [row.get(column, 0.0) for column in PARTS.values()]
        whole = row["training_seconds"]
        seconds = (*parts, whole - sum(parts), whole, other["training_seconds"])
        up, down = (row[name] + row.get(f"query_{name}", 0) for name in ("bytes_up", "bytes_down"))
        cells = [f"{value:.2f}" for value in (*seconds, up / 1e6, down / 1e6)]
        rows.append((number, *cells))
    columns = (*PARTS, "silos, one by one", "all", "all, plain weights")
    return table(("round", *(f"{name}, s" for name in columns), "MB up", "MB down"), rows)


if __name__ == "__main__":
    main()
