"""Data sets by name: each is one pool of examples, which a partition divides.

``digits`` comes with scikit-learn. The others are read from a local folder (the argument, or the
environment variable FLOWER_EXT_DATA), in which their usual files lie. Without these files they come
from flwr-datasets, which must be installed and online.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from flower_ext.data.examples import Examples
from flower_ext.data.files import FOLDER_VARIABLE, DataNotFound, load_from_hub, locate, opened
from flower_ext.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Facts that models need about a data set, and the places where it may lie.

    ``files`` lists alternatives; each is a set of paths below the data folder that suffices. Of the
    hub's labels only ``hub_labels`` are kept, renumbered from 0. ``stand_in`` describes the files'
    content if that is not the data set itself.
    """

    num_classes: int
    input_shape: tuple[int, ...]
    hub: str = ""
    columns: tuple[str, str] = ("image", "label")
    files: tuple[tuple[str, ...], ...] = ()
    hub_labels: range | None = None
    stand_in: str = ""


def _idx_files(*folders: str) -> tuple[tuple[str, ...], ...]:
    names = [
        f"{part}-{kind}-ubyte.gz"
        for part in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    ]
    return tuple(
        tuple(str(Path(folder) / name.removesuffix(suffix)) for name in names)
        for folder in folders
        for suffix in ("", ".gz")
    )


