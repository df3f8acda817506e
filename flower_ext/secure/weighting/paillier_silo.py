"""A silo in private weighting over Paillier; `secure.weighting` describes the protocol."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import gmpy2
import numpy as np
from gmpy2 import mpz
from numpy.typing import NDArray

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.keys_and_ciphers import derive
from flower_ext.secure.messages import check_length, pack_numbers
from flower_ext.secure.pair_keys import uniform_residues
from flower_ext.secure.threads import map_slices
from flower_ext.secure.weighting.encoding import LARGEST_EXPONENT
from flower_ext.secure.weighting.paillier import PublicKey
from flower_ext.secure.weighting.paillier_settings import (
    PaillierSettings,
    PaillierSum,
    PaillierWeights,
)
from flower_ext.secure.weighting.silo_party import COUNTS, SiloParty, SiloSum

# A table of 128 powers modulo n² takes 0.1 MB. Wider digits save a sixth of the multiplications of
# a large model at twice the memory, and cost a small model more than they save.
_DIGIT_BITS = 7


@dataclass(repr=False)
class PaillierSilo(SiloParty):
    """One silo. Take the steps of the set-up with `answer`, then call `open_sum` every round."""

    kind = "paillier"
    settings_type = PaillierSettings

    settings: PaillierSettings

    def open_sum(self, number: int, weights: bytes) -> PaillierOpenSum:
        """Begin this silo's sum of round ``number``: see `SiloParty.open_sum`."""
        self._check_opening(number)
        message = PaillierWeights.from_bytes(weights, self.settings)
        if message.round_number != number:
            raise ProtocolError(f"weights of round {message.round_number}: expected round {number}")
        return PaillierOpenSum(self, message)

    def encrypted_weights(self, message: PaillierWeights) -> list[mpz]:
        """Return the ciphertext Enc(n_su / N_u · C_LCM) of each user in `counted`.

        Computing a ciphertext takes one long exponentiation. The ciphertext then serves all
        coordinates of the user's update.
        """
        settings, public = self.settings, self.public
        inverses = public.unpack(self._opened(message), settings.ciphertext_bytes)
        place = {user: at for at, user in enumerate(self._order)}

        def fold(users: Sequence[int]) -> list[mpz]:
            folded = []
            for user in users:
                # The server inverted r_u N_u, so the blind r_u cancels. C_LCM / N_u is an integer.
                blinded = self.counts[user] * self._blinds[user]
                factor = blinded * settings.common_multiple % public.n
                folded.append(gmpy2.powmod(inverses[place[user]], factor, public.n_squared))
            return folded

        return map_slices(fold, self.counted)

    def draw_masks(self, number: int, count: int) -> list[mpz]:
        """Store that the round's masks are used, and return those for ``count`` ciphertexts."""
        self.use_round(number)
        return self._pairs.multiplicative_masks("sum", number, count, self.public.n_squared)

    @cached_property
    def public(self) -> PublicKey:
        """The server's key."""
        return PublicKey(mpz.from_bytes(self.server_key, "big"))

    def _opened(self, message: PaillierWeights) -> bytes:
        """Return the ciphertexts of all users, joined, by place in the secret order.

        If users are drawn in secret, the silo opens the chosen ciphertext of each user.
        """
        if self.settings.draw_choices is None:
            return message.weights
        receiver = self._draw_receiver(message.round_number, message.offer)
        return b"".join(receiver.open(message.weights, self.settings.ciphertext_bytes))

    def _count_answer(self) -> bytes:
        blinded = [self._blinds[user] * self.counts[user] for user in self._order]
        masked = self._pairs.masked(COUNTS, 0, blinded, self.public.n)
        return pack_numbers(masked, self.settings.count_bytes)

    def _check_server_key(self, server_key: bytes) -> None:
        check_length("server's key", server_key, self.settings.count_bytes)
        most = self.settings.max_records_per_user
        public = PublicKey(mpz.from_bytes(server_key, "big"))
        public.check(self.settings.key_bits, coprime_to=most)

    @cached_property
    def _blinds(self) -> list[mpz]:
        return user_blinds(self.seed, self.settings.users, self.public.n)


