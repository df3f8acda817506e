"""Figures of a run: for each, an SVG file and a CSV file with the same numbers."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flower_ext.files import write_rows, write_whole
from flower_ext.metrics.reported import reported_by_most
from flower_ext.runs.directory import Rounds, RunDirectory

if TYPE_CHECKING:  # a SuperNode imports this package for every message, but draws nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: distinct also to colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("solid", "dashed", "dashdot", "dotted")

Line = tuple[Sequence[float], Sequence[float]]
"""Rounds, and the values measured in these rounds."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart with one line for each label.

    A line is the mean over runs. The band around it is one sample standard deviation wide to each
    side. With ``log``, the vertical axis is logarithmic. With ``from_zero``, it begins at zero,
    unless a value is negative.
    """

    title: str
    ylabel: str
    lines: Mapping[str, Sequence[Line]]
    """The runs of each label. A line has a point for each round that all its runs measured."""
    xlabel: str = "round"
    against: Mapping[str, Sequence[Line]] = field(default_factory=dict)
    """Another metric of the same runs, whose mean the horizontal axis shows in place of rounds."""
    labels: Sequence[str] = ()
    """Labels of all charts of a page, so that a label has the same colour in all of them."""
    log: bool = False
    from_zero: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", self.labels or list(self.lines))

    @property
    def is_crowded(self) -> bool:
        """True if there are so many lines that bands must be faint, and labels beside the axes."""
        return len(self.lines) > 6


def draw_figures(run: RunDirectory, folder: Path) -> dict[str, str]:
    """Draw the run's measurements; return the title of each figure by the name of its SVG file."""
    drawn: dict[str, str] = {}
    rounds, clients = run.metrics(), run.client_metrics()
    names = qualities(rounds, clients)
    for name, chart in _charts(rounds, names):
        if chart.lines:
            stem = _unused(name, drawn)
            drawn[f"{stem}.svg"] = chart.title
            draw_lines(folder, stem, chart)
    for name in names:
        scored = ((place, row) for place, row in enumerate(clients) if name in row)
        of_clients = [(row.get("partition", place), row[name]) for place, row in scored]
        if of_clients:
            stem = _unused("fairness" if name == "accuracy" else f"{name}_spread", drawn)
            drawn[f"{stem}.svg"] = title = f"How {in_words(name)} is spread over clients"
            figure, axes = canvas(title, in_words(name), "clients")
            values = [score for _, score in of_clients]
            # Every run has the same bins, so that histograms can be compared, unless a score is
            # below 0 or above 1.
            bins = np.linspace(min(0.0, *values), max(1.0, *values), 21)
            axes.hist(values, bins=bins.tolist(), color=COLOURS[0], edgecolor="white")
            mean = float(np.mean(values))
            axes.axvline(mean, color=COLOURS[1], linestyle="dashed", label=f"mean {mean:.3f}")
            axes.legend(frameon=False)
            cells = [(f"{partition:.0f}", score) for partition, score in of_clients]
            save_figure(figure, folder, stem, ("partition", in_words(name)), cells)
    return drawn


def _charts(rounds: Rounds, names: Iterable[str]) -> Iterator[tuple[str, Chart]]:
    """Yield (name, chart) for all charts of one run; a chart without measurements has no lines."""
    for name in names:
        noised = ", with noise" if rounds.series(f"{name}_mean_error")[0] else ""
        quality = {
            f"mean over clients{noised}": rounds.series(f"{name}_mean"),
            "worst tenth of clients": rounds.series(f"{name}_worst_decile"),
        }
        title = f"Test {in_words(name)} of the clients' models"
        yield name, _of_one_run(title, in_words(name), quality)
    privacy = _of_one_run("Privacy spent", "ε", epsilon_lines(rounds))
    last = [values[-1] for [(_, values)] in privacy.lines.values()]
    yield "epsilon", replace(privacy, log=bool(last) and max(last) > 20 * min(last))

    def total(name: str, scale: float = 1.0) -> Line:
        return cumulative(rounds.series(name), scale=scale)

    messages = {"to and from clients": total("messages")}
    megabytes = {"to clients": total("bytes_down", 1e-6), "from clients": total("bytes_up", 1e-6)}
    seconds = {"training": total("training_seconds"), "with evaluation": total("seconds")}
    deviation = {"standard deviation over clients": rounds.series("training_loss_std")}
    norm = {"mean over the cohort": rounds.series("update_norm_mean")}
    clipping = "Clipping norm that follows a quantile of the updates' norms"
    for name, title, ylabel, lines in (
        ("messages", "Training messages", "messages, cumulative", messages),
        ("traffic", "Model arrays sent for training", "megabytes, cumulative", megabytes),
        ("time", "Time of the rounds", "seconds, cumulative", seconds),
        ("training_loss_spread", "Spread of the clients' training losses", "loss", deviation),
        ("clipping_norm", clipping, "L2 norm", {"clipping norm": rounds.series("adaptive_norm")}),
        ("update_norm", "Norm of local updates before clipping", "L2 norm", norm),
    ):
        yield name, _of_one_run(title, ylabel, lines)


