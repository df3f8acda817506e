"""The tables of results, made of rows; each function returns Markdown."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from benchmarks.report.rows import Row, curve, gains, numbers, read, where
from benchmarks.runs import mean_and_error
from benchmarks.uldp.experiment import METHODS as ULDP_METHODS
from benchmarks.upcycled.experiment import METHODS as UPCYCLED_METHODS
from benchmarks.upcycled.experiment import SYNTHETIC
from benchmarks.upcycled.table1 import PAPER
from flower_ext.privacy import epsilon_text
from flower_ext.runs.comparison import mean_and_std
from flower_ext.runs.page import table

Panel = Mapping[str, object]
USERS = {4: (100, 1000), 5: (100, 10_000), 6: (50, 200), 7: (50, 200)}
SAME_BUDGET = ("ULDP-SGD", "ULDP-AVG")
METRICS = {4: "loss_pooled", 5: "accuracy_pooled", 6: "accuracy_pooled", 7: "concordance_mean"}


def mean(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean and the sample standard deviation as text; a dash if there are no values."""
    return mean_and_std(values, digits=digits) if values else "–"


def kept(name: str, without: tuple[str, ...] = ()) -> str:
    """Return a table that came from no run directories, without columns of these first words."""
    rows = read(name)
    columns = [column for column in rows[0] if not column.startswith(without)]
    return table(columns, [[row[column] for column in columns] for row in rows])


def uldp_budgets(figure: int) -> str:
    """Return ε, published / provable, by method and panel; a sentence has those of equal cells."""
    rows = [row for row in read(f"uldp-fl-budgets-{figure}") if row["method"] not in SAME_BUDGET]
    panels = dict.fromkeys(row["panel"] for row in rows)
    cells = [
        [
            method.removeprefix("ULDP-"),
            *(
                f"{row['published']} / {row['provable']}"
                for row in where(rows, method=method)
                if row["panel"] in panels
            ),
        ]
        for method in dict.fromkeys(row["method"] for row in rows)
    ]
    labels = [re.sub(r"^\D+-(\d+)-(\w+)-?", r"\1, \2 ", panel).strip() for panel in panels]
    constant = [f"{row[0]} has {row[1]}" for row in cells if len(set(row[1:])) == 1]
    varying = [row for row in cells if len(set(row[1:])) > 1]
    text = f"In every panel, {' and '.join(constant)}:"
    return f"{text}\n\n{table(('users, records', *labels), varying)}"


def uldp_utility(figure: int, dataset: str) -> str:
    """Return the utility of every method in each panel of Uldp-FL's Figures 4 to 7."""
    rows = where(read(f"uldp-fl-figure-{figure}"), dataset=dataset, user_sampling_rate=1.0)
    panels = {
        f"{users}, {distribution}": where(rows, num_users=users, distribution=distribution)
        for users in USERS[figure]
        for distribution in ("uniform", "zipf")
    }
    panels = {name: members for name, members in panels.items() if members}
    metric = METRICS[figure]

    early = int(rows[0]["rounds"]) // 5

    def utility(runs: Sequence[Row]) -> str:
        before = [curve(run, metric)[early] for run in runs]
        return f"{mean(numbers(runs, metric))} ({mean(before)})"

    counts = {len(_of_label(members, "ULDP-AVG-w")) for members in panels.values()}
    text = (
        f"{metric.partition('_')[0].capitalize()} after {rows[0]['rounds']} rounds (in brackets: "
        f"after {early}), {'/'.join(map(str, sorted(counts)))} seeds, and AVG-w − AVG by seed:"
    )
    difference = [
        mean_and_error(
            gains(_of_label(members, "ULDP-AVG-w"), _of_label(members, "ULDP-AVG"), metric), 3
        )
        for members in panels.values()
    ]
    shown = [label for label in ULDP_METHODS if any(_of_label(m, label) for m in panels.values())]
    cells = [
        *(
            [label, *(utility(_of_label(members, label)) for members in panels.values())]
            for label in shown
        ),
        ["AVG-w − AVG", *difference],
    ]
    return f"{text}\n\n{table(('users, records', *panels), cells)}"


def _of_label(rows: Iterable[Row], label: str) -> list[Row]:
    return where(rows, **{key.replace("-", "_"): v for key, v in ULDP_METHODS[label].items()})


