"""Rounds of private weighting over ring-LWE give the plain weighted sum."""

import dataclasses
import hashlib
import itertools
import math
import secrets

import numpy as np
import plain_ring
import pytest
from lattice_world import LatticeWorld, draw_counts, lattice_settings, open_sum, weigh

from flower_ext.errors import IncompleteRound, InvalidValue, ProtocolError
from flower_ext.secure import threads
from flower_ext.secure.keys_and_ciphers import public_of
from flower_ext_lattice import ring
from flower_ext_lattice.encrypted_sum import EncryptedSum, decrypted
from flower_ext_lattice.messages import LatticeKey, LatticeSum
from flower_ext_lattice.server import LatticeServer
from flower_ext_lattice.silo import LatticeSilo
from flower_ext_lattice.weights import weight_table
from tests.support.grids import grid
from tests.support.weighting import close, play


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture(scope="module")
def shared():
    """A world that several tests share, each of which uses further rounds."""
    rng = np.random.default_rng(0)
    facts = lattice_settings()
    counts = np.array([[20, 0, 1, 7], [20, 0, 0, 0], [20, 0, 0, 3]])  # N_max, 0, 1 and 10 records
    world = LatticeWorld(facts, counts)
    return world, *world.draw(rng), itertools.count(1)


def largest_error(world) -> float:
    """Return half a step for each user, noise and dither, and three half steps for the sum."""
    return world.settings.step * (world.settings.users + 2 * world.settings.silos + 3) / 2


def test_the_result_is_the_plain_weighted_sum(shared):
    world, updates, noise, numbers = shared
    result = world.run_round(next(numbers), updates, noise)
    assert np.abs(result - world.plain(updates, noise)).max() <= largest_error(world)
    steps = result / world.settings.step
    assert (steps == np.rint(steps)).all()  # nothing finer is published


@pytest.mark.parametrize(
    ("coordinates", "silos", "workers"),
    grid(
        [(4096, 2, 1), (4097, 3, 2), (32_768 + 4096 + 5, 2, 2), (100_000, 5, 2)],
        lambda case: case[0] in (4097, 36_869),
    ),
)
def test_blocks_of_every_shape_come_out_in_order(rng, coordinates, silos, workers, monkeypatch):
    monkeypatch.setattr(threads, "cores", lambda: workers)
    facts = lattice_settings(coordinates=coordinates, silos=silos, clipping_norm=0.3, users=3)
    world = LatticeWorld(facts, np.full((silos, 3), 5))
    updates, noise = world.draw(rng)
    result = world.run_round(1, updates.astype(np.float32), noise)
    expected = world.plain(updates.astype(np.float32), noise)
    assert np.abs(result - expected).max() <= largest_error(world)


def test_what_silos_drop_and_dither_leaves_the_mean_of_the_sum(rng):
    facts = lattice_settings(coordinates=131_072, silos=4, users=2)
    world = LatticeWorld(facts, np.full((4, 2), 5))
    updates, noise = world.draw(rng)
    errors = (world.run_round(1, updates, noise) - world.plain(updates, noise)) / facts.step
    # Two dropped bytes of the four silos have a mean of 2^-7 steps: by luck 5 errors in 10^7 tests.
    assert abs(errors.mean()) < 5 * errors.std() / math.sqrt(len(errors))


def test_more_products_than_fit_without_reduction_add_up(shared):
    """Totals are reduced on the way: 70 updates of one user, who weighs a third of one."""
    world, updates, noise, numbers = shared
    silo, update = world.silos[0], updates[0, 0]
    total = EncryptedSum(world.settings, silo.public)
    key = silo.opened(world.begin(next(numbers)).weights).encryptions([world.order.index(0)])
    total.add([update] * 33, [20] * 33, np.repeat(key, 33, axis=0))
    total.add([update] * 37, [20] * 37, np.repeat(key, 37, axis=0))
    first, second = total.words(noise[0], [])
    silo_sum = LatticeSum(round_number=1, silo=0, first=first, second=second)
    decrypted_sum = decrypted(world.settings, world.server._secret, [silo_sum])
    assert decrypted_sum == pytest.approx(70 / 3 * update + noise[0], abs=40 * world.settings.step)


def test_an_update_of_full_norm_in_one_coordinate_and_extreme_counts(rng):
    facts = lattice_settings(silos=2, silo_record_limits=(4000, 2500), users=1, coordinates=2)
    for counts in ([[4000], [2500]], [[0], [1]]):
        world = LatticeWorld(facts, np.array(counts))
        updates = np.zeros((2, 1, 2))
        updates[:, :, 1] = -1.0
        noise = rng.standard_normal((2, 2))
        total = world.run_round(1, updates, noise)
        assert np.abs(total - world.plain(updates, noise)).max() <= largest_error(world)


