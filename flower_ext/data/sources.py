"""Places of data sets: a local folder, or the Hugging Face hub through flwr-datasets."""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from flower_ext.errors import FlowerExtError

FOLDER_VARIABLE = "FLOWER_EXT_DATA"


class DataNotFound(FlowerExtError, FileNotFoundError):
    """A data set is missing where it was expected; the message says what to do."""


def data_folder(folder: Path | None = None) -> Path | None:
    """Return the given folder, else the one that FLOWER_EXT_DATA names, else None."""
    given = folder or os.environ.get(FOLDER_VARIABLE)
    return Path(given).expanduser() if given else None


@dataclass(frozen=True, kw_only=True)
class Source:
    """Places where one data set may lie.

    Parameters
    ----------
    name : str
        Name of the data set, for messages.
    files : tuple of tuple of str
        Alternatives, the preferred one first: each is a set of paths below the data folder that
        suffices. Any file may also be gzipped; its name then ends in ``.gz``.
    hub : str
        Name of the data set for flwr-datasets; empty if flwr-datasets does not have it.
    substitute : str
        Data sets that need no files, for messages.
    """

    name: str
    files: tuple[tuple[str, ...], ...]
    hub: str = ""
    substitute: str = ""

    def locate(self, folder: Path | None) -> list[Path] | None:
        """Return the first complete alternative, below the data folder or directly in it."""
        root = data_folder(folder)
        if root is None:
            return None
        below = [[root / path for path in paths] for paths in self.files]
        # The folder itself comes second: MNIST and Fashion-MNIST have files of the same names.
        directly = [[root / Path(path).name for path in paths] for paths in self.files]
        for paths in below + directly:
            existing = [path for plain in paths for path in _plain_or_gzipped(plain)]
            if len(existing) == len(paths):
                return existing
        return None

    def require(self, folder: Path | None) -> list[Path]:
        """Return the files of the first complete alternative.

        Raises
        ------
        DataNotFound
            No alternative is complete; the message names all of them.
        """
        paths = self.locate(folder)
        if paths is None:
            raise self.missing(folder)
        return paths

    def download(self, splits: Sequence[str], folder: Path | None) -> list[Any]:
        """Download splits of the data set through flwr-datasets.

        Raises
        ------
        DataNotFound
            flwr-datasets is not installed, or cannot provide the data set.
        """
        try:
            from flwr_datasets import FederatedDataset
        except ImportError as error:
            raise self.missing(folder) from error
        try:
            # Unshuffled, so that a seed gives the same partition as with the files.
            dataset = FederatedDataset(dataset=self.hub, partitioners={"train": 1}, shuffle=False)
            return [dataset.load_split(split) for split in splits]
        except Exception as error:  # the libraries below raise many types of error when offline
            raise DataNotFound(f"{self.missing(folder)}\nflwr-datasets reports: {error}") from error

    def missing(self, folder: Path | None) -> DataNotFound:
        """Return the error for a data set that ``folder`` does not hold."""
        root = data_folder(folder)
        if root is None:
            place = "needs a folder, and none is given"
        elif root.is_dir():
            place = f"is not in the folder {root}"
        else:
            place = f"is expected in {root}, which is no folder"
        alternatives = "\n    or ".join(", ".join(paths) for paths in self.files)
        ways = [
            f"give a folder with {alternatives}\n    in data-folder or in the environment "
            f"variable {FOLDER_VARIABLE}; gzipped files end in .gz"
        ]
        if self.hub:
            ways.append(
                "pip install 'flower-ext[vision]' and go online: flwr-datasets fetches " + self.hub
            )
        if self.substitute:
            ways.append(f"choose {self.substitute}, which need no files")
        return DataNotFound(
            f"the data set {self.name!r} {place}. Do one of these:\n  - " + "\n  - ".join(ways)
        )


def open_text(path: Path, encoding: str = "utf-8") -> IO[str]:
    """Open a text file, gzipped or not, with its line ends as they are."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding=encoding, newline="")
    return path.open(encoding=encoding, newline="")


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, gzipped or not."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def _plain_or_gzipped(path: Path) -> list[Path]:
    """Return the path, or that of its gzipped form, if it is a file; at most one of both."""
    candidates = (path, path.with_name(f"{path.name}.gz"))
    return [candidate for candidate in candidates if candidate.is_file()][:1]
