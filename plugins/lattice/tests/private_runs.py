"""Runs of ULDP-AVG with private weighting over ring-LWE."""

import numpy as np

from flower_ext.algorithms.uldp import UldpAvg
from flower_ext.privacy import (
    FullParticipation,
    PoissonSampling,
)
from flower_ext_lattice import LatticeWeighting
from flower_ext_lattice.server import LatticeServer
from flower_ext_lattice.silo import LatticeSilo
from tests.support.private_silos import (
    METHOD,
    make,
)
from tests.support.silos import USERS, histogram, silos

NORM = 0.3
LATTICE = LatticeWeighting(silo_record_limits=(8, 8, 8))
EVERYONE, SOME = FullParticipation(USERS), PoissonSampling(USERS, 0.4)


def lattice_of(method=UldpAvg, **options):
    return make(method, **{"protocol": LATTICE, **options})


class Watch:
    """Record everything that enters a run's sums, and the sums."""

    def __init__(self, monkeypatch):
        self.added, self.drawn, self.sums = [], [], []
        begun, opened, closed = (
            LatticeSilo.open_sum,
            LatticeServer.begin_round,
            LatticeServer.close_round,
        )

        def silo_begins(silo, number, weights):
            opened = begun(silo, number, weights)
            add, finish, updates = opened.add, opened.finish, {}

            def watched(noise):
                self.added.append((number, silo.index, updates, noise, silo._order))
                return finish(noise)

            opened.add = lambda some: (updates.update(some), add(some))
            opened.finish = watched
            return opened

        def server_opens(server, number, places):
            self.drawn.append(range(USERS) if places is None else list(places))
            return opened(server, number, places)

        def server_closes(server):
            self.sums.append(closed(server))
            return self.sums[-1]

        monkeypatch.setattr(LatticeSilo, "open_sum", silo_begins)
        monkeypatch.setattr(LatticeServer, "begin_round", server_opens)
        monkeypatch.setattr(LatticeServer, "close_round", server_closes)

    def expected(self, number):
        counts = histogram(silos(), USERS)
        weights = counts / np.maximum(counts.sum(axis=0), 1)
        total = 0.0
        for round_, silo, updates, noise, order in self.added:
            if round_ != number:
                continue
            users = {order[place] for place in self.drawn[number - 1]}
            total = total + noise
            for user in users & set(updates):
                total = total + weights[silo, user] * updates[user]
        return total


def requests_to(grid, number):
    """Return the requests of private weighting to one silo, without that for its histogram."""
    return [
        m
        for m in grid.sent
        if m.metadata.dst_node_id == 1_000 + number
        and m.metadata.message_type in (f"query.{METHOD}", f"train.{METHOD}")
        and "histogram" not in m.content.config_records.get("question", {})
    ]
