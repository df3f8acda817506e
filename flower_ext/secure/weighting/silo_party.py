"""A silo's set-up, seed, draws and state, which are the same under every scheme."""

from __future__ import annotations

import operator
import secrets
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import ClassVar, Generic, Self, TypeVar

from gmpy2 import mpz

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.labels import derive
from flower_ext.secure.pair_keys import PairKeys
from flower_ext.secure.weighting.blinds import user_order
from flower_ext.secure.weighting.oblivious import Receiver
from flower_ext.secure.weighting.party import Party, SettingsT
from flower_ext.secure.weighting.party_state import SiloState, Stage
from flower_ext.secure.weighting.secret_draw import draw_receiver
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

ServerKeyT = TypeVar("ServerKeyT", bound=Message)
_SEED = "seed"
_COUNTS = "counts"
_SEEDING_SILO = 0


class SiloParty(Party[SettingsT], Generic[SettingsT, ServerKeyT]):
    """One silo. Everything it holds is secret, except the messages that its methods return.

    Call `key`, `receive_keys`, then `seal_seed` (silo 0) or `open_seed` (the others), then
    `mask_counts`. If the settings have ``draw_choices``, one silo calls `answer_draw` before the
    server encrypts weights.

    Parameters
    ----------
    index : int
        Number of this silo, from zero.
    settings, save, workers
        As for `Party`.

    Raises
    ------
    ValueError
        ``index`` is out of range.
    """

    server_key_type: ClassVar[type[Message]]
    """Message with the server's public key."""
    state_type: ClassVar[type[SiloState]] = SiloState
    """Dataclass of a silo's state, with one more attribute of the silo for each field it adds."""

    def __init__(
        self,
        settings: SettingsT,
        index: int,
        *,
        save: Callable[[bytes], None] | None = None,
        workers: int = 1,
    ) -> None:
        if not 0 <= index < settings.silos:
            raise InvalidValue(
                f"index={index!r}: expected an integer from 0 to {settings.silos - 1}"
            )
        super().__init__(settings, save=save, workers=workers)
        self.index = index
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
        """Return the state that a restart needs, at any stage.

        It holds secrets in the clear. Store it where nobody else can read it, and never send it.
        """
        added = {name: getattr(self, f"_{name}") for name in self._added_fields()}
        state = self.state_type(
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
        return state.encode(self.settings)

    @classmethod
    def from_state(
        cls,
        settings: SettingsT,
        state: bytes,
        *,
        save: Callable[[bytes], None] | None = None,
        workers: int = 1,
    ) -> Self:
        """Return a silo at the stage of the exported one. What it used stays used.

        Raises
        ------
        ValueError
            ``state`` is malformed or was exported under other settings.
        """
        stored = cls.state_type.decode(state, settings)
        silo = cls(settings, stored.index, workers=workers)
        silo._pairs = PairKeys(context=settings.context, index=stored.index, private=stored.private)
        if stored.stage is not Stage.NEW:
            server_key = cls.server_key_type.from_bytes(stored.server_key, settings)
            silo._take_keys(server_key, dict(enumerate(stored.silo_keys)))  # type: ignore[arg-type]
        if stored.stage in (Stage.SEEDED, Stage.COUNTED):
            silo._take_seed(stored.seed)
        silo._counts = stored.counts
        silo._last_round = stored.last_round
        for name in cls._added_fields():
            setattr(silo, f"_{name}", getattr(stored, name))
        silo._stage = stored.stage
        silo._save = save
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

    def _draw_receiver(self, number: int, public: bytes) -> Receiver:
        return draw_receiver(self.settings, self._seed, number, public, workers=self._workers)

    @classmethod
    def _added_fields(cls) -> list[str]:
        common = {field.name for field in fields(SiloState)}
        return [field.name for field in fields(cls.state_type) if field.name not in common]
