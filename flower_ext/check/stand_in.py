"""Random rows in the place of ``flwr_datasets``, for apps whose data cannot be loaded here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from flower_ext.errors import InvalidValue

ROWS = 40
"""Rows of each client."""

Column = tuple[str, tuple[int, ...]]
"""Kind (image, int, float, text), and shape or number of classes."""
KNOWN: Mapping[str, Mapping[str, Column]] = {
    "mnist": {"image": ("image", (28, 28)), "label": ("int", (10,))},
    "fashion_mnist": {"image": ("image", (28, 28)), "label": ("int", (10,))},
    "femnist": {"image": ("image", (28, 28)), "character": ("int", (62,))},
    "cifar10": {"img": ("image", (32, 32, 3)), "label": ("int", (10,))},
    "cifar100": {"img": ("image", (32, 32, 3)), "fine_label": ("int", (100,))},
    "imdb": {"text": ("text", ()), "label": ("int", (2,))},
}
"""Columns of well-known data sets, by the last part of their name."""


def parsed_column(text: str) -> tuple[str, Column]:
    """Read ``NAME=image:32x32x3``, ``NAME=int:10``, ``NAME=float:8`` or ``NAME=text``."""
    name, _, kind = text.partition("=")
    kind, _, size = kind.partition(":")
    try:
        shape = tuple(int(part) for part in size.split("x") if size)
    except ValueError:
        shape = (0,)
    fits = {"image": len(shape) in (2, 3), "int": len(shape) == 1, "float": True, "text": True}
    if not name or not fits.get(kind, False) or any(part < 1 for part in shape):
        raise InvalidValue(
            f"column {text!r}: expected NAME=image:32x32x3, NAME=int:10, NAME=float:8 or NAME=text"
        )
    return name, (kind, shape)


def install(columns: Mapping[str, Column]) -> None:
    """Make ``import flwr_datasets`` give random rows.

    The rows have ``columns``. If ``columns`` is empty, the rows are like those of the data set that
    the app asks for. This module knows the columns of a few data sets, and refuses all others.
    """

    class FederatedDataset:
        def __init__(self, *, dataset: str, **options: Any) -> None:
            name = dataset.rpartition("/")[2].lower().replace("-", "_")
            if not (known_columns := columns or KNOWN.get(name, {})):
                raise InvalidValue(
                    f"random data for {dataset!r}: its columns are not known; name each, such as "
                    "--column img=image:32x32x3 --column label=int:10"
                )
            self._columns = known_columns

        def load_partition(self, partition_id: int, split: str | None = None) -> _RandomRows:
            return drawn(self._columns, seed=partition_id)

        def load_split(self, split: str) -> _RandomRows:
            return drawn(self._columns, seed=1_000_003)

    module, partitioner = ModuleType("flwr_datasets"), ModuleType("flwr_datasets.partitioner")
    module.FederatedDataset = FederatedDataset  # type: ignore[attr-defined]
    module.partitioner = partitioner  # type: ignore[attr-defined]
    partitioner.__getattr__ = lambda name: _Partitioner  # type: ignore[method-assign]
    sys.modules.update({module.__name__: module, partitioner.__name__: partitioner})


class _Partitioner:
    # A class, because apps inherit from partitioners and name them in types.
    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass


def drawn(columns: Mapping[str, Column], *, seed: int) -> _RandomRows:
    """Return random rows, the same for the same seed."""
    rng = np.random.default_rng(seed)
    return _RandomRows({name: _values(rng, *column) for name, column in columns.items()})


def _values(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> list[Any]:
    if kind == "int":
        return [int(value) for value in rng.integers(0, shape[0], ROWS)]
    if kind == "text":
        return [" ".join(f"word{n}" for n in rng.integers(0, 99, 12)) for _ in range(ROWS)]
    if kind == "float":
        values = rng.standard_normal((ROWS, *shape))
        return list(values) if shape else [float(value) for value in values]
    pixels = rng.integers(0, 256, (ROWS, *shape), dtype=np.uint8)
    try:
        from PIL import Image
    except ImportError:  # then no transform of the app needs it
        return list(pixels)
    return list(map(Image.fromarray, pixels))


@dataclass(frozen=True)
class _RandomRows:
    """Rows with those methods of ``datasets.Dataset`` that Flower's examples use."""

    columns: Mapping[str, Sequence[Any]]
    transform: Callable[[dict[str, list[Any]]], Mapping[str, Any]] | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return list(self.columns[key])
        if isinstance(key, slice):
            return self._rows(range(*key.indices(len(self))))
        if isinstance(key, int | np.integer):
            return {name: values[0] for name, values in self._rows([int(key)]).items()}
        return self._rows(key)

    def __getitems__(self, keys: Sequence[int]) -> list[Any]:
        return [self[key] for key in keys]

    def _rows(self, numbers: Sequence[int]) -> Mapping[str, Any]:
        rows = {name: [values[i] for i in numbers] for name, values in self.columns.items()}
        return rows if self.transform is None else self.transform(rows)

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    @property
    def num_rows(self) -> int:
        return len(self)

    def select(self, numbers: Sequence[int]) -> _RandomRows:
        columns = {name: [values[i] for i in numbers] for name, values in self.columns.items()}
        return replace(self, columns=columns)

    def shuffle(self, seed: int | None = None, **options: Any) -> _RandomRows:
        return self.select(list(np.random.default_rng(seed).permutation(len(self))))

    def train_test_split(
        self, test_size: float = 0.25, seed: int | None = None, **options: Any
    ) -> dict[str, _RandomRows]:
        rows, count = self.shuffle(seed), max(1, round(test_size * len(self)))
        train = rows.select(range(count, len(self)))
        return {"train": train, "test": rows.select(range(count))}

    def with_transform(self, transform: Callable[..., Any], **options: Any) -> _RandomRows:
        return replace(self, transform=transform)

    def with_format(self, kind: str | None = None, **options: Any) -> _RandomRows:
        if kind not in ("torch", "numpy"):
            return self
        return replace(self, transform=_as_tensors if kind == "torch" else _as_arrays)

    def map(self, function: Callable[..., Any], batched: bool = False, **options: Any) -> Any:
        if batched:
            return replace(self, columns={**self.columns, **function(dict(self.columns))})
        rows = [{**row, **function(row)} for row in self]
        return replace(self, columns={name: [row[name] for row in rows] for name in rows[0]})

    def rename_column(self, old: str, new: str) -> _RandomRows:
        named = {new if name == old else name: values for name, values in self.columns.items()}
        return replace(self, columns=named)

    def remove_columns(self, names: Sequence[str]) -> _RandomRows:
        kept = {name: values for name, values in self.columns.items() if name not in names}
        return replace(self, columns=kept)


def _as_arrays(rows: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return each column as an array; a column of texts stays a list, as in ``datasets``."""
    return {
        name: list(values) if isinstance(values[0], str) else np.stack([*map(np.asarray, values)])
        for name, values in rows.items()
    }


def _as_tensors(rows: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    import torch

    return {
        name: values if isinstance(values, list) else torch.from_numpy(values)
        for name, values in _as_arrays(rows).items()
    }
