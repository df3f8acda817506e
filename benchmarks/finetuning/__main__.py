"""Private fine-tuning on CIFAR-10: a head or an adapter on a frozen backbone, by each method.

    python -m benchmarks.finetuning --data-folder DATA --output RESULTS

100 clients of two classes, provable ε against the released models, δ = 1e-5. The backbone's
features of all pictures are computed once, in a quarter of an hour on one core, and kept in the
output folder. Learning rates and clipping norms come from ``--search``, on a seed that the table
leaves out. Finished runs in the output folder are kept, so an interrupted table continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev

from benchmarks.finetuning.timing import timing
from benchmarks.runs import Config, Experiment, parser_of, settings
from flower_ext.runs import RunDirectory
from flower_ext.runs.page import table

APP = Path(__file__).parents[2] / "apps" / "private-finetuning"
SEARCHED_ON = 100
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
    parser = parser_of("benchmarks.finetuning", __doc__)
    parser.set_defaults(workers=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--search", nargs="*", choices=SEARCH, help="search settings instead")
    arguments = parser.parse_args()

    output = arguments.output.absolute()
    folder = arguments.data_folder and str(Path(arguments.data_folder).absolute())
    base = settings(APP) | BASE | {"evaluate-every": BASE["rounds"], "data-folder": folder}
    experiment = Experiment(
        app=APP,
        folder=output,
        base=base | {"features-folder": str(output / "features")},
        workers=arguments.workers,
    )
    if arguments.search is not None:
        for name in arguments.search or SEARCH:
            print(searched(experiment, name))
        return
    seeds = range(1, arguments.seeds + 1)
    text = "\n\n".join([*results(experiment, arguments.methods, seeds), timing()])
    (output / "results.md").write_text(text + "\n")
    print(text)


def searched(experiment: Experiment, name: str) -> str:
    """Return the accuracy of each setting, on the search's own seed."""
    tune, method, grid = SEARCH[name]
    fixed: Config = {"tune": tune, "method": method, "epsilon": EPSILONS[0], "seed": SEARCHED_ON}
    if method == "p-fedsam":
        fixed["head-learning-rate"] = HEAD_RATE
    tried = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    configs = [
        experiment.config(
            "-".join(map(str, ("search", name.replace(" ", "-"), *trial.values()))),
            {**fixed, **trial},
        )
        for trial in tried
    ]
    runs = experiment.run(configs, f"search, {name}")
    rows = [
        [*trial.values(), f"{accuracy(run):.4f}"] for trial, run in zip(tried, runs, strict=True)
    ]
    return f"{name} ({method})\n\n" + table([*grid, "accuracy"], rows)


def results(experiment: Experiment, methods: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Return accuracies, and differences between methods on the same clients and cohorts."""
    cases = [
        (tune, method, epsilon)
        for tune in ("head", "adapter")
        for method in METHODS
        if method in methods and (tune == "adapter" or method not in PERSONAL)
        for epsilon in ((0.0,) if method in WITHOUT_PRIVACY else EPSILONS)
    ]
    every = [(case, seed) for seed in seeds for case in cases]
    configs = [config_of(experiment, *case, seed) for case, seed in every]
    runs = dict(zip(every, experiment.run(configs, "fine-tuning"), strict=True))
    of = {case: [runs[case, seed] for seed in seeds] for case in cases}
    rows = []
    for tune, method in dict.fromkeys((tune, method) for tune, method, _ in cases):
        found = [of.get((tune, method, epsilon), []) for epsilon in (*EPSILONS, 0.0)]
        cells = [spread([accuracy(run) for run in group]) if group else "–" for group in found]
        rows.append([tune, method, *cells, f"{bytes_up(next(filter(None, found))[0]):,}"])
    header = ["trains", "method", *(f"ε = {e:g}" for e in EPSILONS), "no privacy", "bytes up"]
    differences = []
    for epsilon in EPSILONS:
        for other in (("adapter", "centaur", epsilon), ("adapter", "own-head", 0.0)):
            ours = of.get(("adapter", "dp2-fedsam", epsilon), [])
            pairs = zip(ours, of.get(other, []), strict=False)
            gained = [accuracy(one) - accuracy(two) for one, two in pairs]
            if gained:
                differences.append([f"{epsilon:g}", other[1], spread(gained, sign="+")])
    return [table(header, rows), table(["ε", "dp2-fedsam minus", "by seed"], differences)]


def bytes_up(run: RunDirectory) -> int:
    """Return the bytes of the arrays that one client sends in one round."""
    row = next(row for row in run.metrics() if row["answered"])
    return round(row["bytes_up"] / row["answered"])


def config_of(experiment: Experiment, tune: str, method: str, epsilon: float, seed: int) -> Config:
    """Return the settings of one run."""
    kind = "personal" if method in PERSONAL else "ft" if method.endswith("-ft") else "shared"
    free = "free " if method in ("fedavg", "p-fedsam") else ""
    own: Config = {"tune": tune, "method": method, "seed": seed, **TUNED[f"{free}{kind} {tune}"]}
    if epsilon:
        own["epsilon"] = epsilon
    return experiment.config(f"{tune}-{method}-{epsilon:g}-{seed}", own)


def accuracy(run: RunDirectory) -> float:
    """Return the mean over clients, each on its own test examples, after the last round."""
    return float(run.metrics()[-1]["accuracy_mean"])


def spread(values: Sequence[float], sign: str = "") -> str:
    """Return mean and standard error over seeds."""
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{mean(values):{sign}.4f} ± {error:.4f}"


if __name__ == "__main__":
    main()
