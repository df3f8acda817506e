"""Locations of data sets: a local folder, or the hub through flwr-datasets."""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flower_ext.errors import FlowerExtError

FOLDER_VARIABLE = "FLOWER_EXT_DATA"


class DataNotFound(FlowerExtError, FileNotFoundError):
    """A data set is missing where it was expected; the message says what to do."""

    @classmethod
    def named(cls, name: str, folder: Path | None, advice: str) -> DataNotFound:
        """Return the error for a data set that is not in ``folder``."""
        root = data_folder(folder)
        if root is None:
            looked = "needs a folder, and none is given"
        elif root.is_dir():
            looked = f"is not in the folder {root}"
        else:
            looked = f"is expected in {root}, which is no folder"
        return cls(f"the data set {name!r} {looked}. {advice}")


def data_folder(folder: Path | None = None) -> Path | None:
    """Return the given folder, else the one that FLOWER_EXT_DATA names, else None."""
    given = folder or os.environ.get(FOLDER_VARIABLE)
    return Path(given).expanduser() if given else None


def locate(alternatives: Sequence[Sequence[str]], folder: Path | None) -> list[Path] | None:
    """Return the first alternative whose files all exist, below `data_folder` or directly in it."""
    root = data_folder(folder)
    if root is None:
        return None
    below = [[root / path for path in paths] for paths in alternatives]
    # The folder itself comes second: MNIST and Fashion-MNIST have files of the same names.
    directly = [[root / Path(path).name for path in paths] for paths in alternatives]
    complete = (found for found in below + directly if all(path.is_file() for path in found))
    return next(complete, None)


def opened(path: Path, mode: str, **options: Any) -> Any:
    """Open a file, gzipped or not."""
    return (gzip.open if path.suffix == ".gz" else open)(path, mode, **options)


def load_from_hub(hub: str, splits: Sequence[str], missing: DataNotFound) -> list[Any]:
    """Download the splits of a data set through flwr-datasets.

    Raises
    ------
    DataNotFound
        The error ``missing``, with the message of flwr-datasets.
    """
    try:
        from flwr_datasets import FederatedDataset
    except ImportError as error:
        raise missing from error
    try:
        # Unshuffled, so that a seed gives the same partition as with the files.
        source = FederatedDataset(dataset=hub, partitioners={"train": 1}, shuffle=False)
        return [source.load_split(split) for split in splits]
    except Exception as error:  # the libraries below raise many types of error when offline
        raise DataNotFound(f"{missing}\nflwr-datasets said: {error}") from error
