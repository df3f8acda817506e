"""The learning problem of the run configuration, with equally many examples per client."""

from functools import cache, partial
from pathlib import Path

import numpy as np
from flwr.app import Context

from dp_ditto_app.settings import Settings
from flower_ext.data import ClientData, Examples, describe, load, partition, split
from flower_ext.federation import node_settings
from flower_ext.privacy import seeded_generator
from flower_ext.runs.settings import UnfitSetting
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
    settings = node_settings(Settings, context)
    dataset, folder = settings.dataset, settings.data_folder
    model = settings.model or DEFAULT_MODELS[dataset]
    classes = describe(dataset).num_classes
    key = (
        settings.partition,
        settings.clients,
        settings.classes_per_client,
        settings.dirichlet_alpha,
        settings.dirichlet_min_size,
        settings.seed,
    )
    size = settings.examples_per_client
    return Task(
        model=partial(build, model, num_classes=classes),
        data=lambda client: client_data(dataset, folder, key, size, client),
    )


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
        The client has fewer examples for training.
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
