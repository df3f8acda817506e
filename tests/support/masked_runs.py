"""Runs with secure sums, and the models that they should give."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np

from flower_ext.algorithms import Upcycled
from flower_ext.federation.client import assignment, client_side
from flower_ext.federation.messages import records
from flower_ext.privacy import (
    FullParticipation,
    NonPrivatePlan,
    SeededNoise,
)
from tests.support.secure_runs import CLIENTS, SEED, plan, strategy_of
from tests.support.travelling import Recorder
from tests.support.worlds import initial, task


def run(strategy, grid=Recorder, rounds=1, **lost):
    """Run a strategy on a grid; return the grid and the arrays of the last model.

    ``lost`` are attributes of the grid, such as the clients that it loses at each stage.
    """
    base = strategy.base if isinstance(strategy, Upcycled) else strategy
    app = base.method.client_app(task(), allow_seeded_noise=True)
    run_grid = grid(app, num_clients=base.run.plan.sampling.population)
    for name, value in lost.items():
        setattr(run_grid, name, frozenset(value))
    result = strategy.start(run_grid, initial(), num_rounds=rounds)
    return run_grid, records.to_arrays(result.arrays)


def raw_updates():
    """Return each client's upload of the first round, before clipping and noise.

    Clients train as they do before clipping: in the forms in which no bit depends on others.
    """
    bare = NonPrivatePlan(sampling=FullParticipation(CLIENTS))

    def invariant(*args, **options):
        assigned = assignment.assign(*args, **options)
        return replace(assigned, work=replace(assigned.work, batch_invariant=True))

    with patch.object(client_side, "assign", invariant):
        grid, _ = run(strategy_of(plan=bare, seeded_noise=False))
    return {
        reply.metadata.src_node_id - 1_000: records.to_arrays(reply.content[records.UPDATE])
        for reply in grid.received
        if reply.metadata.message_type.startswith("train")
    }


def expected_model(answered):
    """Return the next model by a plain sum of the same clipped, rounded and noised updates."""
    private = plan().mechanism()
    protection = private.client_protection(private.num_members)
    start = records.to_arrays(initial())
    total = {name: np.zeros(array.shape, np.int64) for name, array in start.items()}
    for partition, update in raw_updates().items():
        if partition in answered:
            noise = SeededNoise(SEED, "client-noise", partition, 1)
            for name, cells in protection.released(update, noise).items():
                total[name] += cells
    missing = CLIENTS - len(set(answered))
    if missing:  # the server adds the shares of the missing clients
        stddev = protection.noise_stddev / private.masked.cell * np.sqrt(missing)
        total = {name: total[name] for name in sorted(total)}
        total = SeededNoise(SEED, "server-noise", 1).add_discrete_gaussian(total, stddev)
    return {
        name: start[name] + (total[name] * private.masked.cell / CLIENTS).astype(np.float32)
        for name in start
    }


def assert_same(arrays, expected):
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array)
