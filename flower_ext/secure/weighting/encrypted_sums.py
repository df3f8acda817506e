"""Sums under encryption: a silo's computations on ciphertexts, which take most of its time."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property

import gmpy2
import numpy as np
from gmpy2 import mpz
from numpy.typing import ArrayLike, NDArray

from flower_ext.errors import InvalidValue
from flower_ext.secure.threads import Progress, map_slices
from flower_ext.secure.weighting.agreement import WeightingSettings
from flower_ext.secure.weighting.encoding import FixedPoint
from flower_ext.secure.weighting.multiexp import FixedBaseProducts
from flower_ext.secure.weighting.paillier import PublicKey, ZeroPool
from flower_ext.secure.weighting.paillier_messages import unpack_ciphertexts

_POOL_PAYS: float = 2
"""Least ratio of a round's re-randomised ciphertexts to a pool's set-up for which a pool pays."""


class EncryptedSums:
    """A silo's sums under the server's key, with tables of powers and a pool of zeros.

    Tables and pool only save time. The pool is set up in the first round, if it pays off there.

    Parameters
    ----------
    settings : WeightingSettings
    public : PublicKey
        The server's public key.
    workers : int
        Number of threads.
    """

    def __init__(self, settings: WeightingSettings, public: PublicKey, *, workers: int = 1) -> None:
        self.settings = settings
        self.public = public
        self._workers = workers
        self._folded: tuple[bytes, Mapping[int, mpz]] | None = None
        self._powers: FixedBaseProducts | None = None

    @cached_property
    def zeros(self) -> ZeroPool:
        """Pool of encryptions of zero."""
        return ZeroPool(self.public, workers=self._workers)

    def encode_updates(
        self, updates: Mapping[int, ArrayLike], users: Sequence[int]
    ) -> NDArray[np.int64]:
        """Return the updates of ``users`` in fixed point, of shape (users, coordinates).

        Raises
        ------
        ValueError
            Updates belong to other users, or have a wrong shape or values that are not finite or
            out of bounds.
        """
        if set(updates) != set(users):
            wrong = sorted(set(updates) ^ set(users))
            raise InvalidValue(
                f"updates of users {wrong[:10]} are missing or surplus: expected one update for "
                "every user with records in this silo, and for no other"
            )
        encoded = np.zeros((len(users), self.settings.coordinates), dtype=np.int64)
        for row, user in enumerate(users):
            encoded[row] = self._encode("updates", self.settings.encoding, updates[user])
        return encoded

    def encode_noise(self, noise: ArrayLike) -> NDArray[np.int64]:
        """Return the noise in fixed point, of shape (coordinates,).

        Raises
        ------
        ValueError
            The shape is wrong, or a value is not finite or out of bounds.
        """
        return self._encode("noise", self.settings.noise_encoding, noise)

    def fold(self, weights: bytes, factors: Mapping[int, mpz]) -> FixedBaseProducts:
        """Raise the ciphertext at each place to its factor, and return them as bases of products.

        The factor holds everything that is the same for all coordinates of a user. This saves work:
        each user takes one full exponentiation, instead of one for each coordinate. The last result
        is kept for the same weights and factors.

        Raises
        ------
        ValueError
            A number in ``weights`` is not a ciphertext.
        """
        if self._powers is not None and (weights, factors) == self._folded:
            return self._powers
        settings, n_squared = self.settings, self.public.n_squared
        received = unpack_ciphertexts(weights, settings, self.public)

        def fold(places: Sequence[int]) -> list[mpz]:
            return [gmpy2.powmod(received[at], factors[at], n_squared) for at in places]

        self._powers = FixedBaseProducts(
            map_slices(fold, list(factors), workers=self._workers),
            n_squared,
            lowest=-settings.encoding.largest,
            highest=settings.encoding.largest,
            expected_products=settings.coordinates,
            workers=self._workers,
        )
        self._folded = weights, factors
        return self._powers

    def noised(
        self,
        powers: FixedBaseProducts,
        updates: NDArray[np.int64],
        noise: NDArray[np.int64],
        progress: Progress | None,
    ) -> list[mpz]:
        """Return ciphertexts of the weighted sum of encoded ``updates``, plus noise and dither."""
        products = powers.of(updates, workers=self._workers, progress=progress)
        noises = self.settings.packing.pack([self.dithered(int(value)) for value in noise])
        n_squared = self.public.n_squared
        return [
            product * self.public.plain(noise_) % n_squared
            for product, noise_ in zip(self._pack(products), noises, strict=True)
        ]

    def dithered(self, encoded: int) -> int:
        """Return encoded noise times C_LCM, plus a uniform dither of at most half a step."""
        multiple = self.settings.common_multiple
        return encoded * multiple + secrets.randbelow(multiple) - multiple // 2

    def rerandomise(self, ciphertexts: list[mpz], share: range) -> None:
        """Re-randomise the ciphertexts at the places ``share``, in place."""
        pays = len(share) >= _POOL_PAYS * ZeroPool.size(self.settings.key_bits)
        draw = self.zeros.take if pays else self.public.zeros
        zeros = draw(len(share), workers=self._workers)
        for at, zero in zip(share, zeros, strict=True):
            ciphertexts[at] = ciphertexts[at] * zero % self.public.n_squared

    def _encode(self, name: str, encoding: FixedPoint, values: ArrayLike) -> NDArray[np.int64]:
        encoded = encoding.encode(values, name=name)
        if encoded.shape != (self.settings.coordinates,):
            raise InvalidValue(
                f"{name} of shape {encoded.shape}: expected ({self.settings.coordinates},)"
            )
        return encoded

    def _pack(self, products: Sequence[mpz]) -> list[mpz]:
        """Combine ciphertexts of single coordinates into ciphertexts of packed plaintexts."""
        packing, n_squared = self.settings.packing, self.public.n_squared
        shift = mpz(1) << packing.slot_bits

        def join(starts: Sequence[int]) -> list[mpz]:
            joined = []
            for start in starts:
                *rest, total = products[start : start + packing.slots]
                for product in reversed(rest):
                    total = gmpy2.powmod(total, shift, n_squared) * product % n_squared
                joined.append(total)
            return joined

        return map_slices(join, range(0, len(products), packing.slots), workers=self._workers)
