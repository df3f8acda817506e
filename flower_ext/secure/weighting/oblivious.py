"""1-out-of-P oblivious transfer: a receiver opens one of P texts, and the sender cannot see which.

Source: Chou and Orlandi, "The Simplest Protocol for Oblivious Transfer" (LATINCRYPT 2015), for
honest-but-curious parties. The group is the subgroup of prime order ℓ of the curve Ed25519, and G
is its base point. libsodium (package PyNaCl) computes in it.

====================  =====================================================================
sender                a uniform below ℓ; A = a·G
receiver, choice c    b uniform below ℓ; B = b·G + (c + 1)·A
sender                k_j = H(a·B - (j + 1)·a·A) for every j, and each text sealed under its key
receiver              k_c = H(b·A)
====================  =====================================================================

Multiples of A are counted from one, so that no scalar is zero and no choice is a special case. H is
BLAKE2b. Its key is a hash of the run, A, B and the number of the transfer, and its input includes
j. Keys of different runs, answers and texts are therefore unrelated.

* *The sender learns no choice.* b·G is uniform in the group, and adding (c + 1)·A permutes the
  group, so B is uniform for every c, whatever A the sender chose. This needs no assumption.
* *The receiver learns one key.* The point of its chosen text is b·A. The point of text j differs
  from b·A by (c - j)·a·A, with c - j not a multiple of ℓ. If H is a random oracle, a second key is
  random unless the receiver computes such a point, and hence a²·G from A = a·G. That solves the
  computational Diffie-Hellman problem, because 2·xy = (x + y)² - x² - y².
* *Every received point has order ℓ.* The curve has points of order 1, 2, 4 and 8. The product of
  such a point and a secret scalar reveals the scalar modulo 8, and A of small order would reveal
  the choice. libsodium's check refuses these points, points off the curve or outside the subgroup,
  and second encodings of one point.

Parties send points of the group as they are. Nothing is hashed to the group, because no step needs
a point whose logarithm nobody knows.

All of the receiver's randomness comes from one key. Several parties that share this key therefore
act as one receiver: one of them answers, and all of them open the same texts.
"""

import hashlib
import secrets
from collections.abc import Sequence
from functools import cached_property

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from gmpy2 import mpz
from nacl.bindings import (
    crypto_core_ed25519_add,
    crypto_core_ed25519_is_valid_point,
    crypto_core_ed25519_sub,
    crypto_scalarmult_ed25519_base_noclamp,
    crypto_scalarmult_ed25519_noclamp,
)

from flower_ext.errors import InvalidValue
from flower_ext.secure.keys_and_ciphers import KEY_BYTES, derive
from flower_ext.secure.pair_keys import uniform_residues
from flower_ext.secure.threads import map_slices

POINT_BYTES = 32
"""Length of a point of the group in bytes."""
SEAL_BYTES = 16
"""Bytes that sealing adds to a text."""
ORDER = mpz(2) ** 252 + 27742317777372353535851937790883648493
"""ℓ: the prime order of the group."""

_NONCE = bytes(12)  # every key seals one text


class Sender:
    """The sender of 1-out-of-P oblivious transfers: it offers P texts, and learns no choice."""

    def __init__(self, run: bytes) -> None:
        self._run = run
        self._secret = _scalar(1 + secrets.randbelow(int(ORDER) - 1))
        self.public: bytes = crypto_scalarmult_ed25519_base_noclamp(self._secret)
        """The point A, which the receiver needs."""

    def seal(self, answer: bytes, texts: Sequence[Sequence[bytes]]) -> bytes:
        """Seal the P texts of each transfer under separate keys; return all sealed texts, joined.

        All texts must have the same length. ``answer`` is the result of `Receiver.answer`.
        """
        keys = self.keys(answer, len(texts), len(texts[0]))
        return b"".join(
            ChaCha20Poly1305(joined[KEY_BYTES * at :][:KEY_BYTES]).encrypt(_NONCE, text, None)
            for joined, of_transfer in zip(keys, texts, strict=True)
            for at, text in enumerate(of_transfer)
        )

    def keys(self, answer: bytes, transfers: int, num_texts: int) -> list[bytes]:
        """Return each transfer's P keys, joined. The receiver can compute only one key of each.

        Refuse an ``answer`` of the receiver without one point of the group for each transfer.
        """
        answers = _points(answer, transfers, name="answer")
        step = crypto_scalarmult_ed25519_noclamp(self._secret, self.public)

        def derive_keys(numbers: Sequence[int]) -> list[bytes]:
            joined = []
            for transfer in numbers:
                label = _label(self._run, self.public, answers[transfer], transfer)
                shared = crypto_scalarmult_ed25519_noclamp(self._secret, answers[transfer])
                keys = []
                for text in range(num_texts):
                    shared = crypto_core_ed25519_sub(shared, step)
                    keys.append(_key(label, shared, text))
                joined.append(b"".join(keys))
            return joined

        return map_slices(derive_keys, range(transfers))


