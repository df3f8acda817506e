"""The same round over Paillier, for comparison: minutes at 20,000 coordinates."""

from __future__ import annotations

import numpy as np

from benchmarks.lattice.runs import timed
from benchmarks.uldp.dialogue import open_round, set_up, weigh
from flower_ext.privacy import seeded_generator
from flower_ext.secure.weighting.paillier_server import PaillierServer
from flower_ext.secure.weighting.paillier_settings import PaillierSettings
from flower_ext.secure.weighting.paillier_silo import PaillierSilo


def round_cost(*, coordinates: int, users: int, silos: int) -> tuple[float, float, int]:
    """Return the CPU seconds of one silo and of the server, and the bytes of an upload."""
    settings = PaillierSettings(
        run="benchmark",
        users=users,
        silos=silos,
        coordinates=coordinates,
        max_records_per_user=2000,
        update_bound=1.0,
        noise_bound=16.0,
    )
    server = PaillierServer(settings)
    parties = [PaillierSilo(settings, at) for at in range(silos)]
    rng = seeded_generator(0, "counts")
    counts = rng.integers(1, 2000 // silos + 1, (silos, users))
    set_up(server, parties, counts)
    weights, opening = timed(open_round, server, 1)
    spent, sums = 0.0, []
    for at, silo in enumerate(parties):
        drawn = rng.standard_normal((users, coordinates))
        drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
        own = dict(enumerate(drawn))
        noise = rng.standard_normal(coordinates)
        message, of_silo = timed(weigh, silo, 1, weights, own, noise)
        spent += of_silo / silos
        sums.append(server.read_sum(at, message))
    _, closing = timed(server.close_round, sums)
    return spent, opening + closing, len(sums[0].ciphertexts)