class PaillierOpenSum(SiloSum):
    """A silo's sum of one round. Updates are encoded, and added up in `finish`."""

    def __init__(self, silo: PaillierSilo, message: PaillierWeights) -> None:
        super().__init__(silo, message.round_number)
        self._silo, self._settings, self._message = silo, silo.settings, message
        self._rows = {user: row for row, user in enumerate(silo.counted)}
        self._updates = np.zeros((len(self._rows), silo.settings.coordinates), dtype=np.int64)

    def _add(self, updates: Mapping[int, NDArray[Any]]) -> None:
        for user, update in updates.items():
            encoded = self._settings.encoding.encode(update, name="updates")
            self._updates[self._rows[user]] = encoded

    def _masked(self, noise: NDArray[Any]) -> PaillierSum:
        """Return Σ_u (n_su / N_u) Δ_su + z_s under encryption, masked and re-randomised."""
        silo, settings, public, number = self._silo, self._settings, self._silo.public, self._number
        encoded_noise = settings.noise_encoding.encode(noise, name="noise")
        products = column_products(
            silo.encrypted_weights(self._message),
            self._updates,
            public.n_squared,
            largest=settings.encoding.largest,
            name=f"silo {silo.index}, round {number}: coordinates",
        )
        ciphertexts = _packed(products, settings, public)
        noises = settings.packing.pack([dithered(int(value), settings) for value in encoded_noise])
        # The silo draws masks from here on. An error before this line leaves the round unused.
        for at, mask in enumerate(silo.draw_masks(number, len(ciphertexts))):
            # The noise needs no encryption of its own: the mask hides the whole product.
            masked = ciphertexts[at] * public.plain(noises[at]) % public.n_squared
            ciphertexts[at] = masked * mask % public.n_squared
        self._rerandomise(ciphertexts)
        return PaillierSum(
            round_number=number,
            silo=silo.index,
            ciphertexts=pack_numbers(ciphertexts, settings.ciphertext_bytes),
        )

    def _rerandomise(self, ciphertexts: list[mpz]) -> None:
        """Give the ciphertexts for which this silo is responsible fresh randomness, in place.

        One silo is responsible for each ciphertext, and the silos take turns from round to round.
        Without this step, the server could test a guess of the updates: it made the encryptions, so
        it could compute the randomness that the product of all uploads has if the guess is right.
        """
        silos, public = self._settings.silos, self._silo.public
        first = (self._silo.index - self._number) % silos
        turns = range(first, len(ciphertexts), silos)
        for at, zero in zip(turns, public.zeros(len(turns)), strict=True):
            ciphertexts[at] = ciphertexts[at] * zero % public.n_squared


def user_blinds(seed: bytes, users: int, modulus: mpz) -> list[mpz]:
    """Return a unit modulo ``modulus`` for each user, uniform to a party without the seed."""

    def blind(user: int) -> mpz:
        for attempt in count():
            (drawn,) = uniform_residues(derive(seed, "blind", user, attempt), 1, modulus)
            if gmpy2.gcd(drawn, modulus) == 1:
                break
        return drawn

    return [blind(user) for user in range(users)]


def dithered(encoded: int, settings: PaillierSettings) -> int:
    """Return ``encoded`` times C_LCM, plus a dither: a uniform integer up to C_LCM/2 in magnitude.

    One step of the encoding is C_LCM, so the dither moves the noise by at most half a step.
    """
    multiple = settings.common_multiple
    return encoded * multiple + secrets.randbelow(multiple) - multiple // 2


def column_products(
    bases: Sequence[mpz],
    exponents: NDArray[np.int64],
    modulus: mpz,
    *,
    largest: int,
    name: str = "",
) -> list[mpz]:
    """Return Π_u bases[u]^exponents[u, j] modulo ``modulus`` for every column j.

    The bases are units, and ``largest`` is the largest magnitude of an exponent. These products are
    most of the work of private weighting. All columns have the same bases, so each base gets a
    table of its small powers. An exponent is then a few digits, each of which costs one look-up and
    one multiplication, and all bases of a column share squarings. With U bases and exponents of k
    digits, a column takes about k · (U + 7) multiplications, in place of about 50 · U.
    """
    if exponents.ndim != 2 or len(exponents) != len(bases):
        raise InvalidValue(
            f"exponents of shape {exponents.shape}: expected {len(bases)} rows, one for "
            "each base, and a column for each product"
        )
    if not np.abs(exponents).max(initial=0) <= largest <= LARGEST_EXPONENT:
        raise InvalidValue(
            f"exponents with largest={largest}: expected integers from {-largest} to {largest}, "
            "and a largest of at most 2**61"
        )
    mask, num_digits = (1 << _DIGIT_BITS) - 1, math.ceil((2 * largest).bit_length() / _DIGIT_BITS)

    def powers(some: Sequence[mpz]) -> list[list[mpz]]:
        """Return for each base a table of its powers, one for every value of a digit."""
        tables = []
        for base in some:
            table = [mpz(1)]
            for _ in range(mask):
                table.append(table[-1] * base % modulus)
            tables.append(table)
        return tables

    tables = map_slices(powers, bases)
    # `multiply` takes the digits of x + largest, which is never negative. The factor ``surplus``
    # cancels the added ``largest`` in all products, so that no column needs an inversion.
    product = mpz(1)
    for base in bases:
        product = product * base % modulus
    surplus = gmpy2.powmod(product, -largest, modulus)

    def multiply(columns: Sequence[int]) -> list[mpz]:
        shifted = exponents[:, columns[0] : columns[-1] + 1] + largest
        totals = [mpz(1)] * len(columns)
        for place in reversed(range(num_digits)):  # the highest digit comes first
            digits = shifted >> (_DIGIT_BITS * place) & mask
            for at, of_column in enumerate(digits.T.tolist()):
                # All bases share these squarings, which make room for the next digit.
                total = gmpy2.powmod(totals[at], 1 << _DIGIT_BITS, modulus)
                for table, digit in zip(tables, of_column, strict=True):
                    if digit:
                        total = total * table[digit] % modulus
                totals[at] = total
        return [total * surplus % modulus for total in totals]

    return map_slices(multiply, range(exponents.shape[1]), name=name)


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
