"""Tables from local files: card fraud, heart disease and breast cancer, as Uldp-FL uses them.

Card transactions are standardised by the deviations of all training rows, heart disease by those
of each centre. No privacy guarantee of a training covers these statistics.
"""

from __future__ import annotations

import csv
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from flower_ext.data.examples import ClientData, Examples
from flower_ext.data.files import FOLDER_VARIABLE, DataNotFound, locate, opened
from flower_ext.data.partition import split
from flower_ext.errors import InvalidValue

CREDITCARD_FEATURES = 30
HEART_DISEASE_FEATURES = 13
TCGA_BRCA_FEATURES = 39
HEART_DISEASE_CENTRES = ("cleveland", "hungarian", "switzerland", "va")
TCGA_BRCA_REGIONS = 6

FILES = {
    "creditcard": tuple(
        (f"creditcard/{name}{suffix}",)
        for name in ("creditcard.csv", "creditcard_subset.csv")
        for suffix in ("", ".gz")
    ),
    "heart-disease": (
        tuple(f"heart_disease/processed.{centre}.data" for centre in HEART_DISEASE_CENTRES),
    ),
    "tcga-brca": (("tcga_brca/brca.csv", "tcga_brca/train_test_split.csv"),),
}

_TRAIN_FRACTION = 0.85
_NORMAL_TRANSACTIONS = 28_432
"""A tenth of the 284,315 in Kaggle's file, because the authors train on a tenth of them."""
_HEART_TEST_FRACTION = 0.34
_HEART_SPLIT_SEED = 43


def breast_cancer(*, rng: np.random.Generator) -> ClientData:
    """Load the 569 tumours that come with scikit-learn: 30 features, 1 for benign; 85 % train."""
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    return _standardised(bunch.data, bunch.target, rng)


def creditcard(folder: Path | None = None, *, rng: np.random.Generator) -> ClientData:
    """Load card transactions: 30 features, 1 for fraud; 85 % train, class by class.

    The file is Kaggle's ``creditcard.csv``, or a subset with a column ``pool`` whose rows
    ``random`` count. All frauds are kept, with 28,432 normal transactions or as many as there are.
    The authors thin out only their training rows, and test on all normal rows of the test part.

    Raises
    ------
    DataNotFound
        No folder has the file; the message names the paths.
    ValueError
        The file has other content.
    """
    (path,) = _find("creditcard", folder)
    rows = list(_records(path))
    columns = ["Time", *(f"V{number}" for number in range(1, 29)), "Amount", "Class"]
    kept = [row for row in rows if row.get("pool", "random") == "random"]
    table = _numbers(path, kept, columns)
    fraud = table[:, -1] == 1
    if not np.isin(table[:, -1], (0, 1)).all():
        raise InvalidValue(f"{path}: expected 0 or 1 in the column Class")
    normal = np.flatnonzero(~fraud)
    if len(normal) > _NORMAL_TRANSACTIONS:
        normal = rng.choice(normal, size=_NORMAL_TRANSACTIONS, replace=False)
    chosen = np.sort(np.concatenate([np.flatnonzero(fraud), normal]))
    return _standardised(table[chosen, :-1], table[chosen, -1], rng)


def heart_disease(folder: Path | None = None) -> list[ClientData]:
    """Load UCI's four centres: 13 features, 1 for any disease; the benchmark's split, 66 % train.

    The three columns that are mostly missing are left out, then the incomplete rows: 303, 261, 46
    and 130 rows remain. Chest pain and resting ECG become indicators of all levels but the first;
    they come last. Features are standardised by each centre's own training rows.

    Raises
    ------
    DataNotFound, ValueError
        As `creditcard`.
    """
    return [_heart_centre(path) for path in _find("heart-disease", folder)]


def _heart_centre(path: Path) -> ClientData:
    from sklearn.model_selection import train_test_split

    with path.open(encoding="utf-8", newline="") as stream:
        lines = [line for line in csv.reader(stream) if line]
    complete = []
    for number, line in enumerate(lines, start=1):
        if len(line) != 14:
            raise InvalidValue(f"{path}, line {number}: {len(line)} columns, expected 14")
        left = [*line[:10], line[13]]
        if "?" not in left:
            complete.append([_number(path, number, value) for value in left])
    if not complete:
        raise InvalidValue(
            f"{path}: expected complete rows, without '?' in the columns that are kept"
        )
    table = np.array(complete)
    pain, ecg, disease = table[:, 2], table[:, 6], table[:, -1]
    levels = ((pain, (1, 2, 3, 4)), (ecg, (0, 1, 2)), (disease, (0, 1, 2, 3, 4)))
    if not all(np.isin(column, values).all() for column, values in levels):
        raise InvalidValue(
            f"{path}: expected chest pain 1 … 4, resting ECG 0 … 2 and disease 0 … 4"
        )
    plain = np.delete(table[:, :10], (2, 6), axis=1)
    indicators = [pain == 2, pain == 3, pain == 4, ecg == 1, ecg == 2]
    features = np.column_stack([plain, *indicators]).astype(float)
    targets = (disease > 0).astype(np.int64)
    # As the benchmark: by class, unless a class is too small (one healthy patient in Switzerland).
    by_class = min(np.bincount(targets, minlength=2)) > 2
    train, test = train_test_split(
        np.arange(len(table)),
        test_size=_HEART_TEST_FRACTION,
        random_state=_HEART_SPLIT_SEED,
        stratify=targets if by_class else None,
    )
    return _by_rows(_standardise(features, train), targets, train, test)


