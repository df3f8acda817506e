"""1-out-of-P oblivious transfer: the receiver opens one of P texts; the sender learns not which.

Source: Chou and Orlandi, "The Simplest Protocol for Oblivious Transfer" (LATINCRYPT 2015), for
honest-but-curious parties, in the group of squares modulo the 3072-bit prime of RFC 3526.

====================  =====================================================================
sender                A = g^a
receiver, choice c    B = g^b · A^c
sender                k_j = H((B · A^-j)^a) for every j, and each text sealed under its key
receiver              k_c = H(A^b)
====================  =====================================================================

H hashes the run, A, B, and the numbers of transfer and place as well, so that keys of different
runs and answers have nothing in common. B is uniform for every c. To compute a second key, the
receiver would need g^(a²).

All of the receiver's randomness comes from one key. Several parties that share this key therefore
act as one receiver: one of them answers, and all of them open the same texts.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import cached_property

import gmpy2
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from gmpy2 import mpz

from flower_ext.errors import InvalidValue
from flower_ext.secure.labels import derive
from flower_ext.secure.masks import uniform_residues
from flower_ext.secure.threads import map_slices

ELEMENT_BYTES = 384
"""Length of a group element in bytes."""
KEY_BYTES = 32
"""Length in bytes of the key of one place."""
SEAL_BYTES = 16
"""Bytes that sealing adds to a text."""

_NONCE = bytes(12)  # every key seals one text
_GENERATOR = mpz(2)


def _rfc_3526_prime() -> mpz:
    """Return the modulus p of group 15; p and (p - 1)/2 are prime."""
    with gmpy2.context(precision=3200):
        digits = mpz(gmpy2.floor(gmpy2.const_pi() * mpz(2) ** 2942))
    return mpz(2) ** 3072 - mpz(2) ** 3008 - 1 + mpz(2) ** 64 * (digits + 1690314)


PRIME = _rfc_3526_prime()
ORDER = (PRIME - 1) // 2


class Sender:
    """One party's side of many transfers: it has P texts for each, and learns no choice.

    Parameters
    ----------
    run : bytes
        Name of the run, the same at the receiver.
    exponent : int, optional
        a of an earlier sender; by default a fresh one.
    """

    def __init__(self, run: bytes, *, exponent: int | None = None) -> None:
        self._run = run
        drawn = 1 + secrets.randbelow(int(ORDER) - 1) if exponent is None else exponent
        self._exponent = mpz(drawn)
        self._public = _power(_GENERATOR, self._exponent)

    @property
    def exponent(self) -> int:
        """Return the secret a. Store it at the sender only, and never send it."""
        return int(self._exponent)

    @property
    def public(self) -> bytes:
        """Return A, for the receiver."""
        return _to_bytes(self._public)

    def seal(
        self, answer: bytes, texts: Sequence[Sequence[bytes]], *, workers: int = 1
    ) -> list[list[bytes]]:
        """Return the texts of all transfers, each sealed under the key of its place.

        Parameters
        ----------
        answer : bytes
            `Receiver.answer`.
        texts : Sequence[Sequence[bytes]]
            The P texts of each transfer.

        Raises
        ------
        ValueError
            ``answer`` does not hold one group element for each transfer.
        """
        keys = self.keys(answer, [len(own) for own in texts], workers=workers)
        return [
            [
                ChaCha20Poly1305(joined[KEY_BYTES * at :][:KEY_BYTES]).encrypt(_NONCE, text, None)
                for at, text in enumerate(own)
            ]
            for joined, own in zip(keys, texts, strict=True)
        ]

    def keys(self, answer: bytes, choices: Sequence[int], *, workers: int = 1) -> list[bytes]:
        """Return the P keys of each transfer, joined. The receiver can compute one of each P.

        Parameters
        ----------
        answer : bytes
            `Receiver.answer`.
        choices : Sequence of int
            P of each transfer.

        Raises
        ------
        ValueError
            ``answer`` does not hold one group element for each transfer.
        """
        answers = _elements(answer, len(choices), name="answer")
        step = gmpy2.invert(_power(self._public, self._exponent), PRIME)
        run, public = self._run, self.public

        def derived(transfers: Sequence[int]) -> list[bytes]:
            found = []
            for transfer in transfers:
                element = _to_bytes(answers[transfer])
                shared = _power(answers[transfer], self._exponent)
                own = []
                for place in range(choices[transfer]):
                    own.append(_key(run, public, element, shared, transfer, place))
                    shared = shared * step % PRIME
                found.append(b"".join(own))
            return found

        return map_slices(derived, range(len(choices)), workers=workers)


class Receiver:
    """The other party's side: it opens one text of each transfer, and can open no other.

    Parameters
    ----------
    public : bytes
        `Sender.public`.
    key : bytes
        32 bytes that the sender does not know and that serve no other purpose. Uniform choices
        derive from it and from ``public``, so that choices for different senders are independent.
    run : bytes
        Name of the run, the same at the sender.
    transfers, choices : int
        Number of transfers, and P.

    Raises
    ------
    ValueError
        ``public`` is not a group element.
    """

    def __init__(
        self,
        public: bytes,
        key: bytes,
        *,
        run: bytes,
        transfers: int,
        choices: int,
        workers: int = 1,
    ) -> None:
        self._run = run
        (self._offered,) = _elements(public, 1, name="offer")
        self._public = public
        self._choices = uniform_residues(derive(key, "choices", public), transfers, mpz(choices))
        self._exponents = uniform_residues(derive(key, "exponents", public), transfers, ORDER)
        self._workers = workers

    @property
    def answer(self) -> bytes:
        """Return B of every transfer, for the sender."""
        return b"".join(self._answers)

    @cached_property
    def _answers(self) -> list[bytes]:
        def blind(transfers: Sequence[int]) -> list[bytes]:
            return [
                _to_bytes(
                    _power(_GENERATOR, self._exponents[at])
                    * gmpy2.powmod(self._offered, self._choices[at], PRIME)
                    % PRIME
                )
                for at in transfers
            ]

        return map_slices(blind, range(len(self._choices)), workers=self._workers)

    @property
    def choices(self) -> list[int]:
        """Return the choice of each transfer."""
        return [int(choice) for choice in self._choices]

    def keys(self) -> list[bytes]:
        """Return the key of the chosen place of each transfer, of `Sender.keys`."""
        answers = self._answers

        def derived(transfers: Sequence[int]) -> list[bytes]:
            return [
                _key(
                    self._run,
                    self._public,
                    answers[at],
                    _power(self._offered, self._exponents[at]),
                    at,
                    int(self._choices[at]),
                )
                for at in transfers
            ]

        return map_slices(derived, range(len(self._choices)), workers=self._workers)

    def open(self, sealed: Sequence[Sequence[bytes]]) -> list[bytes]:
        """Return the chosen text of each transfer.

        Raises
        ------
        ValueError
            A text was sealed for another answer, or somebody changed it.
        """
        try:
            return [
                ChaCha20Poly1305(key).decrypt(_NONCE, texts[place], None)
                for key, texts, place in zip(self.keys(), sealed, self.choices, strict=True)
            ]
        except InvalidTag as error:
            raise InvalidValue("sealed texts: expected those sealed for this answer") from error


def _key(run: bytes, public: bytes, answer: bytes, shared: mpz, transfer: int, place: int) -> bytes:
    return derive(_to_bytes(shared), "transfer", run, public, answer, transfer, place)


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