def upcycled_accuracy(ratio: float) -> str:
    """Return plain accuracy and gain of each pair beside the paper's, and how many gains agree."""
    rows = read(f"upcycled-fl-stragglers-{ratio:g}")
    cells, near, signs = [], [], []
    for dataset in SYNTHETIC:
        for method, name in UPCYCLED_METHODS.items():
            pair = where(rows, dataset=dataset, method=method)
            plain, upcycled = where(pair, upcycled=False), where(pair, upcycled=True)
            if not (plain and upcycled):
                continue
            accuracies = [100 * value for value in numbers(plain, "accuracy_pooled")]
            added = [100 * gain for gain in gains(upcycled, plain, "accuracy_pooled")]
            before, after = PAPER[ratio][method][list(SYNTHETIC).index(dataset)]
            near.append(abs(statistics.mean(accuracies) - before))
            near.append(abs(statistics.mean(accuracies) + statistics.mean(added) - after))
            error = statistics.stdev(added) / math.sqrt(len(added))
            signs.append((statistics.mean(added), error))
            cells.append(
                (
                    dataset.removeprefix("synthetic-"),
                    name,
                    mean(accuracies, digits=2),
                    f"{before:.2f}",
                    mean_and_error(added, 2),
                    f"{after - before:+.2f}",
                )
            )
    header = ("data", "method", "plain", "paper", "upcycled adds", "paper")
    # Of equal accuracies, the difference of two means may be 1e-17.
    up = sum(round(gain, 2) > 0 for gain, _ in signs)
    surely = sum(gain > 2 * error for gain, error in signs)
    worse = sum(gain < -2 * error for gain, error in signs)
    text = (
        f"**{up} of {len(signs)} pairs improve**, {surely} by more than two standard errors; "
        f"{worse} get worse by more than two. Of the {len(near)} accuracies, "
        f"{sum(gap <= 1 for gap in near)} are within 1 point of the paper's and "
        f"{sum(gap <= 2 for gap in near)} within 2."
    )
    return f"{table(header, cells)}\n\n{text}"


def upcycled_losses(ratio: float, datasets: Sequence[str]) -> str:
    """Return how often the upcycled loss is below the plain one, and both losses at the end."""
    rows = read(f"upcycled-fl-stragglers-{ratio:g}")
    cells = []
    for method, name in UPCYCLED_METHODS.items():
        runs = where(rows, method=method)
        if not runs:
            continue
        row = [name]
        for dataset in datasets:
            pair = where(runs, dataset=dataset)
            plain = _mean_curve(where(pair, upcycled=False))
            upcycled = _mean_curve(where(pair, upcycled=True))
            both = [at for at in plain if 2 * at in upcycled]
            lower = sum(upcycled[2 * at] < plain[at] for at in both)
            ends = f"{plain[both[-1]]:.3f} → {upcycled[2 * both[-1]]:.3f}" if both else "–"
            row.append(f"{lower}; {ends}")
        cells.append(row)
    names = [dataset.removeprefix("synthetic-") for dataset in datasets]
    return table(("method", *names), cells)


def _mean_curve(runs: Sequence[Row]) -> dict[int, float]:
    curves = [curve(run, "loss_mean") for run in runs]
    shared = set.intersection(*map(set, curves)) if curves else set()
    return {at: statistics.mean(line[at] for line in curves) for at in sorted(shared)}


def upcycled_private(name: str) -> str:
    """Return loss of plain and upcycled methods under one perturbation, and both ε̄."""
    cells = []
    rows = [
        row for row in read("upcycled-fl-private") if row["run"].startswith(f"{name}-synthetic")
    ]
    for dataset in SYNTHETIC:
        for method, label in UPCYCLED_METHODS.items():
            pair = where(rows, dataset=dataset, method=method)
            plain, upcycled = where(pair, upcycled=False), where(pair, upcycled=True)
            if not (plain and upcycled):
                continue
            budgets = [
                " → ".join(_budget(runs, basis) for runs in (plain, upcycled))
                for basis in ("published", "provable")
            ]
            cells.append(
                (
                    dataset.removeprefix("synthetic-"),
                    label,
                    *(mean(numbers(runs, "loss_mean")) for runs in (plain, upcycled)),
                    mean_and_error(gains(upcycled, plain, "loss_mean"), 3),
                    *budgets,
                )
            )
    header = ("data", "method", "loss, plain", "loss, upcycled", "difference by seed")
    return table((*header, "ε̄ published", "ε̄ provable"), cells)


