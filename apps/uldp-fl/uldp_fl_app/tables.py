"""Tables from local files: card fraud, heart disease and breast cancer, as Uldp-FL uses them.

Features are standardised by means and deviations of training rows: card transactions and
scikit-learn's tumours by those of all silos together, heart disease by those of each centre; those
of TCGA-BRCA are not. The privacy guarantee of a training does not cover these statistics.
"""

from __future__ import annotations

import csv
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flower_ext.data import ClientData, Examples, find_files, split
from flower_ext.data.datasets import read_bytes
from flower_ext.errors import InvalidValue

CREDITCARD_FEATURES = 30
HEART_DISEASE_FEATURES = 13
TCGA_BRCA_FEATURES = 39
HEART_DISEASE_CENTRES = ("cleveland", "hungarian", "switzerland", "va")
TCGA_BRCA_REGIONS = 6

CREDITCARD = (("creditcard/creditcard.csv",), ("creditcard/creditcard_subset.csv",))
HEART_DISEASE = (
    tuple(f"heart_disease/processed.{centre}.data" for centre in HEART_DISEASE_CENTRES),
)
TCGA_BRCA = (("tcga_brca/brca.csv", "tcga_brca/train_test_split.csv"),)
"""For each data set, alternative sets of files, of which one suffices."""

_TRAIN_FRACTION = 0.85
_NORMAL_TRANSACTIONS = 28_432
"""A tenth of the 284,315 in Kaggle's file, because the authors train on a tenth of them."""
_HEART_TEST_FRACTION = 0.34
_HEART_SPLIT_SEED = 43


def breast_cancer(*, rng: np.random.Generator) -> ClientData:
    """Load scikit-learn's 569 tumours: 30 features, target 1 if benign; 85 % are for training."""
    from sklearn.datasets import load_breast_cancer

    bunch = load_breast_cancer()
    return _standardised(bunch.data, bunch.target, rng)


def creditcard(folder: Path | None = None, *, rng: np.random.Generator) -> ClientData:
    """Load card transactions: 30 features, target 1 if fraud; 85 % of each class are for training.

    The file is Kaggle's ``creditcard.csv``, or a subset of it with a column ``pool``. In a subset,
    only rows whose ``pool`` is ``random`` count. All frauds are kept, and at most 28,432 normal
    transactions. The authors leave out normal transactions from their training rows only, and test
    on all normal rows of the test part.

    Raises
    ------
    DataNotFound
        No folder has the file; the message names the paths.
    ValueError
        The file has unexpected content.
    """
    (path,) = _find("creditcard", CREDITCARD, folder)
    file = _CsvFile.read(path)
    table = file.numbers(["Time", *(f"V{number}" for number in range(1, 29)), "Amount", "Class"])
    if "pool" in file.header:
        table = table[file.texts("pool") == "random"]
    fraud = table[:, -1] == 1
    if not np.isin(table[:, -1], (0, 1)).all():
        raise InvalidValue(f"{path}: expected 0 or 1 in the column Class")
    normal = np.flatnonzero(~fraud)
    if len(normal) > _NORMAL_TRANSACTIONS:
        normal = rng.choice(normal, size=_NORMAL_TRANSACTIONS, replace=False)
    chosen = np.sort(np.concatenate([np.flatnonzero(fraud), normal]))
    return _standardised(table[chosen, :-1], table[chosen, -1], rng)


def heart_disease(folder: Path | None = None) -> list[ClientData]:
    """Load UCI's four centres: 13 features, target 1 for any disease; 66 % are for training.

    The FLamby benchmark defines the split into training and test.

    The three columns that are mostly missing are left out, then the incomplete rows: 303, 261, 46
    and 130 rows remain. Chest pain and resting ECG become indicators of all levels but the first,
    in the last columns. Features are standardised by each centre's own training rows.

    Raises
    ------
    DataNotFound, ValueError
        As `creditcard`.
    """
    return [_heart_centre(path) for path in _find("heart-disease", HEART_DISEASE, folder)]