class Receiver:
    """The receiver: it opens one text of each transfer, and can open no other.

    ``public`` is `Sender.public`. ``key`` is 32 bytes that the sender does not know and that serve
    no other purpose. Uniform choices derive from ``public`` and ``key``, so that choices for
    different senders are independent.
    """

    def __init__(
        self, public: bytes, key: bytes, *, run: bytes, transfers: int, num_texts: int
    ) -> None:
        self._run, self._num_texts = run, num_texts
        (self._public,) = _points(public, 1, name="offer")
        choices = uniform_residues(derive(key, "choices", public), transfers, mpz(num_texts))
        scalars = uniform_residues(derive(key, "scalars", public), transfers, ORDER)
        self.choices = [int(choice) for choice in choices]
        """For each transfer, the number of the chosen text, from 0."""
        self._scalars = [_scalar(int(scalar)) for scalar in scalars]

    @property
    def answer(self) -> bytes:
        """Return the points B of all transfers, joined, for the sender."""
        return b"".join(self._answers)

    @cached_property
    def _answers(self) -> list[bytes]:
        return [
            crypto_core_ed25519_add(
                crypto_scalarmult_ed25519_base_noclamp(scalar),
                crypto_scalarmult_ed25519_noclamp(_scalar(choice + 1), self._public),
            )
            for scalar, choice in zip(self._scalars, self.choices, strict=True)
        ]

    def keys(self) -> list[bytes]:
        """Return the key of the chosen text of each transfer, one of those in `Sender.keys`."""
        return [
            _key(
                _label(self._run, self._public, answer, at),
                crypto_scalarmult_ed25519_noclamp(self._scalars[at], self._public),
                self.choices[at],
            )
            for at, answer in enumerate(self._answers)
        ]

    def open(self, sealed: bytes, size: int) -> list[bytes]:
        """Decrypt the chosen text of each transfer, ``size`` bytes; refuse altered texts."""
        num_texts, transfers, step = self._num_texts, len(self.choices), size + SEAL_BYTES
        if len(sealed) != step * num_texts * transfers:
            raise InvalidValue(
                f"sealed texts of {len(sealed)} bytes: expected {num_texts} texts of {step} bytes "
                f"for each of {transfers} transfers"
            )
        starts = [(at * num_texts + choice) * step for at, choice in enumerate(self.choices)]
        try:
            return [
                ChaCha20Poly1305(key).decrypt(_NONCE, sealed[start : start + step], None)
                for key, start in zip(self.keys(), starts, strict=True)
            ]
        except InvalidTag as error:
            raise InvalidValue(
                "sealed texts: expected texts that the sender encrypted for this receiver's choices"
            ) from error


def _scalar(number: int) -> bytes:
    return number.to_bytes(POINT_BYTES, "little")


def _label(run: bytes, public: bytes, answer: bytes, transfer: int) -> bytes:
    return derive(answer, "transfer", run, public, transfer)


def _key(label: bytes, shared: bytes, text: int) -> bytes:
    hashed = shared + text.to_bytes(8, "big")
    return hashlib.blake2b(hashed, key=label, digest_size=KEY_BYTES).digest()


def _points(data: bytes, count: int, *, name: str) -> list[bytes]:
    if len(data) != count * POINT_BYTES:
        raise InvalidValue(
            f"{name} of {len(data)} bytes: expected {count} points of {POINT_BYTES} bytes"
        )
    points = [data[at : at + POINT_BYTES] for at in range(0, len(data), POINT_BYTES)]
    if not all(crypto_core_ed25519_is_valid_point(point) for point in points):
        raise InvalidValue(f"{name}: expected points of the prime-order subgroup of Ed25519")
    return points
