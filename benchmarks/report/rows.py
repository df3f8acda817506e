"""Rows of results: CSV files in ``benchmarks/results``, from which tables of pages are made.

`collect` writes a line for each completed run of an app. Experiments without runs of an app write
a CSV file into their output folder, and `copy_files` copies it.
"""

import csv
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flower_ext.runs import RunDirectory

Row = Mapping[str, str]
FOLDER = Path(__file__).parents[1] / "results"
SKIPPED = ("search", "warm-up", "pilot")
"""First folders of runs that no table shows."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns of the runs of one app.

    Parameters
    ----------
    settings : tuple of str
        Settings that differ between runs of an experiment.
    last : tuple of str
        Metrics of the last evaluation.
    curves : tuple of str
        Metrics of every evaluation, in one cell as ``round:value`` with spaces between.
    """

    settings: tuple[str, ...]
    last: tuple[str, ...]
    curves: tuple[str, ...]


COLUMNS = {
    "uldp-fl": Columns(
        settings=(
            "dataset",
            "num-users",
            "distribution",
            "labels-per-user",
            "num-silos",
            "method",
            "group-size",
            "user-sampling-rate",
            "local-epochs",
            "server-learning-rate",
        ),
        last=(
            "accuracy_pooled",
            "concordance_mean",
            "loss_pooled",
            "epsilon_provable",
            "epsilon_published",
        ),
        curves=("accuracy_pooled", "concordance_mean", "loss_pooled"),
    ),
    "upcycled-fl": Columns(
        settings=(
            "dataset",
            "method",
            "upcycled",
            "straggler-ratio",
            "perturbation",
            "clipping-norm",
            "learning-rate",
            "coefficient",
            "proximal-weight",
            "server-momentum",
            "server-learning-rate",
            "regularization",
        ),
        last=(
            "accuracy_pooled",
            "accuracy_mean",
            "loss_pooled",
            "loss_mean",
            "epsilon_published_mean",
            "epsilon_published",
            "epsilon_provable_mean",
        ),
        curves=("accuracy_pooled", "loss_mean"),
    ),
    "dp-ditto": Columns(
        settings=(
            "dataset",
            "model",
            "method",
            "epsilon",
            "clipping-norm",
            "global-weight",
            "learning-rate",
            "examples-per-client",
        ),
        last=(
            "accuracy_mean",
            "accuracy_worst_decile",
            "accuracy_jain",
            "training_loss_mean",
            "training_loss_std",
        ),
        curves=("accuracy_mean", "training_loss_mean", "training_loss_std"),
    ),
    "dp2-fedsam": Columns(
        settings=(
            "dataset",
            "method",
            "clients",
            "classes-per-client",
            "epsilon",
            "calibration",
            "sampling",
            "sam-radius",
            "local-epochs",
        ),
        last=("accuracy_mean", "accuracy_worst_decile", "epsilon_provable", "epsilon_published"),
        curves=("accuracy_mean", "update_norm_mean"),
    ),
}
"""The columns of each app's runs."""


def collect(app: str, runs: Path, folder: Path = FOLDER) -> list[Path]:
    """Write the completed runs below ``runs`` to CSV files, and return the files.

    The file of a run is named by the app and the first folder of its path. Rows of other runs that
    a file has already stay in it, so results from several machines add up.
    """
    groups: dict[str, dict[str, Row]] = {}
    for path in sorted(runs.rglob("run.json")):
        place = path.parent.relative_to(runs)
        if place.parts[0] in SKIPPED or len(place.parts) < 2:
            continue
        run = RunDirectory.open(path.parent)
        if run.status == "completed":
            group, *rest = place.parts
            name = "/".join(rest)
            groups.setdefault(group, {})[name] = row_of(run, COLUMNS[app]) | {"run": name}
    return [_write(folder / f"{app}-{group}.csv", rows) for group, rows in groups.items()]


def rows_of(app: str, *groups: Iterable[RunDirectory]) -> list[Row]:
    """Return the rows of groups of an app's runs."""
    return [row_of(run, COLUMNS[app]) for runs in groups for run in runs]


def row_of(run: RunDirectory, columns: Columns) -> dict[str, str]:
    """Return the cells of a run; a metric that it lacks is an empty cell."""
    config, rounds = run.config, run.metrics()
    row = {"run": run.path.name}
    row |= {name: _text(config[name]) for name in ("seed", "rounds", *columns.settings)}
    for name in columns.last:
        values = rounds.series(name)[1]
        row[name] = _text(values[-1]) if values else ""
    for name in columns.curves:
        points = zip(*rounds.series(name), strict=True)
        row[f"{name} by round"] = " ".join(f"{at:g}:{value:.4g}" for at, value in points)
    row["seconds"] = f"{rounds.total('seconds'):.0f}"
    return row


def store_rows(
    name: str, header: Sequence[str], rows: Iterable[Sequence[object]], *, folder: Path
) -> None:
    """Write a table that comes from no run directories to ``name.csv`` in an output folder.

    `copy_files` publishes the file, so that a short experiment cannot replace published rows.
    """
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerows([header, *rows])


def copy_files(paths: Iterable[Path], folder: Path = FOLDER) -> list[Path]:
    """Copy files that `store_rows` wrote to the published rows, and return the copies."""
    folder.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copyfile(path, folder / path.name)) for path in paths]


def read_rows(*names: str, folder: Path = FOLDER) -> list[Row]:
    """Return the rows of CSV files, in their order; a missing file has none."""
    rows: list[Row] = []
    for name in names:
        path = folder / f"{name}.csv"
        if path.exists():
            with path.open(newline="", encoding="utf-8") as stream:
                rows += csv.DictReader(stream)
    return rows


def select_rows(rows: Iterable[Row], **cells: object) -> list[Row]:
    """Return the rows that have these cells (underscores for hyphens)."""
    wanted = {name.replace("_", "-"): _text(value) for name, value in cells.items()}
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def column_values(rows: Iterable[Row], column: str) -> list[float]:
    """Return a column; NaN for an empty cell, of a run that diverged."""
    return [float(row[column]) if row[column] else math.nan for row in rows]


def gains(rows: Sequence[Row], others: Sequence[Row], column: str) -> list[float]:
    """Return by how much a column exceeds that of the other run with its seed."""
    theirs = {row["seed"]: row for row in others}
    pairs = [(row, theirs[row["seed"]]) for row in rows if row["seed"] in theirs]
    return [
        column_values([row], column)[0] - column_values([other], column)[0] for row, other in pairs
    ]


def curve(row: Row, column: str) -> dict[int, float]:
    """Return a metric by round."""
    points = (point.split(":") for point in row[f"{column} by round"].split())
    return {int(at): float(value) for at, value in points}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _write(path: Path, rows: dict[str, Row]) -> Path:
    """Write rows in the order of their names, beside the rows of other runs in the file."""
    merged = {row["run"]: row for row in read_rows(path.stem, folder=path.parent)} | rows
    path.parent.mkdir(parents=True, exist_ok=True)
    header = list(next(iter(rows.values())))
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, header, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(merged[name] for name in sorted(merged))
    return path
