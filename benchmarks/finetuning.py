"""Private fine-tuning on CIFAR-10: a head or an adapter on a frozen backbone, by each method.

    python -m benchmarks finetuning --data-folder DATA --output RESULTS

100 clients of two classes, provable ε against the released models, δ = 1e-5. The backbone's
features of all pictures are computed once, in a quarter of an hour on one core, and kept in the
output folder. Learning rates and clipping norms come from ``--search``, on a seed that the table
leaves out. Finished runs in the output folder are kept, so an interrupted table continues.
"""

from collections.abc import Sequence
from itertools import product

from benchmarks.command_line import experiment_parser
from benchmarks.runs import (
    Config,
    Experiment,
    differences,
    last_value,
    last_values,
    mean_and_error,
)
from flower_ext.runs import RunDirectory
from flower_ext.runs.page import table

ACCURACY = "accuracy_mean"
"""Mean over clients, each on its own test examples."""
PERSONAL = ("centaur", "dp2-fedsam", "p-fedsam", "own-head")
WITHOUT_PRIVACY = ("fedavg", "p-fedsam", "own-head")
METHODS = ("dp-fedavg", "dp-fedavg-ft", "dp-fedsam", "dp-fedsam-ft", "fedavg", *PERSONAL)
EPSILONS = (2.0, 8.0)
BASE: Config = {
    "rounds": 30,
    "adapter-width": 16,
    "batch-size": 32,
    "local-epochs": 1,
    "head-epochs": 1,
    "seeded-noise": True,  # gives every method the cohorts of its seed
}
SHARED_NORMS: dict[str, Sequence[float]] = {
    "clipping-norm": (0.02, 0.1, 0.5),
    "learning-rate": (0.003, 0.03),
}
FT_NORMS: dict[str, Sequence[float]] = {
    "clipping-norm": (0.02, 0.1),
    "learning-rate": (0.03, 0.1),
}
FREE_RATES: dict[str, Sequence[float]] = {"learning-rate": (0.003, 0.03, 0.1)}
SEARCH: dict[str, tuple[str, str, dict[str, Sequence[float]]]] = {
    "shared head": ("head", "dp-fedavg", SHARED_NORMS),
    "shared adapter": ("adapter", "dp-fedavg", SHARED_NORMS),
    "ft head": ("head", "dp-fedavg-ft", FT_NORMS),
    "ft adapter": ("adapter", "dp-fedavg-ft", FT_NORMS),
    "personal adapter": (
        "adapter",
        "dp2-fedsam",
        {
            "clipping-norm": (0.005, 0.02, 0.1),
            "learning-rate": (0.003, 0.03),
            "head-learning-rate": (0.01, 0.03),
        },
    ),
    "free shared head": ("head", "fedavg", FREE_RATES),
    "free shared adapter": ("adapter", "fedavg", FREE_RATES),
    "free personal adapter": ("adapter", "p-fedsam", {"learning-rate": (0.003, 0.03, 0.1, 1.0)}),
}
"""By kind of method: the part that trains, the method that is searched, and the values tried."""
HEAD_RATE = 0.03
TUNED: dict[str, Config] = {
    "shared head": {"clipping-norm": 0.1, "learning-rate": 0.003},
    "shared adapter": {"clipping-norm": 0.1, "learning-rate": 0.003},
    "ft head": {"clipping-norm": 0.02, "learning-rate": 0.03},
    "ft adapter": {"clipping-norm": 0.02, "learning-rate": 0.03},
    "personal adapter": {
        "clipping-norm": 0.02,
        "learning-rate": 0.003,
        "head-learning-rate": HEAD_RATE,
    },
    "free shared head": {"learning-rate": 0.1},
    "free shared adapter": {"learning-rate": 0.1},
    "free personal adapter": {"learning-rate": 1.0, "head-learning-rate": HEAD_RATE},
}
"""The best settings that ``--search`` found, with privacy at ε = 2; also used for ε = 8."""


