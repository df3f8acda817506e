"""The learning problem that the run configuration asks for."""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from pathlib import Path

import numpy as np
from flwr.app import Context

from dp2_fedsam_app import writers
from dp2_fedsam_app.settings import Settings
from flower_ext.data import ClientData, Examples, describe, load, partition, split
from flower_ext.federation import node_settings
from flower_ext.privacy import seeded_generator
from flower_ext.runs.settings import UnfitSetting
from flower_ext.training import Task
from flower_ext.training.models import build

DEFAULT_MODELS = {
    "digits": "digits-mlp",
    "mnist": "mnist-mlp",
    "fashion-mnist": "mnist-mlp",
    "cifar10": "cifar10-cnn",
    "femnist": "mnist-cnn",
    "letters": "letters-mlp",
    writers.DATASET: "mnist-cnn",
}


def task_of(context: Context) -> Task:
    """Return the task of a run, for its clients and its server alike."""
    settings = node_settings(Settings, context)
    dataset = settings.dataset
    by_writer = dataset == writers.DATASET
    if by_writer != (settings.partition == writers.PARTITION):
        raise UnfitSetting(
            f"run-config partition={settings.partition!r} with dataset={dataset!r}: expected "
            f"{writers.PARTITION!r} for {writers.DATASET!r}, and for no other data set"
        )
    classes = writers.CLASSES if by_writer else describe(dataset).num_classes
    model = settings.model or DEFAULT_MODELS[dataset]
    if settings.method == "fedbn" and not settings.model:
        model += "-bn"
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
    root = Path(folder) if folder else None
    return writers.load_writers(root)[0] if dataset == writers.DATASET else load(dataset, root)


@lru_cache(maxsize=1)
def shares(settings: Settings) -> list[np.ndarray]:
    """Return the rows of each client's examples, the same in every process."""
    rng = seeded_generator(settings.seed, "partition")
    if settings.partition == writers.PARTITION:
        folder = settings.data_folder
        _, names = writers.load_writers(Path(folder) if folder else None)
        return writers.by_writer(names, settings.clients, rng)
    return partition(
        settings.partition,
        pool(settings.dataset, settings.data_folder).targets.numpy(),
        num_partitions=settings.clients,
        classes_per_partition=settings.classes_per_client,
        alpha=settings.dirichlet_alpha,
        min_size=settings.dirichlet_min_size,
        rng=rng,
    )


def client_data(settings: Settings, client: int) -> ClientData:
    """Return one client's examples, 90 % for training and 10 % for testing."""
    examples, rows = pool(settings.dataset, settings.data_folder), shares(settings)[client]
    rng = seeded_generator(settings.seed, "split", client)
    train, test = split(rows, train_fraction=0.9, targets=examples.targets.numpy(), rng=rng)
    return ClientData(train=examples.subset(train), test=examples.subset(test))
