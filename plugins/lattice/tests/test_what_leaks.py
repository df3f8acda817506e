"""Attacks by parties on the messages that they receive.

Each attack finds nothing in what the parties send, and succeeds on a copy that lacks one
correction of the protocol.
"""

import dataclasses
import itertools
from copy import copy

import numpy as np
import pytest
from lattice_world import LatticeWorld, lattice_settings, open_sum, weigh
from scipy import stats

from flower_ext.errors import InvalidValue
from flower_ext.secure.pair_keys import PairKeys
from flower_ext_lattice import encrypted_sum, ring, weights
from flower_ext_lattice.keys import SecretKey
from flower_ext_lattice.layout import DEGREE
from flower_ext_lattice.messages import LatticeSum, LatticeWeights
from flower_ext_lattice.samplers import Stream
from flower_ext_lattice.settings import LatticeSettings
from flower_ext_lattice.silo import LatticeSilo
from flower_ext_lattice.six_byte_words import unpack
from flower_ext_lattice.weights import weight_table
from tests.support.weighting import close

COORDINATES = 3000


def world_of(counts, **changes) -> LatticeWorld:
    counts = np.array(counts)
    facts = {"silos": len(counts), "users": counts.shape[1], "coordinates": COORDINATES}
    return LatticeWorld(lattice_settings(**facts | changes), counts)


@pytest.fixture(scope="module")
def world():
    world = world_of([[3, 0], [5, 9]])
    world.updates, world.noise = world.draw(np.random.default_rng(1))
    return world


def first_words(message: LatticeSum) -> np.ndarray:
    """Return the words of c0 as 64-bit numbers; silos do not send their two lowest bytes."""
    return unpack(np.frombuffer(message.first, np.uint8).reshape(-1, 6)) << np.uint64(16)


def second_words(message: LatticeSum) -> np.ndarray:
    return np.frombuffer(message.second, "<u8")


def opened(world, messages) -> np.ndarray:
    """Return c0 + c1 · s of some silos' sums, at all words of c0: the server's whole view."""
    group = encrypted_sum.Group(world.settings, 0)
    total = np.sum([first_words(message) for message in messages], axis=0, dtype=np.uint64)
    second = np.sum([second_words(message) for message in messages], axis=0, dtype=np.uint64)
    whole = encrypted_sum._opened(group, world.server._secret, second)
    return total.view(np.int64) + whole[: len(total)]


def below_a_step(world, messages) -> np.ndarray:
    """Return the eight highest bits of the sum below a step, in units of 2^-k."""
    total = opened(world, messages)
    return (total - np.rint(total * encrypted_sum._EXCESS).astype(np.int64)) % 2**24 >> 16


def next_round(world):
    return world.begin(world.server._last_round + 1)


def round_of(world, updates=None, noise=None) -> list[LatticeSum]:
    """Return all silos' sums of the next round."""
    opening = next_round(world)
    return world.weigh(
        opening,
        world.updates if updates is None else updates,
        world.noise if noise is None else noise,
    )


# Words of padding


def label_of(message: LatticeWeights) -> bytes:
    return weights._label(message.epoch, message.nonce)


