"""Files of data sets in a folder of this machine."""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from pathlib import Path

from flower_ext.errors import FlowerExtError
from flower_ext.files import FOLDER_VARIABLE


class DataNotFound(FlowerExtError, FileNotFoundError):
    """A data set is missing where it was expected; the message says what to do."""


def find_files(
    name: str, files: Sequence[Sequence[str]], folder: Path | None = None, *, advice: str = ""
) -> list[Path]:
    """Return the files of a data set: those of the first set in ``files`` that is complete.

    Files may be at their paths below the data folder, or all directly in it.

    Parameters
    ----------
    name : str
        Name of the data set, for messages.
    files : sequence of sequence of str
        Alternative sets of files, as paths below the folder, the preferred set first. One complete
        set suffices. Any file may also be gzipped; its name then ends in ``.gz``.
    folder : Path, optional
        By default the folder that the environment variable FLOWER_EXT_DATA names.
    advice : str
        How to get the files, for the error.

    Raises
    ------
    DataNotFound
        No alternative is complete; the message names all of them.
    """
    root = folder or os.environ.get(FOLDER_VARIABLE)
    if root:
        root = Path(root).expanduser()
        below = [[root / path for path in paths] for paths in files]
        # Look directly in the folder last, because MNIST and Fashion-MNIST have files of the same
        # names.
        directly = [[root / Path(path).name for path in paths] for paths in files]
        for paths in below + directly:
            existing = [path for plain in paths for path in _plain_or_gzipped(plain)]
            if len(existing) == len(paths):
                return existing
    alternatives = "".join(f"\n  - {', '.join(paths)}" for paths in files)
    raise DataNotFound(
        f"data-folder={str(root or '')!r}: expected a folder with the data set {name!r}, as one of"
        f"{alternatives}\nAny file may be gzipped, with a name that ends in .gz. The environment "
        f"variable {FOLDER_VARIABLE} may name the folder. {advice}".rstrip()
    )


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, gzipped or not."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def _plain_or_gzipped(path: Path) -> list[Path]:
    """Return a list with the file ``path``, or with the file of the same name plus ``.gz``.

    The plain file has priority. The list is empty if neither exists.
    """
    candidates = (path, path.with_name(f"{path.name}.gz"))
    return [candidate for candidate in candidates if candidate.is_file()][:1]
