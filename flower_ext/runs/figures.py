"""Figures of a run: for each, an SVG file and a CSV file with the same numbers."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flower_ext.files import write_rows, write_whole
from flower_ext.metrics.spread import reported_by_most
from flower_ext.runs.directory import Rounds, RunDirectory

if TYPE_CHECKING:  # a SuperNode imports this package for every message, but draws nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: distinct also to colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("solid", "dashed", "dashdot", "dotted")

Line = tuple[Sequence[float], Sequence[float]]


def draw_figures(run: RunDirectory, folder: Path) -> dict[str, str]:
    """Draw the run's measurements; return the titles of the figures by the SVGs' file names."""
    drawn: dict[str, str] = {}
    rounds, clients = run.metrics(), run.client_metrics()
    names = qualities(rounds, clients)
    for name, title, ylabel, lines in _measurements(rounds, names):
        measured = {label: [line] for label, line in lines.items() if line[0]}
        if measured:
            stem = _unused(name, drawn)
            drawn[f"{stem}.svg"] = title
            last = [values[-1] for [(_, values)] in measured.values()]
            log = name == "epsilon" and max(last) > 20 * min(last)
            draw_lines(folder, stem, title, ylabel, measured, log=log, from_zero=True)
    for name in names:
        scored = ((place, row) for place, row in enumerate(clients) if name in row)
        of_clients = [(row.get("partition", place), row[name]) for place, row in scored]
        if of_clients:
            stem = _unused("fairness" if name == "accuracy" else f"{name}_spread", drawn)
            drawn[f"{stem}.svg"] = title = f"How {in_words(name)} is spread over clients"
            _histogram(folder, stem, title, in_words(name), of_clients)
    return drawn


def _measurements(
    rounds: Rounds, names: Iterable[str]
) -> Iterator[tuple[str, str, str, Mapping[str, Line]]]:
    """Yield name, title, vertical axis and lines of each figure against rounds."""
    for name in names:
        noised = ", with noise" if rounds.series(f"{name}_mean_error")[0] else ""
        quality = {
            f"mean over clients{noised}": rounds.series(f"{name}_mean"),
            "worst tenth of clients": rounds.series(f"{name}_worst_decile"),
        }
        yield name, f"Test {in_words(name)} of the clients' models", in_words(name), quality
    yield "epsilon", "Privacy spent", "ε", epsilon_lines(rounds)
    messages = {"to and from clients": cumulative(rounds.series("messages"))}
    yield "messages", "Training messages", "messages, cumulative", messages
    megabytes = {
        "to clients": cumulative(rounds.series("bytes_down"), scale=1e-6),
        "from clients": cumulative(rounds.series("bytes_up"), scale=1e-6),
    }
    yield "traffic", "Model arrays sent for training", "megabytes, cumulative", megabytes
    seconds = {
        "training": cumulative(rounds.series("training_seconds")),
        "with evaluation": cumulative(rounds.series("seconds")),
    }
    yield "time", "Time of the rounds", "seconds, cumulative", seconds
    spread = {"standard deviation over clients": rounds.series("training_loss_std")}
    title = "Spread of the clients' training losses"
    yield "training_loss_spread", title, "loss", spread
    norm = {"mean over the cohort": rounds.series("update_norm_mean")}
    clipping = {"clipping norm": rounds.series("clipping_norm")}
    title = "Clipping norm that follows a quantile of the updates' norms"
    yield "clipping_norm", title, "L2 norm", clipping
    yield "update_norm", "Norm of local updates before clipping", "L2 norm", norm


def qualities(rounds: Rounds, clients: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the names of scores of clients' models: no losses, but always accuracy."""
    tail = "_worst_decile"
    names = {name for row in rounds for name in row if name.endswith(tail)}
    names = {"accuracy", *(name.removesuffix(tail) for name in names)}
    names |= reported_by_most(clients)
    return sorted(names - {"partition", "num-examples", "loss", "training_loss"})


def _unused(name: str, files: Collection[str]) -> str:
    """Return a file name without suffix: like ``name``, safe everywhere, not among ``files``."""
    safe = re.sub(r"[^\w-]", "_", name, flags=re.ASCII)[:100]
    used = {file.lower() for file in files}
    stems = chain([safe], (f"{safe}-{number}" for number in count(2)))
    return next(stem for stem in stems if f"{stem}.svg".lower() not in used)


def in_words(metric: str) -> str:
    """Return a metric's name for use in a sentence."""
    return metric.replace("_", " ").replace("roc auc", "ROC-AUC")


def epsilon_lines(rounds: Rounds) -> dict[str, Line]:
    """Return ε against rounds; for record-level ε the largest over clients and the mean."""
    lines: dict[str, Line] = {}
    for basis in ("published", "provable"):
        largest, mean = (rounds.series(f"epsilon_{basis}{end}") for end in ("", "_mean"))
        if mean[0]:
            lines[f"{basis}, each upload, largest of the clients"] = largest
            lines[f"{basis}, each upload, mean of the clients"] = mean
        elif largest[0]:
            lines["published" if basis == "published" else "provable, released models"] = largest
    return lines


def cumulative(line: Line, *, scale: float = 1.0) -> Line:
    """Return the sums up to each round."""
    return line[0], (np.cumsum(line[1]) * scale).tolist()


