"""The data sets of the Upcycled-FL experiments, by name; each consists of devices."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flower_ext.checks import require_at_least_one, require_one_of
from flower_ext.data import ClientData, describe, load, pathological, split
from flower_ext.errors import InvalidValue
from upcycled_fl_app import synthetic

_SYNTHETIC = {f"synthetic-{kind}": kind for kind in synthetic.kinds()}


@dataclass(frozen=True, kw_only=True)
class DevicesInfo:
    """Facts about a data set that consists of devices.

    Parameters
    ----------
    feature_shape : tuple of int
        Shape of one record.
    num_devices : int
        Default number of devices.
    model : str
        The paper's model, by its name in ``flower_ext.training.models``.
    source : str
        Origin of the data, for reports: the authors' data, a stand-in, or generated.
    """

    num_classes: int
    feature_shape: tuple[int, ...]
    num_devices: int
    model: str
    source: str


def device_names() -> list[str]:
    """Return the names that `load_devices` knows."""
    return [*_SYNTHETIC, "letters"]


def describe_devices(
    name: str,
    folder: Path | None = None,
    *,
    num_classes: int | None = None,
    generated: bool = False,
) -> DevicesInfo:
    """Return facts about the devices that `load_devices` would load for the same arguments.

    Raises
    ------
    ValueError
        The name is unknown, or the arguments contradict each other.
    """
    require_one_of("name", name, device_names())
    if generated and name not in _SYNTHETIC:
        raise InvalidValue(f"generated=True: expected False, as {name} is no synthetic data set")
    if name in _SYNTHETIC:
        classes = 10 if num_classes is None else num_classes
        info = _describe_synthetic(_SYNTHETIC[name], folder, classes, generated)
    else:
        info = _LETTERS
    if num_classes not in (None, info.num_classes):
        advice = "; generated=True draws others" if name in _SYNTHETIC else ""
        raise InvalidValue(
            f"num_classes={num_classes!r}: expected {info.num_classes}, the classes of {name} "
            f"({info.source}){advice}"
        )
    return info


_LETTERS = DevicesInfo(
    num_classes=10,
    feature_shape=describe("letters").input_shape,
    num_devices=50,
    model="letters-mlp",
    source="letters of NIST, a stand-in for those of FEMNIST",
)


def _describe_synthetic(
    kind: str, folder: Path | None, num_classes: int, generated: bool
) -> DevicesInfo:
    from_authors = not generated and synthetic.locate(kind, folder) is not None
    return DevicesInfo(
        num_classes=2 if from_authors else num_classes,
        feature_shape=(synthetic.FEATURES,),
        num_devices=synthetic.DEVICES,
        model="synthetic-logistic",
        source="the authors' data" if from_authors else "generated as the paper describes",
    )


def load_devices(
    name: str,
    folder: Path | None = None,
    *,
    num_devices: int | None = None,
    num_classes: int | None = None,
    seed: int = 1,
    generated: bool = False,
) -> list[ClientData]:
    """Load the devices of a data set, each with its training and test examples.

    Parameters
    ----------
    name : str
        ``synthetic-iid``, ``synthetic-0-0``, ``synthetic-0.5-0.5`` or ``synthetic-1-1``: the
        authors' file (two classes) if it is found, otherwise generated (ten classes, see
        `synthetic`). ``letters``: five classes per device, 90 % of its examples for training.
    folder : Path, optional
        Folder of the files; by default the environment variable FLOWER_EXT_DATA names it.
    num_devices : int, optional
        Number of devices. If the authors' file has more devices, the first ones are taken.
    num_classes : int, optional
        Number of classes of generated devices. For other data it must match the data.
    seed : int
        Seed of the generator, the partition or the split; the authors' files need none.
    generated : bool
        Generate synthetic devices even if there is a file.

    Raises
    ------
    DataNotFound
        The folder lacks the letters.
    ValueError
        The name is unknown, a number is out of range, or a file has unexpected content.
    """
    info = describe_devices(name, folder, num_classes=num_classes, generated=generated)
    count = info.num_devices if num_devices is None else num_devices
    require_at_least_one("num_devices", count)
    rng = np.random.default_rng(seed)
    if name == "letters":
        return _load_letters(folder, count, rng)
    kind = _SYNTHETIC[name]
    path = None if generated else synthetic.locate(kind, folder)
    if path is None:
        return synthetic.generate(kind, rng=rng, num_devices=count, num_classes=info.num_classes)
    devices = synthetic.read(path)
    if count > len(devices):
        raise InvalidValue(
            f"num_devices={num_devices!r}: expected at most {len(devices)}, the devices of {path}; "
            "generated=True draws any number of devices"
        )
    return devices[:count]


def _load_letters(
    folder: Path | None, num_devices: int, rng: np.random.Generator
) -> list[ClientData]:
    pool = load("letters", folder)
    targets = pool.targets.numpy()
    devices = pathological(targets, num_partitions=num_devices, classes_per_partition=5, rng=rng)
    parts = (split(rows, targets, rng=rng) for rows in devices)
    return [ClientData(train=pool.subset(train), test=pool.subset(test)) for train, test in parts]
