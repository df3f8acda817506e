"""A silo's side of private weighting; `flower_ext.secure.weighting` describes the protocol."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Callable, Mapping, Sequence

from gmpy2 import mpz
from numpy.typing import ArrayLike

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.masks import PairKeys
from flower_ext.secure.threads import Progress
from flower_ext.secure.weighting import draw
from flower_ext.secure.weighting.agreement import WeightingSettings
from flower_ext.secure.weighting.blinds import user_blinds, user_order
from flower_ext.secure.weighting.messages import (
    BlindedCounts,
    DrawAnswer,
    DrawOffer,
    EncryptedWeights,
    MaskedSum,
    SealedSeed,
    SealedWeights,
    SiloKey,
    check_later,
    check_senders,
    from_bytes,
    to_bytes,
)
from flower_ext.secure.weighting.oblivious import Receiver
from flower_ext.secure.weighting.paillier import PublicKey, ZeroPool
from flower_ext.secure.weighting.silo_state import SiloState, Stage
from flower_ext.secure.weighting.sums import EncryptedSums

_SEED = "seed"
_COUNTS = "counts"
_SUM = "sum"
_SEEDING_SILO = 0


class WeightingSilo:
    """One silo. Everything it holds is secret, except the messages that its methods return.

    Call `key`, `receive_keys`, then `seal_seed` (silo 0) or `open_seed` (the others), then
    `blind_counts`, and `weigh` for every round. If the settings have ``draw_choices``, one silo
    calls `answer_draw` before all silos call `weigh`.

    Parameters
    ----------
    settings : WeightingSettings
    index : int
        Number of this silo, from zero.
    save : callable, optional
        Stores `export_state` durably. The silo calls it before it returns a message that must not
        be made twice, so that a silo restored from the stored state never uses a mask again.
    workers : int
        Number of threads.
    """

    def __init__(
        self,
        settings: WeightingSettings,
        index: int,
        *,
        save: Callable[[bytes], None] | None = None,
        workers: int = 1,
    ) -> None:
        if not 0 <= index < settings.silos:
            raise InvalidValue(
                f"index={index!r}: expected an integer from 0 to {settings.silos - 1}"
            )
        self.settings = settings
        self.index = index
        self._save = save
        self._workers = workers
        self._pairs = PairKeys(context=settings.context, index=index)
        self._stage = Stage.NEW
        self._received: EncryptedSums | None = None
        self._silo_keys: dict[int, bytes] = {}
        self._seed = b""
        self._blinds: list[mpz] = []
        self._order: list[int] = []
        self._counts: list[int] = []
        self._last_round = 0

    def __repr__(self) -> str:
        return f"WeightingSilo(index={self.index}, stage={self._stage.name.lower()})"

    @property
    def key(self) -> SiloKey:
        """X25519 public key of this silo, for the other silos."""
        return SiloKey(silo=self.index, public=self._pairs.public)

    @property
    def fingerprint(self) -> str:
        """Hash of all public keys, equal at all silos unless the server swapped keys."""
        return self._pairs.fingerprint

    @property
    def counted(self) -> tuple[int, ...]:
        """Users with records in this silo, each of whom has an update in every sum."""
        return tuple(user for user, count in enumerate(self._counts) if count)

    def receive_keys(self, server_key: bytes, silo_keys: Sequence[SiloKey]) -> None:
        """Take the server's Paillier modulus and all silos' public keys.

        Raises
        ------
        ProtocolError
            This silo received the keys before.
        ValueError
            A key is missing or invalid.
        """
        self._expect(Stage.NEW)
        (n,) = from_bytes(server_key, self.settings.residue_bytes, 1, name="public key")
        public = PublicKey(n)
        public.check(self.settings.key_bits, coprime_to=self.settings.max_records_per_user)
        check_senders([key.silo for key in silo_keys], range(self.settings.silos))
        keys = {key.silo: key.public for key in silo_keys}
        self._pairs.agree(keys, server_key=server_key)
        self._silo_keys = keys
        self._received = EncryptedSums(self.settings, public, workers=self._workers)
        self._stage = Stage.KEYED

    def seal_seed(self) -> list[SealedSeed]:
        """Draw the silos' seed and seal it for every other silo. Silo 0 only.

        Raises
        ------
        ProtocolError
            The keys have not arrived, the seed is known already, or this is not silo 0.
        """
        self._expect(Stage.KEYED)
        if self.index != _SEEDING_SILO:
            raise ProtocolError(
                f"seal_seed at silo {self.index}: expected silo {_SEEDING_SILO}; call open_seed"
            )
        self._set_seed(secrets.token_bytes(32))
        return [
            SealedSeed(receiver=silo, sealed=self._pairs.seal(silo, _SEED, self._seed))
            for silo in range(1, self.settings.silos)
        ]

    def open_seed(self, message: SealedSeed) -> None:
        """Take the silos' seed.

        Raises
        ------
        ProtocolError
            The keys have not arrived, the seed is known already, or this is silo 0.
        ValueError
            The message is for another silo, or silo 0 did not seal it in this run.
        """
        self._expect(Stage.KEYED)
        if self.index == _SEEDING_SILO:
            raise ProtocolError(
                f"open_seed at silo {_SEEDING_SILO}: expected another silo; call seal_seed"
            )
        if message.receiver != self.index:
            raise InvalidValue(f"seed for silo {message.receiver}: expected one for {self.index}")
        seed = self._pairs.open(_SEEDING_SILO, _SEED, message.sealed)
        if len(seed) != 32:
            raise InvalidValue(f"seed of {len(seed)} bytes: expected 32")
        self._set_seed(seed)

    def blind_counts(self, counts: Sequence[int]) -> BlindedCounts:
        """Return the number of records of each user in this silo, blinded and masked.

        Parameters
        ----------
        counts : Sequence of int
            One number per user, in the order of users that all silos share; zero for a user
            without records here.

        Raises
        ------
        ProtocolError
            The seed has not arrived, or counts were blinded before.
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
        self._stage = Stage.COUNTED
        self._store()
        n = self._sums.public.n
        masks = self._pairs.additive_masks(_COUNTS, 0, self.settings.users, n)
        blinded = [
            (self._blinds[user] * counts[user] + mask) % n
            for user, mask in zip(self._order, masks, strict=True)
        ]
        return BlindedCounts(silo=self.index, counts=to_bytes(blinded, self.settings.residue_bytes))

    def prepare(
        self, pool: ZeroPool | None = None, *, progress: Progress | None = None
    ) -> ZeroPool:
        """Set up a `ZeroPool`, so that re-randomising costs an eleventh.

        It needs `receive_keys`, takes `ZeroPool.size` full exponentiations, and pays off after
        somewhat more ciphertexts than that. Silos of one process may share a pool of one server.
        """
        return self._sums.prepare(pool, progress)

    def answer_draw(self, message: DrawOffer) -> DrawAnswer:
        """Return the choices that all silos derive from their seed; the server cannot read them.

        Raises
        ------
        ProtocolError
            The counts were not blinded yet, the settings have no ``draw_choices``, or the round
            number is not above the last.
        ValueError
            The offer is malformed.
        """
        self._expect(Stage.COUNTED)
        check_later(message.round_number, self._last_round)
        return DrawAnswer(round_number=message.round_number, answer=self._chooser(message).answer)

    def weigh(
        self,
        message: EncryptedWeights | SealedWeights,
        updates: Mapping[int, ArrayLike],
        noise: ArrayLike,
        *,
        progress: Progress | None = None,
    ) -> MaskedSum:
        """Return Σ_u (n_su / N_u) Δ_su + z_s under encryption, masked and re-randomised.

        Parameters
        ----------
        updates : Mapping[int, ArrayLike]
            Clipped update of every user with records in this silo, by user. Each has shape
            (coordinates,) and lies within ``settings.update_bound``.
        noise : ArrayLike
            This silo's share of the noise, of shape (coordinates,).
        progress : callable, optional
            Called with the number of finished coordinates.

        Raises
        ------
        ProtocolError
            The counts were not blinded yet, the round number is not above the last, weights are
            sealed although the settings have no ``draw_choices``, or they are not sealed although
            the settings have them.
        ValueError
            Weights are malformed; updates belong to other users than those with records here;
            shapes are wrong; or values are not finite or out of bounds. Nothing has left the silo
            then, so call `weigh` again for the same round.
        """
        self._expect(Stage.COUNTED)
        check_later(message.round_number, self._last_round)
        users = self.counted
        encoded = self._sums.encode_updates(updates, users)
        encoded_noise = self._sums.encode_noise(noise)
        powers = self._sums.fold(self._opened(message), self._factors(users))
        ciphertexts = self._sums.noised(powers, encoded, encoded_noise, progress)
        # Only what follows draws masks. Until here an error leaves the round unused.
        self._last_round = message.round_number
        self._store()
        self._mask(ciphertexts, message.round_number)
        self._rerandomise_share(ciphertexts, message.round_number)
        return MaskedSum(
            round_number=message.round_number,
            silo=self.index,
            ciphertexts=to_bytes(ciphertexts, self.settings.ciphertext_bytes),
        )

    def export_state(self) -> bytes:
        """Return the state that a restart needs, at any stage.

        It holds secrets in the clear. Store it where nobody else can read it, and never send it.
        """
        received = self._received
        state = SiloState(
            index=self.index,
            stage=self._stage,
            private=self._pairs.private,
            silo_keys=tuple(key for _, key in sorted(self._silo_keys.items())),
            modulus=None if received is None else int(received.public.n),
            seed=self._seed,
            counts=self._counts,
            last_round=self._last_round,
        )
        return state.encode(self.settings)

    @classmethod
    def from_state(
        cls,
        settings: WeightingSettings,
        state: bytes,
        *,
        save: Callable[[bytes], None] | None = None,
        workers: int = 1,
    ) -> WeightingSilo:
        """Return a silo at the stage of the exported one. Rounds up to its last one stay used.

        Raises
        ------
        ValueError
            ``state`` is malformed or was exported under other settings.
        """
        kept = SiloState.decode(state, settings)
        silo = cls(settings, kept.index, workers=workers)
        silo._pairs = PairKeys(context=settings.context, index=kept.index, private=kept.private)
        if kept.stage is not Stage.NEW:
            silo._silo_keys = dict(enumerate(kept.silo_keys))
            public = PublicKey(mpz(kept.modulus))
            server_key = to_bytes([public.n], settings.residue_bytes)
            silo._pairs.agree(silo._silo_keys, server_key=server_key)
            silo._received = EncryptedSums(settings, public, workers=workers)
        if kept.stage in (Stage.SEEDED, Stage.COUNTED):
            silo._set_seed(kept.seed)
        silo._counts = kept.counts
        silo._last_round = kept.last_round
        silo._stage = kept.stage
        silo._save = save
        return silo

    def adopt(self, earlier: WeightingSilo) -> None:
        """Take over tables and pool from an earlier object for this silo in the same process.

        They only save time: without them the silo sends messages of the same distribution.

        Raises
        ------
        ValueError
            ``earlier`` is another silo, or its seed, counts or server key differ.
        """
        if (self.index, self._seed, self._counts, self._sums.public) != (
            earlier.index,
            earlier._seed,
            earlier._counts,
            earlier._sums.public,
        ):
            raise InvalidValue("earlier: expected this silo with the same seed and counts")
        self._received = earlier._received

    @property
    def prepared(self) -> bool:
        """Return True once `prepare` was called."""
        return self._sums.zeros is not None

    @property
    def _sums(self) -> EncryptedSums:
        if self._received is None:
            raise ProtocolError("the server's public key is missing: call receive_keys first")
        return self._received

    def _expect(self, stage: Stage) -> None:
        if self._stage is not stage:
            raise ProtocolError(
                f"silo {self.index} is {self._stage.name.lower()}: "
                f"expected it to be {stage.name.lower()}"
            )

    def _store(self) -> None:
        if self._save is not None:
            self._save(self.export_state())

    def _set_seed(self, seed: bytes) -> None:
        self._seed = seed
        self._blinds = user_blinds(seed, self.settings.users, self._sums.public.n)
        self._order = user_order(seed, self.settings.users)
        self._stage = Stage.SEEDED

    def _opened(self, message: EncryptedWeights | SealedWeights) -> bytes:
        """Return one ciphertext per user, by place in the secret order."""
        if isinstance(message, EncryptedWeights):
            if self.settings.draw_choices is not None:
                raise ProtocolError(
                    "EncryptedWeights under settings with draw_choices: expected SealedWeights"
                )
            return message.weights
        size = self.settings.ciphertext_bytes
        chosen = self._chooser(message)
        return b"".join(draw.opened(self.settings, chosen, message.sealed, size=size))

    def _chooser(self, message: DrawOffer | SealedWeights) -> Receiver:
        number, public = message.round_number, message.public
        return draw.chooser(self.settings, self._seed, number, public, workers=self._workers)

    def _factors(self, users: Sequence[int]) -> dict[int, mpz]:
        """Return n_su · r_u · C_LCM of each of ``users``, by place in the secret order."""
        n, multiple = self._sums.public.n, self.settings.common_multiple
        place = {user: at for at, user in enumerate(self._order)}
        return {
            place[user]: self._counts[user] * self._blinds[user] * multiple % n for user in users
        }

    def _mask(self, ciphertexts: list[mpz], round_number: int) -> None:
        """Multiply, in place, by masks whose product over the silos is one."""
        n_squared = self._sums.public.n_squared
        masks = self._pairs.multiplicative_masks(_SUM, round_number, len(ciphertexts), n_squared)
        for at, mask in enumerate(masks):
            ciphertexts[at] = ciphertexts[at] * mask % n_squared

    def _rerandomise_share(self, ciphertexts: list[mpz], round_number: int) -> None:
        """Re-randomise, in place, the ciphertexts whose turn falls on this silo in this round."""
        first = (self.index - round_number) % self.settings.silos
        self._sums.rerandomise(ciphertexts, range(first, len(ciphertexts), self.settings.silos))
