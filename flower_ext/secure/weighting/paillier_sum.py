"""A silo's sum of one round over Paillier; the package describes the protocol."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gmpy2
import numpy as np
from gmpy2 import mpz
from numpy.typing import NDArray

from flower_ext.errors import InvalidValue
from flower_ext.secure.threads import map_slices
from flower_ext.secure.weighting.encoding import FixedPoint
from flower_ext.secure.weighting.multiexp import column_products
from flower_ext.secure.weighting.paillier import PublicKey
from flower_ext.secure.weighting.paillier_settings import (
    PaillierSettings,
    PaillierSum,
    PaillierWeights,
    pack_ciphertexts,
)


class PaillierOpenSum:
    """A silo's sum of one round. It keeps all encoded updates, and adds them up in `finish`.

    ``users`` are the users with records in this silo. ``weights`` is a function that returns for
    each of them the ciphertext Enc(n_su / N_u · C_LCM). ``masks`` is a function of a round's number
    and a number of masks. It stores that the round is used, and returns that many masks.
    """

    def __init__(
        self,
        settings: PaillierSettings,
        message: PaillierWeights,
        *,
        silo: int,
        users: Sequence[int],
        public: PublicKey,
        weights: Callable[[], list[mpz]],
        masks: Callable[[int, int], list[mpz]],
    ) -> None:
        self._settings, self._number, self._silo = settings, message.round_number, silo
        self._public, self._weights, self._masks = public, weights, masks
        self._rows = {user: row for row, user in enumerate(users)}
        self._updates = np.zeros((len(users), settings.coordinates), dtype=np.int64)

    def add(self, updates: Mapping[int, NDArray[Any]]) -> None:
        """Encode and keep updates: see `SiloSum.add`."""
        if unknown := sorted(updates.keys() - self._rows.keys()):
            raise InvalidValue(
                f"updates of users {unknown}: expected users with records in this silo"
            )
        for user, update in updates.items():
            encoded = self._encoded("updates", self._settings.encoding, update)
            self._updates[self._rows[user]] = encoded

    def finish(self, noise: NDArray[Any]) -> bytes:
        """Return Σ_u (n_su / N_u) Δ_su + z_s under encryption, masked and re-randomised."""
        settings, public, number = self._settings, self._public, self._number
        encoded_noise = self._encoded("noise", settings.noise_encoding, noise)
        products = column_products(
            self._weights(),
            self._updates,
            public.n_squared,
            largest=settings.encoding.largest,
            name=f"silo {self._silo}, round {number}: coordinates",
        )
        ciphertexts = _packed(products, settings, public)
        noises = settings.packing.pack([dithered(int(value), settings) for value in encoded_noise])
        # The silo draws masks from here on. An error before this line leaves the round unused.
        masks = self._masks(number, len(ciphertexts))
        for at, mask in enumerate(masks):
            # The noise needs no encryption of its own: the mask hides the whole product.
            masked = ciphertexts[at] * public.plain(noises[at]) % public.n_squared
            ciphertexts[at] = masked * mask % public.n_squared
        self._rerandomise(ciphertexts)
        return PaillierSum(
            round_number=number,
            silo=self._silo,
            ciphertexts=pack_ciphertexts(ciphertexts, settings),
        ).to_bytes()

    def _rerandomise(self, ciphertexts: list[mpz]) -> None:
        """Give the ciphertexts for which this silo is responsible fresh randomness, in place.

        One silo is responsible for each ciphertext, and the silos take turns from round to round.
        Without this step, the server could test a guess of the updates: it made the encryptions, so
        it could compute which randomness the product of all uploads would then have.
        """
        silos, n_squared = self._settings.silos, self._public.n_squared
        turns = range((self._silo - self._number) % silos, len(ciphertexts), silos)
        for at, zero in zip(turns, self._public.zeros(len(turns)), strict=True):
            ciphertexts[at] = ciphertexts[at] * zero % n_squared

    def _encoded(self, name: str, encoding: FixedPoint, values: NDArray[Any]) -> NDArray[np.int64]:
        encoded = encoding.encode(values, name=name)
        if encoded.shape != (self._settings.coordinates,):
            raise InvalidValue(
                f"{name} of shape {encoded.shape}: expected ({self._settings.coordinates},)"
            )
        return encoded


def dithered(encoded: int, settings: PaillierSettings) -> int:
    """Return ``encoded`` times C_LCM, plus a dither: a uniform integer up to C_LCM/2 in magnitude.

    One step of the encoding is C_LCM, so the dither moves the noise by at most half a step.
    """
    multiple = settings.common_multiple
    return encoded * multiple + secrets.randbelow(multiple) - multiple // 2


def _packed(products: Sequence[mpz], settings: PaillierSettings, public: PublicKey) -> list[mpz]:
    """Combine ciphertexts of one coordinate each into ciphertexts of several coordinates each."""
    slots, shift = settings.packing.slots, mpz(1) << settings.packing.slot_bits

    def join(starts: Sequence[int]) -> list[mpz]:
        joined = []
        for start in starts:
            # Horner's rule in the exponent: each power shifts the coordinates so far by one slot.
            *rest, total = products[start : start + slots]
            for product in reversed(rest):
                total = gmpy2.powmod(total, shift, public.n_squared) * product % public.n_squared
            joined.append(total)
        return joined

    return map_slices(join, range(0, len(products), slots))
