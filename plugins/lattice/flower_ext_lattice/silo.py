"""A silo's side of private weighting over ring-LWE; the package describes the protocol."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from gmpy2 import mpz
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaincinv

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.labels import derive
from flower_ext.secure.messages import check_later, pack_numbers
from flower_ext.secure.weighting.agreement import SEEDING_SILO
from flower_ext.secure.weighting.oblivious import Receiver
from flower_ext.secure.weighting.silo_party import COUNTS, SetUpStage, SiloParty
from flower_ext_lattice import columns
from flower_ext_lattice.encrypted_sum import EncryptedSum
from flower_ext_lattice.keys import public_key
from flower_ext_lattice.messages import (
    LatticeKey,
    LatticeSum,
    LatticeWeights,
    RoundOpening,
    check_round_number,
)
from flower_ext_lattice.ring import Reals
from flower_ext_lattice.settings import CLIPPING_SLACK, LatticeSettings
from flower_ext_lattice.weights import OpenedWeights

_TOGETHER = 256
"""Most users whose encryptions, of 128 KB each, are in memory at once."""
_CHANCE = 1e-12
"""Probability of refusing noise of the agreed standard deviation as too small."""


@dataclass(repr=False)
class LatticeSilo(SiloParty):
    """One silo. Everything it holds is secret, except the messages that its methods return.

    After the set-up of `SiloParty`, call `open_sum` in every round; or `receive_weights` in every
    epoch, and `begin` in every round.
    """

    kind = "lattice"
    settings_type = LatticeSettings

    settings: LatticeSettings
    last_epoch: int = 0
    weights_digest: bytes = b""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._weights: OpenedWeights | None = None

    @property
    def epoch(self) -> int | None:
        """The epoch whose weights this silo holds in memory; None without weights."""
        return None if self._weights is None else self._weights.epoch

    def receive_weights(self, message: LatticeWeights) -> None:
        """Take an epoch's weights. Before it opens them, the silo stores that the epoch is used.

        The silo accepts the weights of its last epoch again, for example after a restart, if they
        are the same to the last bit.

        Raises
        ------
        ProtocolError
            The counts were not masked yet, the epoch is below the last one, or it is the last one
            and the weights differ. Two sets of weights for one epoch would reveal N_u.
        ValueError
            The message is malformed.
        """
        self._expect(SetUpStage.COUNTED)
        message.check(self.settings)
        digest = hashlib.sha256(message.to_bytes()).digest()
        if message.epoch != self.last_epoch or digest != self.weights_digest:
            check_later("epoch", message.epoch, self.last_epoch)
            self._weights = None
            self.last_epoch, self.weights_digest = message.epoch, digest
            self.save(self.to_bytes())
        if self._weights is None:
            self._weights = self._open(message)

    def open_sum(self, number: int, weights: bytes) -> Weighing:
        """Begin this silo's sum of round ``number``. The round's epoch then counts as used.

        ``weights`` holds the server's weights and its opening of the round. The server sends the
        weights in every round. A silo that was restarted opens them again, which takes a fraction
        of a second.
        """
        size = LatticeWeights.size(self.settings)
        opening = RoundOpening.from_bytes(weights[size:], self.settings)
        if opening.round_number != number:
            raise ProtocolError(f"round {opening.round_number}: expected round {number}")
        self.receive_weights(LatticeWeights.from_bytes(weights[:size], self.settings))
        return self.begin(opening)

    def begin(self, opening: RoundOpening) -> Weighing:
        """Begin a round. Add users' updates to the result, a few at a time.

        Raises
        ------
        ProtocolError
            The counts were not masked yet, the round number is not above the last one, or the silo
            does not hold the weights of the round's epoch.
        """
        weights = self._weights_of(opening)
        places = {user: place for place, user in enumerate(self._order)}
        return Weighing(self, opening, weights, places)

    def draw_masks(self, opening: RoundOpening) -> list[tuple[bytes, bool]]:
        """Store that the round is used, and return the keys of its masks."""
        self._weights_of(opening)
        self.use_round(opening.round_number)
        return self._pairs.mask_keys("sum", opening.round_number)

    @cached_property
    def public(self) -> Reals:
        """The server's key, as `keys.public_key` returns it."""
        return public_key(self._server_key.public_seed, self._server_key.words)

    @property
    def shifts(self) -> list[int]:
        """ρ_u of every place, which all silos share and the server does not know."""
        return self._transfer.choices

    @cached_property
    def _entry_keys(self) -> list[bytes]:
        """The key K_{u,ρ_u} of every place."""
        return self._transfer.keys()

    def _count_answer(self) -> bytes:
        """Return the masked counts. Silo 0 adds the shifts ρ_u, and appends the transfer's choices.

        All silos derive the same choices ρ_u from their seed, so silo 0 answers for all.
        """
        counts, transfer = [self.counts[user] for user in self._order], b""
        if self.index == SEEDING_SILO:
            counts = [count + shift for count, shift in zip(counts, self.shifts, strict=True)]
            transfer = self._transfer.answer
        masked = self._pairs.masked(COUNTS, 0, counts, mpz(self.settings.table_size))
        return pack_numbers(masked, self.settings.count_bytes) + transfer

    def _check_draw(self, number: int) -> None:
        check_later("epoch", number, self.last_epoch)

    @cached_property
    def _server_key(self) -> LatticeKey:
        return LatticeKey.from_bytes(self.server_key, self.settings)

    def _check_server_key(self, server_key: bytes) -> None:
        key = LatticeKey.from_bytes(server_key, self.settings)
        public_key(key.public_seed, key.words)

    @cached_property
    def _transfer(self) -> Receiver:
        """The silos' side of the oblivious transfer. It chooses ρ_u, and is equal at all silos."""
        return Receiver(
            self._server_key.transfer,
            derive(self.seed, "transfer"),
            run=self.settings.context,
            transfers=self.settings.users,
            num_texts=self.settings.table_size,
        )

    def _open(self, message: LatticeWeights) -> OpenedWeights:
        """Open an epoch's weights with the keys of this silo."""
        opened_columns = []
        if self.settings.draw_choices is not None:
            receiver = self._draw_receiver(message.epoch, message.offer)
            opened_columns = columns.open_columns(receiver, message.columns)
        return OpenedWeights(
            self.settings,
            self._server_key.public_seed,
            message,
            keys=self._entry_keys,
            shifts=self.shifts,
            columns=opened_columns,
        )

    def _weights_of(self, opening: RoundOpening) -> OpenedWeights:
        """Return the weights of a new round's epoch; raise the errors of `begin`."""
        self._expect(SetUpStage.COUNTED)
        check_round_number(opening.round_number, self.last_round, self.settings)
        if self._weights is None or self._weights.epoch != opening.epoch:
            raise ProtocolError(
                f"round of epoch {opening.epoch}: expected weights of epoch {self.epoch}"
            )
        return self._weights


