"""Silos that version 0.1.0 stored, before its rooms moved, resume: ``former_silos.json``.

The file holds three silos as in their vaults, after round 3 of a run that draws users obliviously,
and the server's part of that run: its key and the blinded counts.
"""

import itertools
import json
from pathlib import Path

import numpy as np
from gmpy2 import mpz

from flower_ext.algorithms.uldp.weighting import keeping
from flower_ext.secure import BlindedCounts, SealedSeed, WeightingServer
from flower_ext.secure.weighting.paillier import PrivateKey

FORMER = json.loads(Path(__file__).with_name("former_silos.json").read_text())
COUNTS = np.array([[3, 0, 7, 1], [0, 2, 5, 1], [4, 0, 0, 2]])


class Vault:
    def __init__(self, kept: str) -> None:
        self.kept = kept.encode()

    def load(self) -> bytes:
        return self.kept

    def store(self, secret: bytes) -> None:
        self.kept = secret


def test_silos_that_an_older_version_stored_weigh_the_next_round():
    vaults = [Vault(kept) for kept in FORMER["silos"]]
    silos = [keeping.resume(vault) for vault in vaults]
    settings = silos[0].settings
    for silo, vault, kept in zip(silos, vaults, FORMER["silos"], strict=True):
        keeping.keep(silo, vault)
        assert json.loads(vault.kept) == json.loads(kept)
    server = WeightingServer(settings, key=PrivateKey(mpz(FORMER["p"]), mpz(FORMER["q"])))
    server.relay_keys([silo.key for silo in silos])
    server.relay_seed([SealedSeed(receiver=at, sealed=b"relayed before") for at in (1, 2)])
    server.receive_counts(
        [
            BlindedCounts(silo=silo, counts=bytes.fromhex(counts))
            for silo, counts in enumerate(FORMER["blinded_counts"])
        ]
    )
    rng = np.random.default_rng(0)
    updates = rng.uniform(-1, 1, (settings.silos, settings.users, settings.coordinates))
    noise = rng.uniform(-10, 10, (settings.silos, settings.coordinates))
    answer = silos[0].answer_draw(server.offer_draw(4))
    weights = server.open_drawn_round(answer)
    found = server.close_round(
        [
            silo.weigh(
                weights, {user: updates[at, user] for user in COUNTS[at].nonzero()[0]}, noise[at]
            )
            for at, silo in enumerate(silos)
        ]
    )
    of_users = np.einsum("su,suc->uc", COUNTS / COUNTS.sum(axis=0), updates)
    drawn = itertools.product((0, 1), repeat=settings.users)
    errors = [np.abs(np.array(who) @ of_users + noise.sum(axis=0) - found).max() for who in drawn]
    assert min(errors) <= settings.precision
