"""A silo's set-up, seed, draws and state, which are the same under every scheme."""

from __future__ import annotations

import operator
import secrets
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from logging import getLogger
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from gmpy2 import mpz
from numpy.typing import NDArray

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.labels import derive
from flower_ext.secure.pair_keys import PairKeys
from flower_ext.secure.stored_state import StoredState
from flower_ext.secure.weighting.oblivious import Receiver
from flower_ext.secure.weighting.party import (
    BEGIN,
    COUNT,
    DRAW,
    KEYS,
    Party,
    SettingsT,
    Stage,
)
from flower_ext.secure.weighting.party_settings import PartySettings
from flower_ext.secure.weighting.weighting_messages import (
    SEED_BYTES,
    DrawAnswer,
    DrawOffer,
    MaskedCounts,
    Message,
    SealedSeed,
    SiloKey,
    check_senders,
    pack_numbers,
)

log = getLogger("flwr")

ServerKeyT = TypeVar("ServerKeyT", bound=Message)
_SEED = "seed"
_COUNTS = "counts"
_SEEDING_SILO = 0


class SiloSum(Protocol):
    """A silo's sum of one round, which takes updates while other users still train."""

    def add(self, updates: Mapping[int, NDArray[Any]]) -> None:
        """Add clipped updates (coordinates,) of users with records here, each once."""
        ...

    def finish(self, noise: NDArray[Any]) -> bytes:
        """Return the masked sum with this silo's share of the noise; the round is then used."""
        ...


@dataclass(frozen=True, kw_only=True)
class SiloState(StoredState):
    """State that a silo needs after a restart, at any stage."""

    readers: ClassVar = {"Stage": Stage.__getitem__, "str": str}

    protocol: str
    settings: str
    index: int
    stage: Stage
    private: bytes
    silo_keys: list[bytes]
    server_key: bytes
    seed: bytes
    counts: list[int]
    last_round: int


def user_order(seed: bytes, users: int) -> list[int]:
    """Return the users in an order that is uniform to a party without ``seed``.

    The server numbers users by their place in this order. It therefore cannot tell which user has
    no records, or which user it drew.
    """
    return sorted(range(users), key=lambda user: derive(seed, "order", user))


