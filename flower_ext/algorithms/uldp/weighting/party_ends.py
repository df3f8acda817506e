"""Both ends of a protocol whose parties are a `ServerParty` and a `SiloParty`, over Flower.

====================  =====================================================
step of the set-up    messages
====================  =====================================================
``begin``             the silos' keys, to the server
``keys``              all keys, to all silos; silo 0 answers with sealed seeds, and with what its
                      protocol adds
``count``             each silo's seed; all answer with masked counts
``draw``              before a round or epoch whose draw is secret: an offer to silo 0, and its
                      answer
====================  =====================================================
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from flower_ext.algorithms.uldp.weighting.protocol import (
    BEGIN,
    PROTOCOL,
    STEP,
    Arrays,
    ServerEnd,
    SiloEnd,
    Silos,
    as_record,
    checked_answers,
    cores,
    counts_of,
    log_fingerprint,
)
from flower_ext.algorithms.uldp.weighting.silo_store import (
    StoredSilo,
    VaultWriter,
    settings_from_values,
    settings_to_values,
)
from flower_ext.algorithms.uldp.weights import owned
from flower_ext.errors import InvalidValue, ProtocolError, knowing_no_data, tellable
from flower_ext.federation import ClientVault, Question, Remaining, records
from flower_ext.secure.weighting.party_settings import PartySettings
from flower_ext.secure.weighting.server_party import ServerParty
from flower_ext.secure.weighting.silo_party import SiloParty
from flower_ext.secure.weighting.weighting_messages import (
    DrawAnswer,
    DrawOffer,
    MaskedCounts,
    Message,
    SealedSeed,
    SiloKey,
)

ServerT = TypeVar("ServerT", bound=ServerParty[Any, Any])
SiloT = TypeVar("SiloT", bound=SiloParty[Any, Any])
MessageT = TypeVar("MessageT", bound=Message)

KEYS, COUNT, DRAW = "keys", "count", "draw"
"""Names of the steps after `BEGIN`."""
KEY, SILO_KEYS, SERVER_KEY, SEALED, SEED, COUNTS = (
    "key",
    "silos",
    "server",
    "sealed",
    "seed",
    "counts",
)
"""Names of arrays in messages of the set-up."""
OFFER, ANSWER, WEIGHTS = "offer", "answer", "weights"
"""Names of arrays in messages of a draw, and of a round."""

_LARGEST_CACHE = 8
"""Number of silos that stay in the process between messages."""
_cache: OrderedDict[bytes, PartySiloEnd[Any]] = OrderedDict()
"""Silos by the hash of their stored state, so that a silo that continued elsewhere is not used.

They hold what they computed from weights, which only saves time.
"""


def read_from(silo: int, kind: type[MessageT], data: bytes, settings: PartySettings) -> MessageT:
    """Return a silo's message.

    Raises
    ------
    ValueError
        The message is malformed, or names another silo than the one that sent it.
    """
    message = kind.from_bytes(data, settings)
    named = vars(message)["silo"]
    if named != silo:
        raise InvalidValue(f"{kind.__name__} of silo {named}: expected silo {silo}, its sender")
    return message


class PartyServerEnd(ServerEnd, Generic[ServerT]):
    """The server's end of one run; keys are fresh."""

    protocol: ClassVar[str]
    """Name of the protocol."""
    sum_type: ClassVar[type[Message]]
    """Message with a silo's masked sum."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @cached_property
    def party(self) -> ServerT:
        """The server of `flower_ext.secure`, which makes its keys at first use."""
        return self._new_party()

    @property
    def sum_bytes(self) -> int:
        """Length of a silo's masked sum in bytes."""
        return self.sum_type.size(self.settings)

    @checked_answers()
    def set_up(self, silos: Silos) -> None:
        """Exchange keys and the silos' seed, and collect masked counts."""
        settings, party = self.settings, self.party
        self._log_costs()
        values = {PROTOCOL: self.protocol, **settings_to_values(settings)}
        keys = silos.ask(BEGIN, KEY, SiloKey.size(settings), values=values)
        relayed = party.relay_keys(
            [read_from(silo, SiloKey, key, settings) for silo, key in keys.items()]
        )
        public = {
            SERVER_KEY: records.to_bytes_array(self._server_key().to_bytes()),
            SILO_KEYS: np.stack([records.to_bytes_array(key.to_bytes()) for key in relayed]),
        }
        shared = {silo: {KEYS: records.to_record(public)} for silo in keys}
        size, others = SealedSeed.size(settings), settings.silos - 1
        length = size * others + self._added_bytes()
        sealed = silos.ask(KEYS, SEALED, length, silo_records=shared, answering=(0,))[0]
        seeds = party.relay_seed(
            [
                SealedSeed.from_bytes(sealed[at : at + size], settings)
                for at in range(0, size * others, size)
            ]
        )
        self._take_added(sealed[size * others :])
        for_one = {seed.receiver: {SEED: as_record({SEED: seed.to_bytes()})} for seed in seeds}
        counts = silos.ask(COUNT, COUNTS, MaskedCounts.size(settings), silo_records=for_one)
        party.receive_counts(
            [read_from(silo, MaskedCounts, masked, settings) for silo, masked in counts.items()]
        )

    def check_sum(self, silo: int, data: bytes) -> None:
        """Refuse bytes that are not a masked sum of this round."""
        self.party.check_sum(read_from(silo, self.sum_type, data, self.settings))

    def close_round(self, sums: Mapping[int, bytes]) -> NDArray[np.float64]:
        """Decrypt the sum over all silos."""
        messages = [
            read_from(silo, self.sum_type, data, self.settings) for silo, data in sums.items()
        ]
        return self._decrypt(messages, Remaining("decryption"))

    def _draw(self, offer: DrawOffer, silos: Silos) -> DrawAnswer:
        """Ask silo 0 for the silos' choices of a secret draw."""
        offered = {0: {OFFER: as_record({OFFER: offer.to_bytes()})}}
        length = DrawAnswer.size(self.settings)
        answers = silos.ask(DRAW, ANSWER, length, silo_records=offered, recipients=(0,))
        with checked_answers():
            return DrawAnswer.from_bytes(answers[0], self.settings)

    @abstractmethod
    def _new_party(self) -> ServerT:
        """Return the server with fresh keys."""

    @abstractmethod
    def _server_key(self) -> Message:
        """Return the server's public key."""

    @abstractmethod
    def _log_costs(self) -> None:
        """Log what a round costs."""

    @abstractmethod
    def _decrypt(self, messages: list[Any], progress: Remaining) -> NDArray[np.float64]:
        """Decrypt the sum over all silos."""

    def _added_bytes(self) -> int:
        """Return the length of what silo 0 adds to the sealed seeds."""
        return 0

    def _take_added(self, data: bytes) -> None:
        """Take what silo 0 added to the sealed seeds."""


