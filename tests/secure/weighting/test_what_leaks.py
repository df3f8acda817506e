"""Attacks by the parties on the messages that they receive."""

import itertools
import math

import numpy as np
import pytest
from gmpy2 import invert, mpz, powmod
from scipy import stats

from flower_ext.secure.keys_and_ciphers import public_of
from flower_ext.secure.pair_keys import PairKeys
from flower_ext.secure.weighting import paillier_silo
from flower_ext.secure.weighting.encoding import from_residue
from flower_ext.secure.weighting.paillier_settings import PaillierSum, PaillierWeights
from flower_ext.secure.weighting.paillier_silo import PaillierOpenSum, dithered
from tests.support.weighting import World, key, numbers, root, weighting_settings

ROUNDS = 3


def world_of(counts, **changes) -> World:
    counts = np.array(counts)
    return World(weighting_settings(silos=len(counts), users=counts.shape[1], **changes), counts)


def ratio_is_small(value: mpz, modulus: mpz, largest: int) -> bool:
    """Return True if ``value`` is a / b with 1 <= a, b <= largest, which helps to guess counts."""
    return any((value * b) % modulus <= largest for b in range(1, largest + 1))


@pytest.fixture(scope="module")
def transcript():
    """Return all messages of rounds with the same input, and the world."""
    world = world_of([[3, 0, 7, 20], [5, 9, 0, 20], [1, 2, 8, 20]], slots=2)
    rng = np.random.default_rng(1)
    updates, noise = world.draw(rng)
    for number in range(1, ROUNDS + 1):
        world.run_round(number, updates, noise)
    return world, updates, noise


def of_kind(world, kind):
    return [message for message in world.sent if isinstance(message, kind)]


def test_no_number_is_sent_twice_though_every_round_has_the_same_input(transcript):
    world, _, _ = transcript
    facts = world.settings
    sent = []
    for counts in world.answers("count"):
        sent += numbers(counts, facts.count_bytes)
    for message in of_kind(world, PaillierWeights):
        sent += numbers(message.weights, facts.ciphertext_bytes)
    for message in of_kind(world, PaillierSum):
        sent += numbers(message.ciphertexts, facts.ciphertext_bytes)
    assert len(sent) == 3 * 4 + ROUNDS * 4 + ROUNDS * 3 * facts.ciphertexts
    assert len(set(sent)) == len(sent)


def test_no_count_blind_or_weight_is_sent_in_the_clear(transcript):
    """Neither as a residue nor inside a ciphertext that the server can decrypt."""
    world, _, _ = transcript
    n, facts = key().public.n, world.settings
    silo = world.silos[0]
    totals = world.counts.sum(0)
    secret = {mpz(int(x)) for x in np.unique([*world.counts.ravel(), *totals])}
    for user, blind in enumerate(silo._blinds):
        secret |= {blind, invert(blind, n)}
        for count in world.counts[:, user]:
            weight = int(count) * facts.common_multiple // int(totals[user])
            secret |= {mpz(weight), -mpz(weight) % n, blind * int(count) % n}
    received = []
    for counts in world.answers("count"):
        received += numbers(counts, facts.count_bytes)
    for message in of_kind(world, PaillierSum):
        ciphertexts = numbers(message.ciphertexts, facts.ciphertext_bytes)
        received += ciphertexts + key().decrypt(ciphertexts)
    assert not secret & set(received)
    assert min(x.bit_length() for x in received) > 400
    for message in of_kind(world, PaillierWeights):  # silos receive these, and cannot decrypt them
        weights = numbers(message.weights, facts.ciphertext_bytes)
        assert not secret & {x % n for x in weights}
    raw = b"".join(message.to_bytes() for message in world.sent)
    raw += b"".join(data for _, sent in world.asked + world.answered for data in sent.values())
    assert public_of(world.silos[1].private) in raw
    assert silo.seed not in raw
    assert silo.private not in raw


def test_no_single_silos_sum_can_be_decrypted(transcript):
    world, updates, noise = transcript
    facts, public = world.settings, key().public
    for message in of_kind(world, PaillierSum):
        ciphertexts = numbers(message.ciphertexts, facts.ciphertext_bytes)
        silo_noise = noise[message.silo].copy()
        for user in np.flatnonzero(world.counts[message.silo]):
            weight = world.counts[message.silo, user] / world.counts[:, user].sum()
            silo_noise += weight * updates[message.silo, user]
        encoded = facts.packing.pack(
            [int(x) * facts.common_multiple for x in np.rint(silo_noise / facts.step)]
        )
        for plaintext, expected in zip(key().decrypt(ciphertexts), encoded, strict=True):
            distance = abs(plaintext - expected % public.n)
            assert min(distance, public.n - distance).bit_length() > 400


