"""Small runs of private weighting over ring-LWE, and the plain sum they must equal."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flower_ext_lattice.messages import LatticeKey, LatticeSum, LatticeWeights
from flower_ext_lattice.server import LatticeServer
from flower_ext_lattice.settings import LatticeSettings
from flower_ext_lattice.silo import LatticeSilo
from tests.support.weighting import Parties, close


def lattice_settings(**changes) -> LatticeSettings:
    silos = changes.get("silos", 3)
    facts = {
        "run": "test",
        "users": 4,
        "silos": silos,
        "coordinates": 5,
        "silo_record_limits": (20,) * silos,
        "clipping_norm": 1.0,
        "noise_stddev": 1.0,
        "rounds": 100,
    }
    return LatticeSettings(**facts | changes)


def draw_receiver(settings, seed, number, offer):
    """Return the receiver that a silo of that seed has for a draw."""
    silo = LatticeSilo(settings, 0)
    silo.seed = seed
    return silo._draw_receiver(number, offer)


class Opening(NamedTuple):
    """A round that the server has begun."""

    number: int
    weights: LatticeWeights


def open_sum(silo, opening):
    return silo.open_sum(opening.number, opening.weights.to_bytes())


def weigh(silo, opening, updates, noise) -> LatticeSum:
    """Return a silo's sum of a round that the server began."""
    weighing = open_sum(silo, opening)
    weighing.add(updates)
    return LatticeSum.from_bytes(weighing.finish(noise), silo.settings)


@dataclass
class LatticeWorld(Parties):
    """Parties of the protocol with ring-LWE that have exchanged keys and counts."""

    def __post_init__(self):
        facts = self.settings
        self.server = LatticeServer(facts)
        self.silos = [LatticeSilo(facts, i) for i in range(facts.silos)]
        for silo in self.silos:
            silo.save = self.save
        self.play(self.server.set_up())
        self.sent.append(LatticeKey.from_bytes(self.server.public_key, facts))

    @property
    def order(self) -> list[int]:
        """The user at each place."""
        return self.silos[0]._order

    def draw(self, rng: np.random.Generator, scale=1.0) -> tuple[np.ndarray, np.ndarray]:
        """Draw updates (silos, users, coordinates) of norm ``scale`` C, and noise by silo."""
        facts = self.settings
        updates = rng.standard_normal((facts.silos, facts.users, facts.coordinates))
        updates *= scale * facts.clipping_norm / np.linalg.norm(updates, axis=2, keepdims=True)
        noise = facts.noise_stddev * rng.standard_normal((facts.silos, facts.coordinates))
        return updates, noise

    def begin(self, number, places=None) -> Opening:
        """Begin a round: by default, one in which all users take part or the silos draw."""
        data = self.play(self.server.begin_round(number, places))
        return Opening(number, LatticeWeights.from_bytes(data, self.settings))

    def weigh(self, opening, updates, noise) -> list[LatticeSum]:
        return [
            weigh(silo, opening, self.updates_of(i, updates), noise[i])
            for i, silo in enumerate(self.silos)
        ]

    def run_round(self, number, updates, noise, places=None) -> np.ndarray:
        opening = self.begin(number, places)
        sums = self.weigh(opening, updates, noise)
        self.sent += [opening.weights, *sums]
        return close(self.server, sums)


def draw_counts(rng: np.random.Generator, settings: LatticeSettings) -> np.ndarray:
    """Draw each user's number of records in each silo, up to the silo's limit; often 0."""
    limits = np.array(settings.silo_record_limits)[:, None]
    counts = rng.integers(0, limits + 1, (settings.silos, settings.users))
    return counts * (rng.random((settings.silos, settings.users)) < 0.7)
