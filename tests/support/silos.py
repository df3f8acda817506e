"""Users whose records lie in several silos, and small runs of Uldp-FL over them."""

from functools import partial

import numpy as np
import torch

from flower_ext.data import Examples, SiloData
from flower_ext.federation import Sgd
from flower_ext.training import LocalTraining, Task
from tests.support.plans import release_plan
from tests.support.worlds import CLASSES, FEATURES, Net

SEED, ROUNDS, SILOS, USERS = 4, 3, 3, 12
LOCAL = LocalTraining(
    epochs=2, batch_size=4, learning_rate=0.2, momentum=0.5, learning_rate_decay=0.9
)


def silo(number, records_=40, users=USERS - 1):
    """Return a silo of uneven users; user 0 has no record in silo 0, user ``users`` has none."""
    rng = np.random.default_rng(number)
    owners = rng.choice(users, size=records_, p=np.arange(1, users + 1) / (users * (users + 1) / 2))
    if number == 0:
        owners[owners == 0] = 1
    generator = torch.Generator().manual_seed(number)
    targets = torch.randint(CLASSES, (records_ + 10,), generator=generator)
    features = torch.randn(records_ + 10, FEATURES, generator=generator)
    features[:, 0] += 2.0 * targets
    return SiloData(
        train=Examples(features[:records_], targets[:records_]),
        test=Examples(features[records_:], targets[records_:]),
        owners=torch.from_numpy(owners),
    )


def silos(count=SILOS):
    return [silo(number) for number in range(count)]


def task(data=None, **options):
    data = silos() if data is None else data
    return Task(model=Net, data=lambda number: data[number], device="cpu", **options)


plan = partial(
    release_plan, USERS, clipping_norm=0.3, noise_multiplier=0.4, rounds=ROUNDS, delta=1e-5
)
COMMON = {"num_silos": SILOS, "seed": SEED, "seeded_noise": True, "server": Sgd(learning_rate=5.0)}


def histogram(data, num_users):
    """Return the number of records of each user in each silo, of shape (silos, users)."""
    return np.stack([np.bincount(one.owners.cpu(), minlength=num_users) for one in data])