class SiloParty(Party[SettingsT], Generic[SettingsT, ServerKeyT]):
    """One silo. Everything it holds is secret, except the messages that its methods return.

    Call `key`, `receive_keys`, then `seal_seed` (silo 0) or `open_seed` (the others), then
    `mask_counts`. If the settings have ``draw_choices``, one silo calls `answer_draw` before the
    server encrypts weights.

    Parameters
    ----------
    index : int
        Number of this silo, from zero.
    save : callable, optional
        Stores `export_state` durably. The silo calls it before it returns a message that must not
        be made twice, so that a silo restored from the stored state reuses nothing.
    settings, **options
        As for `Party`.

    Raises
    ------
    ValueError
        ``index`` is out of range.
    """

    settings_type: ClassVar[type[PartySettings]]
    server_key_type: ClassVar[type[Message]]
    """Message with the server's public key."""
    state_type: ClassVar[type[SiloState]] = SiloState
    """Dataclass of a silo's state, with one more attribute of the silo for each field it adds."""

    def __init__(
        self,
        settings: SettingsT,
        index: int,
        *,
        save: Callable[[bytes], None] = lambda state: None,
        **options: Any,
    ) -> None:
        if not 0 <= index < settings.silos:
            raise InvalidValue(
                f"index={index!r}: expected an integer from 0 to {settings.silos - 1}"
            )
        super().__init__(settings, **options)
        self.index, self.save = index, save
        self._pairs = PairKeys(context=settings.context, index=index)
        self._silo_keys: dict[int, bytes] = {}
        self._server_key: ServerKeyT | None = None
        self._seed = b""
        self._order: list[int] = []
        self._counts: list[int] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}(index={self.index}, stage={self._stage.name.lower()})"

    @property
    def key(self) -> SiloKey:
        """X25519 public key of this silo, for the other silos."""
        self._store()
        return SiloKey(silo=self.index, public=self._pairs.public)

    @property
    def fingerprint(self) -> str:
        """Hash of all public keys, equal at all silos unless the server swapped keys."""
        return self._pairs.fingerprint

    @property
    def counted(self) -> tuple[int, ...]:
        """Users with records in this silo, each of whom has an update in every sum."""
        return tuple(user for user, count in enumerate(self._counts) if count)

    def answer(self, step: str, question: bytes, counts: Callable[[int], Sequence[int]]) -> bytes:
        """Take one step of the set-up, or of a secret draw, and return the answer.

        Parameters
        ----------
        step : str
        question : bytes
            The server's message.
        counts : Callable[[int], Sequence[int]]
            Returns each user's number of records in this silo, up to a limit.

        Raises
        ------
        ProtocolError
            The step is unknown or out of order.
        ValueError
            The message is malformed.
        """
        settings = self.settings
        if step == BEGIN:
            return self.key.to_bytes()
        if step == KEYS:
            return self._answer_keys(question)
        if step == COUNT:
            if self.index != _SEEDING_SILO:
                self.open_seed(SealedSeed.from_bytes(question, settings))
            return self.mask_counts(counts(settings.record_limit(self.index))).to_bytes()
        if step == DRAW:
            return self.answer_draw(DrawOffer.from_bytes(question, settings)).to_bytes()
        raise ProtocolError(f"step={step!r}: expected {BEGIN}, {KEYS}, {COUNT} or {DRAW}")

    @abstractmethod
    def open_sum(self, number: int, weights: bytes) -> SiloSum:
        """Begin this silo's sum of round ``number``. The round does not count as used yet.

        Parameters
        ----------
        weights : bytes
            The server's message of the round, of `ServerParty.begin_round`.
        """

    def receive_keys(self, server_key: ServerKeyT, silo_keys: Sequence[SiloKey]) -> None:
        """Take the server's public key and all silos' public keys.

        Raises
        ------
        ProtocolError
            This silo received the keys before.
        ValueError
            A key is missing or invalid.
        """
        self._expect(Stage.NEW)
        server_key.check(self.settings)
        for key in silo_keys:
            key.check(self.settings)
        self._check_server_key(server_key)
        check_senders([key.silo for key in silo_keys], range(self.settings.silos))
        self._take_keys(server_key, {key.silo: key.public for key in silo_keys})
        self._advance(Stage.KEYED)

    def seal_seed(self) -> list[SealedSeed]:
        """Draw this silo's part of the silos' seed and seal it for every other silo. Silo 0 only.

        Raises
        ------
        ProtocolError
            The keys have not arrived, the seed is known already, or this is not silo 0.
        """
        self._expect(Stage.KEYED)
        if self.index != _SEEDING_SILO:
            raise ProtocolError(
                f"seal_seed: silo {self.index} opens the seed that silo {_SEEDING_SILO} sealed; "
                "call open_seed"
            )
        part = secrets.token_bytes(SEED_BYTES)
        sealed = [
            SealedSeed(receiver=silo, sealed=self._pairs.seal(silo, _SEED, part))
            for silo in range(1, self.settings.silos)
        ]
        self._mix_seed(part)
        return sealed

    def open_seed(self, message: SealedSeed) -> None:
        """Take silo 0's part of the silos' seed.

        Raises
        ------
        ProtocolError
            The keys have not arrived, the seed is known already, or this is silo 0.
        ValueError
            The message is for another silo, or silo 0 did not seal it in this run.
        """
        self._expect(Stage.KEYED)
        message.check(self.settings)
        if self.index == _SEEDING_SILO:
            raise ProtocolError(
                f"open_seed: silo {_SEEDING_SILO} creates the seed and cannot open one; call "
                "seal_seed"
            )
        if message.receiver != self.index:
            raise InvalidValue(f"seed for silo {message.receiver}: expected one for {self.index}")
        self._mix_seed(self._pairs.open(_SEEDING_SILO, _SEED, message.sealed))

    def mask_counts(self, counts: Sequence[int]) -> MaskedCounts:
        """Return the number of records of each user in this silo, hidden from the server.

        Parameters
        ----------
        counts : Sequence of int
            One number per user, in the order of users that all silos share; zero for a user
            without records here.

        Raises
        ------
        ProtocolError
            The seed has not arrived, or counts were masked before.
        TypeError
            A count is not an integer.
        ValueError
            The length is wrong, or a count is negative or above this silo's limit.
        """
        self._expect(Stage.SEEDED)
        counts = [operator.index(count) for count in counts]
        limit = self.settings.record_limit(self.index)
        if len(counts) != self.settings.users:
            raise InvalidValue(f"counts of {len(counts)} users: expected {self.settings.users}")
        if not all(0 <= count <= limit for count in counts):
            raise InvalidValue(f"counts: expected 0 to {limit} records of each user in this silo")
        self._counts = counts
        # Stored before masks are drawn: a restored silo cannot mask other counts in the same way.
        self._advance(Stage.COUNTED)
        modulus = self._count_modulus
        masks = self._pairs.additive_masks(_COUNTS, 0, self.settings.users, mpz(modulus))
        masked = [
            (hidden + int(mask)) % modulus
            for hidden, mask in zip(self._hidden_counts(), masks, strict=True)
        ]
        packed = pack_numbers(masked, self.settings.count_bytes)
        return MaskedCounts(silo=self.index, counts=packed)

    def answer_draw(self, message: DrawOffer) -> DrawAnswer:
        """Return the choices that all silos derive from their seed; the server cannot read them.

        Raises
        ------
        ProtocolError
            The counts were not masked yet, the settings have no ``draw_choices``, or the draw is
            for a round or epoch that was used.
        ValueError
            The offer is malformed.
        """
        self._expect(Stage.COUNTED)
        message.check(self.settings)
        self._check_draw(message.number)
        receiver = self._draw_receiver(message.number, message.public)
        return DrawAnswer(number=message.number, answer=receiver.answer)

    def export_state(self) -> bytes:
        """Return the state that a restart needs, at any stage, with the settings of the run.

        It holds secrets in the clear. Store it where nobody else can read it, and never send it.
        """
        added = {name: getattr(self, f"_{name}") for name in self._added_fields()}
        state = self.state_type(
            protocol=self.settings.protocol,
            settings=self.settings.to_bytes().decode(),
            index=self.index,
            stage=self._stage,
            private=self._pairs.private,
            silo_keys=[key for _, key in sorted(self._silo_keys.items())],
            server_key=b"" if self._server_key is None else self._server_key.to_bytes(),
            seed=self._seed,
            counts=self._counts,
            last_round=self._last_round,
            **added,
        )
        return state.encode()

    @classmethod
    def from_state(cls, state: bytes, **options: Any) -> Self:
        """Return a silo at the stage of the exported one. What it used stays used.

        Raises
        ------
        ValueError
            ``state`` is malformed or of another protocol.
        """
        stored = cls.state_type.decode(state)
        settings: Any = cls.settings_type.from_bytes(stored.settings.encode())
        silo = cls(settings, stored.index, **options)
        silo._pairs = PairKeys(context=settings.context, index=stored.index, private=stored.private)
        if stored.stage is not Stage.NEW:
            server_key = cls.server_key_type.from_bytes(stored.server_key, settings)
            silo._take_keys(server_key, dict(enumerate(stored.silo_keys)))  # type: ignore[arg-type]
        if stored.stage in (Stage.SEEDED, Stage.COUNTED):
            silo._take_seed(stored.seed)
        silo._counts, silo._last_round = stored.counts, stored.last_round
        for name in cls._added_fields():
            setattr(silo, f"_{name}", getattr(stored, name))
        silo._stage = stored.stage
        return silo

    @property
    def _name(self) -> str:
        return f"silo {self.index}"

    @property
    def _known_server_key(self) -> ServerKeyT:
        if self._server_key is None:
            raise ProtocolError("the server's public key is missing: call receive_keys first")
        return self._server_key

    @property
    @abstractmethod
    def _count_modulus(self) -> int:
        """Modulus of masked counts."""

    @abstractmethod
    def _check_server_key(self, server_key: ServerKeyT) -> None:
        """Raise a ValueError for a key that the server cannot have drawn."""

    @abstractmethod
    def _hidden_counts(self) -> list[int]:
        """Return the scheme's number for each user's count, by place in the secret order."""

    @abstractmethod
    def _check_draw(self, number: int) -> None:
        """Raise a ProtocolError if a draw is for a round or epoch that was used."""

    def _added(self) -> bytes:
        """Return what silo 0 adds to the sealed seeds; a scheme may add something."""
        return b""

    def _answer_keys(self, question: bytes) -> bytes:
        settings, size = self.settings, SiloKey.size(self.settings)
        end = len(question) - size * settings.silos
        keys = [question[at : at + size] for at in range(max(0, end), len(question), size)]
        self.receive_keys(
            self.server_key_type.from_bytes(question[: max(0, end)], settings),  # type: ignore[arg-type]
            [SiloKey.from_bytes(key, settings) for key in keys],
        )
        # A warning, so that no setting of the log hides it.
        log.warning(
            "silo %d: the fingerprint of all silos' keys is %s; the silos' owners see another one "
            "if somebody swapped a key on the way",
            self.index,
            self.fingerprint,
        )
        if self.index != _SEEDING_SILO:
            return b""
        return b"".join(seed.to_bytes() for seed in self.seal_seed()) + self._added()

    def _take_keys(self, server_key: ServerKeyT, silo_keys: dict[int, bytes]) -> None:
        """Agree on keys with all silos, and keep the public ones."""
        self._pairs.agree(silo_keys, server_key=server_key.to_bytes())
        self._silo_keys, self._server_key = silo_keys, server_key

    def _mix_seed(self, part: bytes) -> None:
        """Take the seed that all silos derive from silo 0's part.

        The server's key is fresh and keeps silo 0 from choosing the seed; the part keeps it secret.
        """
        if len(part) != SEED_BYTES:
            raise InvalidValue(f"seed of {len(part)} bytes: expected {SEED_BYTES}")
        server_key = self._known_server_key.to_bytes()
        self._take_seed(derive(part, "seed", server_key, self.settings.context))
        self._advance(Stage.SEEDED)

    def _take_seed(self, seed: bytes) -> None:
        """Keep the silos' seed; a scheme adds what it derives from it."""
        self._seed = seed
        self._order = user_order(seed, self.settings.users)

    def _draw_receiver(self, number: int, offer: bytes) -> Receiver:
        """Return the receiver of one draw's transfers, which is the same at all silos.

        ``number`` is that of the round or epoch that the draw is for.
        """
        if self.settings.draw_choices is None:
            raise ProtocolError(
                "the settings have no draw_choices: expected weights of users that the server named"
            )
        return Receiver(
            offer,
            derive(self._seed, "draw", number),
            run=self.settings.context,
            transfers=self.settings.users,
            places=self.settings.draw_choices,
            workers=self._workers,
        )

    def _advance(self, stage: Stage) -> None:
        self._stage = stage
        self._store()

    def _store(self) -> None:
        self.save(self.export_state())

    @classmethod
    def _added_fields(cls) -> list[str]:
        common = {field.name for field in fields(SiloState)}
        return [field.name for field in fields(cls.state_type) if field.name not in common]
