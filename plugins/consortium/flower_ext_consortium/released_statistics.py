"""Experiments on released statistics: the canary moves the released sum as far as it can.

The canary is the person or the client whom the plan protects. Its age is far above the public
bound, and nobody else has a known age. The vector that the canary adds to the sum therefore has
norm 1, and nobody else adds to its nonzero elements.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from flower_ext.data import ClientData, Examples, SiloData
from flower_ext.federation import FederatedStrategy, Method
from flower_ext.privacy import AdversaryView, FullParticipation, SecureSum
from flower_ext.privacy.mechanisms.noised_sum import NoisePlacement
from flower_ext_audit.experiment import Experiment, World, projected
from flower_ext_audit.mechanisms.plans import release_plans
from flower_ext_consortium.statistics import (
    ClientStatistics,
    UserStatistics,
    read_statistics,
    statistics_task,
)
from flower_ext_consortium.statistics.release import RELEASED

JOINT = read_statistics("mean age 20:90; histogram age 20:90:2")
_UNKNOWN, _CANARY = float("nan"), 1e9
_UNITS = 3


def _aged(*ages: float) -> Examples:
    return Examples({"age": torch.tensor(ages)}, torch.zeros(len(ages), dtype=torch.long))


def _client(*ages: float) -> ClientData:
    return ClientData(train=_aged(*ages), test=_aged(_UNKNOWN))


def _silo(owners: Sequence[int], *ages: float) -> SiloData:
    return SiloData(train=_aged(*ages), test=_aged(_UNKNOWN), owners=torch.tensor(owners))


def canary_part() -> NDArray[np.float64]:
    """Return the vector (size,) that the canary's data add to the sum. Its norm is 1."""
    return JOINT.part(_aged(_CANARY))


def _experiment(
    name: str,
    method: Method,
    without: Sequence[ClientData],
    present: Sequence[ClientData],
    placement: NoisePlacement | SecureSum = "client",
    views: Sequence[AdversaryView] = tuple(AdversaryView),
    *,
    noise: float = 1.0,
) -> Experiment:
    """Return the experiment that audits ``method`` with a noise multiplier of ``noise`` / 2."""
    plan = release_plans(FullParticipation(_UNITS), noise_placement=placement)(noise, 1)

    def world(data: Sequence[ClientData]) -> World:
        task = statistics_task(JOINT, data.__getitem__)
        return World(
            strategy=partial(FederatedStrategy, method, plan, evaluate_every=0),
            client_app=method.client_app(task),
            num_clients=len(data),
        )

    return Experiment(
        name=name,
        without=world(without),
        present=world(present),
        initial=ArrayRecord({RELEASED: Array(np.zeros(JOINT.size, np.float32))}),
        score=projected({RELEASED: canary_part()}, partitions=[0]),
        views=views,
    )


_OTHERS = _silo([1, 2], _UNKNOWN, _UNKNOWN)
_CLIENTS_WITHOUT = [_client(), _client(_UNKNOWN), _client(_UNKNOWN)]
_CLIENTS = [_client(_CANARY, _CANARY), _client(_UNKNOWN), _client(_UNKNOWN)]
_CASES: Mapping[str, tuple[Any, ...]] = {
    "statistics-users": (
        UserStatistics(num_silos=2),
        [_OTHERS, _OTHERS],
        # The canary has two records, all in one silo.
        [_silo([0, 0, 1, 2], _CANARY, _CANARY, _UNKNOWN, _UNKNOWN), _OTHERS],
    ),
    "statistics-clients": (ClientStatistics(), _CLIENTS_WITHOUT, _CLIENTS),
    "statistics-secure-sum": (
        ClientStatistics(),
        _CLIENTS_WITHOUT,
        _CLIENTS,
        SecureSum(colluding=0.0, dropouts=0.0),
        (AdversaryView.RELEASED_MODELS, AdversaryView.SUM_ONLY),
    ),
}
STATISTICS: Mapping[str, Callable[..., Experiment]] = {
    name: partial(_experiment, name, *case) for name, case in _CASES.items()
}
"""Functions that make the experiments, by their names in ``flower-ext audit``."""

users_experiment = STATISTICS["statistics-users"]
clients_experiment = STATISTICS["statistics-clients"]
secure_sum_experiment = STATISTICS["statistics-secure-sum"]
