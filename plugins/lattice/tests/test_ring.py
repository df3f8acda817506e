import hashlib
import random
from fractions import Fraction
from itertools import product

import numpy as np
import plain_ring
import pytest

from flower_ext.errors import InvalidValue
from flower_ext_lattice import ring, ring_loops
from flower_ext_lattice.layout import DEGREE, GROUP, LANES
from flower_ext_lattice.ring import MODULUS, PRIMES
from flower_ext_lattice.six_byte_words import pack, unpack
from tests.support.grids import grid

Q1, Q2 = (prime.value for prime in PRIMES)


@pytest.fixture(params=[ring_loops, plain_ring], ids=["compiled", "plain"])
def work(request, monkeypatch):
    monkeypatch.setattr(ring, "ring_loops", request.param)
    return request.param


def python_product(a, b, q) -> list[int]:
    """Multiply modulo X^n + 1 and q in Python's integers, each coefficient in 17 bytes."""
    size = 17
    packs = [b"".join((int(x) % q).to_bytes(size, "little") for x in p) for p in (a, b)]
    one, other = (int.from_bytes(pack, "little") for pack in packs)
    product = (one * other).to_bytes(2 * DEGREE * size, "little")
    parts = [product[at : at + size] for at in range(0, len(product), size)]
    coefficients = [int.from_bytes(part, "little") for part in parts]
    return [(x - y) % q for x, y in zip(coefficients[:DEGREE], coefficients[DEGREE:], strict=True)]


def alternating(polynomial, lane) -> np.ndarray:
    spread = np.zeros((DEGREE, LANES))
    spread[:, lane] = polynomial
    return spread.reshape(-1)


def test_primes_are_of_48_bits_and_1_modulo_2n():
    for q in (Q1, Q2):
        assert q.bit_length() == 48
        assert q % (2 * DEGREE) == 1
        assert pow(2, q - 1, q) == 1
    assert MODULUS.bit_length() == 96


