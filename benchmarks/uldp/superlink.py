"""Private weighting on a real SuperLink with a SuperNode for each silo: times by part.

    python -m benchmarks.uldp.superlink heart-disease tcga-brca --data-folder DATA --output RESULTS
    python -m benchmarks.uldp.superlink mnist --protocol lattice --silo-limit 200 --data-folder …

Run ``apps/uldp-fl`` with ``uldp-avg-private`` on this machine, over Paillier with 3072-bit keys or
over ring-LWE. Every message starts a new process, which has only the node's folder for secrets and
its context. The benchmark compares model and rounds with ``uldp-avg-w`` on the same nodes, with the
same seeded noise.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from benchmarks.uldp.app import APP, describe_silos
from flower_ext.cli.preparing import RunOptions, prepare
from flower_ext.cli.run_command import launch
from flower_ext.runs import RunDirectory
from flower_ext.runs.page import table
from tests.support.deployment import CONNECTION, Deployment

_SILO = re.compile(r"silo (\d+), round (\d+): ([\d.]+) s of training, ([\d.]+) s of encryption")


def main() -> None:
    """Print a table for each data set."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.uldp.superlink",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dataset", nargs="+")
    parser.add_argument("--data-folder", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--protocol", choices=("paillier", "lattice"), default="paillier")
    parser.add_argument("--key-bits", type=int, default=3072, help="of Paillier")
    parser.add_argument("--silo-limit", type=int, help="most records of a user in each silo")
    parser.add_argument("--users", type=int, help="the data set's default")
    parser.add_argument("--local-epochs", type=int, default=2)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True)
    for dataset in arguments.dataset:
        report(dataset, arguments)


def report(dataset: str, arguments: argparse.Namespace) -> None:
    """Run one data set on the engine and in this process."""
    silos = describe_silos(dataset).num_silos
    home = (arguments.output / f"flower-{dataset}").absolute()
    settings: dict[str, Any] = {
        "dataset": dataset,
        "data-folder": arguments.data_folder.absolute(),
        "num-silos": silos,
        "num-users": arguments.users or 0,
        "local-epochs": arguments.local_epochs,
        "rounds": arguments.rounds,
        "seeded-noise": "true",
        "evaluate-every": arguments.rounds,
    }
    private_settings = {
        "method": "uldp-avg-private",
        "protocol": arguments.protocol,
        "key-bits": arguments.key_bits,
        "allow-insecure-keys": str(arguments.key_bits < 3072).lower(),
    }
    if arguments.silo_limit:
        limits = ",".join([str(arguments.silo_limit)] * silos)
        private_settings["silo-record-limits"] = limits
    paths = [arguments.output.absolute() / f"{dataset}-{name}" for name in ("private", "plain")]
    own = {"state-folder": str(home / "secrets")}
    with Deployment(home, nodes=silos, node_config=own) as deployment:
        for path, chosen in zip(paths, (private_settings, {"method": "uldp-avg-w"}), strict=True):
            words = _words({**settings, **chosen, "run-directory": path})
            run = prepare(RunOptions(app=APP, superlink=CONNECTION, settings=words))
            launch(run, env=deployment.env)
    private, plain = (load_file(path / "model.safetensors") for path in paths)
    error = max(float(np.abs(private[n] - plain[n]).max()) for n in plain)
    parameters = sum(array.size for array in plain.values())
    runs = [RunDirectory.open(path) for path in paths]
    print(f"\n{dataset}: {silos} silos, {parameters} parameters, {arguments.protocol}\n")
    print(times(runs[0], home))
    rows = [run.metrics()[-1] for run in runs]
    seconds = [f"{row['training_seconds']:.1f}" for row in runs[1].metrics()]
    print(f"\nRounds with plain weights, s: {', '.join(seconds)}")
    print(
        f"Accuracy: {rows[0].get('accuracy_mean')}, with plain weights "
        f"{rows[1].get('accuracy_mean')}"
    )
    print(f"Largest difference to the model of plain weights (float32): {error:.1e}")


def times(run: RunDirectory, home: Path) -> str:
    """Return a table of seconds by round and part, of the server and of the slowest silo."""
    silos: dict[int, list[tuple[float, float]]] = {}
    for log in (home / "logs").glob("node-*.log"):
        for _, number, training, encryption in _SILO.findall(log.read_text()):
            silos.setdefault(int(number), []).append((float(training), float(encryption)))
    rows = []
    for number, row in enumerate(run.metrics(), start=1):
        training, encryption = (max(part) for part in zip(*silos[number], strict=True))
        parts = [
            row.get("setup_seconds", 0.0),
            row["encryption_seconds"],
            training,
            encryption,
            row["decryption_seconds"],
        ]
        whole = row["training_seconds"]
        seconds = [f"{part:.1f}" for part in (*parts, whole - sum(parts), whole)]
        rows.append((number, *seconds, f"{row['bytes_up'] / 1e6:.2f}"))
    header = (
        "round",
        "set-up, s",
        "server encrypts, s",
        "slowest silo trains, s",
        "slowest silo encrypts, s",
        "server decrypts, s",
        "messages and processes, s",
        "all, s",
        "MB up",
    )
    return table(header, rows)


def _words(settings: dict[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items()]


if __name__ == "__main__":
    main()
