"""Small runs of Uldp-FL with encrypted weights, and the plain ones they must equal."""

import numpy as np
from flwr.app import ArrayRecord

from flower_ext.algorithms.uldp import PrivateUldpAvg, PrivateWeighting, UldpSgd
from flower_ext.federation import InProcessGrid, records
from flower_ext.privacy import FullParticipation
from tests.support.silos import COMMON, LOCAL, ROUNDS, SEED, SILOS, USERS, plan, task

SMALL = PrivateWeighting(
    key_bits=512,
    allow_insecure_key_size=True,
    max_records_per_user=60,
    precision=1e-6,  # well above what models in float32 round
)


def make(method=PrivateUldpAvg, protocol=SMALL, **changes):
    rest = {"sampling": FullParticipation(USERS), "ledger": None, "plan": {}, **changes}
    facts = {"dropout_policy": "discard", **rest.pop("plan")}
    local = {"local": LOCAL} if not issubclass(method, UldpSgd) else {}
    weighting = {"protocol": protocol} if issubclass(method, PrivateUldpAvg) else {}
    if not weighting:
        weighting = {"weighting": "by-records"}
    sampled = plan(rest.pop("sampling"), **facts)
    return method(plan=sampled, **weighting, **local, **{**COMMON, **rest})


def start(strategy, grid_of=InProcessGrid, data=None, rounds=ROUNDS, **options):
    """The grid and the final model."""
    app = type(strategy).client_app(task(data), allow_seeded_noise=True)
    grid = grid_of(app, num_clients=SILOS, **options)
    initial = ArrayRecord(task().initial_params(SEED))
    result = strategy.start(grid, initial, num_rounds=rounds)
    return grid, records.to_arrays(result.arrays)


def difference(one, other):
    return max(float(np.abs(one[n] - other[n]).max()) for n in other)