_DATASETS = {
    "digits": DatasetInfo(num_classes=10, input_shape=(1, 8, 8)),
    "mnist": DatasetInfo(
        num_classes=10,
        input_shape=(1, 28, 28),
        hub="ylecun/mnist",
        files=_idx_files("mnist", "MNIST/raw"),
    ),
    "fashion-mnist": DatasetInfo(
        num_classes=10,
        input_shape=(1, 28, 28),
        hub="zalando-datasets/fashion_mnist",
        files=_idx_files("fashion_mnist", "FashionMNIST/raw"),
    ),
    "cifar10": DatasetInfo(
        num_classes=10,
        input_shape=(3, 32, 32),
        hub="uoft-cs/cifar10",
        columns=("img", "label"),
        files=(
            ("cifar10.npz",),
            ("cifar10/cifar10.npz",),
            tuple(
                f"cifar-10-batches-py/{name}"
                for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
            ),
        ),
    ),
    "femnist": DatasetInfo(
        num_classes=10,
        input_shape=(1, 28, 28),
        hub="flwrlabs/femnist",
        columns=("image", "character"),
        files=(("femnist_digits_12clients/femnist_digits_12clients.npz",),),
        hub_labels=range(10),
    ),
    "letters": DatasetInfo(
        num_classes=10,
        input_shape=(1, 28, 28),
        hub="flwrlabs/femnist",
        columns=("image", "character"),
        files=(("nist_vowels10/nist_vowels10_28x28.npz",),),
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
    if name not in _DATASETS:
        raise InvalidValue(f"dataset={name!r}: expected one of {', '.join(_DATASETS)}")
    return _DATASETS[name]


def load(name: str, folder: Path | None = None) -> Examples:
    """Load a data set: features float32 (n, channels, height, width), targets int64 (n,).

    Pixels are scaled to [0, 1]; CIFAR-10 is standardised by its channel means and deviations.
    ``femnist`` holds the digits of FEMNIST. ``letters`` are the letters a … j of FEMNIST if they
    come from the hub; the local file is a stand-in, ten other letters of the same NIST collection.

    Raises
    ------
    DataNotFound
        Neither the folder nor flwr-datasets has it; the message names the files and says how to
        get them.
    ValueError
        The name is unknown, or a file has other content than expected.
    """
    info = describe(name)
    if name == "digits":
        return _digits()
    found = locate(info.files, folder)
    if found is None:
        return _examples(name, info, *_from_hub(name, info, folder))
    try:
        images, labels = _READERS[name](found)
    # gzip, struct, zipfile, NumPy and pickle raise these for damaged files.
    except (OSError, EOFError, KeyError, struct.error, BadZipFile, UnpicklingError) as error:
        folders = ", ".join(sorted({str(path.parent) for path in found}))
        raise InvalidValue(f"{name}: the files in {folders} are damaged: {error}") from error
    return _examples(name, info, images, labels)


def _examples(name: str, info: DatasetInfo, images: np.ndarray, labels: np.ndarray) -> Examples:
    """Convert uint8 images (n, height, width[, channels]) and their labels."""
    if labels.shape != (len(images),):
        raise InvalidValue(
            f"{name}: labels of shape {labels.shape}; expected one for each of {len(images)} images"
        )
    bytes_first = images[:, None] if images.ndim == 3 else np.moveaxis(images, -1, 1)
    if images.dtype != np.uint8 or bytes_first.shape[1:] != info.input_shape:
        raise InvalidValue(
            f"{name}: images of type {images.dtype} and shape {bytes_first.shape[1:]}; "
            f"expected uint8 of {info.input_shape}"
        )
    if not np.isin(labels, np.arange(info.num_classes)).all():
        raise InvalidValue(f"{name}: expected labels 0 … {info.num_classes - 1}")
    # Converted once and scaled in place, because every worker process holds its own pool.
    pixels = torch.from_numpy(np.ascontiguousarray(bytes_first)).float().div_(255)
    if name == "cifar10":
        # Published channel statistics of the 50,000 training images.
        mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(1, 3, 1, 1)
        deviation = torch.tensor([0.2470, 0.2435, 0.2616]).view(1, 3, 1, 1)
        pixels.sub_(mean).div_(deviation)
    return Examples(pixels, torch.from_numpy(labels.astype(np.int64)))


def _digits() -> Examples:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = torch.from_numpy(bunch.images.astype(np.float32) / 16).unsqueeze(1)
    return Examples(pixels, torch.from_numpy(bunch.target.astype(np.int64)))


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file of unsigned bytes, gzipped or not.

    Raises
    ------
    ValueError
        The header does not match the content.
    """
    with opened(path, "rb") as stream:
        zero, kind, dimensions = struct.unpack(">HBB", stream.read(4))
        shape = struct.unpack(f">{dimensions}I", stream.read(4 * dimensions))
        content = np.frombuffer(stream.read(), dtype=np.uint8)
    if zero != 0 or kind != 8 or content.size != np.prod(shape):
        raise InvalidValue(f"{path} is not an idx file of unsigned bytes with shape {shape}")
    return content.reshape(shape)


def _read_idx_pairs(paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    arrays = [read_idx(path) for path in paths]
    images, labels = arrays[0::2], arrays[1::2]
    for path, some, theirs in zip(paths[0::2], images, labels, strict=True):
        if len(some) != len(theirs):
            raise InvalidValue(
                f"{path}: {len(some)} images but {len(theirs)} labels; get both again"
            )
    return np.concatenate(images), np.concatenate(labels)


def _read_cifar10(paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    if paths[0].suffix == ".npz":
        with np.load(paths[0]) as arrays:
            images = np.concatenate([arrays["x_train"], arrays["x_test"]])
            labels = np.concatenate([arrays["y_train"], arrays["y_test"]])
        return images, labels.reshape(-1)
    batches = [_unpickle_batch(path) for path in paths]
    images = np.concatenate([np.asarray(batch[b"data"], dtype=np.uint8) for batch in batches])
    labels = np.concatenate([np.asarray(batch[b"labels"]) for batch in batches])
    return images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


class _ArraysOnly(pickle.Unpickler):
    """Unpickler of NumPy arrays and plain containers; a file cannot make it call anything else."""

    _ALLOWED = frozenset(
        {
            ("_codecs", "encode"),
            ("numpy", "dtype"),
            ("numpy", "ndarray"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy._core.numeric", "_frombuffer"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise UnpicklingError(f"it asks for {module}.{name}, which no CIFAR-10 batch needs")
        return super().find_class(module, name)


def _unpickle_batch(path: Path) -> dict[bytes, Any]:
    with path.open("rb") as stream:
        batch: dict[bytes, Any] = _ArraysOnly(stream, encoding="bytes").load()
    return batch


def _read_npz(paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    with np.load(paths[0]) as arrays:
        return arrays["x"], arrays["y"]


_READERS: dict[str, Callable[[list[Path]], tuple[np.ndarray, np.ndarray]]] = {
    "mnist": _read_idx_pairs,
    "fashion-mnist": _read_idx_pairs,
    "cifar10": _read_cifar10,
    "femnist": _read_npz,
    "letters": _read_npz,
}


def _from_hub(name: str, info: DatasetInfo, folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Download all splits of a data set through flwr-datasets."""
    alternatives = "\n  or ".join(", ".join(paths) for paths in info.files)
    missing = DataNotFound.named(
        name,
        folder,
        f"There are two ways to provide it:\n  1. a folder with {alternatives}\n"
        f"     named by data-folder, or by the environment variable {FOLDER_VARIABLE};\n"
        f"  2. pip install 'flower-ext[vision]' and go online: flwr-datasets fetches {info.hub}.",
    )
    image, label = info.columns
    rows = load_from_hub(info.hub, ["train"] if info.hub_labels else ["train", "test"], missing)
    kept = info.hub_labels or range(info.num_classes)
    if info.hub_labels:
        rows = [table.filter(lambda value: value in kept, input_columns=[label]) for table in rows]
    images = np.stack([np.asarray(each) for table in rows for each in table[image]])
    labels = np.asarray([each for table in rows for each in table[label]])
    return images, labels - kept.start