def _of_one_run(title: str, ylabel: str, lines: Mapping[str, Line]) -> Chart:
    """Return a chart of one run; it leaves out lines without measurements."""
    measured = {label: [line] for label, line in lines.items() if line[0]}
    return Chart(title=title, ylabel=ylabel, lines=measured, from_zero=True)


def qualities(rounds: Rounds, clients: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the names of scores to draw: accuracy, and what most clients report, except losses."""
    tail = "_worst_decile"
    names = {name for row in rounds for name in row if name.endswith(tail)}
    names = {"accuracy", *(name.removesuffix(tail) for name in names)}
    names |= reported_by_most(clients)
    return sorted(names - {"partition", "num-examples", "loss", "training_loss"})


def _unused(name: str, files: Collection[str]) -> str:
    """Return a file's stem: ``name`` in plain characters, and a number if ``files`` has it."""
    safe = re.sub(r"[^\w-]", "_", name, flags=re.ASCII)[:100]
    used = {file.lower() for file in files}
    stems = chain([safe], (f"{safe}-{number}" for number in count(2)))
    return next(stem for stem in stems if f"{stem}.svg".lower() not in used)


def in_words(metric: str) -> str:
    """Return a metric's name for use in a sentence."""
    return metric.replace("_", " ").replace("roc auc", "ROC-AUC")


def epsilon_lines(rounds: Rounds) -> dict[str, Line]:
    """Return lines of ε by label: the largest and the mean if each client has its own ε."""
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
    """Return a line whose values are the cumulative sums of ``line``, times ``scale``."""
    return line[0], (np.cumsum(line[1]) * scale).tolist()


def draw_lines(folder: Path, name: str, chart: Chart) -> Path:
    """Draw a chart as ``name.svg``, with its numbers in ``name.csv``; return the SVG's path."""
    figure, axes = canvas(chart.title, chart.xlabel, chart.ylabel)
    rows = [row for label in chart.lines for row in _draw_line(axes, chart, label)]
    if chart.log:
        axes.set_yscale("log")
    elif chart.from_zero and all(mean >= 0 for _, _, mean, _ in rows):
        axes.set_ylim(bottom=0)
    if chart.is_crowded:  # inside the axes, the legend would hide the lines
        figure.legend(loc="outside right center", frameon=False, fontsize=8)
    elif len(chart.labels) > 1:
        axes.legend(frameon=False)
    columns = ("line", chart.xlabel, chart.ylabel, "std")
    # The last column would hold only zeros if each line were a single run.
    shown = 4 if any(len(runs) > 1 for runs in chart.lines.values()) else 3
    return save_figure(figure, folder, name, columns[:shown], [row[:shown] for row in rows])


def _draw_line(axes: Axes, chart: Chart, label: str) -> list[tuple[str, float, float, float]]:
    """Draw the line of a label and its band; return (label, x, mean, deviation) of each point."""
    runs, number = chart.lines[label], chart.labels.index(label)
    x, mean, deviation = _mean_and_deviation(runs, chart.against.get(label, ()))
    if not len(x):
        return []
    colour = COLOURS[number % len(COLOURS)]
    dash = DASHES[number // len(COLOURS) % len(DASHES)]
    # A line through one point is invisible; a dot is not.
    marker = "o" if len(x) == 1 else ""
    axes.plot(x, mean, label=label, color=colour, linestyle=dash, marker=marker)
    if len(runs) > 1:
        faint = 0.05 if chart.is_crowded else 0.15
        axes.fill_between(x, mean - deviation, mean + deviation, color=colour, alpha=faint)
    return [(label, *row) for row in np.column_stack([x, mean, deviation]).tolist()]


def _mean_and_deviation(
    runs: Sequence[Line], against: Sequence[Line]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return x, and mean and deviation over the runs, for each round that all runs measured."""
    measured = [dict(zip(*run, strict=True)) for run in [*runs, *against]]
    rounds = sorted(set.intersection(*(set(values) for values in measured)))
    values = np.asarray([[run[round] for round in rounds] for run in measured])
    drawn, other = values[: len(runs)], values[len(runs) :]
    mean = drawn.mean(axis=0)
    deviation = drawn.std(axis=0, ddof=1) if len(runs) > 1 else np.zeros_like(mean)
    return other.mean(axis=0) if against else np.asarray(rounds, dtype=float), mean, deviation


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
    if figure.legends:  # a legend beside the axes needs this slow layout, which measures its size
        figure.set_layout_engine("constrained")
    elif figure.get_layout_engine() is None:
        figure.subplots_adjust(left=0.13, right=0.97, bottom=0.16, top=0.87)
    # Write no date, and use a fixed salt, so that the same run gives the same bytes.
    drawing = io.StringIO()
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(drawing, format="svg", metadata={"Date": None})
    path = folder / f"{name}.svg"
    write_whole(path, drawing.getvalue().encode(), sync=False)
    write_rows(folder / f"{name}.csv", columns, rows, sync=False)
    return path
