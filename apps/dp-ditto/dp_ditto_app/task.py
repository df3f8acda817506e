"""The learning problem of the run configuration, with equally many training examples per client."""

from collections.abc import Callable
from functools import cache, lru_cache, partial
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
    model = settings.model or DEFAULT_MODELS[settings.dataset]
    classes = describe(settings.dataset).num_classes
    return Task(model=partial(build, model, num_classes=classes), data=data_of(settings))


@lru_cache(maxsize=1)
def data_of(settings: Settings) -> Callable[[int], ClientData]:
    """Return a function that takes a client's number and returns its examples.

    The examples stay in memory for one run at a time, because a process may make many runs.
    """
    return cache(partial(client_data, settings))


@cache
def pool(dataset: str, folder: str) -> Examples:
    """Return all examples of a data set, read once per process."""
    return load(dataset, Path(folder) if folder else None)


@lru_cache(maxsize=1)
def shares(settings: Settings) -> list[np.ndarray]:
    """Return the rows of each client's examples, the same in every process."""
    return partition(
        settings.partition,
        pool(settings.dataset, settings.data_folder).targets.numpy(),
        num_partitions=settings.clients,
        classes_per_partition=settings.classes_per_client,
        alpha=settings.dirichlet_alpha,
        min_size=settings.dirichlet_min_size,
        rng=seeded_generator(settings.seed, "partition"),
    )


def client_data(settings: Settings, client: int) -> ClientData:
    """Return one client's examples: 10 % for testing, and equally many as others for training.

    Raises
    ------
    UnfitSetting
        The client has fewer than ``examples-per-client`` examples for training.
    """
    examples, rows = pool(settings.dataset, settings.data_folder), shares(settings)[client]
    rng = seeded_generator(settings.seed, "split", client)
    train, test = split(rows, train_fraction=0.9, targets=examples.targets.numpy(), rng=rng)
    size = settings.examples_per_client
    if not 1 <= size <= len(train):
        raise UnfitSetting(
            f"examples-per-client={size}: expected 1 … {len(train)}, the training examples of "
            f"client {client}"
        )
    chosen = np.sort(rng.choice(train, size, replace=False))
    return ClientData(train=examples.subset(chosen), test=examples.subset(test))
