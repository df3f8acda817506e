"""Polynomials of R_q = Z_q[X]/(X^4096 + 1), q = q1 · q2, by their residues modulo q1 and q2.

The number-theoretic transform evaluates a polynomial at the roots of X^n + 1, and turns a product
modulo X^n + 1 into products of numbers. Its butterflies follow Longa and Naehrig, "Speeding up the
Number Theoretic Transform for Faster Ideal Lattice-Based Cryptography" (CANS 2016). The loops
are in `ring_loops`.

Arrays hold residues as whole numbers in float64. Messages hold them as *words*: little-endian
numbers of six bytes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flower_ext.errors import InvalidValue
from flower_ext_lattice import ring_loops, six_byte_words
from flower_ext_lattice.layout import DEGREE, LANES

Reals: TypeAlias = NDArray[np.float64]
Bytes: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]

RESIDUE_BYTES = six_byte_words.WORD_BYTES


@dataclass(frozen=True)
class Prime:
    """A prime of 48 bits that is 1 modulo 2n, and powers of a root of X^n + 1 modulo this prime."""

    value: int

    @property
    def q(self) -> float:
        """The prime as a float."""
        return float(self.value)

    def balanced(self, number: int) -> float:
        """Return the residue of ``number`` that lies between −prime / 2 and prime / 2."""
        rest = number % self.value
        return float(rest - self.value if 2 * rest > self.value else rest)

    @cached_property
    def _root(self) -> int:
        """Return a number whose n-th power is -1 modulo the prime."""
        # The n-th power of this root is base^((q − 1) / 2), which is −1 for half of all bases.
        for base in range(2, 100):
            root = pow(base, (self.value - 1) // (2 * DEGREE), self.value)
            if pow(root, DEGREE, self.value) == self.value - 1:
                return root
        raise AssertionError("found no root: expected one, because half of all bases give a root")

    @cached_property
    def roots(self) -> Reals:
        """Powers of the root. The exponent at index j is j with its 12 bits reversed."""
        return self._powers(self._root)

    @cached_property
    def modulus(self) -> tuple[float, float, Reals]:
        """The prime as a float, its inverse, and `roots`: the constants of a transform's loops."""
        return self.q, 1.0 / self.q, self.roots

    @cached_property
    def back(self) -> Reals:
        """Inverses of `roots` modulo the prime."""
        return self._powers(pow(self._root, -1, self.value))

    @cached_property
    def scale(self) -> float:
        """Inverse of n modulo the prime."""
        return self.balanced(pow(DEGREE, -1, self.value))

    def _powers(self, root: int) -> Reals:
        powers, power = np.empty(DEGREE), 1
        for exponent in range(DEGREE):
            powers[int(f"{exponent:012b}"[::-1], 2)] = self.balanced(power)
            power = power * root % self.value
        return powers


PRIMES = Prime(281474976694273), Prime(281474976636929)
MODULUS = PRIMES[0].value * PRIMES[1].value
ROOM = 32
"""Largest number of products in a total before `reduce`. Each product is at most 0.79 q."""


def _switching(prime: Prime, other: Prime) -> list[float]:
    inverse = prime.balanced(pow(other.value, -1, prime.value))
    fraction = (2**48 - prime.value) * 2**16 / prime.value
    return [prime.q, prime.balanced(2**56), prime.balanced(2**28), inverse, fraction]


_SWITCHING = np.array([_switching(*PRIMES), _switching(*PRIMES[::-1])])
_JOINING = PRIMES[1].balanced(pow(PRIMES[0].value, -1, PRIMES[1].value))


def add_products(x: Reals, multipliers: Reals, totals: Reals, prime: int) -> None:
    """Add the products of eight polynomials with each part's polynomial to ``totals``.

    Parameters
    ----------
    x : float64 (GROUP,)
        Alternating coefficients of magnitude up to 2^47. Overwritten with the transform.
    multipliers : float64 (parts, DEGREE)
        Polynomials from `transformed`.
    totals : float64 (parts, GROUP)
        Transforms. Call `reduce` on them after `ROOM` calls.
    prime : int
        0 or 1.
    """
    ring_loops.add_products(x, multipliers, totals, PRIMES[prime].modulus)


def add_encoded(
    values: NDArray[Any],
    *,
    scale: float,
    count: float,
    squares: Reals,
    scratch: Reals,
    multipliers: Reals,
    totals: Reals,
    prime: int,
) -> None:
    """Add products as `add_products` does, with the polynomials count · rint(scale · values).

    Parameters
    ----------
    values : float32 or float64 (GROUP,)
        Alternating coefficients.
    squares : float64 (512,)
        Partial sums, to which the squares of scale · values are added. The sum of all 512 grows by
        the sum of squares.
    scratch : float64 (GROUP,)
        Overwritten.
    multipliers, totals, prime
        See `add_products`.
    """
    modulus = PRIMES[prime].modulus
    ring_loops.add_encoded(values, scale, count, squares, scratch, multipliers, totals, modulus)


