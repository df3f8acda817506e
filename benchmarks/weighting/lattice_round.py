"""One run of private weighting over ring-LWE in one process, and its cost for each party."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.weighting.dialogue import answers, big_integer_threads, converse, timed
from flower_ext.privacy import seeded_generator
from flower_ext.secure.weighting.agreement import ProtocolStep
from flower_ext_lattice.messages import LatticeWeights
from flower_ext_lattice.server import LatticeServer
from flower_ext_lattice.settings import LatticeSettings
from flower_ext_lattice.silo import LatticeSilo

_BATCH = 16
"""Number of users whose updates are in memory at once."""
_LIMIT = 2000
"""Records of a user in all silos together, at most: N_max of the paper."""


@dataclass
class Cost:
    """Cost of a run: CPU seconds of all threads, and bytes."""

    set_up_server: float = 0.0
    set_up_silo: float = 0.0
    weights_server: float = 0.0
    weights_silo: float = 0.0
    adding: float = 0.0
    finishing: float = 0.0
    elapsed: float = 0.0
    closing: float = 0.0
    up: int = 0
    down: int = 0
    largest_error: float = 0.0
    plain: float = 0.0

    @property
    def silo(self) -> float:
        """CPU seconds of one silo in a round, without its checks of other silos."""
        return self.adding + self.finishing


class _Updates:
    """Updates of norm C, drawn again at every request."""

    def __init__(self, settings: LatticeSettings) -> None:
        self._settings = settings

    def of(self, silo: int, user: int) -> NDArray[np.float32]:
        rng = seeded_generator(0, "update", silo, user)
        drawn = rng.standard_normal(self._settings.coordinates, dtype=np.float32)
        # Not by NumPy's norm: BLAS threads spin after it, and their time would count as the silo's.
        scale = self._settings.clipping_norm / np.sqrt(np.square(drawn, dtype=np.float64).sum())
        return drawn * np.float32(scale * (1 - 1e-6))


def set_up(
    settings: LatticeSettings, counts: NDArray[np.int64], cost: Cost
) -> tuple[LatticeServer, list[LatticeSilo], bytes]:
    """Exchange keys, seed and counts; begin the first round, and return its weights."""
    server, cost.set_up_server = timed(lambda: LatticeServer(settings))
    silos = [LatticeSilo(settings, at) for at in range(settings.silos)]
    answering = 0.0

    def ask(step: ProtocolStep) -> dict[int, bytes]:
        nonlocal answering
        replies, spent = timed(answers, silos, counts.tolist(), step)
        answering += spent
        return replies

    _, whole = timed(converse, server.set_up(), ask)
    cost.set_up_server += whole - answering
    cost.set_up_silo, answering = answering / len(silos), 0.0
    weights, whole = timed(converse, server.begin_round(1, None), ask)
    cost.weights_server, cost.down = whole - answering, len(weights)
    # The first opening also computes the silo's keys of the transfer, once per run.
    _, spent = timed(lambda: silos[0]._entry_keys)
    cost.set_up_silo += spent
    message = LatticeWeights.from_bytes(weights, settings)
    opened, cost.weights_silo = timed(silos[0].opened, message)
    # Opening a sum makes the transforms of the weights of its users.
    cost.weights_silo += timed(opened.encryptions, range(min(settings.users, 1000)))[1] + answering
    return server, silos, weights


def round_cost(
    *,
    coordinates: int,
    users: int,
    silos: int,
    workers: int = 1,
    draw_choices: int | None = None,
) -> Cost:
    """Run one round and compare it with the plain sum.

    If ``draw_choices`` is given, nobody knows who is drawn, so the sum is compared with none.
    """
    settings = LatticeSettings(
        run="benchmark",
        users=users,
        silos=silos,
        coordinates=coordinates,
        silo_record_limits=(_LIMIT // silos,) * silos,
        clipping_norm=1.0,
        noise_stddev=1.0,
        rounds=1000,
        draw_choices=draw_choices,
    )
    with big_integer_threads(workers):
        return _measured_cost(settings)


def _measured_cost(settings: LatticeSettings) -> Cost:
    silos, users, coordinates = settings.silos, settings.users, settings.coordinates
    rng = seeded_generator(0, "counts")
    counts = rng.integers(1, _LIMIT // silos + 1, (silos, users))
    cost, updates = Cost(), _Updates(settings)
    server, parties, weights = set_up(settings, counts, cost)
    expected = np.zeros(coordinates)
    totals = np.maximum(counts.sum(0), 1)
    spent: list[tuple[float, float, float]] = []
    for at, silo in enumerate(parties):
        noise = seeded_generator(0, "noise", at).standard_normal(coordinates)
        expected += noise
        adding = elapsed = 0.0
        weighing = silo.open_sum(1, weights)
        for first in range(0, users, _BATCH):
            together = range(first, min(first + _BATCH, users))
            batch = {user: updates.of(at, user) for user in together}
            start = time.perf_counter()
            adding += timed(weighing.add, batch)[1]
            elapsed += time.perf_counter() - start
            cost.plain += timed(_add, expected, batch, counts[at] / totals)[1] / silos
        start = time.perf_counter()
        message, finishing = timed(weighing.finish, noise)
        spent.append((adding, finishing, elapsed + time.perf_counter() - start))
        server.add_sum(at, message)
        cost.up = len(message)
    # All silos do the same work, so take the one that was disturbed least.
    cost.adding, cost.finishing, cost.elapsed = (float(part) for part in np.min(spent, axis=0))
    total, cost.closing = timed(server.close_round)
    error = float(np.abs(total - expected).max())
    cost.largest_error = math.nan if settings.draw_choices else error
    return cost


def _add(
    total: NDArray[np.float64],
    batch: Mapping[int, NDArray[np.float32]],
    weights: NDArray[np.float64],
) -> None:
    for user, update in batch.items():
        total += weights[user] * update
