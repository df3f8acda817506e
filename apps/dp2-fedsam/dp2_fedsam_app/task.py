"""The learning problem that the run configuration asks for."""

from functools import cache, partial
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
    dataset, folder = settings.dataset, settings.data_folder
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
    partitions = (
        settings.partition,
        settings.clients,
        settings.classes_per_client,
        settings.dirichlet_alpha,
        settings.dirichlet_min_size,
        settings.seed,
    )
    return Task(
        model=partial(build, model, num_classes=classes),
        data=lambda client: client_data(dataset, folder, partitions, client),
    )


@cache
def pool(dataset: str, folder: str) -> Examples:
    """Return all examples of a data set, read once per process."""
    root = Path(folder) if folder else None
    return writers.load_writers(root)[0] if dataset == writers.DATASET else load(dataset, root)


@cache
def shares(
    dataset: str, folder: str, partitions: tuple[str, int, int, float, int, int]
) -> list[np.ndarray]:
    """Return the rows of each client's examples, the same in every process."""
    kind, clients, classes, alpha, min_size, seed = partitions
    rng = seeded_generator(seed, "partition")
    if kind == writers.PARTITION:
        _, names = writers.load_writers(Path(folder) if folder else None)
        return writers.by_writer(names, clients, rng)
    targets = pool(dataset, folder).targets.numpy()
    return partition(
        kind,
        targets,
        num_partitions=clients,
        classes_per_partition=classes,
        alpha=alpha,
        min_size=min_size,
        rng=rng,
    )


@cache
def client_data(
    dataset: str, folder: str, partitions: tuple[str, int, int, float, int, int], client: int
) -> ClientData:
    """Return one client's examples, 90 % for training and 10 % for testing."""
    examples = pool(dataset, folder)
    own = shares(dataset, folder, partitions)[client]
    rng = seeded_generator(partitions[-1], "split", client)
    train, test = split(own, train_fraction=0.9, targets=examples.targets.numpy(), rng=rng)
    return ClientData(train=examples.subset(train), test=examples.subset(test))