def _heart_centre(path: Path) -> ClientData:
    from sklearn.model_selection import train_test_split

    table = _parse(path, _lines(path), converters=_number_or_missing)
    if table.shape[1] != 14:
        raise InvalidValue(f"{path}: {table.shape[1]} columns, expected 14")
    table = np.delete(table, (10, 11, 12), axis=1)
    table = table[~np.isnan(table).any(axis=1)]
    if len(table) == 0:
        raise InvalidValue(
            f"{path}: expected complete rows, without '?' in the columns that are kept"
        )
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

    The FLamby benchmark defines the split into training and test.

    Targets are float32 (n, 2): time in days, and 1 for a death or 0 for the end of observation.
    Features are age in years and indicators, unscaled. An age in years is about fifty times as
    large as any indicator, so under noise its coefficient alone decides how well a model ranks.
    With ``scaled``, age is in decades from 60, a scale that depends on no record.

    Raises
    ------
    DataNotFound, ValueError
        As `creditcard`.
    """
    table_path, split_path = _find("tcga-brca", TCGA_BRCA, folder)
    file, split_file = _CsvFile.read(table_path), _CsvFile.read(split_path)
    features = file.header[1:-2]
    if len(features) != TCGA_BRCA_FEATURES:
        raise InvalidValue(
            f"{table_path}: {len(features)} features, expected {TCGA_BRCA_FEATURES}: the columns "
            "after pid, and before E and T"
        )
    table = file.numbers([*features, "T", "E"]).astype(np.float32)
    if not np.isin(table[:, -1], (0, 1)).all():
        raise InvalidValue(f"{table_path}: expected 0 or 1 in the column E")
    if scaled:
        table[:, 0] = (table[:, 0] - 60) / 10
    part_of = dict(zip(split_file.texts("pid"), split_file.texts("fold2"), strict=True))
    part = np.array([part_of.get(patient, "") for patient in file.texts("pid")])
    return [
        _by_rows(
            table[:, :-2],
            table[:, -2:],
            *(np.flatnonzero(part == f"{fold}_{region}") for fold in ("train", "test")),
        )
        for region in range(TCGA_BRCA_REGIONS)
    ]


def _find(name: str, files: tuple[tuple[str, ...], ...], folder: Path | None) -> list[Path]:
    return find_files(
        name, files, folder, advice="The data sets 'breast-cancer' and 'digits' need no files."
    )


@dataclass(frozen=True)
class _CsvFile:
    """A CSV file whose first line names the columns; ``rows`` are its other lines."""

    path: Path
    header: list[str]
    rows: list[str]

    @classmethod
    def read(cls, path: Path) -> _CsvFile:
        """Read a file, gzipped or not."""
        lines = _lines(path)
        return cls(path, next(csv.reader(lines[:1]), []), lines[1:])

    def numbers(self, columns: Sequence[str]) -> np.ndarray:
        """Return columns as an array of finite numbers, of shape (rows, columns)."""
        return self._parsed(columns, converters=_number)

    def texts(self, column: str) -> np.ndarray:
        """Return a column as texts (rows,)."""
        return self._parsed([column], dtype=str)[:, 0]

    def _parsed(self, columns: Sequence[str], **options: Any) -> np.ndarray:
        places = self._places(columns)
        return _parse(self.path, self.rows, self.header, usecols=places, **options)

    def _places(self, columns: Sequence[str]) -> list[int]:
        missing = [name for name in columns if name not in self.header]
        if missing or not self.rows:
            raise InvalidValue(
                f"{self.path}: found no values of the columns {', '.join(missing or columns)}; "
                "expected a CSV file whose first line names all columns, and one or more rows below"
            )
        return [self.header.index(name) for name in columns]


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, gzipped or not."""
    try:
        return read_bytes(path).decode().splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        # The text of the error may quote bytes of a record.
        kind = type(error).__name__
        raise InvalidValue(f"{path} is damaged ({kind}); get the file again") from None


def _parse(
    path: Path, lines: Sequence[str], header: Sequence[str] = (), **options: Any
) -> np.ndarray:
    """Return the table that the lines below the header hold; no error shows a value."""
    try:
        return np.loadtxt(lines, delimiter=",", quotechar='"', comments=None, ndmin=2, **options)
    except ValueError as error:
        # NumPy's error quotes the value, so no traceback may show it.
        raise InvalidValue(f"{path}: {_without_value(str(error), lines, header)}") from None


def _without_value(message: str, lines: Sequence[str], header: Sequence[str]) -> str:
    """Return the reason of NumPy's error, with the place of the value in place of the value."""
    # A quoted value comes before the place, so the last match is NumPy's.
    *_, (row, column) = re.findall(r"at row (\d+)(?:, column (\d+))?", message)
    # NumPy leaves out empty lines. It counts from 0 if it names a column, and otherwise from 1.
    full = [number for number, line in enumerate(lines, 2 if header else 1) if line]
    if not column:
        return f"expected as many columns in line {full[int(row) - 1]} as in the first line"
    name = repr(header[int(column) - 1]) if header else column
    return f"expected a finite number in line {full[int(row)]}, column {name}"


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise InvalidValue("expected a finite number")
    return number


def _number_or_missing(text: str) -> float:
    """Return a finite number, or NaN for a question mark."""
    return math.nan if text == "?" else _number(text)


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