class PartySiloEnd(SiloEnd, Generic[SiloT]):
    """A silo's end of one run.

    Parameters
    ----------
    silo : SiloParty
        A silo that stores its state by ``writer``.
    writer : VaultWriter
    """

    protocol: ClassVar[str]
    """Name of the protocol."""
    party_type: ClassVar[type[SiloParty[Any, Any]]]
    settings_type: ClassVar[type[PartySettings]]

    def __init__(self, silo: SiloT, writer: VaultWriter) -> None:
        self.silo = silo
        self._writer = writer

    @classmethod
    def begin(cls, question: Question) -> Arrays:
        """Make this silo's keys, and answer with the public one."""
        values = {name: v for name, v in question.asked.items() if name not in (STEP, PROTOCOL)}
        with knowing_no_data():
            settings = settings_from_values(cls.settings_type, values)
            cls._admit(settings, question)
        owned(question.data, settings.users)
        writer = VaultWriter(cls.protocol, settings, question.vault)
        silo = cls.party_type(settings, question.partition, save=writer, workers=cores())
        return {KEY: records.to_bytes_array(silo.key.to_bytes())}

    @classmethod
    def resume(cls, vault: ClientVault) -> Self | None:
        """Return the silo as it was stored last; None if none was stored."""
        stored = vault.load()
        if stored is None:
            return None
        end = _cache.pop(hashlib.sha256(stored).digest(), None)
        if isinstance(end, cls):
            end._writer.vault = vault
            return end
        kept = StoredSilo.read(stored)
        settings = settings_from_values(cls.settings_type, kept.settings)
        writer = VaultWriter(cls.protocol, settings, vault)
        silo: Any = cls.party_type.from_state(settings, kept.state, save=writer, workers=cores())
        return cls(silo, writer)

    @property
    def run(self) -> str:
        """Name of the run."""
        return str(self.silo.settings.run)

    @property
    def users(self) -> int:
        """Number of users that the silos agreed on."""
        return int(self.silo.settings.users)

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

    def stay(self) -> None:
        """Keep the silo, with what it computed, in this process for its next message."""
        stored = self._writer.vault.load()
        if stored is None:
            return
        _cache[hashlib.sha256(stored).digest()] = self
        while len(_cache) > _LARGEST_CACHE:
            _cache.popitem(last=False)

    @classmethod
    def _admit(cls, settings: Any, question: Question) -> None:
        """Raise an error for settings under which this client takes no part."""

    def _added(self) -> bytes:
        """Return what silo 0 adds to the sealed seeds."""
        return b""

    def _take_keys(self, question: Question) -> Arrays:
        silo, settings, sent = self.silo, self.silo.settings, question.arrays[KEYS]
        keys = [SiloKey.from_bytes(bytes(key), settings) for key in sent[SILO_KEYS]]
        server_key = silo.server_key_type.from_bytes(sent[SERVER_KEY].tobytes(), settings)
        silo.receive_keys(server_key, keys)
        log_fingerprint(silo.index, silo.fingerprint)
        if silo.index != 0:
            return {}
        seeds = b"".join(seed.to_bytes() for seed in silo.seal_seed())
        return {SEALED: records.to_bytes_array(seeds + self._added())}

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
