"""The same round over Paillier, for comparison: minutes at 20,000 coordinates."""

from __future__ import annotations

import numpy as np

from benchmarks.lattice.runs import timed
from benchmarks.uldp.dialogue import set_up
from flower_ext.privacy import seeded_generator
from flower_ext.secure.weighting.agreement import WeightingSettings
from flower_ext.secure.weighting.paillier import ZeroPool
from flower_ext.secure.weighting.weighting_server import WeightingServer
from flower_ext.secure.weighting.weighting_silo import WeightingSilo


def round_cost(*, coordinates: int, users: int, silos: int) -> tuple[float, float, int]:
    """Return the CPU seconds of one silo and of the server, and the bytes of an upload."""
    settings = WeightingSettings(
        run="benchmark",
        users=users,
        silos=silos,
        coordinates=coordinates,
        max_records_per_user=2000,
        update_bound=1.0,
        noise_bound=16.0,
    )
    server = WeightingServer(settings)
    parties = [WeightingSilo(settings, at) for at in range(silos)]
    rng = seeded_generator(0, "counts")
    counts = rng.integers(1, 2000 // silos + 1, (silos, users))
    set_up(server, parties, counts)
    weights, opening = timed(server.open_round, 1)
    pool, spent, sums = ZeroPool(server.public_key.public), 0.0, []
    for silo in parties:
        silo._sums.zeros = pool  # set up before the round
        drawn = rng.standard_normal((users, coordinates))
        drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
        own = dict(enumerate(drawn))
        noise = rng.standard_normal(coordinates)
        message, of_silo = timed(silo.weigh, weights, own, noise)
        spent += of_silo / silos
        sums.append(message)
    _, closing = timed(server.close_round, sums)
    return spent, opening + closing, len(sums[0].ciphertexts)