def _budget(runs: Sequence[Row], basis: str) -> str:
    text = runs[0][f"epsilon_{basis}_mean"]
    return epsilon_text(float(text)) if text else "none"


def ditto_bounds() -> str:
    """Return the bounds of DP-Ditto's Figure 2, each number from its least to its greatest seed."""
    rows = read("dp-ditto-figure-2")
    numbered = ("ε_L", "T*", "h(0)", "h(80)", "h(1000)", "least distance to the line")
    cells = []
    for rate, bound in dict.fromkeys((row["η"], row["bound"]) for row in rows):
        runs = [
            {**row, "ε_L": row["ε_L, ε_G"].partition(",")[0]}
            for row in rows
            if (row["η"], row["bound"]) == (rate, bound)
        ]
        cells.append((rate, bound, *(_span([run[name] for run in runs]) for name in numbered)))
    return table(("η", "bound", *numbered), cells)


def _span(values: Sequence[str]) -> str:
    least, greatest = min(values, key=_number), max(values, key=_number)
    return least if least == greatest else f"{least}–{greatest}"


def _number(text: str) -> float:
    return math.nan if text == "–" else float(text)


def ditto_rounds(figure: int, world: str, metrics: Mapping[str, int]) -> str:
    """Return metrics by T for each λ, ε or method of a world."""
    group = f"dp-ditto-figure-{figure}" + (f"-{world}" if world else "")
    rows = read(group)
    labels = sorted({row["run"].rpartition(", T = ")[0] for row in rows}, key=_last_number)
    lengths = sorted({int(row["rounds"]) for row in rows})
    parts = []
    for metric, digits in metrics.items():
        cells = []
        for label in labels:
            line = [row for row in rows if row["run"].startswith(f"{label}, T = ")]
            by_length = [numbers(where(line, rounds=T), metric) for T in lengths]
            cells.append((label, *(mean(values, digits) for values in by_length)))
        header = (metric.replace("_", " "), *(f"T = {T}" for T in lengths))
        parts.append(table(header, cells))
    return "\n\n".join(parts)


def _last_number(label: str) -> tuple[float, str]:
    """Return the key by which labels such as "ε = 10" are sorted; those without a number follow."""
    number = label.rpartition(" = ")[2]
    return (float(number) if number != label else math.inf), label


def ditto_series(world: str, metrics: Mapping[str, int], at: Sequence[int]) -> str:
    """Return metrics after some rounds for each λ of Figure 6."""
    rows = read(f"dp-ditto-figure-6-{world}")
    parts = []
    for metric, digits in metrics.items():
        cells = []
        for weight in sorted({float(row["global-weight"]) for row in rows}):
            curves = [curve(row, metric) for row in where(rows, global_weight=weight)]
            values = [[line[t] for line in curves] for t in at]
            cells.append((f"λ = {weight:g}", *(mean(each, digits) for each in values)))
        parts.append(table((metric.replace("_", " "), *(f"t = {t}" for t in at)), cells))
    return "\n\n".join(parts)


def uldp_weighting() -> str:
    """Return the losses of Uldp-FL's Figure 8, by number of silos and distribution."""
    rows = read("uldp-fl-figure-8", "uldp-fl-figure-4")
    cells = []
    for distribution in ("uniform", "zipf"):
        for silos in (5, 20, 50):
            runs = where(rows, num_users=1000, distribution=distribution, num_silos=silos)
            equal, by_records = where(runs, method="uldp-avg"), where(runs, method="uldp-avg-w")
            if equal and by_records:
                losses = [mean(numbers(each, "loss_pooled"), 4) for each in (equal, by_records)]
                gap = mean_and_error(gains(equal, by_records, "loss_pooled"), 4)
                cells.append((distribution, silos, *losses, gap))
    header = ("records", "silos", "loss, ULDP-AVG", "loss, ULDP-AVG-w", "AVG − AVG-w, by seed")
    return table(header, cells)


def uldp_sampling() -> str:
    """Return utility and ε of Uldp-FL's Figure 10 by the share of users in a round."""
    rows = read("uldp-fl-figure-10")
    rows += where(
        read("uldp-fl-figure-4"), num_users=1000, distribution="zipf", method="uldp-avg-w"
    )
    cells = []
    for dataset in ("creditcard", "mnist"):
        runs = where(rows, dataset=dataset)
        for rate in sorted({float(row["user-sampling-rate"]) for row in runs}):
            of_rate = where(runs, user_sampling_rate=rate)
            utility = (mean(numbers(of_rate, m)) for m in ("accuracy_pooled", "loss_pooled"))
            budgets = [float(of_rate[0][f"epsilon_{b}"]) for b in ("published", "provable")]
            cells.append((dataset, f"{rate:g}", *utility, *map(epsilon_text, budgets)))
    return table(("data", "q", "accuracy", "loss", "ε published", "ε provable"), cells)


