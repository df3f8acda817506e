"""A silo's side of private weighting over ring-LWE; the package describes the protocol."""

from __future__ import annotations

import hashlib
import operator
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from gmpy2 import mpz
from numpy.typing import ArrayLike

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.labels import derive
from flower_ext.secure.masks import PairKeys
from flower_ext.secure.threads import Progress
from flower_ext.secure.weighting.lattice.common import CommonSecrets
from flower_ext.secure.weighting.lattice.keys import public_key
from flower_ext.secure.weighting.lattice.messages import (
    COUNT_BYTES,
    SEED_BYTES,
    DrawAnswer,
    DrawOffer,
    LatticeSum,
    LatticeWeights,
    MaskedCounts,
    RoundOpening,
    SealedSeed,
    ServerKey,
    SiloKey,
    TransferAnswer,
    check_round_number,
)
from flower_ext.secure.weighting.lattice.party import Party
from flower_ext.secure.weighting.lattice.ring import Reals
from flower_ext.secure.weighting.lattice.settings import LatticeSettings
from flower_ext.secure.weighting.lattice.state import SiloStage, SiloState
from flower_ext.secure.weighting.lattice.sums import EncryptedSum
from flower_ext.secure.weighting.lattice.weighing import Weighing
from flower_ext.secure.weighting.lattice.weights import OpenedWeights
from flower_ext.secure.weighting.messages import check_senders

_SEED = "seed"
_COUNTS = "counts"
_SUM = "sum"
_SEEDING_SILO = 0


