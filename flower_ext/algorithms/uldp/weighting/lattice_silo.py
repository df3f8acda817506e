"""A silo's end of private weighting over ring-LWE.

Every step starts from the state in the vault, and stores its outcome there before anything leaves.
The server sends the weights with every round. A silo opens weights of a known epoch again, which
takes a fraction of a second, unless this process still holds them.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_ext.algorithms.uldp.weighting.protocol import (
    ANSWER,
    BEGIN,
    DRAW,
    OFFER,
    PROTOCOL,
    STEP,
    Arrays,
    cores,
    counts_of,
    keeps,
    kept_state,
    log_fingerprint,
)
from flower_ext.algorithms.uldp.weights import owned
from flower_ext.errors import ProtocolError, knowing_no_data, tellable
from flower_ext.federation import ClientVault, Question, records
from flower_ext.secure.weighting.lattice.messages import (
    DrawOffer,
    LatticeWeights,
    RoundOpening,
    SealedSeed,
    ServerKey,
    SiloKey,
)
from flower_ext.secure.weighting.lattice.settings import LatticeSettings
from flower_ext.secure.weighting.lattice.silo import LatticeSilo
from flower_ext.secure.weighting.lattice.weighing import Weighing

NAME = "lattice"
KEYS, COUNT = "keys", "count"
"""Names of the questions after `BEGIN`."""
KEY, SILO_KEYS, SERVER_KEY, SEALED, SEED, COUNTS = (
    "key",
    "silos",
    "server",
    "sealed",
    "seed",
    "counts",
)
WEIGHTS, OPENING = "weights", "opening"
"""Names of arrays in messages."""
_PROCESS_KEEPS = 8
"""Number of silos whose opened weights stay in the process."""
_earlier: OrderedDict[bytes, tuple[LatticeSilo, _Keeper]] = OrderedDict()
"""Silos by the hash of their stored state, so that a silo that continued elsewhere is not used."""


def settings_from_facts(facts: Mapping[str, Any]) -> LatticeSettings:
    """Return the settings of a run from the plain values of a message.

    Raises
    ------
    ValueError
        As `LatticeSettings`.
    """
    limits = tuple(facts["silo_record_limits"])
    return LatticeSettings(**{**facts, "silo_record_limits": limits})


def settings_to_facts(settings: LatticeSettings) -> dict[str, Any]:
    """Undo `settings_from_facts`."""
    facts = {name: value for name, value in asdict(settings).items() if value is not None}
    return {**facts, "silo_record_limits": list(settings.silo_record_limits)}


class _Keeper:
    """Stores one silo in the vault of the message that is being answered."""

    def __init__(self, settings: LatticeSettings, vault: ClientVault) -> None:
        self.settings, self.vault = settings, vault

    def __call__(self, state: bytes) -> None:
        told = json.dumps(settings_to_facts(self.settings)).encode()
        self.vault.store(keeps(NAME, told + b"\n" + state))


def begin(question: Question) -> Arrays:
    """Make this silo's keys, and answer with the public one."""
    facts = {name: v for name, v in question.asked.items() if name not in (STEP, PROTOCOL)}
    with knowing_no_data():
        settings = settings_from_facts(facts)
    owned(question.data, settings.users)
    keeper = _Keeper(settings, question.vault)
    silo = LatticeSilo(settings, question.partition, save=keeper, workers=cores())
    return {KEY: records.to_bytes_array(silo.key.to_bytes())}


def resume(vault: ClientVault) -> LatticeEnd | None:
    """Return the silo as it was stored last; None if none was stored."""
    kept = vault.load()
    if kept is None:
        return None
    told, state = kept_state(kept).split(b"\n", 1)
    known = _earlier.pop(hashlib.sha256(kept).digest(), None)
    if known is None:
        settings = settings_from_facts(json.loads(told))
        keeper = _Keeper(settings, vault)
        silo = LatticeSilo.from_state(settings, state, save=keeper, workers=cores())
    else:
        silo, keeper = known
        keeper.vault = vault
    return LatticeEnd(silo, keeper)


class LatticeEnd:
    """A silo after `begin`."""

    def __init__(self, silo: LatticeSilo, keeper: _Keeper) -> None:
        self.silo = silo
        self._keeper = keeper

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

    def open_sum(self, number: int, sent: Mapping[str, bytes]) -> LatticeOpenSum:
        """Begin this silo's sum of round ``number``; its epoch then counts as used."""
        silo, settings = self.silo, self.silo.settings
        opening = RoundOpening.from_bytes(sent[OPENING], settings)
        if opening.round_number != number:
            raise ProtocolError(f"round {opening.round_number}: expected round {number}")
        silo.receive_weights(LatticeWeights.from_bytes(sent[WEIGHTS], settings))
        return LatticeOpenSum(silo.begin(opening), self._remember)

    def _take_keys(self, question: Question) -> Arrays:
        silo, settings, sent = self.silo, self.silo.settings, question.arrays[KEYS]
        keys = [SiloKey.from_bytes(bytes(key), settings) for key in sent[SILO_KEYS]]
        silo.receive_keys(ServerKey.from_bytes(sent[SERVER_KEY].tobytes(), settings), keys)
        log_fingerprint(silo.index, silo.fingerprint)
        if silo.index != 0:
            return {}
        sealed = [seed.to_bytes() for seed in silo.seal_seed()]
        answer = silo.answer_transfer().to_bytes()
        return {SEALED: records.to_bytes_array(b"".join((*sealed, answer)))}

    def _count(self, question: Question) -> Arrays:
        silo, settings = self.silo, self.silo.settings
        if silo.index != 0:
            sealed = question.arrays[SEED][SEED].tobytes()
            silo.open_seed(SealedSeed.from_bytes(sealed, settings))
        most = settings.record_limit(silo.index)
        masked = silo.mask_counts(counts_of(question.data, settings.users, most=most))
        return {COUNTS: records.to_bytes_array(masked.to_bytes())}

    def _draw(self, question: Question) -> Arrays:
        offered = question.arrays[OFFER][OFFER].tobytes()
        answer = self.silo.answer_draw(DrawOffer.from_bytes(offered, self.silo.settings))
        return {ANSWER: records.to_bytes_array(answer.to_bytes())}

    def _remember(self) -> None:
        """Keep the opened weights in this process for the next round."""
        kept = self._keeper.vault.load()
        if kept is None:
            return
        _earlier[hashlib.sha256(kept).digest()] = self.silo, self._keeper
        while len(_earlier) > _PROCESS_KEEPS:
            _earlier.popitem(last=False)


class LatticeOpenSum:
    """A silo's sum of one round. It adds updates under encryption and keeps none."""

    def __init__(self, weighing: Weighing, done: Callable[[], None]) -> None:
        self._weighing, self._done = weighing, done

    def add(self, updates: Mapping[int, NDArray[np.float64]]) -> None:
        """Add updates of some users under encryption."""
        self._weighing.add(updates)

    def finish(self, noise: NDArray[np.float64]) -> bytes:
        """Return the masked sum; the round then counts as used."""
        masked = self._weighing.finish(noise)
        self._done()
        return masked.to_bytes()