_LOSS = {"training_loss_mean": 3}
_LOSSES = {**_LOSS, "training_loss_std": 3}
_UTILITY = {"accuracy_mean": 3, "training_loss_std": 3}


def private_gains(cell: Sequence[Row]) -> tuple[str, list[float]]:
    """Return the better private method of a cell of `benchmarks.sharing`, and its gains by seed.

    A gain is the method's accuracy minus that of clients alone, in percentage points.
    """
    alone = where(cell, method="alone")
    methods = {row["method"] for row in cell if row["epsilon"] not in ("", "inf")}
    points = {
        method: [100 * gain for gain in gains(where(cell, method=method), alone, "accuracy")]
        for method in sorted(methods)
    }
    best = max(points, key=lambda method: statistics.mean(points[method]))
    return best, points[best]


def sharing() -> str:
    """Return the accuracy of each method in each cell, and what the better private one gains."""
    rows = read("sharing")
    methods = dict.fromkeys(row["method"] for row in rows)
    sizes = ("clients", "examples", "classes")
    cells = []
    for numbers_of_cell in sorted({tuple(int(row[size]) for size in sizes) for row in rows}):
        cell = where(rows, **dict(zip(sizes, numbers_of_cell, strict=True)))
        means = [
            f"{statistics.mean(numbers(where(cell, method=m), 'accuracy')):.2f}" for m in methods
        ]
        gain = mean_and_error(private_gains(cell)[1], 1)
        cells.append([*map(str, numbers_of_cell), *means, gain])
    return table(("clients", "examples", "classes", *methods, "sharing adds"), cells)


TABLES: dict[str, Callable[[], str]] = {
    "uldp-figure-4": partial(uldp_utility, 4, "creditcard"),
    "uldp-figure-5": partial(uldp_utility, 5, "mnist"),
    "uldp-figure-6": partial(uldp_utility, 6, "heart-disease"),
    "uldp-figure-7": partial(uldp_utility, 7, "tcga-brca"),
    "uldp-figure-7-scaled": partial(uldp_utility, 7, "tcga-brca-scaled"),
    **{f"uldp-budgets-{number}": partial(uldp_budgets, number) for number in USERS},
    "ditto-figure-2": ditto_bounds,
    "uldp-figure-11": partial(kept, "uldp-fl-figure-11", without=("set-up",)),
    "uldp-figure-12": partial(kept, "uldp-fl-figure-12", without=("set-up", "ring-LWE")),
    "uldp-figure-8": uldp_weighting,
    "uldp-figure-10": uldp_sampling,
    "upcycled-table-1": partial(upcycled_accuracy, 0.9),
    "upcycled-table-3": partial(upcycled_accuracy, 0.3),
    **{f"upcycled-by-rate-{r:g}": partial(kept, f"upcycled-fl-by-rate-{r:g}") for r in PAPER},
    "upcycled-figure-5": partial(upcycled_losses, 0.9, tuple(SYNTHETIC)),
    "upcycled-figure-6": partial(upcycled_losses, 0.3, tuple(SYNTHETIC)),
    "upcycled-figure-3-tau-2": partial(upcycled_private, "output-2"),
    "upcycled-figure-3-tau-4": partial(upcycled_private, "output-4"),
    "upcycled-figure-4": partial(upcycled_private, "objective"),
    "ditto-figure-3-mnist-dnn": partial(ditto_rounds, 3, "mnist-dnn", _UTILITY),
    "ditto-figure-4-mnist-dnn": partial(ditto_rounds, 4, "mnist-dnn", _UTILITY),
    "ditto-figure-5-mnist-dnn": partial(ditto_rounds, 5, "mnist-dnn", _LOSS),
    "ditto-figure-5-mnist-mlr": partial(ditto_rounds, 5, "mnist-mlr", _LOSS),
    "ditto-figure-6-mnist-dnn": partial(ditto_series, "mnist-dnn", _UTILITY, (3, 9, 15, 30)),
    "sharing": sharing,
    "ditto-figure-7": partial(ditto_rounds, 7, "", _LOSSES),
}
"""The tables by their names in the pages."""
