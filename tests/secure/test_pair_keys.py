import itertools

import numpy as np
import pytest
from gmpy2 import mpz
from scipy import stats

from flower_ext.errors import ProtocolError
from flower_ext.secure.keys_and_ciphers import derive, public_of
from flower_ext.secure.pair_keys import PairKeys, uniform_residues

SERVER_KEY = b"server key"
MODULUS = mpz(2) ** 89 - 1  # a prime, so that every draw but zero is invertible


PRIVATES = [bytes([i]) * 32 for i in range(1, 8)]
PUBLIC = [public_of(private) for private in PRIVATES]


def keys_of(index, public=PUBLIC[:3], context=b"run", server_key=SERVER_KEY) -> PairKeys:
    """Return a silo's keys with silos of these public keys."""
    return PairKeys(
        context=context,
        index=index,
        private=PRIVATES[index],
        public_keys=public,
        server_key=server_key,
    )


def agreed(silos: int = 4, context: bytes = b"run") -> list[PairKeys]:
    return [keys_of(i, PUBLIC[:silos], context) for i in range(silos)]


@pytest.mark.parametrize("silos", [2, 3, 7])
def test_masks_of_all_silos_cancel_and_those_of_fewer_do_not(silos):
    pairs = agreed(silos)
    added = [pair.masked("a", 1, [0] * 10, MODULUS) for pair in pairs]
    multiplied = [pair.multiplicative_masks("m", 1, 10, MODULUS) for pair in pairs]
    for size in range(1, silos + 1):
        for some in itertools.combinations(range(silos), size):
            for at in range(10):
                product = mpz(1)
                for silo in some:
                    product = product * multiplied[silo][at] % MODULUS
                total = sum(added[silo][at] for silo in some) % MODULUS
                assert (total == 0) == (product == 1) == (size == silos)


def test_each_run_round_purpose_pair_and_place_has_independent_masks():
    seen = []
    for context in (b"run", b"other run"):
        for pair in agreed(4, context):
            for purpose in ("a", "b"):
                for round_number in (0, 1, 2):
                    seen += pair.masked(purpose, round_number, [0] * 3, MODULUS)
            seen += pair.multiplicative_masks("c", 1, 3, MODULUS)
    assert len(set(seen)) == len(seen)


def test_labels_cannot_be_read_as_one_another():
    labels = [("a", "b"), ("ab",), ("a", b"b"), ("a", "1"), ("a", 1), ("a1",), ("a", "b", ""), ()]
    assert len({derive(b"k", *label) for label in labels}) == len(labels)


@pytest.mark.parametrize("part", [np.int64(3), True, None, 1.5])
def test_a_label_that_parties_could_encode_differently_is_refused(part):
    with pytest.raises(ValueError, match="expected a str, an int or bytes"):
        derive(b"k", "a", part)


def test_a_mask_is_drawn_once():
    pair = agreed()[0]
    pair.masked("a", 1, [0, 0], MODULUS)
    for draw in (
        lambda: pair.masked("a", 1, [0, 0], MODULUS),
        lambda: pair.multiplicative_masks("a", 1, 2, MODULUS),
    ):
        with pytest.raises(ProtocolError, match="'a' of round 1 were drawn before"):
            draw()


def test_residues_are_uniform_even_for_a_modulus_between_powers_of_two():
    modulus = mpz(3) << 60
    drawn = uniform_residues(bytes(32), 60_000, modulus)
    assert max(drawn) < modulus
    shares = np.array([float(x) for x in drawn]) / float(modulus)
    assert stats.kstest(shares, "uniform").pvalue > 1e-6
    lowest = np.bincount([int(x) % 8 for x in drawn], minlength=8)
    assert stats.chisquare(lowest).pvalue > 1e-6
    assert abs(np.corrcoef(shares[1:], shares[:-1])[0, 1]) < 0.03