def main() -> None:
    """Run missing runs, print the tables, and write ``results.md``."""
    parser = experiment_parser(__doc__)
    parser.set_defaults(workers=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--search", nargs="*", choices=SEARCH, help="search settings instead")
    arguments = parser.parse_args()
    features: Config = {"features-folder": str(arguments.output.absolute() / "features")}
    changes = BASE | features | {"evaluate-every": BASE["rounds"]}
    experiment = Experiment.of(arguments, "private-finetuning", changes)
    if arguments.search is not None:
        experiment.write("search", *searched(experiment, arguments.search or list(SEARCH)))
        return
    seeds = range(1, arguments.seeds + 1)
    experiment.write("results", *results(experiment, arguments.methods, seeds))


def searched(experiment: Experiment, names: Sequence[str]) -> list[str]:
    """Return the accuracy of each setting, on the search's own seed."""
    trials: dict[str, list[Config]] = {}
    fixed: dict[str, Config] = {}
    for name in names:
        tune, method, grid = SEARCH[name]
        trials[name] = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
        fixed[name] = {"tune": tune, "method": method, "epsilon": EPSILONS[0]}
        if method == "p-fedsam":
            fixed[name]["head-learning-rate"] = HEAD_RATE
    scores = experiment.scores(trials, accuracy, "fine-tuning", fixed=fixed)
    return [
        f"{name} ({SEARCH[name][1]})\n\n"
        + table(
            [*SEARCH[name][2], "accuracy"],
            [[*trial.values(), f"{score:.4f}"] for score, trial in tried],
        )
        for name, tried in scores.items()
    ]


def accuracy(run: RunDirectory) -> float:
    """Return the accuracy after the last round."""
    return last_value(run, ACCURACY)


def results(experiment: Experiment, methods: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Return accuracies, and differences between methods on the same clients and cohorts."""
    cases = {
        f"{tune}-{method}-{epsilon:g}": settings_of(tune, method, epsilon)
        for tune in ("head", "adapter")
        for method in METHODS
        if method in methods and (tune == "adapter" or method not in PERSONAL)
        for epsilon in ((0.0,) if method in WITHOUT_PRIVACY else EPSILONS)
    }
    groups = experiment.grouped(cases, seeds, "fine-tuning")
    rows = []
    for tune, method in dict.fromkeys((str(c["tune"]), str(c["method"])) for c in cases.values()):
        columns = [groups.get(f"{tune}-{method}-{e:g}", []) for e in (*EPSILONS, 0.0)]
        cells = [
            mean_and_error(last_values(runs, ACCURACY), sign="") if runs else "–"
            for runs in columns
        ]
        rows.append([tune, method, *cells, f"{bytes_up(next(filter(None, columns))[0]):,}"])
    header = ["trains", "method", *(f"ε = {e:g}" for e in EPSILONS), "no privacy", "bytes up"]
    gains = []
    for epsilon in EPSILONS:
        ours = groups.get(f"adapter-dp2-fedsam-{epsilon:g}")
        for method, budget in (("centaur", epsilon), ("own-head", 0.0)):
            others = groups.get(f"adapter-{method}-{budget:g}")
            if ours and others:
                gain = mean_and_error(differences(ours, others, ACCURACY))
                gains.append([f"{epsilon:g}", method, gain])
    return [table(header, rows), table(["ε", "dp2-fedsam minus", "by seed"], gains)]


def bytes_up(run: RunDirectory) -> int:
    """Return the bytes of the arrays that one client sends in one round."""
    row = next(row for row in run.metrics() if row["answered"])
    return round(row["bytes_up"] / row["answered"])


def settings_of(tune: str, method: str, epsilon: float) -> Config:
    """Return the settings of a method; an ``epsilon`` of 0 stands for no privacy."""
    kind = "personal" if method in PERSONAL else "ft" if method.endswith("-ft") else "shared"
    free = "free " if method in ("fedavg", "p-fedsam") else ""
    budget: Config = {"epsilon": epsilon} if epsilon else {}
    return {"tune": tune, "method": method, **TUNED[f"{free}{kind} {tune}"], **budget}


if __name__ == "__main__":
    main()
