"""Compare correlated noise in known cohorts with Poisson sampling in secret ones, at equal ε.

    python -m benchmarks correlated --data-folder DATA --output RESULTS

``correlated-ratios.csv`` has the error that correlated noise gives the models, divided by the error
that Poisson sampling gives. Below 1, correlated noise is better. ``correlated.csv`` has
the accuracy of every run. Finished runs in the output folder are kept. On CIFAR-10, clients train
a linear head on a pretrained network's features, which are computed once, in a quarter of an hour.
"""

from collections.abc import Iterator, Mapping
from itertools import product

from benchmarks.command_line import experiment_parser
from benchmarks.report.rows import store_rows
from benchmarks.runs import Config, Experiment, last_value, mean_and_std
from flower_ext.privacy import (
    CorrelatedNoise,
    PoissonSampling,
    SpacedSampling,
    calibrate_noise_multiplier,
)
from flower_ext.privacy.mechanisms.correlated_noise import StrategyMatrix
from flower_ext.runs.page import table

POPULATIONS = (
    (50, 10, 40, 0.02),
    (1000, 50, 100, 1e-4),
    (1000, 20, 500, 1e-4),
    (10_000, 100, 500, 1e-5),
)
"""Clients, cohort size, rounds and δ."""
EPSILONS, MOMENTA = (0.5, 1.0, 2.0, 4.0, 8.0), (0.0, 0.9)

_COMMON: Config = {
    "method": "dp-fedavg",
    "partition": "iid",
    "sampling": "poisson",
    "noise-placement": "server",
    "learning-rate-decay": 1.0,
}
DATA: Mapping[str, Config] = {
    "mnist": {
        "dataset": "mnist",
        "clients": 1000,
        "sampling-rate": 0.05,
        "rounds": 100,
        "clipping-norm": 0.5,
        "delta": 1e-4,
        "evaluate-every": 100,
    },
    "digits": {
        "dataset": "digits",
        "clients": 50,
        "sampling-rate": 0.2,
        "rounds": 40,
        "clipping-norm": 0.2,
        "delta": 0.02,
        "evaluate-every": 40,
    },
    "cifar10": {
        "tune": "head",
        "dataset": "cifar10",
        "clients": 1000,
        "sampling-rate": 0.05,
        "rounds": 100,
        "clipping-norm": 0.1,
        "learning-rate": 0.03,
        "delta": 1e-4,
        "evaluate-every": 100,
    },
}
APPS: Mapping[str, str] = {
    "mnist": "dp2-fedsam",
    "digits": "dp2-fedsam",
    "cifar10": "private-finetuning",
}
_AVERAGE: Config = {"average-decay": 0.9}
_MOMENTUM: Config = {"server-momentum": 0.8, "server-learning-rate": 0.3}
_CORRELATED: Config = {"noise": "correlated"}
CASES: Mapping[str, Config] = {
    "Poisson": {},
    "Poisson, average": _AVERAGE,
    "Poisson, average, momentum": {**_AVERAGE, **_MOMENTUM},
    "correlated": _CORRELATED,
    "correlated, average": {**_CORRELATED, **_AVERAGE},
    "correlated, average, momentum": {**_CORRELATED, **_AVERAGE, **_MOMENTUM, "noise-bands": 20},
}


def main() -> None:
    """Compute the ratios, run missing runs, and write both tables."""
    parser = experiment_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--datasets", nargs="*", choices=DATA, default=[*DATA])
    parser.add_argument("--epsilons", type=float, nargs="*", default=[2.0])
    arguments = parser.parse_args()
    folder = arguments.output.absolute()
    columns = ["clients", "cohort", "rounds", "momentum", *(f"ε = {each:g}" for each in EPSILONS)]
    ratio_rows = [row for population in POPULATIONS for row in ratios(*population)]
    folder.mkdir(parents=True, exist_ok=True)
    store_rows("correlated-ratios", columns, ratio_rows, folder=folder)
    rows, means = [], []
    for dataset, epsilon in product(arguments.datasets, arguments.epsilons):
        base = _COMMON | DATA[dataset]
        if dataset == "cifar10":
            base["features-folder"] = str(folder / "features")
        experiment = Experiment.of(arguments, APPS[dataset], base)
        cases = {
            f"{dataset}-{epsilon:g}-{name}": {"epsilon": epsilon, **changes}
            for name, changes in CASES.items()
        }
        # The settings were chosen on seeds below 11.
        seeds = range(11, 11 + arguments.seeds)
        groups = experiment.grouped(cases, seeds, f"{dataset}, ε = {epsilon:g}")
        for name, runs in zip(CASES, groups.values(), strict=True):
            accuracies = [last_value(run, "accuracy_mean") for run in runs]
            rows += [
                (dataset, f"{epsilon:g}", name, str(seed), f"{accuracy:.4f}")
                for seed, accuracy in zip(seeds, accuracies, strict=True)
            ]
            means.append((dataset, f"{epsilon:g}", name, mean_and_std(accuracies)))
    header = ("data", "epsilon", "mechanism", "seed", "accuracy")
    store_rows("correlated", header, rows, folder=folder)
    accuracy = table(("data", "ε", "mechanism", "accuracy"), means)
    experiment.write("correlated", table(columns, ratio_rows), accuracy)


def ratios(clients: int, size: int, rounds: int, delta: float) -> Iterator[tuple[str, ...]]:
    """Yield, for each momentum, the ratio of errors at each ε, after the numbers of the row."""
    apart = clients // size
    limits = {"rounds_apart": apart, "participations": -(-rounds // apart)}
    samplings = (
        (PoissonSampling(clients, size / clients), rounds),
        (SpacedSampling(clients, size, **limits), 1),  # all rounds are one Gaussian mechanism
    )
    poisson, spaced = (
        [
            calibrate_noise_multiplier(
                epsilon=epsilon, delta=delta, sampling=sampling, rounds=releases
            )
            for epsilon in EPSILONS
        ]
        for sampling, releases in samplings
    )
    for momentum in MOMENTA:
        matrix = CorrelatedNoise(momentum=momentum).matrix(rounds, **limits)
        correlated = matrix.model_error(rounds, momentum=momentum) * matrix.sensitivity(**limits)
        independent = StrategyMatrix().model_error(rounds, momentum=momentum)
        values = [
            f"{spaced_noise * correlated / (poisson_noise * independent):.2f}"
            for poisson_noise, spaced_noise in zip(poisson, spaced, strict=True)
        ]
        yield (str(clients), str(size), str(rounds), f"{momentum:g}", *values)


if __name__ == "__main__":
    main()