@pytest.mark.parametrize("bits", range(57, 73))
def test_each_draw_has_at_least_128_bits_more_than_the_modulus(bits):
    class Modulus:
        """Keeps a draw whole: the remainder would hide how long it was."""

        def bit_length(self):
            return bits

        def __rmod__(self, drawn):
            return drawn

    drawn = zip(*(uniform_residues(bytes([i]) * 32, 3, Modulus()) for i in range(60)), strict=True)
    assert all(max(at_one_place).bit_length() >= bits + 128 for at_one_place in drawn)


def test_one_silos_masks_are_uniform():
    masks = agreed(3)[1].multiplicative_masks("m", 1, 20_000, MODULUS)
    shares = np.array([float(x) for x in masks]) / float(MODULUS)
    assert stats.kstest(shares, "uniform").pvalue > 1e-6


LOW_ORDER = [
    bytes(32),
    (1).to_bytes(32, "little"),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    (2**255 - 20).to_bytes(32, "little"),
    (2**255 - 19).to_bytes(32, "little"),
    (2**255 - 18).to_bytes(32, "little"),
]


@pytest.mark.parametrize("public", [*LOW_ORDER, b"", bytes(31), bytes(33)], ids=range(10))
def test_public_keys_of_low_order_or_wrong_length_are_refused(public):
    with pytest.raises(ValueError, match=r"public_keys\[2\]"):
        keys_of(0, [*PUBLIC[:2], public])


def test_foreign_and_repeated_public_keys_are_refused():
    for keys, match in (
        ([PUBLIC[1], PUBLIC[0]], "public key of this silo"),
        ([PUBLIC[2], PUBLIC[1]], "public key of this silo"),
        ([PUBLIC[0], PUBLIC[0]], "a different key"),
        ([*PUBLIC[:2], PUBLIC[1]], "a different key"),
    ):
        with pytest.raises(ValueError, match=match):
            keys_of(0, keys)


def test_fingerprints_agree_unless_somebody_swapped_a_key():
    pairs = agreed(3)
    assert len({pair.fingerprint for pair in pairs}) == 1
    swapped = keys_of(0, [PUBLIC[0], PUBLIC[5], PUBLIC[2]])
    assert swapped.fingerprint != pairs[1].fingerprint


def test_silos_that_received_different_server_keys_agree_on_nothing():
    pairs = agreed(3)
    pairs[1] = keys_of(1, server_key=b"another server key")
    assert pairs[0].fingerprint == pairs[2].fingerprint != pairs[1].fingerprint
    sealed = pairs[0].seal(1, "seed", b"secret")
    with pytest.raises(ValueError, match="in this run"):
        pairs[1].open(0, "seed", sealed)


def test_a_sealed_message_opens_for_its_receiver_run_and_purpose_only():
    one, two, three, _ = agreed(4)
    sealed = one.seal(1, "seed", b"secret")
    assert two.open(0, "seed", sealed) == b"secret"
    assert b"secret" not in sealed
    assert one.seal(1, "seed", b"secret") != sealed
    elsewhere = agreed(4, b"other run")[1]
    flipped = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for opener, sender, purpose, text in (
        (three, 0, "seed", sealed),
        (two, 2, "seed", sealed),
        (two, 0, "other", sealed),
        (elsewhere, 0, "seed", sealed),
        (two, 0, "seed", flipped),
        (two, 0, "seed", b""),
        (one, 1, "seed", sealed),  # sent back to its sender
    ):
        with pytest.raises(ValueError, match="sealed message"):
            opener.open(sender, purpose, text)


def test_a_silo_without_a_key_is_refused_by_its_number():
    pair = agreed(2)[0]
    for exchange in (pair.seal, pair.open):
        with pytest.raises(ProtocolError, match="no key with silo 2"):
            exchange(2, "seed", b"message")


def test_secrets_are_not_shown():
    pair = agreed()[0]
    shown = repr(pair) + str(pair)
    for secret in (PRIVATES[0], *pair._keys.values()):
        assert secret.hex() not in shown
        assert repr(secret) not in shown