def test_users_that_are_not_drawn_contribute_nothing(shared):
    updates, noise = shared[1:3]
    world = LatticeWorld(lattice_settings(), shared[0].counts)
    for number, places in enumerate(([0, 3], [], [1]), start=1):
        users = [world.order[place] for place in places]
        result = world.run_round(number, updates, noise, places)
        assert np.abs(result - world.plain(updates, noise, users)).max() <= largest_error(world)


def test_weights_of_a_user_sum_to_one_at_most():
    table = weight_table(2001)
    assert table[0] == 0
    totals = np.arange(1, 2001)
    assert (totals * table[1:] <= 2**56).all()
    assert (totals * table[1:] > 2**56 - totals).all()


def test_updates_may_be_added_a_few_users_at_a_time(shared):
    world, updates, noise, numbers = shared
    opening = world.begin(next(numbers))
    sums = []
    for at, silo in enumerate(world.silos):
        weighing = open_sum(silo, opening)
        for user, update in world.updates_of(at, updates).items():
            weighing.add({user: update})
        sums.append(LatticeSum.from_bytes(weighing.finish(noise[at]), world.settings))
        with pytest.raises(ProtocolError, match="call open_sum again"):
            weighing.finish(noise[at])
    result = close(world.server, sums)
    assert np.abs(result - world.plain(updates, noise)).max() <= largest_error(world)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda updates: updates[0].__setitem__(0, np.nan), "finite numbers"),
        (lambda updates: updates[0].__setitem__(0, np.inf), "finite numbers"),
        (lambda updates: updates[0].__setitem__(0, 1e300), "at most clipping_norm=1"),
        (lambda updates: updates[0].__imul__(1 + 1e-5), "at most clipping_norm=1"),
        (lambda updates: updates.__setitem__(2, np.zeros(4)), r"shape \(4,\): expected \(5,\)"),
        (lambda updates: updates.__setitem__(1, np.zeros(5)), r"updates of users \[1\]"),
    ],
)
def test_updates_that_break_the_bound_are_refused_and_nothing_leaves(shared, change, message):
    world, updates, noise, numbers = shared
    opening = world.begin(next(numbers))
    broken = {user: update.copy() for user, update in world.updates_of(0, updates).items()}
    change(broken)
    with pytest.raises(InvalidValue, match=message):
        weigh(world.silos[0], opening, broken, noise[0])
    result = close(world.server, world.weigh(opening, updates, noise))  # it can go on
    assert np.abs(result - world.plain(updates, noise)).max() <= largest_error(world)


def test_a_user_without_an_update_counts_as_zero(shared):
    world, updates, noise, numbers = shared
    opening = world.begin(next(numbers))
    updates = updates.copy()
    updates[0, 2] = 0
    others = {user: update for user, update in world.updates_of(0, updates).items() if user != 2}
    assert len(others) < len(world.updates_of(0, updates))
    sums = [weigh(world.silos[0], opening, others, noise[0])]
    sums += [
        weigh(silo, opening, world.updates_of(at, updates), noise[at])
        for at, silo in enumerate(world.silos)
        if at
    ]
    result = close(world.server, sums)
    assert np.abs(result - world.plain(updates, noise)).max() <= largest_error(world)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (np.zeros(5), "noise of standard deviation 0"),
        (np.full(5, 1e-4), "expected about noise_stddev=1"),
        (np.full(5, 16.1), "magnitude of 16.1: expected finite numbers up to 16"),
        (np.array([0, 0, np.nan, 1, 1]), "magnitude of nan"),
        (np.array([0, 0, -np.inf, 1, 1]), "magnitude of inf"),
        (np.ones(4), r"shape \(4,\)"),
    ],
)
def test_noise_that_is_no_share_is_refused(shared, noise, message):
    world, updates, _, numbers = shared
    opening = world.begin(next(numbers))
    with pytest.raises(InvalidValue, match=message):
        weigh(world.silos[0], opening, world.updates_of(0, updates), noise)


def test_noise_that_is_a_tenth_too_small_is_refused_for_many_coordinates(rng):
    facts = lattice_settings(coordinates=20_000)
    world = LatticeWorld(facts, np.zeros((3, 4), int))
    opening = world.begin(1)
    noise = rng.standard_normal(20_000)
    with pytest.raises(InvalidValue, match="noise of standard deviation"):
        weigh(world.silos[0], opening, {}, 0.9 * noise)
    weigh(world.silos[0], opening, {}, noise)