@pytest.mark.parametrize(
    ("kind", "prime"),
    grid(
        product(["random", "extreme", "alternating"], [0, 1]),
        lambda case: case[1] == (case[0] == "extreme"),
    ),
)
def test_sums_of_products_are_those_of_pythons_integers(work, prime, kind):
    """The sums have as many products as `ROOM` permits, and the largest numbers."""
    q = PRIMES[prime].value
    rng = random.Random(prime)
    if kind == "random":
        a = [rng.randrange(-(q // 2), q // 2) for _ in range(DEGREE)]
        b = [rng.randrange(q) for _ in range(DEGREE)]
    elif kind == "extreme":
        a, b = [q // 2] * DEGREE, [q // 2] * DEGREE
    else:
        a = [(-1) ** i * (q // 2) for i in range(DEGREE)]
        b = [q // 2 + (i % 2) for i in range(DEGREE)]
    key = ring.transformed(np.array([b], float), prime)
    total = np.zeros((1, GROUP))
    for _ in range(ring.ROOM):
        ring.add_products(alternating(a, 3), key, total, prime)
    ring.reduce(total[0], prime)
    ring.invert(total[0], prime)
    lanes = total[0].reshape(DEGREE, LANES)
    expected = [ring.ROOM * x % q for x in python_product(a, b, q)]
    assert lanes[:, 3].astype(np.int64).tolist() == expected
    assert not np.delete(lanes, 3, axis=1).any()


def test_transforms_stay_within_the_bounds_that_exactness_needs(work):
    for prime, own in enumerate(PRIMES):
        q = own.value
        for signs in (np.ones(DEGREE), np.sign(own.roots), -np.sign(own.back)):
            x = np.repeat(signs * (q // 2), LANES)
            total = np.zeros((1, GROUP))
            ring.add_products(x, np.full((1, DEGREE), float(q // 2)), total, prime)
            assert np.abs(x).max() < 10 * q
            assert np.abs(total).max() < 0.8 * q


def test_transforms_are_undone(work):
    rng = np.random.default_rng(0)
    for prime, own in enumerate(PRIMES):
        polynomials = rng.integers(0, own.value, (3, DEGREE)).astype(float)
        found = ring.inverted(ring.transformed(polynomials, prime), prime)
        assert (found == polynomials).all()


def test_switching_rounds_to_the_nearest_word_of_64_bits(work):
    rng = random.Random(0)
    numbers = [rng.randrange(MODULUS) for _ in range(500)] + [0, 1, MODULUS - 1, MODULUS // 2]
    high = [rng.randrange(-(2**45), 2**45) for _ in numbers]
    low = [rng.randrange(2**56) for _ in numbers]
    low[-1], high[-1], low[-2], high[-2] = 0, 0, -21, 0
    residues = np.array([[x % q for x in numbers] for q in (Q1, Q2)], float)
    words = ring.switch(residues, np.array(high, float), np.array(low))
    for word, number, h, x in zip(words.tolist(), numbers, high, low, strict=True):
        exact = Fraction((number + 2**56 * h + x) % MODULUS * 2**64, MODULUS)
        distance = abs(word - exact)
        assert min(distance, 2**64 - distance) <= Fraction(1, 2) + Fraction(1, 2**20)


def test_words_split_into_residues_and_join_again(work):
    words = np.random.default_rng(0).integers(-(2**63), 2**63, 1000)
    words[:2] = -(2**63), 2**63 - 1
    residues = np.array([np.mod(ring.to_residues(words, p), PRIMES[p].q) for p in (0, 1)])
    for own, q in zip(residues, (Q1, Q2), strict=True):
        assert own.astype(np.int64).tolist() == [int(word) % q for word in words]
    found = np.zeros(1000, np.int64)
    ring.add_joined(found, residues)
    assert (found == words).all()


def test_words_of_six_bytes_are_little_endian_and_drop_high_bits():
    words = pack(np.array([2**48 + 258, 2**48 - 1, 0], np.uint64))
    assert words.tobytes() == bytes([2, 1, 0, 0, 0, 0]) + b"\xff" * 6 + bytes(6)
    assert unpack(words).tolist() == [258, 2**48 - 1, 0]


def test_words_that_are_not_below_their_prime_are_refused():
    residues = np.array([[Q1 - 1], [Q2 - 1]], float)
    assert (ring.from_words(ring.to_words(residues), (2, 1), name="x") == residues).all()
    residues[1] = Q2
    with pytest.raises(InvalidValue, match=f"x: expected numbers below the prime {Q2}"):
        ring.from_words(ring.to_words(residues), (2, 1), name="x")


def test_known_answers(work):
    """Fixed products have fixed words, so that a change of the ring is noticed."""
    x = np.arange(GROUP, dtype=float) * 2**20 - 2**34
    key = ring.transformed(np.arange(DEGREE, dtype=float)[None] * 2**33, 1)
    total = np.zeros((1, GROUP))
    ring.add_products(x, key, total, 1)
    ring.invert(total[0], 1)
    digest = hashlib.sha256(ring.to_words(total)).hexdigest()
    assert digest[:16] == "e49cef03a9cae9b7"


def test_encoding_rounds_to_whole_steps_and_sums_squares(work):
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        values = rng.standard_normal(GROUP).astype(dtype)
        x, squares, own = np.empty(GROUP), np.zeros(512), ring.PRIMES[0]
        nothing = np.empty((0, DEGREE)), np.empty((0, GROUP))
        work.add_encoded(values, 2.0**30, 7.0, squares, x, *nothing, own.modulus)
        work.invert(x, own.back, own.q, own.scale)
        assert (x == np.mod(7 * np.rint(values.astype(float) * 2**30), own.q)).all()
        assert squares.sum() == pytest.approx(np.square(values.astype(float) * 2**30).sum())