def _alternating(polynomials: Reals) -> Reals:
    """Return up to eight polynomials as one array, in which their coefficients alternate.

    Zeros take the place of missing polynomials.
    """
    x = np.zeros((DEGREE, LANES))
    x[:, : len(polynomials)] = polynomials.T
    return x.reshape(-1)


def transformed(polynomials: Reals, prime: int) -> Reals:
    """Return the transforms, reduced, of polynomials (count, DEGREE)."""
    result = np.empty(polynomials.shape)
    for start in range(0, len(polynomials), LANES):
        part = polynomials[start : start + LANES]
        x = _alternating(part)
        ring_loops.reduce(x, PRIMES[prime].q)
        ring_loops.transform(x, PRIMES[prime].modulus)
        ring_loops.reduce(x, PRIMES[prime].q)
        result[start : start + LANES] = x.reshape(DEGREE, LANES).T[: len(part)]
    return result


def inverted(transforms: Reals, prime: int) -> Reals:
    """Return the polynomials of transforms (count, DEGREE), as nonnegative residues."""
    result = np.empty(transforms.shape)
    for start in range(0, len(transforms), LANES):
        part = transforms[start : start + LANES]
        x = _alternating(part)
        invert(x, prime)
        result[start : start + LANES] = x.reshape(DEGREE, LANES).T[: len(part)]
    return result


def invert(x: Reals, prime: int) -> None:
    """Turn the transforms ``x`` of eight alternating polynomials back into the polynomials.

    The function writes their coefficients into ``x``, as nonnegative residues.
    """
    modulus = PRIMES[prime]
    ring_loops.invert(x, modulus.back, modulus.q, modulus.scale)


def reduce(x: Reals, prime: int) -> None:
    """Bring ``x`` (one-dimensional) below q in magnitude, in place."""
    ring_loops.reduce(x, PRIMES[prime].q)


def multiplied(x: Reals, y: Reals, prime: int) -> Reals:
    """Return x · y as nonnegative residues, for x below 2^50 and y below q / 2 in magnitude."""
    q = PRIMES[prime].value
    # Both products wrap modulo 2^64, but their difference is small, and therefore exact.
    quotient = np.rint(x * (y / q)).astype(np.int64)
    return ((x.astype(np.int64) * y.astype(np.int64) - quotient * q) % q).astype(np.float64)


def switch(residues: Reals, high: Reals, low: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Add 2^56 · ``high`` + ``low`` to numbers modulo q, and round the sums c to the modulus 2^64.

    Parameters
    ----------
    residues : float64 (2, count)
        Nonnegative residues of the numbers.
    high : float64 (count,)
        Whole numbers up to 2^50 in magnitude.
    low : int64 (count,)
        Numbers up to 2^56 in magnitude.

    Returns
    -------
    uint64 (count,)
        rint(c · 2^64 / q). If c · 2^64 / q is within 2^-20 of the middle between two integers, the
        result may be either of them.
    """
    words = np.empty(residues.shape[1], np.uint64)
    ring_loops.switch(residues[0], residues[1], high, low, _SWITCHING, words)
    return words


def to_residues(words: NDArray[np.int64], prime: int) -> Reals:
    """Return the residues of signed 64-bit integers modulo a prime."""
    x = np.empty(len(words))
    ring_loops.to_residues(words, PRIMES[prime].q, x)
    return x


def add_joined(words: NDArray[np.int64], residues: Reals) -> None:
    """Add signed numbers to the 64-bit integers ``words``, modulo 2^64.

    ``residues``, of shape (2, count), has each number modulo the two primes.
    """
    q1, q2 = (prime.value for prime in PRIMES)
    ring_loops.join(residues[0], residues[1], _JOINING, q1, q2, words)


def to_words(residues: Reals) -> bytes:
    """Return nonnegative residues of any shape as words."""
    return six_byte_words.pack(residues.reshape(-1).astype(np.uint64)).tobytes()


def from_words(data: Bytes, shape: tuple[int, ...], *, name: str) -> Reals:
    """Return the residues that `to_words` turned into ``data``, as an array of this ``shape``.

    The first axis has the length 2: one entry for each prime.

    Raises
    ------
    ValueError
        A residue is not below its prime; the error names the message ``name``.
    """
    words = np.frombuffer(data, np.uint8).reshape(-1, RESIDUE_BYTES)
    residues = six_byte_words.unpack(words).reshape(shape).astype(np.float64)
    for of_prime, prime in zip(residues, PRIMES, strict=True):
        if of_prime.size and of_prime.max() >= prime.q:
            raise InvalidValue(f"{name}: expected numbers below the prime {prime.value}")
    return residues
