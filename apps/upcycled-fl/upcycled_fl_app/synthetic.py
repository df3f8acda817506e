"""The synthetic devices of Li et al. (2020), as Upcycled-FL uses them (its Appendix F.1).

Device k draws features x ~ N(v_k, Σ) in 20 dimensions, where Σ is diagonal with Σ_jj = j^-1.2. It
labels them y = argmax(W_k x + b_k). All entries of W_k and b_k are N(u_k, 1) with u_k ~ N(0, β);
the entries of the centre v_k are N(B_k, 1) with B_k ~ N(0, γ); β and γ are variances. The kinds
``0-0``, ``0.5-0.5`` and ``1-1`` name β and γ. In ``iid`` all devices share one W and b, and v_k is
zero.

Because u_k is added to every entry, it moves all logits equally, so β changes no label. The last
three kinds differ only in γ.
"""

from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from zipfile import BadZipFile

import numpy as np
import torch

from flower_ext.checks import require_at_least_one, require_one_of
from flower_ext.data import ClientData, DataNotFound, Examples, find_files, split
from flower_ext.errors import InvalidValue

FEATURES = 20
DEVICES = 30
SMALLEST_DEVICE = 50
"""Number of examples of the smallest device, as in the authors' files."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """One kind of synthetic devices: the variance β = γ, and the sizes in Table 2.

    The variance is None if all devices share one model.
    """

    variance: float | None
    samples: int
    stdev: float


_KINDS = {
    "iid": _Kind(variance=None, samples=6_726, stdev=166),
    "0-0": _Kind(variance=0.0, samples=13_791, stdev=841),
    "0.5-0.5": _Kind(variance=0.5, samples=8_036, stdev=410),
    "1-1": _Kind(variance=1.0, samples=10_493, stdev=586),
}


def kinds() -> list[str]:
    """Return the kinds that `generate` knows."""
    return list(_KINDS)


def _known(kind: str) -> _Kind:
    require_one_of("kind", kind, kinds())
    return _KINDS[kind]


def device_sizes(kind: str, *, rng: np.random.Generator, num_devices: int = DEVICES) -> np.ndarray:
    """Draw the number of examples of each device, int64 (num_devices,): 50 plus a log-normal.

    Every draw is scaled so that the mean and the standard deviation of the sizes over devices equal
    those in Table 2, unless there are too few devices for this standard deviation.

    Raises
    ------
    ValueError
        The kind is unknown, or ``num_devices`` is below 1.
    """
    published = _known(kind)
    require_at_least_one("num_devices", num_devices)
    mean = published.samples / DEVICES - SMALLEST_DEVICE
    draws = rng.standard_normal(num_devices)

    def above_smallest(scale: float) -> np.ndarray:
        weights = np.exp(scale * (draws - draws.max()))
        return np.asarray(mean * weights / weights.mean())

    # The deviation grows with the scale, so bisection finds the scale. The upper end is four times
    # the population's scale, more than any usual draw needs.
    low, high = 0.0, 4 * np.sqrt(np.log1p((published.stdev / mean) ** 2))
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if above_smallest(middle).std() < published.stdev else (low, middle)
        )
    ends = np.round(np.cumsum(SMALLEST_DEVICE + above_smallest(low)))
    return np.diff(ends, prepend=0).astype(np.int64)


def generate(
    kind: str,
    *,
    rng: np.random.Generator,
    num_devices: int = DEVICES,
    num_classes: int = 10,
) -> list[ClientData]:
    """Draw devices from ``rng``, with 90 % of each for training and 10 % for testing.

    Parameters
    ----------
    kind : str
        ``iid``, ``0-0``, ``0.5-0.5`` or ``1-1``; it also sets the sizes (see `device_sizes`).
    rng : numpy.random.Generator
        The only source of randomness.
    num_classes : int
        Number of rows of W and b; with 2 the labels are binary.

    Returns
    -------
    list of ClientData
        Features float32 (n, 20), targets int64 (n,) in 0 … num_classes - 1.

    Raises
    ------
    ValueError
        The kind is unknown, ``num_devices`` is below 1, or ``num_classes`` is below 2.
    """
    variance = _known(kind).variance
    if num_classes < 2:
        raise InvalidValue(f"num_classes={num_classes!r}: expected at least 2")
    sizes = device_sizes(kind, rng=rng, num_devices=num_devices)
    deviations = np.arange(1, FEATURES + 1) ** -0.6

    def classifier(mean: float) -> tuple[np.ndarray, np.ndarray]:
        return rng.normal(mean, 1, (num_classes, FEATURES)), rng.normal(mean, 1, num_classes)

    centre = np.zeros(FEATURES)
    weights, bias = classifier(0.0)
    devices = []
    for size in sizes:
        if variance is not None:
            weights, bias = classifier(rng.normal(0, np.sqrt(variance)))
            centre = rng.normal(rng.normal(0, np.sqrt(variance)), 1, FEATURES)
        features = rng.normal(centre, deviations, (size, FEATURES))
        targets = (features @ weights.T + bias).argmax(axis=1)
        train, test = split(np.arange(size), targets, rng=rng)
        records = _examples(features, targets)
        devices.append(ClientData(train=records.subset(train), test=records.subset(test)))
    return devices


def file_name(kind: str) -> str:
    """Return the path of the authors' file of a kind, below the data folder.

    Raises
    ------
    ValueError
        The kind is unknown.
    """
    _known(kind)
    return f"upcycled_synthetic/synthetic_{kind.replace('-', '_')}.npz"


def locate(kind: str, folder: Path | None) -> Path | None:
    """Return the authors' file of a kind if it exists."""
    try:
        return find_files(f"synthetic-{kind}", [[file_name(kind)]], folder)[0]
    except DataNotFound:
        return None


