"""The learning problem of the run configuration, with equally many examples per client."""

from functools import cache, partial
from pathlib import Path

import numpy as np
from flwr.app import Context, UserConfig

from flower_ext.data import ClientData, Examples, describe, load, partition, split
from flower_ext.federation import settings_of
from flower_ext.privacy import seeded_generator
from flower_ext.runs.settings import UnfitSetting, integer, number, text
from flower_ext.training import Task
from flower_ext.training.models import build

DEFAULT_MODELS = {
    "digits": "digits-mlp",
    "mnist": "mnist-dnn",
    "fashion-mnist": "mnist-cnn-32-64",
    "cifar10": "cifar10-cnn-32-64",
    "femnist": "mnist-dnn",
    "letters": "letters-mlp",
}


def task_of(context: Context) -> Task:
    """Return the task of a run, for its clients and its server alike."""
    config = settings_of(context)
    dataset, model = text(config, "dataset"), model_name(config)
    classes = describe(dataset).num_classes
    key = (
        text(config, "partition"),
        integer(config, "clients"),
        integer(config, "classes-per-client", least=1),
        number(config, "dirichlet-alpha", above=0),
        integer(config, "dirichlet-min-size", least=1),
        integer(config, "seed"),
    )
    size = integer(config, "examples-per-client")
    return Task(
        model=partial(build, model, num_classes=classes),
        data=lambda client: client_data(dataset, text(config, "data-folder"), key, size, client),
    )


def model_name(config: UserConfig) -> str:
    """Return the name of the configured model, or of the data set's."""
    return text(config, "model") or DEFAULT_MODELS[describe_known(text(config, "dataset"))]


def describe_known(dataset: str) -> str:
    """Return the name of a data set that this app knows.

    Raises
    ------
    UnfitSetting
        The app does not know it.
    """
    if dataset not in DEFAULT_MODELS:
        raise UnfitSetting(f"dataset={dataset!r}: expected one of {', '.join(DEFAULT_MODELS)}")
    return dataset


@cache
def pool(dataset: str, folder: str) -> Examples:
    """Return all examples of a data set, read once per process."""
    return load(dataset, Path(folder) if folder else None)


@cache
def shares(
    dataset: str, folder: str, key: tuple[str, int, int, float, int, int]
) -> list[np.ndarray]:
    """Return the rows of each client's examples, the same in every process."""
    kind, clients, classes, alpha, min_size, seed = key
    return partition(
        kind,
        pool(dataset, folder).targets.numpy(),
        num_partitions=clients,
        classes_per_partition=classes,
        alpha=alpha,
        min_size=min_size,
        rng=seeded_generator(seed, "partition"),
    )


@cache
def client_data(
    dataset: str, folder: str, key: tuple[str, int, int, float, int, int], size: int, client: int
) -> ClientData:
    """Return one client's examples: 10 % for testing, and ``size`` of the others for training.

    Raises
    ------
    UnfitSetting
        The client has fewer.
    """
    examples = pool(dataset, folder)
    own = shares(dataset, folder, key)[client]
    rng = seeded_generator(key[-1], "split", client)
    train, test = split(own, train_fraction=0.9, targets=examples.targets.numpy(), rng=rng)
    if not 1 <= size <= len(train):
        raise UnfitSetting(
            f"examples-per-client={size}: expected 1 … {len(train)}, the training examples of "
            f"client {client}"
        )
    chosen = np.sort(rng.choice(train, size, replace=False))
    return ClientData(train=examples.subset(chosen), test=examples.subset(test))