def test_sums_of_some_silos_stay_masked(transcript):
    world, _, _ = transcript
    facts, public = world.settings, key().public
    sums = of_kind(world, PaillierSum)[:3]
    for some in itertools.combinations(sums, 2):
        product = mpz(1)
        for message in some:
            product *= numbers(message.ciphertexts, facts.ciphertext_bytes)[0]
        (plaintext,) = key().decrypt([product % public.n_squared])
        assert min(plaintext, public.n - plaintext) > facts.packing.largest


def test_uploads_are_uniform_to_the_server():
    """Ciphertexts of each silo are uniform over Z*_{n²}, in their messages and their randomness."""
    world = world_of([[1, 1], [1, 1]], coordinates=400, slots=1)
    sums = world.weigh(world.begin(1), np.zeros((2, 2, 400)), np.zeros((2, 400)))
    private = key()
    for message in sums:
        ciphertexts = numbers(message.ciphertexts, world.settings.ciphertext_bytes)
        randomness = [root(private, ciphertext) for ciphertext in ciphertexts]
        for values, modulus in (
            (ciphertexts, private.public.n_squared),
            (private.decrypt(ciphertexts), private.public.n),
            (randomness, private.public.n),
        ):
            shares = [float(x / modulus) for x in values]
            assert stats.kstest(shares, "uniform").pvalue > 1e-6


def blinded(world) -> tuple[list[list[mpz]], list[mpz]]:
    """Return what the server receives: each silo's blinded counts, and their totals, by place."""
    n, size = key().public.n, world.settings.count_bytes
    counts = [numbers(data, size) for data in world.answers("count")]
    return counts, [sum(column) % n for column in zip(*counts, strict=True)]


COUNTS = [[5, 9, 3, 20], [7, 1, 8, 20], [2, 2, 8, 20]]


def test_a_server_cannot_guess_counts_from_their_ratios():
    n = key().public.n
    counts, totals = blinded(world_of(COUNTS))
    for one, two in itertools.permutations(range(4), 2):
        assert not ratio_is_small(totals[one] * invert(totals[two], n), n, 180)
    for one, two in itertools.permutations(range(3), 2):
        for place in range(4):
            assert not ratio_is_small(counts[one][place] * invert(counts[two][place], n), n, 180)


def test_the_same_guess_succeeds_where_users_share_a_blind(monkeypatch):
    n = key().public.n
    monkeypatch.setattr(
        "flower_ext.secure.weighting.paillier_silo.user_blinds",
        lambda seed, users, n: [mpz(2) ** 300 + 1] * 4,
    )
    _, totals = blinded(world_of(COUNTS))
    assert ratio_is_small(totals[0] * invert(totals[1], n), n, 180)


def test_the_same_guess_succeeds_where_counts_are_not_masked(monkeypatch):
    n = key().public.n
    monkeypatch.setattr(
        PairKeys, "masked", lambda self, purpose, number, numbers, n: [mpz(x) % n for x in numbers]
    )
    counts, _ = blinded(world_of(COUNTS))
    assert ratio_is_small(counts[0][0] * invert(counts[1][0], n), n, 180)


def test_totals_are_uniform_whatever_the_counts():
    n = key().public.n
    for counts in ([[1] * 300, [0] * 300], [[60] * 300, [0] * 300]):
        _, totals = blinded(world_of(counts))
        assert stats.kstest([float(x / n) for x in totals], "uniform").pvalue > 1e-6


def test_a_server_learns_how_many_users_have_no_records_but_not_which():
    places = []
    for _ in range(60):
        _, totals = blinded(world_of([[1, 0, 1, 1], [1, 0, 1, 1]]))
        (place,) = [at for at, total in enumerate(totals) if total == 0]
        places.append(place)
    assert len(set(places)) == 4
    assert stats.chisquare(np.bincount(places, minlength=4)).pvalue > 1e-6


def guess_is_confirmed(world, message, sums, guess) -> list[bool]:
    """Test a guess of all updates as the key holder can, coordinate by coordinate.

    The key holder made the encryptions, so it knows their randomness. A guess of counts gives it
    the blinds. From both, and a guess of the updates, it predicts the randomness of the product of
    all uploads.
    """
    private, facts = key(), world.settings
    n, size = private.public.n, facts.ciphertext_bytes
    made = [root(private, x) for x in numbers(message.weights, size)]
    _, totals = blinded(world)
    order = world.silos[0]._order
    predicted = [mpz(1)] * facts.coordinates
    for place, user in enumerate(order):
        blind = totals[place] * invert(mpz(int(world.counts[:, user].sum())), n) % n
        for silo in range(facts.silos):
            factor = int(world.counts[silo, user]) * blind * facts.common_multiple % n
            base = powmod(made[place], factor, n)
            for at, encoded in enumerate(facts.encoding.encode(guess[silo, user])):
                predicted[at] = predicted[at] * powmod(base, int(encoded), n) % n
    products = [mpz(1)] * facts.coordinates
    for sent in sums:
        for at, x in enumerate(numbers(sent.ciphertexts, size)):
            products[at] = products[at] * x % private.public.n_squared
    return [root(private, x) == expected for x, expected in zip(products, predicted, strict=True)]


