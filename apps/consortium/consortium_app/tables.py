"""The silos' tables: columns of numbers, and the user of every row."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from consortium_app.settings import Settings
from flower_ext.data import find_files
from flower_ext.errors import InvalidValue, knowing_no_data
from flower_ext.privacy import seeded_generator
from flower_ext.runs.settings import UnfitSetting
from flower_ext_consortium.record_files import RecordFile

INVENTED_PEOPLE, INVENTED_VISITS = 2000, 4
_CENTRES = ("cleveland", "hungarian", "switzerland", "va")
_HEART = (
    *("age", "sex", "pain", "pressure", "cholesterol", "sugar", "ecg", "heart_rate", "angina"),
    *("depression", "slope", "vessels", "thal", "disease"),
)


@dataclass(frozen=True)
class Table:
    """The rows of one silo.

    Parameters
    ----------
    columns : dict of ndarray
        Numbers (rows,) by name; NaN where a value is missing.
    users : ndarray
        The user of every row (rows,).
    """

    columns: dict[str, NDArray[np.float64]]
    users: NDArray[np.int64]


def num_users_of(settings: Settings) -> int:
    """Return the number of users of a run."""
    if settings.num_users:
        return settings.num_users
    if settings.dataset == "files":
        raise UnfitSetting(
            "run-config num-users=0 with dataset='files': expected the total that "
            "`flower-ext link union` prints, or the --buckets that `flower-ext link` was given"
        )
    if settings.dataset == "invented":
        return INVENTED_PEOPLE
    return sum(len(table.users) for table in _silos(settings.dataset, settings.data_folder))


def table_of(settings: Settings, silo: int) -> Table:
    """Return a silo's table.

    Raises
    ------
    DataNotFound, InvalidValue
        The files are missing or malformed; no message shows a value.
    """
    match settings.dataset:
        case "files":
            return _read(settings, silo)
        case "invented":
            return invented(settings.num_silos, settings.seed)[silo]
    silos = _silos(settings.dataset, settings.data_folder)
    if settings.num_silos != len(silos):
        raise UnfitSetting(
            f"run-config num-silos={settings.num_silos}: expected {len(silos)}, the silos of "
            f"{settings.dataset}"
        )
    return silos[silo]


def _read(settings: Settings, silo: int) -> Table:
    # Names of files and columns reveal nobody's data, so the server may see them.
    with knowing_no_data():
        if not settings.data_folder:
            raise UnfitSetting(
                "run-config data-folder='' with dataset='files': expected the folder that holds "
                "the silo's file; set data-folder in its SuperNode's node config, or as a setting"
            )
        path = Path(settings.data_folder) / settings.table.format(silo=silo)
        source = RecordFile(path=path)
        (user,) = source.positions([settings.user_column])
    names, rows = source.column_names(), [*source.rows()]
    columns = {
        name: np.array([_number(row[place]) for row in rows])
        for place, name in enumerate(names)
        if place != user
    }
    try:
        users = np.array([int(row[user]) for row in rows], dtype=np.int64)
    except ValueError:
        raise InvalidValue(
            f"{path}: expected whole numbers in the column {settings.user_column!r}, as "
            "`flower-ext link users` writes them"
        ) from None
    return Table(columns, users)


def _number(text: object) -> float:
    """Return a value as a number; NaN for a text or an empty field."""
    try:
        return float(str(text))
    except ValueError:
        return float("nan")


@cache
def invented(num_silos: int, seed: int) -> list[Table]:
    """Return silos of invented patients. Many patients have records in several silos.

    Older people, smokers and people with high blood pressure have the disease more often.
    """
    rng = seeded_generator(seed, "invented patients")
    people = INVENTED_PEOPLE
    age = rng.normal(55, 12, people).clip(18, 95)
    smoker = (rng.random(people) < 0.3).astype(float)
    pressure = rng.normal(110 + 0.4 * age, 12)
    risk = -1.2 + 0.07 * (age - 55) + 1.5 * smoker + 0.06 * (pressure - 132)
    disease = (rng.random(people) < 1 / (1 + np.exp(-risk))).astype(float)
    days = rng.exponential(np.where(disease == 1, 1500, 6000))
    ends = rng.uniform(500, 4000, people)
    patient = rng.integers(people, size=INVENTED_VISITS * people)
    silo = rng.integers(num_silos, size=len(patient))
    measured = pressure[patient] + rng.normal(0, 6, len(patient))
    measured[rng.random(len(patient)) < 0.02] = np.nan  # not taken at this visit
    columns = {
        "age": age[patient],
        "smoker": smoker[patient],
        "pressure": measured,
        "disease": disease[patient],
        "days": np.minimum(days, ends)[patient],
        "event": (days <= ends)[patient].astype(float),
    }
    return [
        Table({name: column[silo == s] for name, column in columns.items()}, patient[silo == s])
        for s in range(num_silos)
    ]


@cache
def _silos(dataset: str, folder: str) -> list[Table]:
    """Return the silos of real data; every row is a different person."""
    where = Path(folder) if folder else None
    tables = _tcga_brca(where) if dataset == "tcga-brca" else _heart_disease(where)
    ends = np.cumsum([len(next(iter(table.values()))) for table in tables])
    return [
        Table(table, np.arange(end - len(next(iter(table.values()))), end))
        for table, end in zip(tables, ends.tolist(), strict=True)
    ]


def _heart_disease(folder: Path | None) -> list[dict[str, NDArray[np.float64]]]:
    """Return UCI's four centres, with all rows; ``disease`` is 1 for a disease of any degree."""
    files = [tuple(f"heart_disease/processed.{centre}.data" for centre in _CENTRES)]
    silos = []
    for path in find_files("heart-disease", files, folder):
        rows = [line.split(",") for line in path.read_text(encoding="utf-8").split()]
        columns = _columns(_HEART, rows)
        columns["disease"] = np.where(columns["disease"] > 0, 1.0, columns["disease"])
        silos.append(columns)
    return silos


def _tcga_brca(folder: Path | None) -> list[dict[str, NDArray[np.float64]]]:
    """Return breast cancer patients by region; ``days`` counts the days to death or censoring."""
    paths = find_files("tcga-brca", [("tcga_brca/brca.csv", "tcga_brca/centers.csv")], folder)
    with paths[1].open(encoding="utf-8", newline="") as stream:
        region = {row["TSS Code"]: row["Region"] for row in csv.DictReader(stream)}
    with paths[0].open(encoding="utf-8", newline="") as stream:
        header, *rows = csv.reader(stream)
    names = ["age" if name == "age_at_index" else name for name in header]
    names = [{"E": "event", "T": "days"}.get(name, name) for name in names]
    regions = [region[row[0].split("-")[1]] for row in rows]
    return [
        _columns(
            names[1:], [row[1:] for row, place in zip(rows, regions, strict=True) if place == r]
        )
        for r in sorted(set(regions))
    ]


def _columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, NDArray[np.float64]]:
    numbers = np.array([[_number(value) for value in row] for row in rows])
    return {name: numbers[:, place] for place, name in enumerate(names)}