class Weighing:
    """A round that a silo has begun: call `add` with users' updates, then `finish`."""

    def __init__(
        self,
        silo: LatticeSilo,
        opening: RoundOpening,
        weights: OpenedWeights,
        places: Mapping[int, int],
    ) -> None:
        self._silo, self._settings, self._opening = silo, silo.settings, opening
        self._weights, self._places = weights, places
        self._total: EncryptedSum | None = EncryptedSum(silo.settings, silo.public)
        self._missing = set(silo.counted)

    def add(self, updates: Mapping[int, ArrayLike]) -> None:
        """Add clipped updates, by user.

        Every user must have records in this silo, and may be added once. Adding a few dozen users
        at a time is as fast as adding all of them.

        Parameters
        ----------
        updates : Mapping[int, ArrayLike]
            Each update has shape (coordinates,) and an L2 norm of at most C. Arrays may be
            memory-mapped.

        Raises
        ------
        ProtocolError
            The round is finished, or updates were refused before.
        ValueError
            A user has no records in this silo or was added before, a shape is wrong, a value is not
            finite, or an update is longer than C. After a refused update, begin the round again.
        """
        total = self._open()
        unknown = set(updates) - self._missing
        if unknown:
            raise InvalidValue(
                f"updates of users {sorted(unknown)}: expected users with records in this silo, "
                "each once"
            )
        arrays = {
            user: self._array(update, f"update of user {user}") for user, update in updates.items()
        }
        users = list(arrays)
        self._total = None  # restored below if all updates are accepted
        for start in range(0, len(users), _TOGETHER):
            batch = users[start : start + _TOGETHER]
            norms = total.add(
                [arrays[user] for user in batch],
                [self._silo.counts[user] for user in batch],
                self._weights.keys([self._places[user] for user in batch]),
            )
            self._check_norms(batch, norms)
        self._missing -= set(users)
        self._total = total

    def finish(self, noise: ArrayLike) -> bytes:
        """Return Σ_u (n_su / N_u) Δ_su + z_s under encryption, masked and re-randomised.

        A user without an update counts as zero. After this call the round counts as used.

        Raises
        ------
        ProtocolError
            The round is finished, updates were refused, or another round was finished meanwhile.
        ValueError
            The noise is not plausible. The round is not used, so call again with fresh noise.
        """
        self._open()
        noise_array = self._checked_noise(noise)
        self.add(dict.fromkeys(self._missing, np.zeros(self._settings.coordinates, np.float32)))
        total = self._open()
        masks = self._silo.draw_masks(self._opening)
        self._total = None
        first, second = total.words(noise_array, masks)
        return LatticeSum(
            round_number=self._opening.round_number,
            epoch=self._opening.epoch,
            silo=self._silo.index,
            first=first,
            second=second,
        ).to_bytes()

    def _checked_noise(self, noise: ArrayLike) -> NDArray[Any]:
        """Return the noise as an array, if it is plausible as this silo's share.

        Raises
        ------
        ValueError
            The shape is wrong, a value is not finite or beyond ``noise_bound``, or the noise is too
            small: Gaussian noise of ``noise_stddev`` is as small only once in 10^12 draws.
        """
        array = self._array(noise, "noise")
        highest = float(np.abs(array).max())
        if not highest <= self._settings.noise_bound:
            raise InvalidValue(
                f"noise reaches a magnitude of {highest:g}: expected finite numbers up to "
                f"{self._settings.noise_bound:g}"
            )
        squares = float(np.square(array / self._settings.noise_stddev, dtype=np.float64).sum())
        # The quantile of a chi-squared law; importing scipy.stats takes a second.
        if squares < 2 * gammaincinv(self._settings.coordinates / 2, _CHANCE):
            measured = self._settings.noise_stddev * np.sqrt(squares / self._settings.coordinates)
            raise InvalidValue(
                f"noise of standard deviation {measured:.3g}: expected about "
                f"noise_stddev={self._settings.noise_stddev:g}"
            )
        return array

    def _open(self) -> EncryptedSum:
        if self._total is None:
            raise ProtocolError(
                "this round is finished, or its updates were refused: call begin again"
            )
        return self._total

    def _array(self, values: ArrayLike, name: str) -> NDArray[Any]:
        array = np.asarray(values)
        if array.dtype not in (np.float32, np.float64):
            array = array.astype(np.float64)
        if array.shape != (self._settings.coordinates,):
            raise InvalidValue(
                f"{name} of shape {array.shape}: expected ({self._settings.coordinates},)"
            )
        return np.ascontiguousarray(array)

    def _check_norms(self, users: list[int], norms: NDArray[np.float64]) -> None:
        longest = self._settings.clipping_norm * (1 + CLIPPING_SLACK)
        for user, norm in zip(users, norms, strict=True):
            if not norm <= longest:
                raise InvalidValue(
                    f"update of user {user} has an L2 norm of {norm:g}: expected finite numbers "
                    f"and at most clipping_norm={self._settings.clipping_norm:g}"
                )