def decrypted(world, number: int) -> list[mpz]:
    """Return the integers that the server decrypts in a round without packing."""
    private, facts = key(), world.settings
    updates, noise = world.draw(np.random.default_rng(number))
    sums = world.weigh(world.begin(number), updates, noise)
    product = [mpz(1)] * facts.ciphertexts
    for message in sums:
        for at, x in enumerate(numbers(message.ciphertexts, facts.ciphertext_bytes)):
            product[at] = product[at] * x % private.public.n_squared
    return [from_residue(x, private.public.n) for x in private.decrypt(product)]


def denominator(world, sums: list[mpz]) -> int:
    """Return the denominator of the sums over C_LCM in lowest terms: it depends on the N_u only."""
    multiple = world.settings.common_multiple
    return math.lcm(*(multiple // math.gcd(int(x), multiple) for x in sums))


def test_without_a_dither_the_sum_shows_the_factors_of_all_totals(monkeypatch):
    monkeypatch.setattr(
        paillier_silo, "dithered", lambda encoded, settings: encoded * settings.common_multiple
    )
    world = world_of([[10, 4, 25], [3, 21, 24]], coordinates=20, slots=1)
    assert denominator(world, decrypted(world, 1)) == math.lcm(13, 25, 49)


def test_with_the_dither_the_sum_modulo_c_lcm_is_uniform():
    for counts in ([[10, 4, 25], [3, 21, 24]], [[1, 1, 1], [0, 0, 0]]):
        world = world_of(counts, coordinates=300, slots=1)
        multiple = world.settings.common_multiple
        sums = decrypted(world, 1)
        shares = [float(x % multiple / mpz(multiple)) for x in sums]
        assert stats.kstest(shares, "uniform").pvalue > 1e-6
        remainders = np.bincount([int(x) % 7 for x in sums], minlength=7)
        assert stats.chisquare(remainders).pvalue > 1e-6


def test_a_dither_moves_by_at_most_half_a_step_without_bias():
    facts = world_of([[10, 4, 25], [3, 21, 24]]).settings
    multiple = facts.common_multiple
    for encoded in (-7, 0, 10**6):
        moved = [dithered(encoded, facts) - encoded * multiple for _ in range(2_000)]
        assert max(map(abs, moved)) <= multiple / 2
        assert abs(float(sum(moved) / multiple)) / 2_000 < 5 * math.sqrt(1 / 12 / 2_000)


def round_of():
    world = world_of(COUNTS, coordinates=6, slots=1)
    updates, noise = world.draw(np.random.default_rng(5))
    message = world.begin(1)
    return world, message, world.weigh(message, updates, noise), updates


def test_without_rerandomisation_a_key_holder_confirms_guesses_of_coordinates(monkeypatch):
    monkeypatch.setattr(PaillierOpenSum, "_rerandomise", lambda self, total: None)
    world, message, sums, updates = round_of()
    guess = updates.copy()
    guess[1, 2, 3] += 1e-9
    assert guess_is_confirmed(world, message, sums, guess) == [True] * 3 + [False] + [True] * 2


def test_with_rerandomisation_a_sum_confirms_no_guess():
    world, message, sums, updates = round_of()
    assert guess_is_confirmed(world, message, sums, updates) == [False] * 6


def test_every_coordinate_is_rerandomised_by_one_silo_in_turn(monkeypatch):
    """If a silo skipped its turn, its share could be guessed in every round."""
    untouched = PaillierOpenSum._rerandomise
    monkeypatch.setattr(
        PaillierOpenSum,
        "_rerandomise",
        lambda self, total: None if self._silo.index == 1 else untouched(self, total),
    )
    world = world_of(COUNTS, coordinates=6, slots=1)
    updates, noise = world.draw(np.random.default_rng(5))
    shares = []
    for number in (1, 2, 3):
        message = world.begin(number)
        sums = world.weigh(message, updates, noise)
        shares.append(guess_is_confirmed(world, message, sums, updates))
    assert np.array(shares).sum(0).tolist() == [1] * 6
    assert np.array(shares).sum(1).tolist() == [2] * 3


def test_parties_do_not_show_their_secrets(transcript):
    world, _, _ = transcript
    silo = world.silos[1]
    secret = [silo.seed, silo.private]
    shown = "".join(repr(x) + str(x) for x in (world.server, *world.silos, silo._pairs))
    for value in secret:
        assert value.hex() not in shown
        assert repr(value) not in shown
    for number in (*silo._blinds, key().p, key().q):
        assert str(number) not in shown
    assert len(shown) < 2000
