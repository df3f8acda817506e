"""Paillier encryption with generator n + 1; keys and ciphertexts are as in the library `phe`.

Source: Paillier, "Public-Key Cryptosystems Based on Composite Degree Residuosity Classes"
(EUROCRYPT 1999).

GMP does the arithmetic, and its running time depends on its operands. Run no untrusted program on a
party's machine, because it could measure this time.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import gmpy2
from gmpy2 import mpz
from phe.paillier import PaillierPrivateKey, PaillierPublicKey, generate_paillier_keypair

from flower_ext.errors import InvalidValue
from flower_ext.secure.messages import unpack_numbers
from flower_ext.secure.threads import map_slices

SECURE_KEY_BITS = 3072
"""Length of n in bits for 128-bit security against factoring (NIST SP 800-57)."""

_LARGEST_KEY_BITS = 2**14


def check_key_bits(key_bits: int, *, allow_insecure_key_size: bool) -> None:
    """Refuse a key so long that a run would take days, or so short that it is insecure."""
    if key_bits % 2 or not 64 <= key_bits <= _LARGEST_KEY_BITS:
        raise InvalidValue(
            f"key_bits={key_bits!r}: expected an even integer from {SECURE_KEY_BITS} to "
            f"{_LARGEST_KEY_BITS}"
        )
    if key_bits < SECURE_KEY_BITS and not allow_insecure_key_size:
        raise InvalidValue(
            f"key_bits={key_bits}: expected at least {SECURE_KEY_BITS} "
            "(smaller in tests only, with allow_insecure_key_size=True)"
        )


@dataclass(frozen=True)
class PublicKey:
    """The modulus n, and the operations that need no secret."""

    n: mpz

    @cached_property
    def n_squared(self) -> mpz:
        """n², the modulus of ciphertexts."""
        return self.n * self.n

    def check(self, key_bits: int, *, coprime_to: int) -> None:
        """Refuse a modulus that cannot belong to a key of ``key_bits`` bits.

        The protocol hides numbers up to ``coprime_to`` by multiplying them with random units modulo
        n. The product hides a number only if the number shares no factor with n.
        """
        if (bits := self.n.bit_length()) != key_bits:
            raise InvalidValue(f"public key of {bits} bits: expected {key_bits}")
        if not self.n & 1 or gmpy2.is_prime(self.n) or gmpy2.is_square(self.n):
            raise InvalidValue("public key: expected the product of two large primes")
        if gmpy2.gcd(self.n, gmpy2.primorial(coprime_to)) != 1:
            raise InvalidValue(
                f"public key with a factor of {coprime_to} or less: expected the product of two "
                "large primes"
            )

    def check_ciphertext(self, ciphertext: mpz) -> None:
        """Raise an error unless the number is between 0 and n² and a unit modulo n²."""
        if not 0 < ciphertext < self.n_squared or gmpy2.gcd(ciphertext, self.n) != 1:
            raise InvalidValue("ciphertext: expected a unit modulo n², between 0 and n²")

    def unpack(self, data: bytes, size: int) -> list[mpz]:
        """Return ciphertexts of ``size`` bytes each; refuse a number that is no ciphertext."""
        ciphertexts = [mpz(number) for number in unpack_numbers(data, size)]
        for ciphertext in ciphertexts:
            self.check_ciphertext(ciphertext)
        return ciphertexts

    def plain(self, message: mpz) -> mpz:
        """Return a ciphertext of ``message`` without randomness, which anybody can decrypt.

        Multiply a ciphertext by the result to add ``message`` to its content.
        """
        return (1 + self.n * (message % self.n)) % self.n_squared

    def zeros(self, count: int) -> list[mpz]:
        """Return ``count`` fresh ciphertexts of zero. Each is r^n for its own uniform unit r.

        Multiply a ciphertext by one of them to keep its message and give it fresh randomness. This
        matters because the key holder can read the randomness of a ciphertext. If the ciphertext
        was computed from ciphertexts of the key holder, its randomness would reveal the
        computation.
        """

        def draw(slice_: Sequence[int]) -> list[mpz]:
            return [gmpy2.powmod(_random_unit(self.n), self.n, self.n_squared) for _ in slice_]

        return map_slices(draw, range(count))


@dataclass(frozen=True)
class PrivateKey:
    """The primes p and q of equal length with n = pq. The repr hides them; never send them."""

    p: mpz = field(repr=False)
    q: mpz = field(repr=False)

    def __post_init__(self) -> None:
        if self.p == self.q or self.p.bit_length() != self.q.bit_length():
            raise InvalidValue("primes: expected two different primes of the same length")

    @cached_property
    def public(self) -> PublicKey:
        """The public key, which everybody may know."""
        return PublicKey(self.p * self.q)

    def encrypt(self, messages: Sequence[mpz], *, name: str = "") -> list[mpz]:
        """Return fresh encryptions of the messages.

        Their randomness has the same distribution as in `PublicKey.zeros`, but this method is about
        3.5 times as fast. `PublicKey.zeros` draws r and computes r^n. Modulo p², r^n equals s^p,
        where s = r^q modulo p. If r is uniform, so is s, because taking the q-th power permutes the
        units modulo p. This method therefore draws s.
        """
        n_squared = self.public.n_squared
        p_squared, q_squared = self.p * self.p, self.q * self.q
        inverse = gmpy2.invert(p_squared, q_squared)

        def encrypt(slice_: Sequence[mpz]) -> list[mpz]:
            ciphertexts = []
            for message in slice_:
                modulo_p = gmpy2.powmod(_random_unit(self.p), self.p, p_squared)
                modulo_q = gmpy2.powmod(_random_unit(self.q), self.q, q_squared)
                # The Chinese remainder theorem, with p² and q² in place of p and q.
                randomness = modulo_p + p_squared * ((modulo_q - modulo_p) * inverse % q_squared)
                ciphertexts.append(self.public.plain(message) * randomness % n_squared)
            return ciphertexts

        return map_slices(encrypt, messages, name=name)

    def decrypt(self, ciphertexts: Sequence[mpz], *, name: str = "") -> list[mpz]:
        """Return messages in [0, n); refuse a number that is not a ciphertext."""
        for ciphertext in ciphertexts:
            self.public.check_ciphertext(ciphertext)
        key = PaillierPrivateKey(PaillierPublicKey(int(self.public.n)), int(self.p), int(self.q))

        def decrypt(slice_: Sequence[mpz]) -> list[mpz]:
            return [mpz(key.raw_decrypt(int(ciphertext))) for ciphertext in slice_]

        return map_slices(decrypt, ciphertexts, name=name)


def generate_key(
    key_bits: int = SECURE_KEY_BITS, *, allow_insecure_key_size: bool = False
) -> PrivateKey:
    """Return a new key. `phe` draws its two primes from the operating system's randomness."""
    check_key_bits(key_bits, allow_insecure_key_size=allow_insecure_key_size)
    _, drawn = generate_paillier_keypair(n_length=key_bits)
    return PrivateKey(mpz(drawn.p), mpz(drawn.q))


def _random_unit(modulus: mpz) -> mpz:
    while True:
        drawn = mpz(1 + secrets.randbelow(int(modulus) - 1))
        if gmpy2.gcd(drawn, modulus) == 1:
            return drawn
