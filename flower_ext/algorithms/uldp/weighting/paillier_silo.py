"""A silo's end of Protocol 1 over Paillier.

Every step starts from the state in the vault, and stores its outcome there before anything leaves
(see `keeping`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from flower_ext.algorithms.uldp.weighting import keeping
from flower_ext.algorithms.uldp.weighting.protocol import (
    ANSWER,
    BEGIN,
    DRAW,
    NUMBER,
    OFFER,
    PROTOCOL,
    STEP,
    Arrays,
    counts_of,
    log_fingerprint,
)
from flower_ext.algorithms.uldp.weights import owned
from flower_ext.errors import knowing_no_data, tellable
from flower_ext.federation import ClientVault, Question, Remaining, records
from flower_ext.secure import (
    DrawOffer,
    EncryptedWeights,
    ProtocolError,
    SealedSeed,
    SealedWeights,
    SiloKey,
    WeightingSilo,
)

KEYS, COUNT = "keys", "count"
"""Names of the questions after `BEGIN`."""
KEY, SILO_KEYS, SERVER_KEY, SEEDS, SEED, COUNTS = (
    "key",
    "silos",
    "server",
    "seeds",
    "seed",
    "counts",
)
WEIGHTS = "weights"
"""Names of arrays in messages."""


def begin(question: Question) -> Arrays:
    """Make this silo's keys, and answer with the public one."""
    facts = {name: v for name, v in question.asked.items() if name not in (STEP, PROTOCOL)}
    with knowing_no_data():
        settings = keeping.settings_from_facts(facts)
        if settings.allow_insecure_key_size and not question.may_simulate:
            raise PermissionError(
                f"the server asks for keys of {settings.key_bits} bits that may be insecure: this "
                "client takes part only in simulation (client_app(..., allow_seeded_noise=True))"
            )
    owned(question.data, settings.users)
    silo = WeightingSilo(settings, question.partition)
    keeping.keep(silo, question.vault)
    return {KEY: records.to_bytes_array(silo.key.public)}


def resume(vault: ClientVault) -> PaillierSilo | None:
    """Return the silo as it was stored last; None if none was stored."""
    silo = keeping.resume(vault)
    return None if silo is None else PaillierSilo(silo)


class PaillierSilo:
    """A silo after `begin`."""

    def __init__(self, silo: WeightingSilo) -> None:
        self.silo = silo

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.silo.settings.run

    @property
    def users(self) -> int:
        """Number of users that the silos agreed on."""
        return self.silo.settings.users

    @property
    def index(self) -> int:
        """Number of the silo, from zero."""
        return self.silo.index

    @property
    def counted(self) -> Collection[int]:
        """Users whose records this silo counted."""
        return self.silo.counted

    def answer(self, question: Question) -> Arrays:
        """Take one step of the set-up, or of a secret draw."""
        steps = {KEYS: self._take_keys, COUNT: self._count, DRAW: self._draw}
        step = str(question.asked[STEP])
        if step not in steps:
            known = ", ".join((BEGIN, *steps))
            raise tellable(ProtocolError(f"step={step!r}: expected one of {known}"))
        return steps[step](question)

    def open_sum(self, number: int, sent: Mapping[str, bytes]) -> PaillierOpenSum:
        """Begin this silo's sum of round ``number``."""
        if OFFER in sent:
            sealed = SealedWeights(round_number=number, public=sent[OFFER], sealed=sent[WEIGHTS])
            return PaillierOpenSum(self.silo, sealed)
        weights = EncryptedWeights(round_number=number, weights=sent[WEIGHTS])
        return PaillierOpenSum(self.silo, weights)

    def _take_keys(self, question: Question) -> Arrays:
        silo, sent = self.silo, question.arrays[KEYS]
        public = [bytes(key) for key in sent[SILO_KEYS]]
        keys = [SiloKey(silo=number, public=key) for number, key in enumerate(public)]
        silo.receive_keys(sent[SERVER_KEY].tobytes(), keys)
        log_fingerprint(silo.index, silo.fingerprint)
        sealed = [seed.sealed for seed in silo.seal_seed()] if silo.index == 0 else []
        keeping.keep(silo, question.vault)
        return {SEEDS: records.to_bytes_array(b"".join(sealed))} if sealed else {}

    def _count(self, question: Question) -> Arrays:
        silo = self.silo
        if silo.index != 0:
            sealed = question.arrays[SEED][SEED].tobytes()
            silo.open_seed(SealedSeed(receiver=silo.index, sealed=sealed))
        settings, most = silo.settings, silo.settings.record_limit(silo.index)
        blinded = silo.blind_counts(counts_of(question.data, settings.users, most=most))
        return {COUNTS: records.to_bytes_array(blinded.counts)}

    def _draw(self, question: Question) -> Arrays:
        number, public = int(question.asked[NUMBER]), question.arrays[OFFER][OFFER].tobytes()
        answer = self.silo.answer_draw(DrawOffer(round_number=number, public=public))
        return {ANSWER: records.to_bytes_array(answer.answer)}


class PaillierOpenSum:
    """A silo's sum of one round. It needs all updates at once, because it works by coordinates."""

    def __init__(self, silo: WeightingSilo, weights: EncryptedWeights | SealedWeights) -> None:
        self._silo, self._weights = silo, weights
        self._updates: dict[int, NDArray[np.float64]] = {}

    def add(self, updates: Mapping[int, NDArray[np.float64]]) -> None:
        """Keep updates until all users' updates have arrived."""
        self._updates |= updates

    def finish(self, noise: NDArray[np.float64]) -> bytes:
        """Return the masked sum; the round then counts as used."""
        silo, number = self._silo, self._weights.round_number
        keeping.prepare(silo)
        progress = Remaining(f"silo {silo.index}, round {number}: coordinates")
        masked = silo.weigh(self._weights, self._updates, noise, progress=progress)
        keeping.remember(silo)
        return masked.ciphertexts
