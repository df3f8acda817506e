"""Sums under encryption: what a silo computes on ciphertexts, and where its time goes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import gmpy2
import numpy as np
from gmpy2 import mpz
from numpy.typing import ArrayLike, NDArray

from flower_ext.errors import InvalidValue
from flower_ext.secure.fixed_point import FixedPoint
from flower_ext.secure.threads import Progress, map_slices
from flower_ext.secure.weighting.agreement import WeightingSettings
from flower_ext.secure.weighting.messages import ciphertexts_from
from flower_ext.secure.weighting.multiexp import FixedBaseProducts
from flower_ext.secure.weighting.paillier import PublicKey, ZeroPool


class EncryptedSums:
    """Tables of powers and a pool of zeros, which spare work and decide nothing.

    Parameters
    ----------
    settings : WeightingSettings
    public : PublicKey
        The server's.
    workers : int
        Threads.
    """

    def __init__(self, settings: WeightingSettings, public: PublicKey, *, workers: int = 1) -> None:
        self.settings = settings
        self.public = public
        self.zeros: ZeroPool | None = None
        self._workers = workers
        self._folded: tuple[bytes, Mapping[int, mpz]] | None = None
        self._powers: FixedBaseProducts | None = None

    def prepare(self, pool: ZeroPool | None, progress: Progress | None) -> ZeroPool:
        """Take ``pool``, or set one up."""
        if pool is None:
            pool = ZeroPool(self.public, workers=self._workers, progress=progress)
        if pool.public != self.public:
            raise InvalidValue("pool: expected one of this server's key")
        self.zeros = pool
        return pool

    def encode_updates(
        self, updates: Mapping[int, ArrayLike], users: Sequence[int]
    ) -> NDArray[np.int64]:
        """Fixed-point updates of ``users``, of shape (users, coordinates).

        Raises
        ------
        ValueError
            Updates of other users, of wrong shape, not finite, or out of bounds.
        """
        if set(updates) != set(users):
            wrong = sorted(set(updates) ^ set(users))
            raise InvalidValue(
                f"updates of users {wrong[:10]}: expected one of every user with records here, "
                "and of no other"
            )
        encoded = np.zeros((len(users), self.settings.coordinates), dtype=np.int64)
        for row, user in enumerate(users):
            encoded[row] = self._encode("updates", self.settings.encoding, updates[user])
        return encoded

    def encode_noise(self, noise: ArrayLike) -> NDArray[np.int64]:
        """Fixed-point noise, of shape (coordinates,).

        Raises
        ------
        ValueError
            Of wrong shape, not finite, or out of bounds.
        """
        return self._encode("noise", self.settings.noise_encoding, noise)

    def fold(self, weights: bytes, factors: Mapping[int, mpz]) -> FixedBaseProducts:
        """The ciphertext at each place to the power of its factor, ready to be raised further.

        Everything of a user that is the same for all coordinates goes in here: one full
        exponentiation a user instead of one a user and coordinate. The last result is kept.

        Raises
        ------
        ValueError
            Something in ``weights`` is no ciphertext.
        """
        if self._powers is not None and (weights, factors) == self._folded:
            return self._powers
        settings, n_squared = self.settings, self.public.n_squared
        received = ciphertexts_from(weights, settings, self.public, count=settings.users)

        def fold(places: Sequence[int]) -> list[mpz]:
            return [gmpy2.powmod(received[at], factors[at], n_squared) for at in places]

        self._powers = FixedBaseProducts(
            map_slices(fold, list(factors), workers=self._workers),
            n_squared,
            lowest=-settings.encoding.largest,
            highest=settings.encoding.largest,
            expected_products=settings.coordinates,
            table_memory_limit=settings.table_memory_limit,
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
        """Ciphertexts of the weighted sum of encoded ``updates``, plus noise and dither."""
        products = powers.of(updates, workers=self._workers, progress=progress)
        noises = self.settings.packing.pack([self.dithered(int(value)) for value in noise])
        n_squared = self.public.n_squared
        return [
            product * self.public.plain(noise_) % n_squared
            for product, noise_ in zip(self._pack(products), noises, strict=True)
        ]

    def dithered(self, encoded: int) -> int:
        """Encoded noise times C_LCM, moved by less than half a step, uniformly."""
        multiple = self.settings.common_multiple
        return encoded * multiple + secrets.randbelow(multiple) - multiple // 2

    def rerandomise(self, ciphertexts: list[mpz], share: range) -> None:
        """Re-randomise some of ``ciphertexts``, in place."""
        draw = self.public.zeros if self.zeros is None else self.zeros.take
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
        """Ciphertexts of packed plaintexts from ciphertexts of single coordinates."""
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
