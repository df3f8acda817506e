"""Random numbers of the ring have their distributions, and fresh streams are independent."""

import numpy as np
import pytest
from scipy import stats

from flower_ext_lattice.ring import PRIMES
from flower_ext_lattice.samplers import Stream, public_polynomial
from tests.support.grids import grid

COUNT = 300_000


def stream(number=1) -> Stream:
    return Stream(bytes([number]) * 32)


def test_errors_are_binomial():
    drawn = stream().errors(COUNT)
    values, expected = np.arange(-21, 22), stats.binom.pmf(np.arange(43), 42, 0.5) * COUNT
    counted = np.array([(drawn == value).sum() for value in values])
    common = expected > 5
    assert counted.sum() == COUNT
    assert (
        stats.chisquare(
            [*counted[common], counted[~common].sum()], [*expected[common], expected[~common].sum()]
        ).pvalue
        > 1e-6
    )


def test_ternary_numbers_are_uniform():
    drawn = stream().ternary(COUNT)
    counted = [(drawn == value).sum() for value in (-1, 0, 1)]
    assert sum(counted) == COUNT
    assert stats.chisquare(counted).pvalue > 1e-6


def test_no_byte_of_ternary_numbers_favours_zero():
    """Of all 256 bytes modulo 3, one value would come 86 times and the others 85 times."""

    class Counting(Stream):
        def octets(self, count):
            return np.resize(np.arange(256, dtype=np.uint8), count)

    drawn = Counting(bytes(32)).ternary(255)
    assert [(drawn == value).sum() for value in (-1, 0, 1)] == [85, 85, 85]


@pytest.mark.parametrize("bits", grid([1, 56, 63], lambda bits: bits != 56))
def test_dithers_are_uniform_in_high_and_in_low_bits(bits):
    drawn = stream().dither(COUNT, bits)
    assert drawn.min() >= 0
    assert drawn.max() < 2**bits
    for part in (drawn / 2.0**bits, (drawn % 256 + 0.5) / min(256, 2**bits)):
        if bits > 8:
            assert stats.kstest(part, "uniform").pvalue > 1e-6
    assert abs((drawn & 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(COUNT)


def test_residues_are_uniform_below_their_prime():
    for prime, modulus in enumerate(PRIMES):
        drawn = stream().uniform(COUNT, prime)
        assert (drawn == np.rint(drawn)).all()
        assert drawn.max() < modulus.q
        assert stats.kstest(drawn / modulus.q, "uniform").pvalue > 1e-6
        assert stats.kstest(drawn % 256 / 256 + 1 / 512, "uniform").pvalue > 1e-9


def test_a_residue_above_the_prime_is_drawn_again():
    class Scripted(Stream):
        def octets(self, count):
            scripted = np.full((count // 6, 6), 255, np.uint8)
            scripted[::2] = [1, 0, 0, 0, 0, 0]
            return scripted.reshape(-1)

    assert (Scripted(bytes(32)).uniform(10, 0) == 1).all()


def test_fresh_streams_share_nothing_and_known_keys_determine_all():
    assert not (Stream.fresh().words(8) == Stream.fresh().words(8)).any()
    assert (stream().words(8) == stream().words(8)).all()
    assert not (stream(1).words(8) == stream(2).words(8)).any()


def test_known_answers():
    """The expected numbers are read from the bytes of ChaCha20 one at a time."""
    assert stream().errors(12).tolist() == [5, 0, 5, -1, 1, 3, 3, 7, -4, -1, 1, 0]
    assert stream().ternary(12).tolist() == [
        1.0,
        -1.0,
        0.0,
        1.0,
        0.0,
        -1.0,
        0.0,
        0.0,
        0.0,
        -1.0,
        0.0,
        0.0,
    ]
    assert stream().dither(2, 56).tolist() == [55298993401378623, 47354165229037158]
    assert stream().uniform(2, 0).tolist() == [39832067194626.0, 31501003900022.0]
    assert public_polynomial(bytes(32), "weights", 1, 2)[:, 0].tolist() == [
        141269041159472.0,
        46700108796511.0,
    ]


def test_words_are_those_of_rfc_8439():
    """The first test vector of ChaCha20 there has a key and a nonce of zeros."""
    assert Stream(bytes(32)).octets(16).tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"
