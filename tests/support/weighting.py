"""Small runs of the private weighting protocol, and the plain sum that they must equal."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
from gmpy2 import invert, mpz, powmod

from flower_ext.secure.weighting.encoding import Packing
from flower_ext.secure.weighting.paillier import PrivateKey, generate_key
from flower_ext.secure.weighting.paillier_server import PaillierServer
from flower_ext.secure.weighting.paillier_settings import (
    PaillierSettings,
    PaillierSum,
    PaillierWeights,
)
from flower_ext.secure.weighting.paillier_silo import PaillierSilo

KEY_BITS = 512


def key(bits: int = KEY_BITS, number: int = 0) -> PrivateKey:
    """Return a small key; it is generated once per process."""
    return _key(bits, number)


@cache
def _key(bits: int, number: int) -> PrivateKey:
    return generate_key(bits, allow_insecure_key_size=True)


@dataclass(frozen=True, kw_only=True)
class SlottedSettings(PaillierSettings):
    """Settings with fewer coordinates in a plaintext than fit."""

    slots: int

    @cached_property
    def packing(self) -> Packing:
        return Packing(bound=self.sum_bound, slots=self.slots)


def weighting_settings(*, slots: int | None = None, **changes) -> PaillierSettings:
    """Return the settings of a small run, with ``slots`` coordinates in a plaintext if given."""
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
    if slots is not None:
        return SlottedSettings(slots=slots, **facts | changes)
    return PaillierSettings(**facts | changes)


def draw_counts(rng: np.random.Generator, settings: PaillierSettings) -> np.ndarray:
    """Return each user's number of records in each silo, at most N_max; some users have none."""
    totals = rng.integers(0, settings.max_records_per_user + 1, settings.users)
    if not totals.any():
        totals[0] = 1
    return np.array(
        [rng.multinomial(total, rng.dirichlet(np.ones(settings.silos))) for total in totals]
    ).T


def play(dialogue, silos, counts, silo_questions, answered):
    """Take all steps of a dialogue, and return its result; note all questions and answers."""
    answers = None
    while True:
        try:
            step = dialogue.send(answers)
        except StopIteration as end:
            return end.value
        answers = {
            at: silos[at].answer(step.name, question, counts[at])
            for at, question in step.questions.items()
        }
        silo_questions.append((step.name, step.questions))
        answered.append((step.name, answers))


def weigh(silo, message, updates, noise) -> PaillierSum:
    """Return a silo's sum of the round whose weights are ``message``."""
    opened = silo.open_sum(message.round_number, message.to_bytes())
    opened.add(updates)
    return PaillierSum.from_bytes(opened.finish(noise), silo.settings)


def close(server, sums):
    """Give the server the sums that it lacks, and close its round."""
    for message in sums:
        if message.silo not in server._sums:
            server.add_sum(message.silo, message.to_bytes())
    return server.close_round()


@dataclass
class Parties:
    """A server, silos and their counts of records, whatever the encryption.

    ``sent`` has the messages of all rounds, ``asked`` and ``answered`` those of all steps by silo.
    """

    settings: Any
    counts: np.ndarray
    save: Callable[[bytes], None] = lambda state: None
    sent: list = field(default_factory=list)
    asked: list = field(default_factory=list)
    answered: list = field(default_factory=list)

    def play(self, dialogue):
        return play(dialogue, self.silos, self.counts, self.asked, self.answered)

    def answers(self, step) -> list[bytes]:
        """Return all answers of silos to a step, by round and silo."""
        of_step = [of_silos for name, of_silos in self.answered if name == step]
        return [data for of_silos in of_step for data in of_silos.values()]

    def updates_of(self, silo: int, updates: np.ndarray) -> dict[int, np.ndarray]:
        """Return the updates of the users that have records in ``silo``."""
        return {int(user): updates[silo, user] for user in np.flatnonzero(self.counts[silo])}

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


@dataclass
class World(Parties):
    """Parties of the protocol with Paillier that have exchanged keys and counts."""

    def __post_init__(self):
        self.server = PaillierServer(self.settings, key=key(self.settings.key_bits))
        self.silos = [PaillierSilo(self.settings, i) for i in range(self.settings.silos)]
        for silo in self.silos:
            silo.save = self.save
        self.play(self.server.set_up())

    def begin(self, number, places=None):
        """Return the weights of a round that begins."""
        data = self.play(self.server.begin_round(number, places))
        return PaillierWeights.from_bytes(data, self.settings)

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return updates (silos × users × coordinates) and noise (silos × coordinates)."""
        settings = self.settings
        shape = (settings.silos, settings.users, settings.coordinates)
        updates = rng.uniform(-settings.update_bound, settings.update_bound, shape)
        noise = rng.uniform(-settings.noise_bound, settings.noise_bound, shape[::2])
        return updates, noise

    def weigh(self, message, updates, noise) -> list[PaillierSum]:
        return [
            weigh(silo, message, self.updates_of(i, updates), noise[i])
            for i, silo in enumerate(self.silos)
        ]

    def run_round(self, number, updates, noise, places=None) -> np.ndarray:
        message = self.begin(number, places)
        sums = self.weigh(message, updates, noise)
        self.sent += [message, *sums]
        return close(self.server, sums)


def root(private: PrivateKey, ciphertext: mpz) -> mpz:
    """Return r of a ciphertext (1 + n)^m · r^n, which a holder of the key can read."""
    p, q, n = private.p, private.q, private.public.n
    return powmod(ciphertext % n, invert(n, (p - 1) * (q - 1)), n)


def numbers(data: bytes, size: int) -> list[mpz]:
    return [mpz.from_bytes(data[at : at + size], "big") for at in range(0, len(data), size)]