class LatticeSilo(Party[SiloStage]):
    """One silo. Everything it holds is secret, except the messages that its methods return.

    Call `key`, `receive_keys`, then `seal_seed` and `answer_transfer` (silo 0) or `open_seed` (the
    others), then `mask_counts`, `receive_weights` in every epoch, and `weigh` in every round. If
    the settings have ``draw_choices``, one silo calls `answer_draw` before each epoch.

    Parameters
    ----------
    settings : LatticeSettings
    index : int
        Number of this silo, from zero.
    save : callable, optional
        Stores `export_state` durably. The silo calls it before it uses an epoch or a round, so that
        a silo restored from the stored state reuses none.
    workers : int
        Number of threads.
    """

    def __init__(
        self,
        settings: LatticeSettings,
        index: int,
        *,
        save: Callable[[bytes], None] | None = None,
        workers: int = 1,
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
        self._last_epoch = self._last_round = 0
        self._digest = b""
        self._weights: OpenedWeights | None = None

    def __repr__(self) -> str:
        return f"LatticeSilo(index={self.index}, stage={self._stage.name.lower()})"

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
    def epoch(self) -> int | None:
        """The epoch whose weights this silo holds in memory."""
        return None if self._weights is None else self._weights.epoch

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

    def answer_draw(self, message: DrawOffer) -> DrawAnswer:
        """Return the choices that all silos derive from their seed; the server cannot read them.

        Raises
        ------
        ProtocolError
            The counts were not masked yet, the settings have no ``draw_choices``, or the epoch is
            not above the last one.
        ValueError
            The offer is malformed.
        """
        self._expect(SiloStage.COUNTED)
        message.check(self.settings)
        self._check_epoch(message.epoch)
        answer = self._shared.draw_answer(message.epoch, message.public)
        return DrawAnswer(epoch=message.epoch, answer=answer)

    def receive_weights(self, message: LatticeWeights) -> None:
        """Take an epoch's weights. The silo stores that the epoch is used before it opens anything.

        The silo accepts the weights of its last epoch again, for example after a restart, if they
        are the same to the last bit.

        Raises
        ------
        ProtocolError
            The counts were not masked yet, the epoch is below the last one, or it is the last one
            with other weights. Other weights would reveal N_u.
        ValueError
            The message is malformed.
        """
        self._expect(SiloStage.COUNTED)
        message.check(self.settings)
        digest = hashlib.sha256(message.to_bytes()).digest()
        if message.epoch != self._last_epoch or digest != self._digest:
            self._check_epoch(message.epoch)
            self._last_epoch, self._digest, self._weights = message.epoch, digest, None
            self._store()
        if self._weights is None:
            self._weights = self._shared.opened(message)

    def begin(self, opening: RoundOpening) -> Weighing:
        """Begin a round. Add users' updates to the result, a few at a time.

        Raises
        ------
        ProtocolError
            The counts were not masked yet, the round number is not above the last one, or the silo
            does not hold the weights of the round's epoch.
        """
        self._check_round(opening)
        counts = {user: count for user, count in enumerate(self._counts) if count}
        assert self._weights is not None  # the round belongs to its epoch
        return Weighing(
            self.settings,
            opening,
            silo=self.index,
            counts=counts,
            places={user: place for place, user in enumerate(self._shared.order)},
            weights=self._weights,
            total=EncryptedSum(self.settings, self._public, workers=self._workers),
            masks=self._use_round,
        )

    def weigh(
        self,
        opening: RoundOpening,
        updates: Mapping[int, ArrayLike],
        noise: ArrayLike,
        *,
        progress: Progress | None = None,
    ) -> LatticeSum:
        """Return Σ_u (n_su / N_u) Δ_su + z_s under encryption, masked and re-randomised.

        Parameters
        ----------
        updates : Mapping[int, ArrayLike]
            Clipped update of every user with records in this silo, by user. Each has shape
            (coordinates,) and an L2 norm of at most C. Arrays may be memory-mapped.
        noise : ArrayLike
            This silo's share of the noise, of shape (coordinates,).
        progress : callable, optional
            Called with the number of finished groups of 32,768 coordinates.

        Raises
        ------
        ProtocolError
            As `begin`.
        ValueError
            Updates belong to other users than those with records here; shapes are wrong; values are
            not finite or out of bounds; or the noise is too small. Nothing has left the silo then,
            so call `weigh` again for the same round.
        """
        weighing = self.begin(opening)
        weighing.check_noise(noise)
        weighing.add(updates, progress=progress)
        return weighing.finish(noise)

    def export_state(self) -> bytes:
        """Return the state that a restart needs, at any stage.

        It holds secrets in the clear. Store it where nobody else can read it, and never send it.
        """
        state = SiloState(
            index=self.index,
            stage=self._stage,
            private=self._pairs.private,
            silo_keys=[key for _, key in sorted(self._silo_keys.items())],
            server_key=b"" if self._server_key is None else self._server_key.to_bytes(),
            seed=b"" if self._common is None else self._common.seed,
            counts=self._counts,
            last_epoch=self._last_epoch,
            weights_digest=self._digest,
            last_round=self._last_round,
        )
        return state.encode(self.settings)

    @classmethod
    def from_state(
        cls,
        settings: LatticeSettings,
        state: bytes,
        *,
        save: Callable[[bytes], None] | None = None,
        workers: int = 1,
    ) -> LatticeSilo:
        """Return a silo at the stage of the exported one.

        Its epochs and rounds stay used. It needs the weights of its epoch again.

        Raises
        ------
        ValueError
            ``state`` is malformed or was exported under other settings.
        """
        kept = SiloState.decode(state, settings)
        silo = cls(settings, kept.index, workers=workers)
        silo._pairs = PairKeys(context=settings.context, index=kept.index, private=kept.private)
        if kept.stage is not SiloStage.NEW:
            silo._silo_keys = dict(enumerate(kept.silo_keys))
            silo._server_key = ServerKey.from_bytes(kept.server_key, settings)
            silo._pairs.agree(silo._silo_keys, server_key=kept.server_key)
        if kept.stage in (SiloStage.SEEDED, SiloStage.COUNTED):
            silo._common = silo._derived(kept.seed)
        silo._counts = kept.counts
        silo._last_epoch, silo._digest = kept.last_epoch, kept.weights_digest
        silo._last_round = kept.last_round
        silo._stage = kept.stage
        silo._save = save
        return silo

    @property
    def _name(self) -> str:
        return f"silo {self.index}"

    @property
    def _told(self) -> ServerKey:
        assert self._server_key is not None  # from stage KEYED on
        return self._server_key

    @cached_property
    def _public(self) -> Reals:
        return public_key(self._told.public_seed, self._told.words)

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

    def _check_epoch(self, epoch: int) -> None:
        if epoch <= self._last_epoch:
            raise ProtocolError(
                f"weights of epoch {epoch}: expected an epoch above {self._last_epoch}"
            )

    def _check_round(self, opening: RoundOpening) -> None:
        self._expect(SiloStage.COUNTED)
        check_round_number(opening.round_number, self._last_round, self.settings)
        if self.epoch != opening.epoch:
            raise ProtocolError(
                f"round of epoch {opening.epoch}: expected weights of epoch {self.epoch}"
            )

    def _use_round(self, opening: RoundOpening) -> list[tuple[bytes, bool]]:
        """Store that the round is used, and return the keys of its masks."""
        self._check_round(opening)
        self._last_round = opening.round_number
        self._store()
        return self._pairs.mask_keys(_SUM, opening.round_number)
