"""A silo's side of private weighting over ring-LWE; the package describes the protocol."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from gmpy2 import mpz
from numpy.typing import NDArray
from scipy.special import gammaincinv

from flower_ext.errors import InvalidValue
from flower_ext.secure.keys_and_ciphers import derive
from flower_ext.secure.messages import check_later, pack_numbers
from flower_ext.secure.weighting.agreement import SEEDING_SILO
from flower_ext.secure.weighting.oblivious import Receiver
from flower_ext.secure.weighting.silo_party import COUNTS, SiloParty, SiloSum
from flower_ext_lattice import columns
from flower_ext_lattice.encrypted_sum import EncryptedSum
from flower_ext_lattice.keys import public_key
from flower_ext_lattice.messages import LatticeKey, LatticeSum, LatticeWeights
from flower_ext_lattice.ring import Reals
from flower_ext_lattice.settings import CLIPPING_SLACK, LatticeSettings
from flower_ext_lattice.weights import OpenedWeights

_TOGETHER = 256
"""Largest number of users whose encryptions, of 128 KB each, are in memory at once."""
_CHANCE = 1e-12
"""Probability of refusing noise of the agreed standard deviation as too small."""


@dataclass(repr=False)
class LatticeSilo(SiloParty):
    """One silo. Take the steps of the set-up with `answer`, then call `open_sum` every round."""

    kind = "lattice"
    settings_type = LatticeSettings

    settings: LatticeSettings
    last_epoch: int = 0
    weights_digest: bytes = b""

    def open_sum(self, number: int, weights: bytes) -> LatticeOpenSum:
        """Begin this silo's sum of round ``number``. The epoch of ``weights`` then counts as used.

        See `SiloParty.open_sum`.
        """
        self._check_opening(number)
        message = LatticeWeights.from_bytes(weights, self.settings)
        return LatticeOpenSum(self, number, self.opened(message))

    def opened(self, message: LatticeWeights) -> OpenedWeights:
        """Store that an epoch is used, and then open its weights.

        The silo accepts the weights of its last epoch again if they are the same to the last bit.

        Raises
        ------
        ProtocolError
            The epoch is below the last one, or it is the last one and the weights differ. Two sets
            of weights for one epoch would reveal N_u.
        ValueError
            The weights are malformed.
        """
        digest = hashlib.sha256(message.to_bytes()).digest()
        if message.epoch != self.last_epoch or digest != self.weights_digest:
            check_later("epoch", message.epoch, self.last_epoch)
            self.last_epoch, self.weights_digest = message.epoch, digest
            self.save(self.to_bytes())
        opened_columns = []
        if self.settings.draw_choices is not None:
            receiver = self._draw_receiver(message.epoch, message.offer)
            opened_columns = columns.open_columns(receiver, message.sealed_columns)
        return OpenedWeights(
            self.settings,
            self._server_key.public_seed,
            message,
            keys=self._entry_keys,
            shifts=self.shifts,
            opened_columns=opened_columns,
        )

    def draw_masks(self, number: int) -> list[tuple[bytes, bool]]:
        """Store that round ``number`` is used, and return the keys of its masks."""
        self.use_round(number)
        return self._pairs.mask_keys("sum", number)

    @cached_property
    def public(self) -> Reals:
        """The server's key, as `keys.public_key` returns it."""
        return public_key(self._server_key.public_seed, self._server_key.words)

    @property
    def shifts(self) -> list[int]:
        """ρ_u of every user, in the secret order. All silos share them, unknown to the server."""
        return self._transfer.choices

    @cached_property
    def _entry_keys(self) -> list[bytes]:
        """The key K_{u,ρ_u} of every user, in the secret order."""
        return self._transfer.keys()

    def _count_answer(self) -> bytes:
        """Return the masked counts. Silo 0 adds the shifts ρ_u, and appends the transfer's points.

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
        """The silos' side of the oblivious transfer: the choices ρ_u, equal at all silos."""
        return Receiver(
            self._server_key.transfer,
            derive(self.seed, "transfer"),
            run=self.settings.context,
            transfers=self.settings.users,
            num_texts=self.settings.table_size,
        )


class LatticeOpenSum(SiloSum):
    """A silo's sum of one round. Updates are encrypted as they are added."""

    def __init__(self, silo: LatticeSilo, number: int, weights: OpenedWeights) -> None:
        super().__init__(silo, number)
        self._silo, self._settings, self._weights = silo, silo.settings, weights
        self._places = {user: place for place, user in enumerate(silo._order)}
        self._total = EncryptedSum(silo.settings, silo.public)

    def _add(self, updates: Mapping[int, NDArray[Any]]) -> None:
        everyone = list(updates)
        for start in range(0, len(everyone), _TOGETHER):
            users = everyone[start : start + _TOGETHER]
            norms = self._total.add(
                [updates[user] for user in users],
                [self._silo.counts[user] for user in users],
                self._weights.encryptions([self._places[user] for user in users]),
            )
            self._check_norms(users, norms)

    def _masked(self, noise: NDArray[Any]) -> LatticeSum:
        """Return Σ_u (n_su / N_u) Δ_su + z_s under encryption, masked and re-randomised."""
        self._check_noise(noise)
        self._add(dict.fromkeys(self._missing, np.zeros(self._settings.coordinates, np.float32)))
        first, second = self._total.words(noise, self._silo.draw_masks(self._number))
        return LatticeSum(
            round_number=self._number, silo=self._silo.index, first=first, second=second
        )

    def _check_noise(self, noise: NDArray[Any]) -> None:
        """Refuse noise that is not plausible as this silo's share.

        Values must be finite and within ``noise_bound``. Noise is refused as too small if Gaussian
        noise of ``noise_stddev`` is so small only once in 10^12 draws.
        """
        settings = self._settings
        highest = float(np.abs(noise).max())
        if not highest <= settings.noise_bound:
            raise InvalidValue(
                f"noise reaches a magnitude of {highest:g}: expected finite numbers up to "
                f"{settings.noise_bound:g}"
            )
        squares = float(np.square(noise / settings.noise_stddev, dtype=np.float64).sum())
        # The quantile of a chi-squared law; importing scipy.stats takes a second.
        if squares < 2 * gammaincinv(settings.coordinates / 2, _CHANCE):
            measured = settings.noise_stddev * np.sqrt(squares / settings.coordinates)
            raise InvalidValue(
                f"noise of standard deviation {measured:.3g}: expected about "
                f"noise_stddev={settings.noise_stddev:g}"
            )

    def _check_norms(self, users: list[int], norms: NDArray[np.float64]) -> None:
        longest = self._settings.clipping_norm * (1 + CLIPPING_SLACK)
        for user, norm in zip(users, norms, strict=True):
            if not norm <= longest:
                raise InvalidValue(
                    f"update of user {user} has an L2 norm of {norm:g}: expected finite numbers "
                    f"and at most clipping_norm={self._settings.clipping_norm:g}"
                )
