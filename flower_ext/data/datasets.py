"""Image data sets by name: digits come with scikit-learn, all others are read from local files.

The folder is an argument, or the environment variable FLOWER_EXT_DATA. Nothing is downloaded: the
errors say which files are missing and which library fetches them.
"""

import gzip
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

from flower_ext.checks import require_one_of
from flower_ext.data.examples import Examples
from flower_ext.errors import FlowerExtError, InvalidValue
from flower_ext.files import FOLDER_VARIABLE


class DataNotFound(FlowerExtError, FileNotFoundError):
    """A data set is missing where it was expected; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """The shape of a data set's images, its number of classes, and its files.

    Parameters
    ----------
    files : tuple of tuple of str
        Alternative sets of files, as paths below the data folder; one complete set suffices. The
        tuple is empty if the data set needs no file. `load` also accepts one file ``NAME.npz`` in
        place of a set.
    advice : str
        How to get the files, for the error about missing ones.
    """

    num_classes: int = 10
    input_shape: tuple[int, ...] = (1, 28, 28)
    files: tuple[tuple[str, ...], ...] = ()
    advice: str = "flwr-datasets fetches it; save images as x and labels as y."


def _idx_files(*folders: str) -> tuple[tuple[str, ...], ...]:
    """Return the paths of MNIST's four files of images and labels, for each folder."""
    kinds = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(tuple(f"{folder}/{kind}-ubyte" for kind in kinds) for folder in folders)


_DATASETS = {
    "digits": DatasetInfo(input_shape=(1, 8, 8)),
    "mnist": DatasetInfo(
        files=_idx_files("mnist", "MNIST/raw"),
        advice="torchvision.datasets.MNIST(FOLDER, download=True) writes these files.",
    ),
    "fashion-mnist": DatasetInfo(
        files=_idx_files("fashion_mnist", "FashionMNIST/raw"),
        advice="torchvision.datasets.FashionMNIST(FOLDER, download=True) writes these files.",
    ),
    "cifar10": DatasetInfo(
        input_shape=(3, 32, 32),
        files=(("cifar10/cifar10.npz",),),
        advice="torchvision.datasets.CIFAR10 fetches it; save data and targets of both parts as "
        "x_train, y_train, x_test and y_test.",
    ),
    "femnist": DatasetInfo(files=(("femnist_digits_12clients/femnist_digits_12clients.npz",),)),
    "letters": DatasetInfo(files=(("nist_vowels10/nist_vowels10_28x28.npz",),)),
}


def names() -> list[str]:
    """Return the names that `load` knows."""
    return list(_DATASETS)


def describe(name: str) -> DatasetInfo:
    """Return the description of a data set.

    Raises
    ------
    ValueError
        The name is unknown; the message lists the known names.
    """
    require_one_of("dataset", name, names())
    return _DATASETS[name]


def load(name: str, folder: Path | None = None) -> Examples:
    """Load a data set: features float32 (n, channels, height, width), targets int64 (n,).

    A file ``NAME.npz`` has two arrays: images ``x`` of type uint8 and of shape (n, height, width)
    or (n, height, width, 3), and labels ``y`` of shape (n,). Or it has ``x_train``,
    ``y_train``, ``x_test`` and ``y_test``; the function joins the two parts. It reads ``mnist`` and
    ``fashion-mnist`` also from their four usual files. ``femnist`` has the digits of FEMNIST, and
    ``letters`` has images of ten letters, one class each, for example a e i o u A E I O U of NIST.

    Pixels are scaled to [0, 1]; CIFAR-10 is standardised by its channel means and deviations.

    Raises
    ------
    DataNotFound
        The folder lacks the files; the message names them and says how to get them.
    ValueError
        The name is unknown, or a file has unexpected content.
    """
    info = describe(name)
    if not info.files:
        return _digits()
    files = (*info.files, (f"{name}.npz",))
    paths = find_files(name, files, folder, advice=info.advice)
    return _examples(name, info, *_read(name, paths))


