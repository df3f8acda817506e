"""Clients with a few handwritten digits each, and held-out digits that test all of them."""

import math
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context
from torch import Tensor
from torch.nn import functional

from demo_app.settings import Settings
from flower_ext.data import ClientData, Examples, load, split
from flower_ext.errors import InvalidValue
from flower_ext.federation import node_settings
from flower_ext.privacy import seeded_generator
from flower_ext.training import Task
from flower_ext.training.models import build

SOURCES = {
    "digits": "scikit-learn's digits. Each client has copies of some of 1,438 digits, turned, "
    "scaled, moved and inked a little, because there are too few for all clients. Tests use 359 "
    "other digits, unchanged",
    "mnist": "MNIST. No two clients have the same digit; tests use 500 other digits",
}
TEST_SHARE, MOST_TESTS = 0.2, 500
"""Share of the digits that are held out for tests, and the largest number that tests use."""


def task_of(context: Context) -> Task:
    """Return the task of a run, for its clients and its server alike."""
    settings = node_settings(Settings, context)
    return Task(
        model=partial(build, f"{settings.dataset}-logistic"),
        data=partial(client_data, settings),
    )


@cache
def client_data(settings: Settings, client: int) -> ClientData:
    """Return one client's training digits, and the held-out digits, which all clients share.

    Each digit of MNIST belongs to one client only. The digits that come with the package are few,
    so each client draws from all of them, and varies its digits.

    Raises
    ------
    InvalidValue
        MNIST has too few digits for so many clients.
    """
    pool, tests = digits(settings.dataset, settings.data_folder, settings.seed)
    count = settings.digits_per_client
    if settings.dataset == "digits":
        rng = seeded_generator(settings.seed, "digits", client)
        drawn = pool.subset(rng.integers(len(pool), size=count))
        return ClientData(train=Examples(varied(drawn.features, rng), drawn.targets), test=tests)
    if settings.clients * count > len(pool):
        raise InvalidValue(
            f"run-config digits-per-client={count} with clients={settings.clients}: expected at "
            f"most {len(pool)} digits in all; choose fewer clients, or fewer digits for each"
        )
    return ClientData(train=pool.subset(range(client * count, (client + 1) * count)), test=tests)


@cache
def digits(dataset: str, folder: str, seed: int) -> tuple[Examples, Examples]:
    """Return the digits to train on, and those to test on, in random order."""
    everything = load(dataset, Path(folder) if folder else None)
    rng, rows = seeded_generator(seed, "tests"), np.arange(len(everything))
    targets = everything.targets.numpy()
    train, test = split(rows, targets, train_fraction=1 - TEST_SHARE, rng=rng)
    kept = rng.permutation(test)[:MOST_TESTS]
    return everything.subset(rng.permutation(train)), everything.subset(kept)


def varied(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Turn, scale, move, and lighten or darken each image a little.

    Each change is drawn at random, up to a limit: 15 degrees, a tenth of the size, 3/32 of the
    image's width (three quarters of a pixel in an image of 8 × 8), and three tenths of the ink.
    """

    def uniform(bound: float, *shape: int) -> Tensor:
        return torch.from_numpy(rng.uniform(-bound, bound, (len(images), *shape))).float()

    angles, scales = uniform(math.radians(15)), 1 + uniform(0.1)
    turns = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], dim=1)
    turns = (turns * scales[:, None]).reshape(-1, 2, 2)
    # An image is two units wide here, so three quarters of one of its eight pixels are 0.1875.
    moves = torch.cat([turns, uniform(0.1875, 2)[:, :, None]], dim=2)
    grid = functional.affine_grid(moves, list(images.shape), align_corners=False)
    moved = functional.grid_sample(images, grid, align_corners=False)
    return (moved * (1 + uniform(0.3, 1, 1, 1))).clamp(0, 1)
