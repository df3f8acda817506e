"""Random rows in the place of ``flwr_datasets``, for apps whose data cannot be loaded here."""

from collections.abc import Mapping
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


def parse_column(text: str) -> tuple[str, Column]:
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
    """Replace ``FederatedDataset`` of ``flwr_datasets`` by a class that returns random rows.

    The class ignores partitioners. The rows have ``columns``. If ``columns`` is empty, the rows are
    like those of the data set that the app asks for. This module knows the columns of a few data
    sets, and refuses all others.
    """
    import flwr_datasets  # takes seconds, so only for those who ask for random rows

    class FederatedDataset:
        def __init__(self, *, dataset: str, **options: Any) -> None:
            name = dataset.rpartition("/")[2].lower().replace("-", "_")
            if not (known_columns := columns or KNOWN.get(name, {})):
                raise InvalidValue(
                    f"random data for {dataset!r}: its columns are not known; name each, such as "
                    "--column img=image:32x32x3 --column label=int:10"
                )
            self._columns = known_columns

        def load_partition(self, partition_id: int, split: str | None = None) -> Any:
            return draw_rows(self._columns, seed=partition_id)

        def load_split(self, split: str) -> Any:
            return draw_rows(self._columns, seed=1_000_003)

    for module in (flwr_datasets, flwr_datasets.federated_dataset):
        module.FederatedDataset = FederatedDataset


def draw_rows(columns: Mapping[str, Column], *, seed: int) -> Any:
    """Return random rows as a ``datasets.Dataset``, the same rows for the same seed."""
    from datasets import Dataset

    rng = np.random.default_rng(seed)
    return Dataset.from_dict({name: _values(rng, *column) for name, column in columns.items()})


def _values(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> list[Any]:
    if kind == "int":
        return list(rng.integers(0, shape[0], ROWS))
    if kind == "text":
        return [" ".join(f"word{n}" for n in rng.integers(0, 99, 12)) for _ in range(ROWS)]
    if kind == "float":
        return list(rng.standard_normal((ROWS, *shape)))
    from PIL import Image

    return list(map(Image.fromarray, rng.integers(0, 256, (ROWS, *shape), dtype=np.uint8)))
