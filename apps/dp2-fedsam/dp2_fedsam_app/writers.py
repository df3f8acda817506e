"""FEMNIST by writer: each client has the characters of one writer.

The file ``femnist_writers.npz`` has images ``x`` as bytes (n, 28, 28), labels ``y`` from 0 to 61,
and the writer of each image as ``writer``. `save_writers` makes it from the rows of flwr-datasets::

    from flwr_datasets import FederatedDataset

    data = FederatedDataset(dataset="flwrlabs/femnist", partitioners={"train": 1})
    save_writers(data.load_split("train"), Path("DATA/femnist_writers.npz"))
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flower_ext.data import Examples
from flower_ext.data.datasets import find_files
from flower_ext.errors import InvalidValue

DATASET = "femnist-writers"
PARTITION = "by-writer"
CLASSES = 62
LEAST = 10
"""Fewest images of a writer who can be a client: one in ten is for testing."""
FILE = "femnist_writers.npz"


def save_writers(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write rows with ``image``, ``character`` and ``writer_id`` to a file for `load_writers`."""
    images, labels, writers = [], [], []
    for row in rows:
        images.append(np.asarray(row["image"], dtype=np.uint8))
        labels.append(int(row["character"]))
        writers.append(str(row["writer_id"]))
    numbers = np.unique(writers, return_inverse=True)[1]
    np.savez_compressed(path, x=np.stack(images), y=np.array(labels), writer=numbers)


@cache
def load_writers(folder: Path | None) -> tuple[Examples, np.ndarray]:
    """Return all images and the writer of each.

    Raises
    ------
    DataNotFound
        The folder lacks the file.
    InvalidValue
        The file has unexpected content.
    """
    advice = f"dp2_fedsam_app.writers.save_writers makes {FILE} from the rows of flwr-datasets."
    (path,) = find_files(DATASET, ((FILE,),), folder, advice=advice)
    with np.load(path) as arrays:
        missing = {"x", "y", "writer"} - set(arrays)
        if missing:
            raise InvalidValue(f"{path} lacks {', '.join(sorted(missing))}: {advice}")
        images, labels, writers = (arrays[name] for name in ("x", "y", "writer"))
    count = len(images)
    if images.dtype != np.uint8 or images.shape[1:] != (28, 28):
        raise InvalidValue(f"{path}: x has shape {images.shape}: expected bytes (n, 28, 28)")
    if labels.shape != (count,) or writers.shape != (count,):
        raise InvalidValue(f"{path}: expected a label y and a writer for each of {count} images")
    if not np.isin(labels, np.arange(CLASSES)).all():
        raise InvalidValue(f"{path}: expected labels y from 0 to {CLASSES - 1}")
    pixels = torch.from_numpy(images[:, None]).float().div_(255)
    return Examples(pixels, torch.from_numpy(labels.astype(np.int64))), writers


def by_writer(
    writers: np.ndarray, num_partitions: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return the rows of ``num_partitions`` writers, drawn from those with enough images.

    Raises
    ------
    InvalidValue
        Fewer than ``num_partitions`` writers have enough images.
    """
    names, counts = np.unique(writers, return_counts=True)
    fit = names[counts >= LEAST]
    if len(fit) < num_partitions:
        raise InvalidValue(
            f"clients={num_partitions}: expected at most {len(fit)}, the number of writers with "
            f"{LEAST} images or more"
        )
    drawn = rng.choice(fit, num_partitions, replace=False)
    return [np.flatnonzero(writers == writer) for writer in drawn]