def draw_lines(
    folder: Path,
    name: str,
    title: str,
    ylabel: str,
    lines: Mapping[str, Sequence[Line]],
    *,
    xlabel: str = "round",
    against: Mapping[str, Sequence[Line]] | None = None,
    labels: Sequence[str] = (),
    log: bool = False,
    from_zero: bool = False,
) -> Path:
    """Draw the mean of each label's runs, in a band of one sample standard deviation.

    Only rounds that all runs of a label measured are drawn. The function returns the SVG's path.

    Parameters
    ----------
    lines : Mapping[str, Sequence[Line]]
        The runs of each label, as (rounds, values).
    against : Mapping[str, Sequence[Line]], optional
        The same for the horizontal axis if that is not the round; the mean over runs is drawn.
    labels : Sequence[str], optional
        Labels of all figures of a page, so that a label has one colour in all of them.
    log : bool
        Use a logarithmic vertical axis.
    from_zero : bool
        Begin the vertical axis at zero, unless a value is negative.
    """
    figure, axes = canvas(title, xlabel, ylabel)
    faint = 0.15 if len(lines) <= 6 else 0.05
    rows: list[tuple[str, float, float, float]] = []
    labels = labels or list(lines)
    for label, runs in lines.items():
        number = labels.index(label)
        x, mean, deviation = _mean_and_deviation(runs, (against or {}).get(label, ()))
        if not len(x):
            continue
        colour = COLOURS[number % len(COLOURS)]
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        # A line through one point is invisible; a dot is not.
        marker = "o" if len(x) == 1 else ""
        axes.plot(x, mean, label=label, color=colour, linestyle=dash, marker=marker)
        if len(runs) > 1:
            axes.fill_between(x, mean - deviation, mean + deviation, color=colour, alpha=faint)
        rows += [(label, *row) for row in np.column_stack([x, mean, deviation]).tolist()]
    if log:
        axes.set_yscale("log")
    elif from_zero and all(mean >= 0 for _, _, mean, _ in rows):
        axes.set_ylim(bottom=0)
    if len(lines) > 6:  # inside the axes, the legend would hide the lines
        figure.legend(loc="outside right center", frameon=False, fontsize=8)
    elif len(labels) > 1:
        axes.legend(frameon=False)
    columns = ("line", xlabel, ylabel, "std")
    if all(len(runs) == 1 for runs in lines.values()):
        return save_figure(figure, folder, name, columns[:3], [row[:3] for row in rows])
    return save_figure(figure, folder, name, columns, rows)


def _mean_and_deviation(
    runs: Sequence[Line], against: Sequence[Line]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return places on the horizontal axis, and the runs' mean and standard deviation there.

    The places are the rounds that all runs measured, or the mean of ``against`` in these rounds.
    """
    measured = [dict(zip(*run, strict=True)) for run in [*runs, *against]]
    rounds = sorted(set.intersection(*(set(values) for values in measured)))
    values = np.asarray([[run[round] for round in rounds] for run in measured])
    drawn, other = values[: len(runs)], values[len(runs) :]
    mean = drawn.mean(axis=0)
    deviation = drawn.std(axis=0, ddof=1) if len(runs) > 1 else np.zeros_like(mean)
    return other.mean(axis=0) if against else np.asarray(rounds, dtype=float), mean, deviation


def _histogram(
    folder: Path, name: str, title: str, xlabel: str, scores: Sequence[tuple[float, float]]
) -> None:
    """Draw a histogram of the clients' scores, given each client's (partition, score)."""
    figure, axes = canvas(title, xlabel, "clients")
    values = [score for _, score in scores]
    # The same bins for every run, so that histograms can be compared, unless a score needs more.
    bins = np.linspace(min(0.0, *values), max(1.0, *values), 21)
    axes.hist(values, bins=bins.tolist(), color=COLOURS[0], edgecolor="white")
    mean = float(np.mean(values))
    axes.axvline(mean, color=COLOURS[1], linestyle="dashed", label=f"mean {mean:.3f}")
    axes.legend(frameon=False)
    rows = [(f"{partition:.0f}", score) for partition, score in scores]
    save_figure(figure, folder, name, ("partition", xlabel), rows)


def canvas(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """Return an empty figure and its axes, in the style of all figures."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.0, 3.4))
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    axes.set_xlabel(xlabel, parse_math=False)
    axes.set_ylabel(ylabel, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    if xlabel == "round":
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axes.ticklabel_format(axis="y", scilimits=(-3, 5), useOffset=False)
    return figure, axes


def save_figure(
    figure: Figure,
    folder: Path,
    name: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
) -> Path:
    """Write a figure as ``name.svg``, and its numbers as ``name.csv``; return the SVG's path."""
    folder.mkdir(parents=True, exist_ok=True)
    if figure.legends:  # a legend beside the axes: measuring its size takes long
        figure.set_layout_engine("constrained")
    elif figure.get_layout_engine() is None:
        figure.subplots_adjust(left=0.13, right=0.97, bottom=0.16, top=0.87)
    # No date and a fixed salt: the same run draws the same bytes.
    drawing = io.StringIO()
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(drawing, format="svg", metadata={"Date": None})
    path = folder / f"{name}.svg"
    write_whole(path, drawing.getvalue().encode(), sync=False)
    write_rows(folder / f"{name}.csv", columns, rows, sync=False)
    return path
