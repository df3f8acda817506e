"""Paillier encryption equals that of phe, with fresh and uniform randomness."""

import phe
import pytest
from gmpy2 import gcd, mpz, next_prime, powmod, primorial
from scipy import stats

from flower_ext.secure.weighting.paillier import PrivateKey, PublicKey, generate_key
from tests.support.weighting import key, root


def encrypt(public: PublicKey, message: int, zero: mpz | None = None) -> mpz:
    """Return a ciphertext of ``message`` by ``zero``, by default with a fresh one."""
    zero = public.zeros(1)[0] if zero is None else zero
    return public.plain(mpz(message)) * zero % public.n_squared


def test_ciphertexts_are_those_of_phe():
    private = key()
    public = phe.PaillierPublicKey(int(private.public.n))
    theirs = phe.PaillierPrivateKey(public, int(private.p), int(private.q))
    for message in (0, 1, 12345, int(private.public.n) - 1):
        for ciphertext in (encrypt(private.public, message), *private.encrypt([mpz(message)])):
            assert theirs.raw_decrypt(int(ciphertext)) == message
        assert private.decrypt([mpz(public.raw_encrypt(message))]) == [message]


def test_sums_and_multiples_under_encryption():
    private = key()
    n, n_squared = private.public.n, private.public.n_squared
    one, two = private.encrypt([mpz(20), n - 3])
    assert private.decrypt([one * two % n_squared]) == [17]
    assert private.decrypt([powmod(one, 4, n_squared)]) == [80]
    assert private.decrypt([one * private.public.plain(mpz(-21)) % n_squared]) == [n - 1]


def test_both_ways_of_encrypting_draw_the_randomness_uniformly():
    """The key is so small that the test sees every unit: 7 · 11, with 60 units."""
    private = PrivateKey(mpz(13), mpz(11))
    units = [r for r in range(1, 143) if gcd(r, 143) == 1]
    draws = 120 * 40
    for ciphertexts in (
        private.encrypt([mpz(5)] * draws),
        [encrypt(private.public, 5) for _ in range(draws)],
    ):
        seen = [int(root(private, ciphertext)) for ciphertext in ciphertexts]
        counts = [seen.count(unit) for unit in units]
        assert sum(counts) == draws
        assert stats.chisquare(counts).pvalue > 1e-6
        assert set(private.decrypt(ciphertexts[:100])) == {5}


def test_randomness_is_fresh_every_time():
    private = key()
    ciphertexts = private.encrypt([mpz(1)] * 200)
    ciphertexts += [encrypt(private.public, 1) for _ in range(50)]
    zeros = private.public.zeros(250)
    n_squared = private.public.n_squared
    again = [text * zero % n_squared for text, zero in zip(ciphertexts, zeros, strict=True)]
    assert len({*ciphertexts, *again}) == 500
    assert set(private.decrypt(again)) == {1}


def test_numbers_that_are_no_ciphertext_are_refused():
    private = key()
    n_squared = private.public.n_squared
    for wrong in (mpz(0), mpz(-1), n_squared, n_squared + 1, private.p, 5 * private.public.n):
        with pytest.raises(ValueError, match="unit modulo n²"):
            private.decrypt([wrong])


def test_small_keys_are_for_tests_only():
    with pytest.raises(ValueError, match="key_bits=2048: expected at least 3072"):
        generate_key(2048)
    for odd in (513, 10, -4, 10**9):
        with pytest.raises(ValueError, match="even integer"):
            generate_key(odd, allow_insecure_key_size=True)
    for bits in (128, 256, 514):
        assert key(bits).public.n.bit_length() == bits


def test_moduli_that_no_key_has_are_refused():
    n = key().public.n
    key().public.check(512, coprime_to=2000)
    for modulus, match in (
        (n >> 1, "511 bits"),
        (n - 1, "two large primes"),
        (key(1024).p, "two large primes"),
        (max(key().p, key().q) ** 2, "two large primes"),
    ):
        with pytest.raises(ValueError, match=match):
            PublicKey(modulus).check(512, coprime_to=1)
    for p, q in ((key().p, key().p), (key().p, key(256).q)):
        with pytest.raises(ValueError, match="two different"):
            PrivateKey(p, q)


def test_moduli_with_a_factor_that_a_total_may_share_are_refused():
    """A total times a uniform blind is uniform only if the total is a unit modulo n."""
    rough = next_prime(mpz(63) << 500) * 59
    assert rough.bit_length() == 512
    PublicKey(rough).check(512, coprime_to=58)
    smooth = next_prime(mpz(2) ** 200) * primorial(300) // 2
    for modulus, largest in ((rough, 59), (rough, 2000), (smooth, 3)):
        with pytest.raises(ValueError, match=f"a factor of {largest} or less"):
            PublicKey(modulus).check(modulus.bit_length(), coprime_to=largest)


def test_keys_differ_and_their_primes_are_not_shown():
    assert key(256, 0).p != key(256, 1).p
    private = key()
    for shown in (repr(private), str(private), f"{private}"):
        assert str(private.p) not in shown
        assert str(private.q) not in shown
        assert hex(private.p)[2:] not in shown
