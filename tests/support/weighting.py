"""Small runs of the private weighting protocol, and the plain sum that they must equal."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from gmpy2 import invert, mpz, powmod

from flower_ext.secure.weighting.agreement import WeightingSettings
from flower_ext.secure.weighting.paillier import PrivateKey, generate_key
from flower_ext.secure.weighting.paillier_messages import MaskedSum
from flower_ext.secure.weighting.weighting_server import WeightingServer
from flower_ext.secure.weighting.weighting_silo import WeightingSilo

KEY_BITS = 512


def key(bits: int = KEY_BITS, number: int = 0) -> PrivateKey:
    """Return a small key; it is generated once per process."""
    return _key(bits, number)


@cache
def _key(bits: int, number: int) -> PrivateKey:
    return generate_key(bits, allow_insecure_key_size=True)


def weighting_settings(**changes) -> WeightingSettings:
    facts = {
        "run": "test",
        "users": 4,
        "silos": 3,
        "coordinates": 5,
        "max_records_per_user": 60,
        "update_bound": 1.0,
        "noise_bound": 10.0,
        "key_bits": KEY_BITS,
        "allow_insecure_key_size": True,
    }
    return WeightingSettings(**facts | changes)


def draw_counts(rng: np.random.Generator, settings: WeightingSettings) -> np.ndarray:
    """Return each user's number of records in each silo, at most N_max; some users have none."""
    totals = rng.integers(0, settings.max_records_per_user + 1, settings.users)
    if not totals.any():
        totals[0] = 1
    return np.array(
        [rng.multinomial(total, rng.dirichlet(np.ones(settings.silos))) for total in totals]
    ).T


@dataclass
class World:
    """Parties that have exchanged keys and counts; ``sent`` records everything that they send."""

    settings: WeightingSettings
    counts: np.ndarray
    save: Callable[[bytes], None] = lambda state: None
    sent: list = field(default_factory=list)

    def __post_init__(self):
        self.server = WeightingServer(self.settings, key=key(self.settings.key_bits))
        self.silos = [
            WeightingSilo(self.settings, i, save=self.save) for i in range(self.settings.silos)
        ]
        relayed = self.server.relay_keys([silo.key for silo in self.silos])
        for silo in self.silos:
            silo.receive_keys(self.server.public_key, relayed)
        seeds = self.server.relay_seed(self.silos[0].seal_seed())
        for silo, seed in zip(self.silos[1:], seeds, strict=True):
            silo.open_seed(seed)
        masked = [s.mask_counts(c) for s, c in zip(self.silos, self.counts, strict=True)]
        self.server.receive_counts(masked)
        self.sent += [self.server.public_key, *relayed, *seeds, *masked]

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return updates (silos × users × coordinates) and noise (silos × coordinates)."""
        settings = self.settings
        shape = (settings.silos, settings.users, settings.coordinates)
        updates = rng.uniform(-settings.update_bound, settings.update_bound, shape)
        noise = rng.uniform(-settings.noise_bound, settings.noise_bound, shape[::2])
        return updates, noise

    def own(self, silo: int, updates: np.ndarray) -> dict[int, np.ndarray]:
        """Return the updates of the users that have records in ``silo``."""
        return {user: updates[silo, user] for user in np.flatnonzero(self.counts[silo])}

    def weigh(self, message, updates, noise) -> list[MaskedSum]:
        return [
            silo.weigh(message, self.own(i, updates), noise[i]) for i, silo in enumerate(self.silos)
        ]

    def run_round(self, number, updates, noise, sampled=None) -> np.ndarray:
        if self.settings.draw_choices is None:
            message = self.server.open_round(number, sampled=sampled)
        else:
            offer = self.server.offer_draw(number)
            answer = self.silos[0].answer_draw(offer)
            message = self.server.open_drawn_round(answer)
            self.sent += [offer, answer]
        sums = self.weigh(message, updates, noise)
        self.sent += [message, *sums]
        return self.server.close_round(sums)

    def plain(self, updates, noise, users=None) -> np.ndarray:
        """Return the same sum without encryption, one product at a time."""
        total = np.zeros(self.settings.coordinates)
        for silo in range(self.settings.silos):
            for user in range(self.settings.users) if users is None else users:
                if self.counts[silo, user]:
                    weight = self.counts[silo, user] / self.counts[:, user].sum()
                    total = total + weight * updates[silo, user]
            total = total + noise[silo]
        return total


def root(private: PrivateKey, ciphertext: mpz) -> mpz:
    """Return r of a ciphertext (1 + n)^m · r^n, which a holder of the key can read."""
    p, q, n = private.p, private.q, private.public.n
    return powmod(ciphertext % n, invert(n, (p - 1) * (q - 1)), n)


def numbers(data: bytes, size: int) -> list[mpz]:
    return [mpz.from_bytes(data[at : at + size], "big") for at in range(0, len(data), size)]
