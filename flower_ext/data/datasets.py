"""Data sets by name: each is one pool of examples, which a partition divides.

``digits`` comes with scikit-learn. The others are read from a local folder (the argument, or the
environment variable FLOWER_EXT_DATA). Without these files they come from flwr-datasets, which must
be installed and online.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

from flower_ext.checks import require_one_of
from flower_ext.data.examples import Examples
from flower_ext.data.sources import Source, read_bytes
from flower_ext.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Facts that models need about a data set, and its source (None: it comes with scikit-learn).

    Of the hub's labels only ``hub_labels`` are kept, renumbered from 0. ``stand_in`` describes the
    files' content if that is not the data set itself.
    """

    num_classes: int = 10
    input_shape: tuple[int, ...] = (1, 28, 28)
    source: Source | None = None
    hub_columns: tuple[str, str] = ("image", "label")
    hub_splits: tuple[str, ...] = ("train", "test")
    hub_labels: range | None = None
    stand_in: str = ""


def _idx_files(*folders: str) -> tuple[tuple[str, ...], ...]:
    """Return the four usual files of images and labels, in each of the folders."""
    return tuple(
        tuple(
            f"{folder}/{part}-{kind}-ubyte"
            for part in ("train", "t10k")
            for kind in ("images-idx3", "labels-idx1")
        )
        for folder in folders
    )


_DATASETS = {
    "digits": DatasetInfo(input_shape=(1, 8, 8)),
    "mnist": DatasetInfo(
        source=Source(name="mnist", files=_idx_files("mnist", "MNIST/raw"), hub="ylecun/mnist")
    ),
    "fashion-mnist": DatasetInfo(
        source=Source(
            name="fashion-mnist",
            files=_idx_files("fashion_mnist", "FashionMNIST/raw"),
            hub="zalando-datasets/fashion_mnist",
        )
    ),
    "cifar10": DatasetInfo(
        input_shape=(3, 32, 32),
        source=Source(
            name="cifar10",
            files=(("cifar10.npz",), ("cifar10/cifar10.npz",)),
            hub="uoft-cs/cifar10",
        ),
        hub_columns=("img", "label"),
    ),
    "femnist": DatasetInfo(
        source=Source(
            name="femnist",
            files=(("femnist_digits_12clients/femnist_digits_12clients.npz",),),
            hub="flwrlabs/femnist",
        ),
        hub_columns=("image", "character"),
        hub_splits=("train",),
        hub_labels=range(10),
    ),
    "letters": DatasetInfo(
        source=Source(
            name="letters",
            files=(("nist_vowels10/nist_vowels10_28x28.npz",),),
            hub="flwrlabs/femnist",
        ),
        hub_columns=("image", "character"),
        hub_splits=("train",),
        # FEMNIST numbers 0 … 9, A … Z, a … z.
        hub_labels=range(36, 46),
        stand_in="10,000 NIST letters a e i o u A E I O U, white on black, without writers",
    ),
}


def names() -> list[str]:
    """Return the names that `load` knows."""
    return list(_DATASETS)


def describe(name: str) -> DatasetInfo:
    """Return facts about a data set.

    Raises
    ------
    ValueError
        The name is unknown; the message lists the known ones.
    """
    require_one_of("dataset", name, names())
    return _DATASETS[name]


def load(name: str, folder: Path | None = None) -> Examples:
    """Load a data set: features float32 (n, channels, height, width), targets int64 (n,).

    Pixels are scaled to [0, 1]; CIFAR-10 is standardised by its channel means and deviations.
    Its file ``cifar10.npz`` has the arrays x_train, y_train, x_test and y_test, images as bytes
    (n, 32, 32, 3). ``femnist`` holds the digits of FEMNIST. ``letters`` are the letters a … j of
    FEMNIST if they come from the hub; the local file is a stand-in, ten other letters of the same
    NIST collection.

    Raises
    ------
    DataNotFound
        Neither the folder nor flwr-datasets has it; the message names the files and says how to
        get them.
    ValueError
        The name is unknown, or a file has other content than expected.
    """
    info = describe(name)
    if info.source is None:
        return _digits()
    paths = info.source.locate(folder)
    images, labels = _download(info, info.source, folder) if paths is None else _read(name, paths)
    return _examples(name, info, images, labels)


