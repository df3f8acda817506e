"""The data sets of the Uldp-FL experiments, by name: silos with common users."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from flower_ext.checks import require_one_of
from flower_ext.data import (
    ClientData,
    SiloData,
    load,
    split,
)
from flower_ext.errors import InvalidValue
from uldp_fl_app import tables
from uldp_fl_app.allocation import Distribution, allocate, deal_silos
from uldp_fl_app.fixed_silos import allocate_within

_MNIST, _MNIST_TRAINING = 70_000, 60_000
_DIGITS_TRAINING = 0.85


@dataclass(frozen=True, kw_only=True)
class SilosInfo:
    """Facts about a data set that consists of silos.

    Parameters
    ----------
    num_classes : int
        1 for survival times, for which the model outputs one number.
    feature_shape : tuple of int
        Shape of one record.
    num_users : int
        Default number of users: the smaller of the two numbers in the paper.
    model : str
        Name of the model in ``flower_ext.training.models``.
    num_silos : int
        Default number of silos; with ``fixed_silos``, the only accepted number.
    fixed_silos : bool
        The data themselves assign records to silos, such as hospitals or regions.
    records_per_user : int
        Least number of records of a user in a silo where the user has any.
    """

    num_classes: int
    feature_shape: tuple[int, ...]
    num_users: int
    model: str
    num_silos: int = 5
    fixed_silos: bool = False
    records_per_user: int = 1


_TCGA_BRCA = SilosInfo(
    num_classes=1,
    feature_shape=(tables.TCGA_BRCA_FEATURES,),
    num_users=50,
    model="tcga-brca-cox",
    num_silos=tables.TCGA_BRCA_REGIONS,
    fixed_silos=True,
    records_per_user=2,
)
_SILOS = {
    "digits": SilosInfo(num_classes=10, feature_shape=(1, 8, 8), num_users=100, model="digits-mlp"),
    "breast-cancer": SilosInfo(
        num_classes=2, feature_shape=(30,), num_users=50, model="creditcard-mlp"
    ),
    "mnist": SilosInfo(num_classes=10, feature_shape=(1, 28, 28), num_users=100, model="mnist-cnn"),
    "creditcard": SilosInfo(
        num_classes=2,
        feature_shape=(tables.CREDITCARD_FEATURES,),
        num_users=100,
        model="creditcard-mlp",
    ),
    "heart-disease": SilosInfo(
        num_classes=2,
        feature_shape=(tables.HEART_DISEASE_FEATURES,),
        num_users=50,
        model="heart-disease-logistic",
        num_silos=len(tables.HEART_DISEASE_CENTRES),
        fixed_silos=True,
    ),
    "tcga-brca": _TCGA_BRCA,
    "tcga-brca-scaled": _TCGA_BRCA,
}


def silo_names() -> list[str]:
    """Return the names that `load_silos` knows."""
    return list(_SILOS)


def describe_silos(name: str) -> SilosInfo:
    """Return facts about the silos that `load_silos` returns, without loading them.

    Raises
    ------
    ValueError
        The name is unknown; the message lists the known names.
    """
    require_one_of("name", name, silo_names())
    return _SILOS[name]


def load_silos(
    name: str,
    folder: Path | None = None,
    *,
    num_users: int | None = None,
    num_silos: int | None = None,
    distribution: Distribution = "uniform",
    labels_per_user: int | None = None,
    seed: int = 1,
) -> list[SiloData]:
    """Load the silos of a data set; training examples have owners, test examples have none.

    ``digits`` and ``breast-cancer`` come with scikit-learn, the others from local files. If the
    silos are not fixed, the test examples are dealt out evenly.

    Parameters
    ----------
    folder : Path, optional
        Folder of the files; by default the environment variable FLOWER_EXT_DATA names it.
    num_users, num_silos : int, optional
        By default as `describe_silos` returns them. For fixed silos no other ``num_silos`` is
        accepted.
    distribution : {"uniform", "zipf"}
        See `allocate` and, for fixed silos, `allocate_within`.
    labels_per_user : int, optional
        Largest number of labels per user; not for fixed silos.
    seed : int
        Seed of the split into training and test, and of the allocation. All silos that load their
        parts need the same seed.

    Raises
    ------
    DataNotFound
        The files do not exist; the message names them.
    ValueError
        The name is unknown, a number is out of range, or a file has unexpected content.
    """
    info = describe_silos(name)
    users = info.num_users if num_users is None else num_users
    silos = info.num_silos if num_silos is None else num_silos
    rng = np.random.default_rng(seed)
    if not info.fixed_silos:
        pool = _pool(name, folder, rng)
        allocation = allocate(
            distribution,
            pool.train.targets.numpy(),
            num_users=users,
            num_silos=silos,
            rng=rng,
            labels_per_user=labels_per_user,
        )
        return deal_silos(pool, allocation, rng)
    if silos != info.num_silos:
        raise InvalidValue(f"num_silos={silos!r}: expected {info.num_silos}, the silos of {name}")
    if labels_per_user is not None:
        raise InvalidValue(
            f"labels_per_user={labels_per_user!r}: expected None, as the silos of {name} are fixed"
        )
    centres = _centres(name, folder)
    owners = allocate_within(
        distribution,
        [len(centre.train) for centre in centres],
        num_users=users,
        rng=rng,
        at_least=info.records_per_user,
    )
    return [
        SiloData(train=centre.train, test=centre.test, owners=torch.from_numpy(of_records))
        for centre, of_records in zip(centres, owners, strict=True)
    ]


def _centres(name: str, folder: Path | None) -> list[ClientData]:
    """Return the data of each hospital or region."""
    if name == "heart-disease":
        return tables.heart_disease(folder)
    return tables.tcga_brca(folder, scaled=name == "tcga-brca-scaled")


def _pool(name: str, folder: Path | None, rng: np.random.Generator) -> ClientData:
    if name == "creditcard":
        return tables.creditcard(folder, rng=rng)
    if name == "breast-cancer":
        return tables.breast_cancer(rng=rng)
    pool = load(name, folder)
    rows = np.arange(len(pool))
    if name == "mnist":
        if len(pool) != _MNIST:
            raise InvalidValue(
                f"mnist: {len(pool)} images, expected {_MNIST}: the first {_MNIST_TRAINING} for "
                "training, the others for tests"
            )
        train, test = rows[:_MNIST_TRAINING], rows[_MNIST_TRAINING:]
    else:
        train, test = split(rows, pool.targets.numpy(), train_fraction=_DIGITS_TRAINING, rng=rng)
    return ClientData(train=pool.subset(train), test=pool.subset(test))
