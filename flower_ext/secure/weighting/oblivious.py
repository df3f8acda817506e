"""1-out-of-P oblivious transfer: one text of P is taken, and the sender does not learn which.

Source: Chou and Orlandi, "The Simplest Protocol for Oblivious Transfer" (LATINCRYPT 2015), for
honest-but-curious parties, in the group of squares modulo the 3072-bit prime of RFC 3526.

====================  =====================================================================
sender                A = g^a
receiver, choice c    B = g^b · A^c
sender                k_j = H((B · A^-j)^a) for every j, and each text sealed under its key
receiver              k_c = H(A^b)
====================  =====================================================================

B is uniform whatever c is. The receiver would need g^(a²) for another key.

All of the receiver's randomness comes from a key. So several parties that share it are one
receiver: one of them answers, and all of them open the same texts.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import gmpy2
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from gmpy2 import mpz

from flower_ext.errors import InvalidValue
from flower_ext.secure.labels import derive
from flower_ext.secure.masks import uniform_residues
from flower_ext.secure.threads import map_slices

ELEMENT_BYTES = 384
"""Length of a group element."""
SEAL_BYTES = 16
"""By how much a sealed text is longer."""

_NONCE = bytes(12)  # every key seals one text
_GENERATOR = mpz(2)


def _rfc_3526_prime() -> mpz:
    """Group 15: p and (p - 1)/2 are prime."""
    with gmpy2.context(precision=3200):
        digits = mpz(gmpy2.floor(gmpy2.const_pi() * mpz(2) ** 2942))
    return mpz(2) ** 3072 - mpz(2) ** 3008 - 1 + mpz(2) ** 64 * (digits + 1690314)


PRIME = _rfc_3526_prime()
ORDER = (PRIME - 1) // 2


class Sender:
    """One party's side of many transfers: it has P texts for each, and learns no choice."""

    def __init__(self) -> None:
        self._exponent = 1 + mpz(secrets.randbelow(int(ORDER) - 1))
        self._public = _power(_GENERATOR, self._exponent)

    @property
    def public(self) -> bytes:
        """A, for the receiver."""
        return _to_bytes(self._public)

    def seal(
        self, answer: bytes, texts: Sequence[Sequence[bytes]], *, workers: int = 1
    ) -> list[list[bytes]]:
        """Texts of all transfers, each under the key of its place.

        Parameters
        ----------
        answer : bytes
            `Receiver.answer`.
        texts : Sequence[Sequence[bytes]]
            For each transfer its P texts.

        Raises
        ------
        ValueError
            Not an element of the group for each transfer.
        """
        answers = _elements(answer, len(texts), name="answer")
        step = gmpy2.invert(_power(self._public, self._exponent), PRIME)

        def seal(transfers: Sequence[int]) -> list[list[bytes]]:
            sealed = []
            for transfer in transfers:
                shared = _power(answers[transfer], self._exponent)
                own = []
                for place, text in enumerate(texts[transfer]):
                    cipher = _cipher(self.public, shared, transfer, place)
                    own.append(cipher.encrypt(_NONCE, text, None))
                    shared = shared * step % PRIME
                sealed.append(own)
            return sealed

        return map_slices(seal, range(len(texts)), workers=workers)


class Receiver:
    """The other party's side: it opens one text of each transfer, and can open no other.

    Parameters
    ----------
    public : bytes
        `Sender.public`.
    key : bytes
        32 bytes that the sender does not know and that serve no other purpose. Choices derive from
        it and from ``public``, uniformly, so that one key gives independent ones for every sender.
    transfers, choices : int
        How many there are, and P.

    Raises
    ------
    ValueError
        ``public`` is no element of the group.
    """

    def __init__(
        self, public: bytes, key: bytes, *, transfers: int, choices: int, workers: int = 1
    ) -> None:
        (self._offered,) = _elements(public, 1, name="offer")
        self._public = public
        self._choices = uniform_residues(derive(key, "choices", public), transfers, mpz(choices))
        self._exponents = uniform_residues(derive(key, "exponents", public), transfers, ORDER)
        self._workers = workers

    @property
    def answer(self) -> bytes:
        """B of every transfer, for the sender."""

        def blind(transfers: Sequence[int]) -> list[mpz]:
            return [
                _power(_GENERATOR, self._exponents[at])
                * gmpy2.powmod(self._offered, self._choices[at], PRIME)
                % PRIME
                for at in transfers
            ]

        blinded = map_slices(blind, range(len(self._choices)), workers=self._workers)
        return b"".join(_to_bytes(element) for element in blinded)

    def open(self, sealed: Sequence[Sequence[bytes]]) -> list[bytes]:
        """The chosen text of each transfer.

        Raises
        ------
        ValueError
            Sealed for another answer, or changed on the way.
        """

        def open_(transfers: Sequence[int]) -> list[bytes]:
            opened = []
            for at in transfers:
                place = int(self._choices[at])
                cipher = _cipher(
                    self._public, _power(self._offered, self._exponents[at]), at, place
                )
                opened.append(cipher.decrypt(_NONCE, sealed[at][place], None))
            return opened

        try:
            return map_slices(open_, range(len(sealed)), workers=self._workers)
        except InvalidTag as error:
            raise InvalidValue("sealed texts: expected those sealed for this answer") from error


def _cipher(public: bytes, shared: mpz, transfer: int, place: int) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(derive(_to_bytes(shared), "transfer", public, transfer, place))


def _power(base: mpz, exponent: mpz) -> mpz:
    return gmpy2.powmod(base, exponent, PRIME)


def _to_bytes(element: mpz) -> bytes:
    return int(element).to_bytes(ELEMENT_BYTES, "big")


def _elements(data: bytes, count: int, *, name: str) -> list[mpz]:
    if len(data) != count * ELEMENT_BYTES:
        raise InvalidValue(
            f"{name} of {len(data)} bytes: expected {count} group elements of {ELEMENT_BYTES} bytes"
        )
    starts = range(0, len(data), ELEMENT_BYTES)
    elements = [mpz.from_bytes(data[at : at + ELEMENT_BYTES], "big") for at in starts]
    for element in elements:
        if not 1 < element < PRIME - 1 or gmpy2.legendre(element, PRIME) != 1:
            raise InvalidValue(f"{name}: expected squares modulo the prime, other than one")
    return elements
