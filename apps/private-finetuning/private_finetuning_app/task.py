"""The learning problem that the run configuration asks for."""

from collections.abc import Callable
from functools import cache, lru_cache, partial

import numpy as np
import torch
from flwr.app import Context
from torch import nn

from flower_ext.data import ClientData, Examples, SiloData, partition, split
from flower_ext.federation import node_settings
from flower_ext.privacy import seeded_generator
from flower_ext.runs.settings import absolute_path
from flower_ext.training import Task
from flower_ext.training.models import HeadedModel
from flower_ext_pretrained.features import Features
from private_finetuning_app.pictures import Pictures
from private_finetuning_app.settings import Settings
from private_finetuning_app.texts import Texts

TEXT = "text"
USERS = "uldp-avg-w"
"""The method whose clients are silos, in which users have records."""


def task_of(context: Context) -> Task:
    """Return the task of a run, for its clients and its server alike."""
    settings = node_settings(Settings, context)
    source, tune = source_of(settings), settings.tune
    is_frozen = tune == "head" or (tune == "adapter" and source.adapts_features)
    return Task(model=partial(build, source, tune), data=data_of(settings, features=is_frozen))


def source_of(settings: Settings) -> Pictures | Texts:
    """Return the data set that the settings name, with its pretrained model."""
    return Texts.of(settings) if settings.dataset == TEXT else Pictures.of(settings)


def build(source: Pictures | Texts, tune: str) -> nn.Module:
    """Return the model: an extractor, which may be shared, and a head, which may be personal."""
    head = nn.Linear(source.width, source.num_classes)
    if tune == "head":
        return HeadedModel(nn.Identity(), head)
    return source.headed(source.adapted() if tune == "adapter" else source.whole(), head)


@lru_cache(maxsize=1)
def data_of(settings: Settings, *, features: bool) -> Callable[[int], ClientData]:
    """Return a function that takes a client's number and returns its examples.

    With ``features``, the frozen model turns the examples into features. The examples stay in
    memory for one run at a time, because a process may make many runs.
    """
    data = partial(client_data, settings)
    if features:
        return Features(source_of(settings).frozen, data, absolute_path(settings.features_folder))
    return cache(data)


@lru_cache(maxsize=1)
def pool(source: Pictures | Texts) -> Examples:
    """Return all examples of a data set, read once per process."""
    return source.pool()


@lru_cache(maxsize=1)
def shares(settings: Settings) -> list[np.ndarray]:
    """Return the rows of each client's examples, the same in every process."""
    targets = pool(source_of(settings)).targets.numpy()
    rng = seeded_generator(settings.seed, "partition")
    drawn = np.arange(len(targets))
    if settings.examples:
        drawn = np.sort(rng.permutation(len(targets))[: settings.examples])
    parts = partition(
        settings.partition,
        targets[drawn],
        num_partitions=settings.clients,
        classes_per_partition=settings.classes_per_client,
        alpha=settings.dirichlet_alpha,
        min_size=settings.dirichlet_min_size,
        rng=rng,
    )
    return [drawn[part] for part in parts]


def client_data(settings: Settings, client: int) -> ClientData:
    """Return one client's examples, 90 % for training and 10 % for testing.

    If there are users, the client is a silo, and each training example belongs to one of them,
    drawn at random.
    """
    examples, rows = pool(source_of(settings)), shares(settings)[client]
    rng = seeded_generator(settings.seed, "split", client)
    train, test = split(rows, train_fraction=0.9, targets=examples.targets.numpy(), rng=rng)
    data = ClientData(train=examples.subset(train), test=examples.subset(test))
    if settings.method != USERS:
        return data
    rng = seeded_generator(settings.seed, "owners", client)
    owners = torch.from_numpy(rng.integers(settings.num_users, size=len(train)))
    return SiloData(train=data.train, test=data.test, owners=owners)