def tcga_brca(folder: Path | None = None, *, scaled: bool = False) -> list[ClientData]:
    """Load survival of breast cancer patients in six regions, with 39 features.

    The split into train and test is that of the FLamby benchmark.

    Targets are float32 (n, 2): time in days, and 1 for a death or 0 for the end of observation.
    Features are age in years and indicators, unscaled. In years, age weighs fifty times as much as
    any indicator, so under noise its weight alone decides how well a model ranks. With ``scaled``,
    age is in decades from 60, a scale that depends on no record.

    Raises
    ------
    DataNotFound, ValueError
        As `creditcard`.
    """
    table_path, split_path = _find("tcga-brca", folder)
    rows = list(_records(table_path))
    features = list(rows[0])[1:-2] if rows else []
    if len(features) != TCGA_BRCA_FEATURES:
        raise InvalidValue(
            f"{table_path}: {len(features)} features, expected {TCGA_BRCA_FEATURES} between pid "
            "and E, T"
        )
    table = _numbers(table_path, rows, [*features, "T", "E"]).astype(np.float32)
    if not np.isin(table[:, -1], (0, 1)).all():
        raise InvalidValue(f"{table_path}: expected 0 or 1 in the column E")
    if scaled:
        table[:, 0] = (table[:, 0] - 60) / 10
    parts = {row["pid"]: row["fold2"] for row in _records(split_path)}
    part = np.array([parts.get(row["pid"], "") for row in rows])
    return [
        _by_rows(
            table[:, :-2],
            table[:, -2:],
            *(np.flatnonzero(part == f"{fold}_{region}") for fold in ("train", "test")),
        )
        for region in range(TCGA_BRCA_REGIONS)
    ]


def _find(name: str, folder: Path | None) -> list[Path]:
    found = locate(FILES[name], folder)
    if found is None:
        alternatives = "\n  or ".join(", ".join(paths) for paths in FILES[name])
        raise DataNotFound.named(
            name,
            folder,
            f"Give a folder with {alternatives}\n"
            f"  named by data-folder, or by the environment variable {FOLDER_VARIABLE}; or choose\n"
            "  'breast-cancer' or 'digits', which are always available.",
        )
    return found


def _records(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file with a header, gzipped or not."""
    try:
        with opened(path, "rt", encoding="utf-8", newline="") as stream:
            yield from csv.DictReader(stream)
    except (OSError, EOFError, zlib.error, csv.Error, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} is damaged: {error}") from error


def _numbers(path: Path, rows: Sequence[dict[str, str]], columns: Sequence[str]) -> np.ndarray:
    missing = [name for name in columns if not rows or name not in rows[0]]
    if missing:
        raise InvalidValue(
            f"{path}: found no values of the columns {', '.join(missing)}; expected a CSV file "
            "whose first line names all columns, and one or more rows below it"
        )
    try:
        return np.array([[_finite(row[name]) for name in columns] for row in rows])
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"{path}: expected finite numbers: {error}") from error


def _number(path: Path, line: int, text: str) -> float:
    try:
        return _finite(text)
    except ValueError as error:
        raise InvalidValue(
            f"{path}, line {line}: expected finite numbers or '?': {error}"
        ) from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise InvalidValue(f"could not read {text!r} as a finite number")
    return number


def _standardise(features: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Scale to mean 0 and deviation 1 over the rows ``train``; constant columns become 0."""
    mean, deviation = features[train].mean(axis=0), features[train].std(axis=0)
    scaled: np.ndarray = (features - mean) / np.where(deviation > 0, deviation, 1.0)
    return scaled


def _standardised(
    features: np.ndarray, targets: np.ndarray, rng: np.random.Generator
) -> ClientData:
    labels = targets.astype(np.int64)
    train, test = split(np.arange(len(labels)), labels, train_fraction=_TRAIN_FRACTION, rng=rng)
    return _by_rows(_standardise(features, train), labels, train, test)


def _by_rows(
    features: np.ndarray, targets: np.ndarray, train: np.ndarray, test: np.ndarray
) -> ClientData:
    pool = Examples(torch.from_numpy(features.astype(np.float32)), torch.from_numpy(targets))
    return ClientData(train=pool.subset(np.sort(train)), test=pool.subset(np.sort(test)))
