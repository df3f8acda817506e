"""A silo's part in the set-up of private weighting over ring-LWE, once per run."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Callable, Sequence

from gmpy2 import mpz

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.labels import derive
from flower_ext.secure.masks import PairKeys
from flower_ext.secure.weighting.lattice.common import CommonSecrets
from flower_ext.secure.weighting.lattice.keys import public_key
from flower_ext.secure.weighting.lattice.messages import (
    COUNT_BYTES,
    SEED_BYTES,
    MaskedCounts,
    SealedSeed,
    ServerKey,
    SiloKey,
    TransferAnswer,
)
from flower_ext.secure.weighting.lattice.party import Party
from flower_ext.secure.weighting.lattice.settings import LatticeSettings
from flower_ext.secure.weighting.lattice.state import SiloStage
from flower_ext.secure.weighting.messages import check_senders

_SEED = "seed"
_COUNTS = "counts"
_SEEDING_SILO = 0


class SiloSetUp(Party[SiloStage]):
    """The steps by which silos agree on their secrets and the server learns masked counts.

    Parameters
    ----------
    index : int
        Number of this silo, from zero.
    save, workers
        See `Party`.

    Raises
    ------
    ValueError
        ``index`` is out of range.
    """

    def __init__(
        self,
        settings: LatticeSettings,
        index: int,
        *,
        save: Callable[[bytes], None] | None,
        workers: int,
    ) -> None:
        if not 0 <= index < settings.silos:
            raise InvalidValue(
                f"index={index!r}: expected an integer from 0 to {settings.silos - 1}"
            )
        super().__init__(settings, SiloStage.NEW, save=save, workers=workers)
        self.index = index
        self._pairs = PairKeys(context=settings.context, index=index)
        self._silo_keys: dict[int, bytes] = {}
        self._server_key: ServerKey | None = None
        self._common: CommonSecrets | None = None
        self._counts: list[int] = []

    @property
    def key(self) -> SiloKey:
        """X25519 public key of this silo, for the other silos."""
        self._store()
        return SiloKey(silo=self.index, public=self._pairs.public)

    @property
    def fingerprint(self) -> str:
        """Hash of all public keys, equal at all silos unless the server swapped keys."""
        return self._pairs.fingerprint

    def receive_keys(self, server_key: ServerKey, silo_keys: Sequence[SiloKey]) -> None:
        """Take the server's public key and all silos' public keys.

        Raises
        ------
        ProtocolError
            This silo received the keys before.
        ValueError
            A key is missing or invalid.
        """
        self._expect(SiloStage.NEW)
        for message in (server_key, *silo_keys):
            message.check(self.settings)
        public_key(server_key.public_seed, server_key.words)  # refuses
        check_senders([key.silo for key in silo_keys], range(self.settings.silos))
        keys = {key.silo: key.public for key in silo_keys}
        self._pairs.agree(keys, server_key=server_key.to_bytes())
        self._silo_keys, self._server_key = keys, server_key
        self._advance(SiloStage.KEYED)

    def seal_seed(self) -> list[SealedSeed]:
        """Draw this silo's part of the silos' seed and seal it for every other silo. Silo 0 only.

        Raises
        ------
        ProtocolError
            The keys have not arrived, the seed is known already, or this is not silo 0.
        """
        self._expect(SiloStage.KEYED)
        if self.index != _SEEDING_SILO:
            raise ProtocolError(
                f"seal_seed at silo {self.index}: expected silo {_SEEDING_SILO}; call open_seed"
            )
        part = secrets.token_bytes(SEED_BYTES)
        sealed = [
            SealedSeed(receiver=silo, sealed=self._pairs.seal(silo, _SEED, part))
            for silo in range(1, self.settings.silos)
        ]
        self._set_seed(part)
        self._advance(SiloStage.SEEDED)
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
        self._expect(SiloStage.KEYED)
        message.check(self.settings)
        if self.index == _SEEDING_SILO:
            raise ProtocolError(
                f"open_seed at silo {_SEEDING_SILO}: expected another silo; call seal_seed"
            )
        if message.receiver != self.index:
            raise InvalidValue(f"seed for silo {message.receiver}: expected one for {self.index}")
        self._set_seed(self._pairs.open(_SEEDING_SILO, _SEED, message.sealed))
        self._advance(SiloStage.SEEDED)

    def answer_transfer(self) -> TransferAnswer:
        """Return the silos' choices ρ_u, which all silos derive from their seed. Silo 0 only.

        Raises
        ------
        ProtocolError
            The seed is not known yet, or this is not silo 0.
        """
        self._expect(SiloStage.SEEDED)
        if self.index != _SEEDING_SILO:
            raise ProtocolError(
                f"answer_transfer at silo {self.index}: expected silo {_SEEDING_SILO}"
            )
        return TransferAnswer(answer=self._shared.answer)

    def mask_counts(self, counts: Sequence[int]) -> MaskedCounts:
        """Return the number of records of each user here, masked modulo M; silo 0 adds ρ_u.

        Parameters
        ----------
        counts : Sequence of int
            One number per user, in the order of users that all silos share; zero for a user
            without records here.

        Raises
        ------
        ProtocolError
            The seed is not known yet, or the counts were masked before.
        TypeError
            A count is not an integer.
        ValueError
            The length is wrong, or a count is negative or above this silo's limit.
        """
        self._expect(SiloStage.SEEDED)
        counts = [operator.index(count) for count in counts]
        limit = self.settings.record_limit(self.index)
        if len(counts) != self.settings.users:
            raise InvalidValue(f"counts of {len(counts)} users: expected {self.settings.users}")
        if not all(0 <= count <= limit for count in counts):
            raise InvalidValue(f"counts: expected 0 to {limit} records of each user in this silo")
        self._counts = counts
        self._advance(SiloStage.COUNTED)
        users, choices = self.settings.users, self.settings.choices
        masks = self._pairs.additive_masks(_COUNTS, 0, users, mpz(choices))
        shifts = self._shared.shifts if self.index == _SEEDING_SILO else [0] * users
        masked = [
            (counts[user] + shift + int(mask)) % choices
            for user, shift, mask in zip(self._shared.order, shifts, masks, strict=True)
        ]
        packed = b"".join(count.to_bytes(COUNT_BYTES, "big") for count in masked)
        return MaskedCounts(silo=self.index, counts=packed)

    @property
    def _name(self) -> str:
        return f"silo {self.index}"

    @property
    def _told(self) -> ServerKey:
        assert self._server_key is not None  # from stage KEYED on
        return self._server_key

    @property
    def _shared(self) -> CommonSecrets:
        assert self._common is not None  # from stage SEEDED on
        return self._common

    def _derived(self, seed: bytes) -> CommonSecrets:
        return CommonSecrets(
            self.settings,
            seed,
            transfer=self._told.transfer,
            public_seed=self._told.public_seed,
            workers=self._workers,
        )

    def _set_seed(self, part: bytes) -> None:
        if len(part) != SEED_BYTES:
            raise InvalidValue(f"seed of {len(part)} bytes: expected {SEED_BYTES}")
        # The server's nonce keeps silo 0 from choosing the seed; silo 0's part keeps it secret.
        seed = derive(part, "seed", self._told.nonce, self.settings.context)
        self._common = self._derived(seed)
