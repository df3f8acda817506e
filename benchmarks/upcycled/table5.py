"""Table 5: training time, plain against upcycled, one after the other in one process."""

import statistics
import time

from benchmarks.runs import Config, Experiment, run
from benchmarks.upcycled.experiment import METHODS, Scale, method_config
from flower_ext.runs.page import table

PAPER = {  # seconds, plain and upcycled
    "fedavg": (147.50, 86.44),
    "fedavgm": (147.47, 84.95),
    "fedprox": (139.91, 80.59),
    "scaffold": (153.88, 95.09),
    "feddyn": (181.49, 99.82),
    "pfedme": (467.42, 259.54),
    "fedyogi": (153.53, 92.82),
}
PRIVATE: Config = {
    "dataset": "synthetic-iid",
    "sampling-rate": 1.0,
    "straggler-ratio": 0.0,
    "perturbation": "output",
}


def times(experiment: Experiment, scale: Scale) -> None:
    """Time output perturbation on Syn(iid), all devices, equal visible rounds; write the table."""
    rows = []
    for method, name in METHODS.items():
        training: dict[bool, list[float]] = {False: [], True: []}
        for seed in scale.seeds:
            for upcycled in (False, True):
                config = experiment.config(
                    f"time/{method}-{upcycled:d}-{seed}-{scale.timed_rounds}",
                    PRIVATE,
                    method_config(method),
                    {"seed": seed, "upcycled": upcycled},
                    {"rounds": scale.timed_rounds, "evaluate-every": scale.timed_rounds},
                )
                timed = run(experiment.app, config)
                training[upcycled].append(sum(timed.metrics().series("training_seconds")[1]))
        ratios = [
            upcycled / plain
            for plain, upcycled in zip(training[False], training[True], strict=True)
        ]
        before, after = PAPER[method]
        rows.append(
            (
                name,
                f"{statistics.mean(training[False]):.2f}",
                f"{statistics.mean(training[True]):.2f}",
                f"{statistics.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{after / before:.2f}",
            )
        )
    header = ("method", "plain, s", "upcycled, s", "ratio (range over seeds)", "ratio in the paper")
    notes = (
        f"{scale.timed_rounds} visible rounds each, all 30 devices; plain and upcycled alternate "
        f"in one process, {len(scale.seeds)} times. One evaluation, in the last round."
    )
    experiment.write("time", "# Training time", table(header, rows), notes)


def warm_up(experiment: Experiment) -> None:
    """Make one short run that is not timed, to import, load data and start thread pools."""
    run(experiment.app, experiment.config(f"warm-up/{time.time():.0f}", PRIVATE, {"rounds": 2}))
