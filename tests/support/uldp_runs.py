"""Data, plans and runs of Uldp-FL's methods in this process."""

from dataclasses import dataclass, replace

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord

from flower_ext.algorithms.uldp.averaging import UldpAvg
from flower_ext.data import SiloData
from flower_ext.federation import InProcessGrid, Sgd
from flower_ext.federation.messages import records
from flower_ext.training import DpSgdTraining
from tests.support.silos import (
    COMMON,
    LOCAL,
    ROUNDS,
    SEED,
    SILOS,
    USERS,
    plan,
    task,
)
from tests.support.strategies import group_strategy, strategy_of


def run(strategy, data=None, rounds=ROUNDS, **grid_options):
    app = strategy.method.client_app(task(data), allow_seeded_noise=True)
    count = len(data) if data is not None else SILOS
    grid = InProcessGrid(app, num_clients=count, **grid_options)
    result = strategy.start(grid, ArrayRecord(task().initial_params(SEED)), num_rounds=rounds)
    return records.to_params(result.arrays)


DP_SGD = DpSgdTraining(
    steps=4,
    sampling_rate=0.4,
    batch_size=8.0,
    learning_rate=0.5,
    clipping_norm=0.7,
    noise_multiplier=0.5,
)


def grouped(size, **changes):
    facts = {"num_users": USERS, "local": DP_SGD, "delta": 1e-5, **COMMON, **changes}
    return group_strategy(group_size=size, **facts)


def sum_of(method, data, sampling, weighting, bound):
    """Return Σ_s Δ_s of one round before any division, with the same small noise for all data."""
    seen = {}

    @dataclass(frozen=True, kw_only=True)
    class Watched(method):
        def step(self, model, released, state):
            size = strategy.run.plan.sampling.expected_cohort_size
            seen.update({n: a.astype(np.float64) * size for n, a in released.mean.items()})
            return model, state

    strategy = strategy_of(
        Watched,
        plan=plan(sampling, clipping_norm=bound, noise_multiplier=1e-6),
        weighting=weighting,
        **{"local": replace(LOCAL, learning_rate=3.0)} if method is UldpAvg else {},
        **{**COMMON, "num_silos": len(data), "server": Sgd()},
        evaluate_every=0,
    )
    grid = InProcessGrid(
        method.client_app(task(data), allow_seeded_noise=True), num_clients=len(data)
    )
    start = ArrayRecord(task().initial_params(SEED))
    strategy.run.progress.begin()
    requests = strategy.configure_train(1, start, ConfigRecord(), grid)
    strategy.aggregate_train(1, grid.send_and_receive(requests))
    assert strategy.refusals == []
    return np.concatenate([a.ravel() for a in seen.values()])


def without(user, data):
    """Return the silos' data without the records of one user."""
    return [
        SiloData(
            train=one.train.subset(np.flatnonzero(one.owners != user)),
            test=one.test,
            owners=one.owners[one.owners != user],
        )
        for one in data
    ]