def find_files(
    name: str, files: Sequence[Sequence[str]], folder: Path | None = None, *, advice: str = ""
) -> list[Path]:
    """Return the files of the first set in ``files`` that is complete.

    The files of a set may be at their paths below the data folder, or all directly in this folder.

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
            pairs = [(path, path.with_name(f"{path.name}.gz")) for path in paths]
            existing = [file for pair in pairs for file in [*filter(Path.is_file, pair)][:1]]
            if len(existing) == len(paths):
                return existing
    alternatives = "".join(f"\n  - {', '.join(paths)}" for paths in files)
    raise DataNotFound(
        f"data-folder={str(root or '')!r}: expected a folder with the data set {name!r}, as one of"
        f"{alternatives}\nAny file may be gzipped, with a name that ends in .gz. Name the "
        f"folder by data-folder or the environment variable {FOLDER_VARIABLE}. {advice}".rstrip()
    )


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, gzipped or not."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def _digits() -> Examples:
    # Import scikit-learn here: the import takes a second, and each client's process would wait.
    library = find_spec("sklearn")
    assert library is not None
    assert library.origin is not None
    file = Path(library.origin).parent / "datasets" / "data" / "digits.csv.gz"
    rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
    pixels = torch.from_numpy(rows[:, :-1].reshape(-1, 1, 8, 8) / 16)
    return Examples(pixels, torch.from_numpy(rows[:, -1].astype(np.int64)))


def _read(name: str, paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    try:
        return _read_npz(paths[0]) if paths[0].suffix == ".npz" else _read_idx_pairs(paths)
    except InvalidValue:
        raise
    # gzip, zipfile and NumPy raise these for damaged files.
    except (OSError, EOFError, KeyError, ValueError, struct.error, BadZipFile, zlib.error) as error:
        folders = ", ".join(sorted({str(path.parent) for path in paths}))
        raise InvalidValue(
            f"{name}: the files in {folders} are damaged: {error}; get them again"
        ) from error


def _read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    # NumPy refuses pickled objects unless asked, so a file cannot run code.
    with np.load(path) as arrays:
        parts = [""] if "x" in arrays else ["_train", "_test"]
        images, labels = (
            np.concatenate([arrays[f"{letter}{part}"] for part in parts]) for letter in "xy"
        )
    # Some tools store CIFAR's labels as a column.
    return images, labels.reshape(-1) if labels.shape == (len(images), 1) else labels


def _read_idx_pairs(paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    arrays = [_read_idx(path) for path in paths]
    images, labels = arrays[0::2], arrays[1::2]
    for path, part, part_labels in zip(paths[0::2], images, labels, strict=True):
        if len(part) != len(part_labels):
            raise InvalidValue(
                f"{path}: {len(part)} images but {len(part_labels)} labels, expected equally many; "
                "get both files again"
            )
    return np.concatenate(images), np.concatenate(labels)


def _read_idx(path: Path) -> np.ndarray:
    """Read an idx file of unsigned bytes, gzipped or not."""
    content = read_bytes(path)
    zero, kind, dimensions = struct.unpack_from(">HBB", content)
    shape = struct.unpack_from(f">{dimensions}I", content, offset=4)
    values = np.frombuffer(content[4 + 4 * dimensions :], dtype=np.uint8)
    if zero != 0 or kind != 8 or values.size != np.prod(shape):
        raise InvalidValue(
            f"{path} is not an idx file of unsigned bytes with shape {shape}: get it again"
        )
    return values.reshape(shape)


def _examples(name: str, info: DatasetInfo, images: np.ndarray, labels: np.ndarray) -> Examples:
    """Convert uint8 images (n, height, width[, channels]) and labels (n,) to `Examples`."""
    if labels.shape != (len(images),):
        raise InvalidValue(
            f"{name}: labels of shape {labels.shape}; expected one for each of {len(images)} images"
        )
    channels_first = images[:, None] if images.ndim == 3 else np.moveaxis(images, -1, 1)
    if images.dtype != np.uint8 or channels_first.shape[1:] != info.input_shape:
        raise InvalidValue(
            f"{name}: images of type {images.dtype} and shape {channels_first.shape[1:]}; "
            f"expected uint8 of {info.input_shape}"
        )
    if not np.isin(labels, np.arange(info.num_classes)).all():
        raise InvalidValue(
            f"{name}: expected labels 0 … {info.num_classes - 1}, but the file has other "
            "labels; get the file again"
        )
    # Convert once and scale in place, because every worker process holds a copy of the data set.
    pixels = torch.from_numpy(np.ascontiguousarray(channels_first)).float().div_(255)
    if name == "cifar10":
        # Published channel statistics of the 50,000 training images.
        mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(1, 3, 1, 1)
        deviation = torch.tensor([0.2470, 0.2435, 0.2616]).view(1, 3, 1, 1)
        pixels.sub_(mean).div_(deviation)
    return Examples(pixels, torch.from_numpy(labels.astype(np.int64)))
