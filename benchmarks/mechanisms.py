"""Fixed and adaptive norms, Adam on the server, and correlated noise, at one ε on one data set.

    python -m benchmarks mechanisms --data-folder DATA --output RESULTS

A thousand clients share MNIST. The table has each mechanism's ε against released models, its
accuracy, the norm of the last round, and the processor time and largest memory of a run's process.
Finished runs in the output folder are kept, with what was measured.
"""

import json
import resource
import shutil
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.command_line import experiment_parser, parse_overrides
from benchmarks.runs import Config, Experiment, last_values, mean_and_std, run
from flower_ext.files import write_whole
from flower_ext.privacy import AdversaryView, epsilon_text
from flower_ext.runs import RunDirectory
from flower_ext.runs.page import table

DEFAULT: Config = {
    "method": "dp-fedavg",
    "dataset": "mnist",
    "partition": "iid",
    "clients": 1000,
    "sampling": "poisson",
    "sampling-rate": 0.05,
    "noise-placement": "server",
    "rounds": 60,
    "epsilon": 2.0,
    "delta": 1e-4,
    "clipping-norm": 0.5,
    "clipping-learning-rate": 0.5,
    "evaluate-every": 60,
}
CASES: dict[str, Config] = {
    "fixed norm 0.5": {},
    "fixed norm 0.05": {"clipping-norm": 0.05},
    "fixed norm 5": {"clipping-norm": 5.0},
    "adaptive from 0.05": {"clipping": "adaptive", "clipping-norm": 0.05},
    "adaptive from 5": {"clipping": "adaptive", "clipping-norm": 5.0},
    "fixed norm 0.5, Adam on the server": {
        "server-optimizer": "adam",
        "server-learning-rate": 0.03,
        "server-tau": 0.02,
    },
    "known cohorts, correlated noise, fixed norm 0.5": {
        "noise": "correlated",
        "noise-placement": "server",
    },
    "the same, momentum 0.8 and an average": {
        "noise": "correlated",
        "noise-placement": "server",
        "noise-bands": 20,
        "server-momentum": 0.8,
        "server-learning-rate": 0.3,
        "average-decay": 0.9,
    },
}
HEADER = ("mechanism", "ε", "accuracy", "last norm", "seconds", "MB")


def main() -> None:
    """Run missing runs, one after another, then write the table."""
    parser = experiment_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="run-config values, name=value")
    arguments = parser.parse_args()
    overrides = parse_overrides(parser, "dp2-fedsam", arguments.overrides)
    experiment = Experiment.of(arguments, "dp2-fedsam", DEFAULT | overrides)
    rows = []
    for name, changes in CASES.items():
        configs = [
            experiment.config(f"{name}-{seed}", changes, {"seed": seed})
            for seed in range(1, arguments.seeds + 1)
        ]
        rows.append(row(name, list(measured_runs(experiment.app, configs))))
        print(" · ".join(rows[-1]), flush=True)
    experiment.write("mechanisms", table(HEADER, rows))


def measured_runs(
    app: Path, configs: Iterable[Config]
) -> Iterator[tuple[RunDirectory, Mapping[str, float]]]:
    """Yield each run with the seconds and megabytes that its process used."""
    for config in configs:
        path = Path(str(config["run-directory"]))
        if not (file := path / "usage.json").exists():
            shutil.rmtree(path, ignore_errors=True)  # a run that was not measured is run again
            # A process that had other runs before would show their memory.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                process.submit(run, app, config).result()
                usage = process.submit(resource.getrusage, resource.RUSAGE_SELF).result()
            resources = {
                "seconds": usage.ru_utime + usage.ru_stime,
                "megabytes": usage.ru_maxrss * 1024 / 1e6,
            }
            write_whole(file, json.dumps(resources).encode(), private=False)
        # A finished run is kept; one with other settings is refused.
        yield run(app, config), json.loads(file.read_text())


def row(name: str, runs: Sequence[tuple[RunDirectory, Mapping[str, float]]]) -> tuple[str, ...]:
    """Return a row of the table."""
    directories = [directory for directory, _ in runs]
    epsilon = max(
        claim.epsilon
        for directory in directories
        for claim in directory.guarantees()
        if claim.view is AdversaryView.RELEASED_MODELS and claim.basis == "provable"
    )
    seconds, memory = (
        statistics.fmean(usage[name] for _, usage in runs) for name in ("seconds", "megabytes")
    )
    return (
        name,
        epsilon_text(epsilon),
        mean_and_std(last_values(directories, "accuracy_mean")),
        f"{statistics.fmean(map(last_norm, directories)):.2f}",
        f"{seconds:.0f}",
        f"{memory:.0f}",
    )


def last_norm(directory: RunDirectory) -> float:
    """Return the clipping norm of a run's last round."""
    norms = directory.metrics().series("clipping_norm")[1]
    return norms[-1] if norms else float(directory.config["clipping-norm"])


if __name__ == "__main__":
    main()