def _digits() -> Examples:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = torch.from_numpy(bunch.images.astype(np.float32) / 16).unsqueeze(1)
    return Examples(pixels, torch.from_numpy(bunch.target.astype(np.int64)))


def _read(name: str, paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    try:
        return _read_npz(paths[0]) if paths[0].suffix == ".npz" else _read_idx_pairs(paths)
    except InvalidValue:
        raise
    # gzip, zipfile and NumPy raise these for damaged files.
    except (OSError, EOFError, KeyError, ValueError, struct.error, BadZipFile, zlib.error) as error:
        folders = ", ".join(sorted({str(path.parent) for path in paths}))
        raise InvalidValue(f"{name}: the files in {folders} are damaged: {error}") from error


def _read_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images ``x`` and labels ``y``, or those of the parts ``train`` and ``test``."""
    with np.load(path) as arrays:
        parts = [""] if "x" in arrays else ["_train", "_test"]
        images, labels = (
            np.concatenate([arrays[f"{letter}{part}"] for part in parts]) for letter in "xy"
        )
    # Some tools store CIFAR's labels as a column.
    return images, labels.reshape(-1) if labels.shape == (len(images), 1) else labels


def _read_idx_pairs(paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    arrays = [read_idx(path) for path in paths]
    images, labels = arrays[0::2], arrays[1::2]
    for path, part, part_labels in zip(paths[0::2], images, labels, strict=True):
        if len(part) != len(part_labels):
            raise InvalidValue(
                f"{path}: {len(part)} images but {len(part_labels)} labels; get both again"
            )
    return np.concatenate(images), np.concatenate(labels)


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file of unsigned bytes, gzipped or not.

    Raises
    ------
    ValueError
        The header does not match the content.
    """
    content = read_bytes(path)
    zero, kind, dimensions = struct.unpack_from(">HBB", content)
    shape = struct.unpack_from(f">{dimensions}I", content, offset=4)
    values = np.frombuffer(content[4 + 4 * dimensions :], dtype=np.uint8)
    if zero != 0 or kind != 8 or values.size != np.prod(shape):
        raise InvalidValue(f"{path} is not an idx file of unsigned bytes with shape {shape}")
    return values.reshape(shape)


def _download(
    info: DatasetInfo, source: Source, folder: Path | None
) -> tuple[np.ndarray, np.ndarray]:
    """Download all splits of a data set."""
    tables = source.download(info.hub_splits, folder)
    image, label = info.hub_columns
    known = info.hub_labels or range(info.num_classes)
    if info.hub_labels:
        tables = [
            table.filter(lambda value: value in known, input_columns=[label]) for table in tables
        ]
    images = np.stack([np.asarray(picture) for table in tables for picture in table[image]])
    labels = np.asarray([number for table in tables for number in table[label]])
    return images, labels - known.start


def _examples(name: str, info: DatasetInfo, images: np.ndarray, labels: np.ndarray) -> Examples:
    """Convert uint8 images (n, height, width[, channels]) and their labels."""
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
        raise InvalidValue(f"{name}: expected labels 0 … {info.num_classes - 1}")
    # Converted once and scaled in place, because every worker process holds its own pool.
    pixels = torch.from_numpy(np.ascontiguousarray(channels_first)).float().div_(255)
    if name == "cifar10":
        # Published channel statistics of the 50,000 training images.
        mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(1, 3, 1, 1)
        deviation = torch.tensor([0.2470, 0.2435, 0.2616]).view(1, 3, 1, 1)
        pixels.sub_(mean).div_(deviation)
    return Examples(pixels, torch.from_numpy(labels.astype(np.int64)))
