"""Secret polynomials and dithers from ChaCha20. Every distribution is exact; none is truncated."""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from flower_ext.privacy.randomness import keystream
from flower_ext.secure.keys_and_ciphers import KEY_BYTES, derive
from flower_ext_lattice.layout import DEGREE
from flower_ext_lattice.ring import PRIMES, RESIDUE_BYTES, Reals
from flower_ext_lattice.settings import ERROR_BOUND
from flower_ext_lattice.six_byte_words import unpack

_ERROR_MASK = np.uint64((1 << ERROR_BOUND) - 1)
_TERNARY_LIMIT = 255  # a multiple of three
_TERNARY = (np.arange(_TERNARY_LIMIT) % 3 - 1).astype(np.float64)


class Stream:
    """Bytes of ChaCha20 under a key that serves one purpose.

    Parameters
    ----------
    key : bytes
        32 bytes. Use `fresh` for secret streams, because a known key determines every sample.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = keystream(key)

    @classmethod
    def fresh(cls) -> Stream:
        """Return a stream under a new key from the operating system."""
        return cls(secrets.token_bytes(KEY_BYTES))

    def octets(self, count: int) -> NDArray[np.uint8]:
        """Return the next ``count`` bytes."""
        return np.frombuffer(self._cipher.update(bytes(count)), np.uint8)

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return ``count`` numbers that are uniform on [0, 2^64)."""
        return self.octets(8 * count).view("<u8")

    def dither(self, count: int, bits: int) -> NDArray[np.int64]:
        """Return ``count`` numbers that are uniform on [0, 2^bits), for up to 63 bits."""
        return (self.words(count) >> np.uint64(64 - bits)).astype(np.int64)

    def ternary(self, count: int) -> Reals:
        """Return ``count`` numbers that are uniform on -1, 0 and 1.

        Each number is a byte modulo 3, minus 1; bytes of 255 are skipped.
        """
        accepted = np.empty(0, np.uint8)
        # One byte in 256 is skipped, because 256 is no multiple of 3. A few more bytes than needed
        # therefore nearly always suffice.
        while len(accepted) < count:
            drawn = self.octets(count - len(accepted) + count // 200 + 16)
            accepted = np.concatenate([accepted, drawn[drawn < _TERNARY_LIMIT]])
        return _TERNARY[accepted[:count]]

    def errors(self, count: int) -> NDArray[np.int64]:
        """Return ``count`` numbers of the centred binomial distribution, of variance 21/2.

        Each sample is the number of ones in 21 bits minus the number of ones in 21 other bits.
        """
        drawn = self.words(count)  # 42 of the 64 bits are used
        ones = _ones(drawn & _ERROR_MASK)
        return ones - _ones(drawn >> np.uint64(ERROR_BOUND) & _ERROR_MASK)

    def uniform(self, count: int, prime: int) -> Reals:
        """Return ``count`` residues that are uniform modulo a prime.

        Draws of 48 bits that are not below the prime are skipped.
        """
        accepted = np.empty(0)  # skips are rarer than 1 in 10^9: the primes are just below 2^48
        while len(accepted) < count:
            octets = self.octets((count - len(accepted) + 4) * RESIDUE_BYTES)
            drawn = unpack(octets.reshape(-1, RESIDUE_BYTES)).astype(np.float64)
            accepted = np.concatenate([accepted, drawn[drawn < PRIMES[prime].q]])
        return accepted[:count]


def _ones(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the number of set bits in each word."""
    if hasattr(np, "bitwise_count"):  # from NumPy 2.0 on
        ones: NDArray[np.int64] = np.bitwise_count(words).astype(np.int64)
    else:
        ones = np.unpackbits(words.view(np.uint8)).reshape(-1, 64).sum(1, dtype=np.int64)
    return ones


def public_polynomial(seed: bytes, *label: str | int | bytes) -> Reals:
    """Return the residues (2, DEGREE) of a uniform polynomial that all parties can compute.

    Use them as the polynomial's transform, because a uniform polynomial has a uniform transform.
    """
    return np.stack(
        [
            Stream(derive(seed, "public", *label, prime)).uniform(DEGREE, prime)
            for prime in range(len(PRIMES))
        ]
    )