def test_updates_that_were_refused_spoil_the_sum_that_they_were_added_to(shared):
    world, updates, _noise, numbers = shared
    weighing = open_sum(world.silos[0], world.begin(next(numbers)))
    with pytest.raises(InvalidValue, match="finite"):
        weighing.add({0: np.full(5, np.nan)})
    with pytest.raises(ProtocolError, match="updates were refused"):
        weighing.add({0: updates[0, 0]})


def test_rounds_and_epochs_only_rise(rng):
    world = LatticeWorld(lattice_settings(), draw_counts(rng, lattice_settings()))
    updates, noise = world.draw(rng)
    first = world.begin(1, [0])
    close(world.server, world.weigh(first, updates, noise))
    with pytest.raises(ProtocolError, match="expected a number above 1"):
        world.begin(1)
    with pytest.raises(ProtocolError, match="expected a number above 1"):
        world.weigh(first, updates, noise)
    with pytest.raises(ProtocolError, match="at most rounds=100"):
        world.begin(101)
    with pytest.raises(ProtocolError, match="at most rounds=100"):
        open_sum(world.silos[0], first._replace(number=101))
    newest = world.begin(2, [0])
    open_sum(world.silos[0], newest)
    with pytest.raises(ProtocolError, match="epoch 1: expected a number above 2"):
        open_sum(world.silos[0], first._replace(number=2))
    open_sum(world.silos[0], newest)  # the same, to the last bit
    sealed = bytes([newest.weights.sealed[0] ^ 1]) + newest.weights.sealed[1:]
    changed = dataclasses.replace(newest.weights, sealed=sealed)
    with pytest.raises(ProtocolError, match="epoch 2: expected a number above 2"):
        open_sum(world.silos[0], newest._replace(weights=changed))


def test_without_a_draw_all_rounds_have_the_same_weights(shared):
    world, _, _, numbers = shared
    assert world.begin(next(numbers)).weights == world.begin(next(numbers)).weights
    drawn = [world.begin(next(numbers), range(4)).weights for _ in range(2)]
    assert drawn[0].words != drawn[1].words


def test_two_weighings_of_one_round_cannot_both_finish(shared):
    world, updates, noise, numbers = shared
    opening = world.begin(next(numbers))
    first, second = (open_sum(world.silos[0], opening) for _ in range(2))
    for weighing in (first, second):
        weighing.add(world.updates_of(0, updates))
    first.finish(noise[0])
    with pytest.raises(ProtocolError, match="expected a number above"):
        second.finish(noise[0])


def test_all_silos_or_nothing(shared):
    world, updates, noise, numbers = shared
    opening = world.begin(next(numbers))
    sums = world.weigh(opening, updates, noise)
    with pytest.raises(IncompleteRound, match=r"silos \[1\] sent nothing"):
        close(world.server, [sums[0], sums[2]])
    with pytest.raises(ProtocolError, match="silo 0 has already sent its sum"):
        world.server.add_sum(0, sums[0].to_bytes())
    with pytest.raises(InvalidValue, match="cut off"):
        world.server.add_sum(0, dataclasses.replace(sums[0], first=sums[0].first[:-1]).to_bytes())
    with pytest.raises(ProtocolError, match="sum of round 99: expected round"):
        world.server.add_sum(0, dataclasses.replace(sums[0], round_number=99).to_bytes())
    close(world.server, sums)
    with pytest.raises(ProtocolError, match="no round is open"):
        close(world.server, sums)


def test_each_silo_checks_its_limit():
    """Checking totals would not help, because no party sees how many records a silo holds."""
    facts = lattice_settings(silo_record_limits=(1, 20, 20))
    with pytest.raises(InvalidValue, match="expected 0 to 1 records of each user"):
        LatticeWorld(facts, np.array([[2, 0, 0, 0], [0] * 4, [0] * 4]))
    for wrong, error in (
        ([-1, 0, 0, 0], InvalidValue),
        ([1], InvalidValue),
        ([1.0] * 4, TypeError),
    ):
        with pytest.raises(error):
            LatticeWorld(facts, [wrong, [0] * 4, [0] * 4])


def keys_of(server_key, silos) -> bytes:
    return b"".join(public_of(silo.private) for silo in silos) + server_key