def read(path: Path) -> list[ClientData]:
    """Read the devices of one of the authors' files.

    The file is an .npz with the arrays ``x_train``, ``y_train`` and ``client_train``, and with
    ``x_test``, ``y_test`` and ``client_test``.
    These data sets have two classes, although the paper says ten.

    Returns
    -------
    list of ClientData
        Device k at place k (30 in the authors' files): features float32 (n, 20), targets int64.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        The file is damaged or has unexpected content.
    """
    try:
        with np.load(path) as arrays:
            train, test = (
                [arrays[f"{name}_{part}"] for name in ("x", "y", "client")]
                for part in ("train", "test")
            )
    except FileNotFoundError:
        raise
    except (OSError, EOFError, KeyError, ValueError, BadZipFile, UnpicklingError) as error:
        raise InvalidValue(f"{path} is not a file of synthetic devices: {error}") from error
    trains, tests = _by_device(path, *train), _by_device(path, *test)
    if len(trains) != len(tests):
        raise InvalidValue(
            f"{path}: {len(trains)} devices for training but {len(tests)} for tests: "
            "expected equally many"
        )
    return [ClientData(train=a, test=b) for a, b in zip(trains, tests, strict=True)]


def _by_device(
    path: Path, features: np.ndarray, targets: np.ndarray, device: np.ndarray
) -> list[Examples]:
    if not len(features) == len(targets) == len(device):
        raise InvalidValue(
            f"{path}: {len(features)} features, {len(targets)} targets and {len(device)} devices; "
            "expected one target and one device for each row of features"
        )
    if features.shape[1:] != (FEATURES,) or not np.isfinite(features).all():
        raise InvalidValue(f"{path}: expected finite features of shape (n, {FEATURES})")
    if targets.ndim != 1 or targets.dtype.kind not in "iu" or not np.isin(targets, (0, 1)).all():
        raise InvalidValue(f"{path}: expected integer targets 0 or 1, one for each record")
    count = len(np.unique(device))
    if not np.isin(device, np.arange(count)).all():
        raise InvalidValue(f"{path}: expected devices numbered 0 … {count - 1}, each with examples")
    records = _examples(features, targets)
    return [records.subset(np.flatnonzero(device == number)) for number in range(count)]


def _examples(features: np.ndarray, targets: np.ndarray) -> Examples:
    return Examples(
        torch.from_numpy(features.astype(np.float32)), torch.from_numpy(targets.astype(np.int64))
    )
