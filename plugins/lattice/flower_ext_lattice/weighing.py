"""One round at one silo: it checks updates and noise, and returns the encrypted sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaincinv

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext_lattice.encrypted_sum import EncryptedSum
from flower_ext_lattice.messages import LatticeSum, RoundOpening
from flower_ext_lattice.settings import CLIPPING_SLACK, LatticeSettings
from flower_ext_lattice.weights import OpenedWeights

_TOGETHER = 256
"""Number of users whose encryptions are in memory at once, of 128 KB each."""
_CHANCE = 1e-12
"""Probability of refusing noise of the agreed standard deviation as too small."""


class Weighing:
    """A round that a silo has begun: call `add` with users' updates, then `finish`."""

    def __init__(
        self,
        settings: LatticeSettings,
        opening: RoundOpening,
        *,
        silo: int,
        counts: Mapping[int, int],
        places: Mapping[int, int],
        weights: OpenedWeights,
        total: EncryptedSum,
        masks: Callable[[RoundOpening], list[tuple[bytes, bool]]],
    ) -> None:
        self._settings = settings
        self._opening = opening
        self._silo = silo
        self._counts = counts
        self._places = places
        self._weights = weights
        self._total: EncryptedSum | None = total
        self._masks = masks
        self._missing = set(counts)

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
                [self._counts[user] for user in batch],
                self._weights.keys([self._places[user] for user in batch]),
            )
            self._check_norms(batch, norms)
        self._missing -= set(users)
        self._total = total

    def finish(self, noise: ArrayLike) -> bytes:
        """Return Σ_u (n_su / N_u) Δ_su + z_s under encryption, masked and re-randomised.

        A user without an update counts as zero. After this call the round counts as used.

        Parameters
        ----------
        noise : ArrayLike
            This silo's share of the noise, of shape (coordinates,).

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
        masks = self._masks(self._opening)
        self._total = None
        first, second = total.words(noise_array, masks)
        return LatticeSum(
            round_number=self._opening.round_number,
            epoch=self._opening.epoch,
            silo=self._silo,
            first=first,
            second=second,
        ).to_bytes()

    def _checked_noise(self, noise: ArrayLike) -> NDArray[Any]:
        """Return the noise as an array, if it is plausible as this silo's share.

        Raises
        ------
        ValueError
            The shape is wrong, a value is not finite or beyond ``noise_bound``, or the noise is so
            short that a Gaussian of ``noise_stddev`` is as short only once in 10^12 draws.
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