def test_steps_out_of_order_are_refused():
    facts = lattice_settings(silos=2, users=1)
    server, silos = LatticeServer(facts), [LatticeSilo(facts, i) for i in range(2)]
    with pytest.raises(ProtocolError, match="the set-up is not complete"):
        next(server.begin_round(1, None))
    with pytest.raises(ProtocolError, match="expected stage counted"):
        silos[0].open_sum(1, b"")
    question = keys_of(server.public_key, silos)
    sealed, nothing = (silo.answer("keys", question) for silo in silos)
    assert len(sealed) == 60
    assert nothing == b""
    assert silos[0].fingerprint == silos[1].fingerprint
    with pytest.raises(InvalidValue, match="expected the message as silo 0 sealed it for silo 1"):
        silos[1].answer("count", bytes(60), [1])
    assert len(silos[1].answer("count", sealed, [1])) == 4
    assert len(silos[0].answer("count", b"", [1])) == 4 + 32  # the choices of all silos, too
    with pytest.raises(ProtocolError, match="expected stage keyed"):
        silos[1].answer("count", sealed, [1])


@pytest.mark.parametrize(
    ("step", "forged", "message"),
    [
        ("keys", bytes(59), "sealed seeds of 59 bytes: expected 60"),
        ("count", b"\xff" * (4 + 32), "expected integers below the modulus"),
        ("count", bytes(4 + 32), "answer: expected points of the prime-order"),
        ("count", bytes(4 + 31), "answer of 31 bytes: expected 1 points"),
        ("count", bytes(3), "counts of silo 0 of 3 bytes: expected 4"),
    ],
)
def test_malformed_answers_end_the_set_up(step, forged, message):
    class Forging(LatticeSilo):
        def answer(self, name, question, counts):
            answer = super().answer(name, question, counts)
            return forged if (name, self.index) == (step, 0) else answer

    facts = lattice_settings(silos=2, users=1)
    silos = [Forging(facts, i) for i in range(2)]
    with pytest.raises(InvalidValue, match=message):
        play(LatticeServer(facts).set_up(), silos, [[1], [1]], [], [])


def test_a_server_names_places_of_its_users_only():
    world = LatticeWorld(lattice_settings(), np.ones((3, 4), int))
    with pytest.raises(InvalidValue, match="places: expected integers from 0 to 3"):
        world.begin(1, places=[4])


def test_silos_agree_only_if_the_server_sends_one_key_to_all():
    facts = lattice_settings(silos=2, users=1)
    server, silos = LatticeServer(facts), [LatticeSilo(facts, i) for i in range(2)]
    sealed = silos[0].answer("keys", keys_of(server.public_key, silos))
    key = LatticeKey.from_bytes(server.public_key, facts)
    other = dataclasses.replace(key, public_seed=bytes(32))
    silos[1].answer("keys", keys_of(other.to_bytes(), silos))
    assert silos[0].fingerprint != silos[1].fingerprint
    with pytest.raises(InvalidValue, match="sealed message from silo 0"):
        silos[1].answer("count", sealed, [1])


def _known_bytes(monkeypatch):
    """Replace the operating system's randomness by known bytes."""
    drawn = itertools.count()

    def token_bytes(count):
        return hashlib.sha512(b"known %d" % next(drawn)).digest()[:count]

    monkeypatch.setattr(secrets, "token_bytes", token_bytes)
    monkeypatch.setattr(secrets, "randbelow", lambda n: int.from_bytes(token_bytes(64)) % n)


def _known_run() -> tuple[list, np.ndarray]:
    """Return the messages and the sum of a run whose inputs are known."""
    rng = np.random.default_rng(1)
    facts = lattice_settings(silos=2, users=2, coordinates=4100, silo_record_limits=(3, 4))
    world = LatticeWorld(facts, np.array([[3, 0], [1, 4]]))
    scale = np.linspace(-1, 1, 4100) / 64
    updates = np.stack([[scale, -scale], [scale[::-1], scale]])
    noise = np.rint(rng.standard_normal((2, 4100)) * 2**20) / 2**20
    return world.sent, world.run_round(1, updates, noise, [0])


def test_known_answers_of_a_whole_run_and_the_same_in_plain_numpy(monkeypatch):
    digests = []
    for work in (ring.ring_loops, plain_ring):
        monkeypatch.setattr(ring, "ring_loops", work)
        _known_bytes(monkeypatch)
        sent, result = _known_run()
        whole = hashlib.sha256(b"".join(message.to_bytes() for message in sent))
        digests.append((whole.hexdigest()[:16], hashlib.sha256(result.tobytes()).hexdigest()[:16]))
        assert sum(isinstance(message, LatticeSum) for message in sent) == 2
    assert digests[0] == digests[1]
    assert digests[0] == ("34429fb5c6eb34d1", "cc5b870d723952ed")
