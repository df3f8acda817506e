"""Masks that hide one silo's message from the server, drawn from keys that pairs of silos share.

Two silos agree on a key by X25519 and HKDF-SHA256 and draw the same numbers from it. One silo adds
(or multiplies by) them, and the other subtracts (or divides by) them. The masks therefore cancel in
the sum (or product) over all silos, but not in a sum over fewer silos.

The numbers come from ChaCha20 under a key that serves one run, pair, purpose and round. Each number
is drawn with 128 bits more than the modulus has, so its remainder is within 2⁻¹²⁸ of uniform.

The server relays the public keys. A server that swaps them could read every message. If silos do
not trust the server to relay keys unchanged, let them compare `PairKeys.fingerprint` over another
channel.
"""

import hashlib
from collections.abc import Sequence

import gmpy2
from gmpy2 import mpz

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.privacy.randomness import keystream
from flower_ext.secure.keys_and_ciphers import agreed, decrypt, derive, encrypt, public_of

_SURPLUS_BITS = 128


def uniform_residues(key: bytes, count: int, modulus: mpz) -> list[mpz]:
    """Return ``count`` numbers in [0, modulus) that ``key`` determines. Use each key once."""
    size = (modulus.bit_length() + _SURPLUS_BITS + 7) // 8
    stream = keystream(key).update(bytes(count * size))
    return [
        mpz.from_bytes(stream[start : start + size], "big") % modulus
        for start in range(0, count * size, size)
    ]


class PairKeys:
    """The keys that silo ``index`` shares with every other silo of one run.

    No other run has the same public ``context``. ``private`` is the silo's raw X25519 key, and
    ``public_keys`` are the raw keys of all silos, in their order. ``server_key`` is the server's
    public key. Two silos that received different server keys derive different pair keys.

    Attributes
    ----------
    fingerprint : str
        SHA-256 of all public keys, including the server's, in 64 hexadecimal digits. All silos have
        the same fingerprint unless somebody swapped a key.

    Raises
    ------
    InvalidValue
        A key is malformed, of low order or given twice, or ``public_keys[index]`` does not belong
        to ``private``.
    """

    def __init__(
        self,
        *,
        context: bytes,
        index: int,
        private: bytes,
        public_keys: Sequence[bytes],
        server_key: bytes,
    ) -> None:
        if public_keys[index] != public_of(private):
            raise InvalidValue(f"public_keys[{index}]: expected the public key of this silo")
        if len(set(public_keys)) != len(public_keys):
            raise InvalidValue("public_keys: expected a different key for every silo")
        self._context, self._index = context, index
        self._keys: dict[int, bytes] = {}
        self._used: set[tuple[str, int]] = set()
        for other, public in enumerate(public_keys):
            if other == index:
                continue
            try:
                shared, _ = agreed(private, public)
            except InvalidValue as error:
                raise InvalidValue(f"public_keys[{other}]: {error}") from error
            # Both silos of a pair name themselves in the same order, so they derive the same key.
            low, high = sorted((index, other))
            both = public_keys[low], public_keys[high]
            self._keys[other] = derive(shared, "pair", context, low, high, *both, server_key)
        everything = context + b"".join(public_keys) + server_key
        self.fingerprint = hashlib.sha256(everything).hexdigest()

    def __repr__(self) -> str:
        return f"PairKeys(index={self._index}, agreed_with={sorted(self._keys)})"

    def masked(
        self, purpose: str, round_number: int, numbers: Sequence[int], modulus: mpz
    ) -> list[mpz]:
        """Return ``numbers`` plus this silo's masks, modulo ``modulus``.

        At each position, the masks of all silos sum to zero.
        """
        total = [mpz(number) for number in numbers]
        for key, subtracts in self.mask_keys(purpose, round_number):
            for at, x in enumerate(uniform_residues(key, len(total), modulus)):
                total[at] = (total[at] - x if subtracts else total[at] + x) % modulus
        return total

    def multiplicative_masks(
        self, purpose: str, round_number: int, count: int, modulus: mpz
    ) -> list[mpz]:
        """Return this silo's masks: ``count`` numbers that are invertible modulo ``modulus``.

        At each position, the product of all silos' masks is one. The probability that a random
        number has no inverse is about one over the smallest prime factor of ``modulus``.
        """
        above, below = [mpz(1)] * count, [mpz(1)] * count
        for key, divides in self.mask_keys(purpose, round_number):
            side = below if divides else above
            for at, x in enumerate(uniform_residues(key, count, modulus)):
                side[at] = side[at] * x % modulus
        return [x * gmpy2.invert(y, modulus) % modulus for x, y in zip(above, below, strict=True)]

    def mask_keys(self, purpose: str, round_number: int) -> list[tuple[bytes, bool]]:
        """Return one pair (key, subtracts) for every other silo.

        The other silo gets the same key as this silo, and draws the same mask from it. The silo
        with ``subtracts`` True subtracts the mask, and the other silo adds it.

        Raises
        ------
        ProtocolError
            Masks for this purpose and round were drawn before. Two values under the same mask
            reveal the difference of the values.
        """
        if (purpose, round_number) in self._used:
            raise ProtocolError(
                f"masks for {purpose!r} of round {round_number} were drawn before: use a "
                "different round number"
            )
        self._used.add((purpose, round_number))
        return [
            (derive(key, "mask", purpose, round_number), self._index > other)
            for other, key in sorted(self._keys.items())
        ]

    def seal(self, receiver: int, purpose: str, message: bytes) -> bytes:
        """Encrypt a message for one silo, bound to sender, run and purpose (ChaCha20-Poly1305)."""
        header = self._header(self._index, receiver, purpose)
        return encrypt(self._sealing_key(receiver), message, header)

    def open(self, sender: int, purpose: str, sealed: bytes) -> bytes:
        """Decrypt a message that ``sender`` sealed for this silo, run and purpose."""
        key, header = self._sealing_key(sender), self._header(sender, self._index, purpose)
        try:
            return decrypt(key, sealed, header)
        except InvalidValue as error:
            raise InvalidValue(
                f"sealed message from silo {sender} cannot be opened: expected the message as silo "
                f"{sender} sealed it for silo {self._index} in this run"
            ) from error

    def _sealing_key(self, other: int) -> bytes:
        if other not in self._keys:
            raise ProtocolError(
                f"no key with silo {other!r}: expected one of the other silos, {sorted(self._keys)}"
            )
        return derive(self._keys[other], "seal")

    def _header(self, sender: int, receiver: int, purpose: str) -> bytes:
        return derive(self._context, "header", sender, receiver, purpose)
