"""The learning problem that the run configuration asks for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context
from torch import nn

from flower_ext.data import ClientData, Examples, SiloData, partition, split
from flower_ext.federation import node_settings
from flower_ext.privacy import seeded_generator
from flower_ext.runs.settings import absolute_path
from flower_ext.training import Features, Task
from flower_ext.training.models import HeadedModel
from private_finetuning_app.pictures import Pictures
from private_finetuning_app.settings import Settings
from private_finetuning_app.texts import Texts

TEXT = "text"
USERS = "uldp-avg-w"
"""The method whose clients are silos, in which users have records."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The settings that decide which examples each client gets."""

    examples: int
    partition: str
    clients: int
    classes: int
    alpha: float
    min_size: int
    users: int
    seed: int


def task_of(context: Context) -> Task:
    """Return the task of a run, for its clients and its server alike."""
    settings = node_settings(Settings, context)
    source, tune = source_of(settings), settings.tune
    data: Callable[[int], ClientData] = partial(whole_data, source, shares_of(settings))
    if tune == "head" or (tune == "adapter" and source.adapts_features):
        data = features(source, shares_of(settings), absolute_path(settings.features_folder))
    return Task(model=partial(build, source, tune), data=data)


def source_of(settings: Settings) -> Pictures | Texts:
    """Return the data set that the settings name, with its pretrained model."""
    return Texts.of(settings) if settings.dataset == TEXT else Pictures.of(settings)


def shares_of(settings: Settings) -> Shares:
    """Return the settings that divide examples among clients."""
    return Shares(
        examples=settings.examples,
        partition=settings.partition,
        clients=settings.clients,
        classes=settings.classes_per_client,
        alpha=settings.dirichlet_alpha,
        min_size=settings.dirichlet_min_size,
        users=settings.num_users if settings.method == USERS else 0,
        seed=settings.seed,
    )


def build(source: Pictures | Texts, tune: str) -> nn.Module:
    """Return the model: an extractor, which may be shared, and a head, which may be personal."""
    head = nn.Linear(source.width, source.num_classes)
    if tune == "head":
        return HeadedModel(nn.Identity(), head)
    return source.headed(source.adapted() if tune == "adapter" else source.whole(), head)


@lru_cache(maxsize=1)
def features(source: Pictures | Texts, shares: Shares, folder: Path | None) -> Features:
    """Return a function that takes a client's number and returns its examples as features.

    The frozen model computes the features, which are cached for one run at a time.
    """
    own = partial(client_data, source, shares)
    return Features(source.frozen, own, folder)


@lru_cache(maxsize=1)
def pool(source: Pictures | Texts) -> Examples:
    """Return all examples of a data set, read once per process."""
    return source.pool()


@cache
def rows(source: Pictures | Texts, shares: Shares) -> list[np.ndarray]:
    """Return the rows of each client's examples, the same in every process."""
    targets = pool(source).targets.numpy()
    rng = seeded_generator(shares.seed, "partition")
    drawn = np.arange(len(targets))
    if shares.examples:
        drawn = np.sort(rng.permutation(len(targets))[: shares.examples])
    parts = partition(
        shares.partition,
        targets[drawn],
        num_partitions=shares.clients,
        classes_per_partition=shares.classes,
        alpha=shares.alpha,
        min_size=shares.min_size,
        rng=rng,
    )
    return [drawn[part] for part in parts]


def client_data(source: Pictures | Texts, shares: Shares, client: int) -> ClientData:
    """Return one client's examples, 90 % for training and 10 % for testing.

    If there are users, the client is a silo, and each training example belongs to one of them,
    drawn at random.
    """
    examples, own = pool(source), rows(source, shares)[client]
    rng = seeded_generator(shares.seed, "split", client)
    train, test = split(own, train_fraction=0.9, targets=examples.targets.numpy(), rng=rng)
    data = ClientData(train=examples.subset(train), test=examples.subset(test))
    if not shares.users:
        return data
    rng = seeded_generator(shares.seed, "owners", client)
    owners = torch.from_numpy(rng.integers(shares.users, size=len(train)))
    return SiloData(train=data.train, test=data.test, owners=owners)


whole_data = lru_cache(maxsize=None)(client_data)