def errors_of(world, message: LatticeWeights) -> np.ndarray:
    """Return e_u of every place as the server knows it: b_u + a_u · s without constant word."""
    users = world.settings.users
    words = np.zeros((2, users, DEGREE))
    words[:, :, 1:] = ring.from_words(message.words, (2, users, DEGREE - 1), name="x")
    masks = weights._masks(world.server._public_seed, label_of(message), range(users))
    zero = np.zeros((users, DEGREE))
    errors = words[0] - world.server._secret.encryptions(masks, zero)[0]
    q = ring.PRIMES[0].q
    errors = np.mod(errors + q // 2, q) - q // 2
    errors[:, 0] = 0
    return errors


def padding_filter(world, message, total: np.ndarray, update: np.ndarray, place: int) -> float:
    """Correlate words beyond the coordinates with what a user's update would leave there."""
    padding = np.zeros(DEGREE)
    padding[: len(update)] = update
    product = np.fft.fft(np.concatenate([padding, np.zeros(DEGREE)])) * np.fft.fft(
        np.concatenate([errors_of(world, message)[place], np.zeros(DEGREE)])
    )
    long = np.fft.ifft(product).real
    expected = (long[:DEGREE] - long[DEGREE:])[COORDINATES:]
    words = total[COORDINATES:].astype(float)
    if len(words) == 0:
        return 0.0
    return float(np.corrcoef(words, expected)[0, 1])


class WithPadding(encrypted_sum.EncryptedSum):
    """A copy that also sends the words of c0 beyond the coordinates, without noise or dither."""

    def words(self, noise, masks):
        group = encrypted_sum.Group(self._settings, 0)
        residues, errors, dither = self._rerandomised(group)
        padding = np.zeros(DEGREE)
        padding[: len(noise)] = np.rint(noise / self._settings.step)
        dither[len(noise) :] = 0
        one = ring.switch(np.ascontiguousarray(residues[:, 0]), padding, dither)
        two = ring.switch(np.ascontiguousarray(residues[:, 1]), np.zeros(DEGREE), errors)
        return one.astype("<u8").tobytes(), two.tobytes()


def test_padding_that_would_reveal_participants_is_never_sent():
    world = world_of([[1500, 0], [5, 9]], silo_record_limits=(2000, 10))
    world.updates, world.noise = world.draw(np.random.default_rng(1))
    epoch, update, place = world.begin(1).weights, world.updates[0, 0], world.order.index(0)
    another = world.draw(np.random.default_rng(8))[0][0, 0]

    faulty = WithPadding(world.settings, world.silos[0].public)
    faulty.add([update], [1500], world.silos[0].opened(epoch).encryptions([place]))
    first, second = (np.frombuffer(words, "<i8") for words in faulty.words(world.noise[0], []))
    group = encrypted_sum.Group(world.settings, 0)
    total = first + encrypted_sum._opened(group, world.server._secret, second.view(np.uint64))
    assert padding_filter(world, epoch, total, update, place) > 0.9
    assert abs(padding_filter(world, epoch, total, another, place)) < 0.3

    messages = round_of(world)
    total = opened(world, messages)
    assert all(len(first_words(message)) == COORDINATES for message in messages)
    assert len(total) == COORDINATES
    assert padding_filter(world, epoch, total, update, place) == 0


# A repeated epoch


def read_totals(silo, kept: LatticeWeights, repeated: LatticeWeights) -> list[int]:
    """Return N_u of all places from two sets of weights: one for all users, one for none.

    The silo subtracts what it opened. The errors of an entry are small against the weights.
    """
    prime = ring.PRIMES[0].value
    constants = [
        weights.OpenedWeights(
            silo.settings,
            silo._server_key.public_seed,
            message,
            keys=silo._entry_keys,
            shifts=silo.shifts,
        )._constants
        for message in (kept, repeated)
    ]
    table = weight_table(silo.settings.table_size)
    totals = []
    for place in range(silo.settings.users):
        difference = int(constants[0][0, place] - constants[1][0, place]) - table
        distance = (difference + prime // 2) % prime - prime // 2
        nearest = int(np.argmin(np.abs(distance)))
        totals.append(nearest if abs(int(distance[nearest])) < 2**12 else -1)
    return totals


@pytest.mark.parametrize("constant", [False, True], ids=["fresh bytes", "constant bytes"])
def test_a_silo_with_both_messages_of_a_repeated_epoch_reads_no_total(monkeypatch, constant):
    """A server that was restored from a copy opens an epoch twice.

    The planted fault: weights without fresh bytes, whose difference shows the drawn weights.
    """
    world = world_of([[3, 0], [5, 9]])
    silo = world.silos[0]
    totals = [int(world.counts.sum(0)[user]) for user in world.order]
    if constant:
        monkeypatch.setattr(weights, "_label", lambda epoch, nonce: epoch.to_bytes(40, "big"))
    messages = []
    for drawn in (None, []):
        again = copy(world)
        again.server = copy(world.server)
        messages.append(again.begin(1, drawn).weights)
    assert messages[0].epoch == messages[1].epoch
    assert messages[0].words != messages[1].words
    assert read_totals(silo, *messages) == (totals if constant else [-1, -1])


# Limits


def weight_sums(world) -> np.ndarray:
    """Σ_s n_su · W of every user, in whole weights, as the silos' encryptions have it."""
    message = world.begin(1).weights
    silo = world.silos[0]
    masks = weights._masks(
        silo._server_key.public_seed, label_of(message), range(world.settings.users)
    )
    users = world.settings.users
    pairs = silo.opened(message).encryptions(range(users))
    sums = np.empty((2, users))
    for prime, modulus in enumerate(ring.PRIMES):
        product = ring.multiplied(masks[prime], world.server._secret.transforms[prime], prime)
        plain = ring.inverted(np.mod(pairs[:, prime, 0] + product, modulus.q), prime)
        sums[prime] = plain[:, 0]
    words = np.zeros(users, np.int64)
    ring.add_joined(words, sums)
    return world.counts.sum(0)[world.order] * words / 2.0**56


def test_a_user_beyond_the_limits_is_refused(monkeypatch):
    """If silos checked totals only, N_u could reach M, and the table would give a wrong weight."""
    world = world_of([[20, 3], [20, 2]])
    assert weight_sums(world) == pytest.approx([1, 1])
    with pytest.raises(InvalidValue, match="expected 0 to 20 records"):
        world_of([[40, 3], [20, 2]])
    monkeypatch.setattr(LatticeSettings, "record_limit", lambda self, silo: 40)
    world = world_of([[40, 3], [20, 2]])
    assert weight_sums(world)[world.order.index(0)] > 2


# Low bits of the sum


def test_the_sum_below_a_step_is_uniform_whatever_the_totals(world, monkeypatch):
    """Equal updates in all coordinates: without dithers, all sums are equal below a step."""
    equal = np.full((2, 2, COORDINATES), 0.99 / np.sqrt(COORDINATES))
    low = below_a_step(world, round_of(world, updates=equal))
    assert stats.chisquare(np.bincount(low, minlength=256)).pvalue > 1e-6
    with monkeypatch.context() as patch:
        patch.setattr(Stream, "dither", lambda self, count, bits: np.zeros(count, np.int64))
        low = below_a_step(world, round_of(world, updates=equal))
    assert stats.chisquare(np.bincount(low, minlength=256)).pvalue < 1e-12


# Sums of some silos


def looks_uniform(words: np.ndarray) -> bool:
    return bool(stats.kstest(words.astype(np.uint64) / 2.0**64, "uniform").pvalue > 1e-6)


def test_single_uploads_and_sums_of_all_silos_but_one_are_uniform(monkeypatch):
    world = world_of([[3, 0], [5, 9], [1, 1]])
    world.updates, world.noise = world.draw(np.random.default_rng(1))
    messages = round_of(world)
    for size in (1, 2):
        for some in itertools.combinations(messages, size):
            assert looks_uniform(opened(world, some))
            for words in (first_words, second_words):
                total = np.sum([words(message) for message in some], axis=0, dtype=np.uint64)
                assert looks_uniform(total)
    assert not looks_uniform(opened(world, messages))  # the noisy sum itself

    monkeypatch.setattr(PairKeys, "mask_keys", lambda *_: [])
    messages = round_of(world)
    assert not looks_uniform(opened(world, messages[:1]))
    assert not looks_uniform(opened(world, messages[:2]))


# Fresh randomness


def test_every_round_has_fresh_randomness(world, monkeypatch):
    """Without masks, the key holder sees one silo's words in two rounds of the same input."""
    monkeypatch.setattr(PairKeys, "mask_keys", lambda *_: [])

    def two_rounds():
        return [round_of(world)[0] for _ in range(2)]

    one, other = two_rounds()
    difference = second_words(one) - second_words(other)
    assert looks_uniform(second_words(one))
    assert looks_uniform(difference)  # of r and e2
    below = (below_a_step(world, [one]) - below_a_step(world, [other])) % 256
    assert stats.chisquare(np.bincount(below, minlength=256)).pvalue > 1e-6  # of dithers

    monkeypatch.setattr(Stream, "fresh", classmethod(lambda cls: cls(bytes(32))))
    one, other = two_rounds()
    assert not (second_words(one) - second_words(other)).any()


@pytest.mark.parametrize("lost", ["ternary", "errors"])
def test_words_of_c1_would_be_predictable_without_r_or_e2(monkeypatch, lost):
    """Without records, c1 is r · pk1 + e2: small without r, and a multiple of pk1 without e2."""
    idle = world_of([[0, 0], [5, 9]], coordinates=DEGREE)
    idle.updates, idle.noise = idle.draw(np.random.default_rng(1))
    monkeypatch.setattr(PairKeys, "mask_keys", lambda *_: [])
    public = idle.silos[0].public

    def distance_to_multiples_of_pk1() -> float:
        """Largest coefficient of c1 / pk1: small for r · pk1 alone."""
        total = encrypted_sum.EncryptedSum(idle.settings, public)
        residues, errors, _ = total._rerandomised(encrypted_sum.Group(idle.settings, 0))
        q = ring.PRIMES[0]
        c1 = np.mod(residues[0, 1] + errors, q.q)
        transform = np.mod(ring.transformed(c1[None], 0)[0], q.q)
        inverses = np.array([float(pow(int(x) % q.value, -1, q.value)) for x in public[0, 1]])
        balanced = np.where(inverses > q.q / 2, inverses - q.q, inverses)
        quotient = ring.inverted(ring.multiplied(transform, balanced, 0)[None], 0)[0]
        return float(np.abs(np.where(quotient > q.q / 2, quotient - q.q, quotient)).max())

    assert distance_to_multiples_of_pk1() > 2**40
    zeros = np.float64 if lost == "ternary" else np.int64
    monkeypatch.setattr(Stream, lost, lambda self, count: np.zeros(count, zeros))
    if lost == "errors":
        assert distance_to_multiples_of_pk1() <= 1  # r itself
    else:
        assert np.abs(second_words(round_of(idle)[0]).view(np.int64)).max() < 1  # e2 alone


# Counts


def test_counts_on_the_wire_are_uniform_whatever_they_are(monkeypatch):
    """Use 24 users with two records each, and M = 3."""
    facts = lattice_settings(silos=2, users=24, silo_record_limits=(1, 1))
    counts = np.ones((2, 24), int)

    def totals_and_parts():
        world = LatticeWorld(facts, counts)
        parts = [np.frombuffer(counts[: 4 * 24], ">u4") for counts in world.answers("count")]
        return np.array(world.server._shifted), parts

    totals, parts = totals_and_parts()
    for values in (totals, *parts):
        assert stats.chisquare(np.bincount(values, minlength=3)).pvalue > 1e-6

    with monkeypatch.context() as patch:  # silo 0 forgets ρ_u
        patch.setattr(LatticeSilo, "shifts", [0] * 24)
        totals, _ = totals_and_parts()
    assert (totals == 2).all()

    monkeypatch.setattr(
        PairKeys, "masked", lambda self, purpose, number, numbers, n: [x % n for x in numbers]
    )
    _, parts = totals_and_parts()
    assert (parts[1] == 1).all()


def test_entries_beside_the_chosen_one_stay_sealed(world):
    """A silo's key opens the entry at ρ_u; at another place it gives no candidate of the table."""
    message = next_round(world).weights
    silo = world.silos[0]
    constant = silo.opened(message)._constants[0]
    table = set((weight_table(silo.settings.table_size) % ring.PRIMES[0].value).tolist())
    for place, choice in enumerate(silo.shifts):
        for other in range(silo.settings.table_size):
            at = (place * silo.settings.table_size + other) * 12
            entry = np.frombuffer(message.sealed[at : at + 12], np.uint8)
            pad = weights._pad(
                silo.settings, silo._entry_keys[place], label_of(message), place, other
            )
            weight_read = int.from_bytes(bytes(entry ^ np.frombuffer(pad, np.uint8))[:6], "little")
            if other != choice:
                differences = {
                    (weight_read - int(constant[place]) + w) % ring.PRIMES[0].value for w in table
                }
                assert not differences & table


def test_no_secret_is_sent_in_the_clear(world):
    raw = b"".join(message.to_bytes() for message in world.sent)
    silo, server = world.silos[0], world.server
    for secret in (
        silo.seed,
        silo.private,
        server._key_seed,
        *silo._entry_keys,
    ):
        assert secret not in raw


# What holds against a silo that does not follow the protocol, and what does not


def test_an_honest_silo_amplifies_nobody_and_an_active_one_can_amplify_itself(world):
    """The limit that the documentation states: no party can check another's update."""
    opening = next_round(world)
    amplified = {0: 1000 * world.updates[0, 0]}
    with pytest.raises(InvalidValue, match="L2 norm"):
        weigh(world.silos[0], opening, amplified, world.noise[0])
    active = open_sum(world.silos[0], opening)
    active._check_norms = lambda users, norms: None
    active.add({0: 100 * world.updates[0, 0]})
    sent = [LatticeSum.from_bytes(active.finish(world.noise[0]), world.settings)]
    sent.append(weigh(world.silos[1], opening, world.updates_of(1, world.updates), world.noise[1]))
    assert looks_uniform(opened(world, sent[1:]))  # what the honest silo sent stays hidden
    excess = close(world.server, sent) - world.plain(world.updates, world.noise)
    assert excess == pytest.approx(99 * 3 / 8 * world.updates[0, 0], abs=1e-5)


def test_an_active_server_learns_a_choice_from_a_refused_round(world):
    """The limit that the documentation states: entries are not authenticated."""
    silo, message = world.silos[0], world.begin(world.server._last_round + 1, range(2)).weights
    choice, size = silo.shifts[0], 12
    sealed = bytearray(message.sealed)
    pad = weights._pad(silo.settings, silo._entry_keys[0], label_of(message), 0, choice)
    sealed[choice * size : (choice + 1) * size] = bytes(b ^ 255 for b in pad)
    wrong = dataclasses.replace(message, sealed=bytes(sealed))
    with pytest.raises(
        InvalidValue, match="expected weights that the server sealed for these silos"
    ):
        silo.opened(wrong)


def test_the_secret_key_is_ternary_and_never_repeats():
    one, other = SecretKey(bytes(32)), SecretKey(bytes([1]) * 32)
    for key in (one, other):
        polynomial = ring.inverted(key.transforms[0][None], 0)[0]
        assert set(polynomial) <= {0.0, 1.0, ring.PRIMES[0].q - 1}
    assert (one.transforms != other.transforms).any()
