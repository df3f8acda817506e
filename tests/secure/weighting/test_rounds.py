import dataclasses
import json

import numpy as np
import pytest
from gmpy2 import mpz, next_prime

from flower_ext.secure import IncompleteRound, ProtocolError
from flower_ext.secure.weighting import encrypted_sums
from flower_ext.secure.weighting.paillier import PublicKey
from flower_ext.secure.weighting.paillier_messages import (
    EncryptedWeights,
    MaskedSum,
    PaillierKey,
)
from flower_ext.secure.weighting.weighting_messages import MaskedCounts, SealedSeed, SiloKey
from flower_ext.secure.weighting.weighting_server import WeightingServer
from flower_ext.secure.weighting.weighting_silo import WeightingSilo
from tests.support.grids import grid
from tests.support.weighting import World, draw_counts, key, weighting_settings


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def world(rng):
    return World(weighting_settings(), draw_counts(rng, weighting_settings()))


@pytest.mark.parametrize("seed", grid(range(50), lambda seed: seed < 5))
def test_the_result_is_the_plain_weighted_sum_within_the_precision(seed, monkeypatch):
    """20 rounds in each of 50 random worlds: a thousand cases."""
    rng = np.random.default_rng(seed)
    facts = weighting_settings(
        users=int(rng.integers(1, 9)),
        silos=int(rng.integers(2, 6)),
        coordinates=int(rng.integers(1, 12)),
        max_records_per_user=int(rng.integers(1, 200)),
        update_bound=float(10 ** rng.uniform(-3, 3)),
        noise_bound=float(10 ** rng.uniform(-3, 4)),
        precision=float(10 ** rng.uniform(-12, -2)),
        coordinates_per_plaintext=None if seed % 3 else 1,
    )
    world = World(facts, draw_counts(rng, facts))
    if seed % 2:
        monkeypatch.setattr(encrypted_sums, "_POOL_PAYS", 0)
    rounding = 1e-13 * (facts.update_bound * facts.users + facts.noise_bound * facts.silos)
    for number in range(1, 21):
        updates, noise = world.draw(rng)
        places = users = None
        if number % 2:
            places = np.flatnonzero(rng.random(facts.users) < 0.5).tolist()
            users = [world.silos[0]._order[place] for place in places]
        result = world.run_round(number, updates, noise, places)
        plain = world.plain(updates, noise, users)
        assert np.abs(result - plain).max() <= facts.precision + rounding


def test_extremes_of_every_bound_add_up_exactly():
    facts = weighting_settings(
        users=6, silos=4, update_bound=2.0, noise_bound=3.0, max_records_per_user=40
    )
    world = World(facts, np.full((4, 6), 10))
    for number, sign in enumerate((1.0, -1.0), start=1):
        updates = np.full((4, 6, facts.coordinates), sign * 2.0)
        noise = np.full((4, facts.coordinates), sign * 3.0)
        result = world.run_round(number, updates, noise)
        assert result == pytest.approx(np.full(facts.coordinates, sign * 24.0), abs=1e-10)


def test_neighbouring_slots_of_opposite_sign_do_not_touch(rng):
    facts = weighting_settings(coordinates=12, coordinates_per_plaintext=2)
    world = World(facts, draw_counts(rng, facts))
    updates, noise = world.draw(rng)
    noise[:] = np.where(np.arange(12) % 2, -10.0, 10.0)
    assert world.run_round(1, updates, noise) == pytest.approx(
        world.plain(updates, noise), abs=1e-10
    )


def test_n_max_is_reached_exactly_and_one_record_more_is_refused(rng):
    facts = weighting_settings()  # N_max = 60
    counts = np.array([[20, 1, 60, 0], [20, 0, 0, 0], [20, 0, 0, 0]])
    world = World(facts, counts)
    updates, noise = world.draw(rng)
    result = world.run_round(1, updates, noise)
    assert result == pytest.approx(world.plain(updates, noise), abs=1e-10)
    counts[0, 0] += 1
    for slots in (1, None):
        world = World(weighting_settings(coordinates_per_plaintext=slots), counts)
        with pytest.raises(OverflowError, match="max_records_per_user=60"):
            world.run_round(1, updates, noise)


def test_totals_that_are_not_allowed_are_refused(rng):
    facts = weighting_settings(max_records_per_user=100, allowed_totals=(10, 100))
    world = World(facts, np.array([[4, 50, 0, 10], [5, 30, 0, 0], [1, 20, 0, 0]]))
    updates, noise = world.draw(rng)
    assert world.run_round(1, updates, noise) == pytest.approx(
        world.plain(updates, noise), abs=1e-10
    )
    world = World(facts, np.array([[4, 50, 0, 10], [5, 30, 0, 0], [2, 20, 0, 0]]))
    with pytest.raises(OverflowError, match=r"one of \(10, 100\)"):
        world.run_round(1, updates, noise)


def test_limits_of_silos_keep_n_max_before_anything_is_sent():
    with pytest.raises(ValueError, match="0 to 20 records"):
        World(weighting_settings(silo_record_limits=(20, 20, 20)), np.full((3, 4), 21))
    with pytest.raises(ValueError, match="0 to 60 records"):
        World(weighting_settings(), np.full((3, 4), 61))
    with pytest.raises(ValueError, match="0 to 60 records"):
        World(weighting_settings(), np.full((3, 4), -1))
    with pytest.raises(TypeError):
        World(weighting_settings(), np.full((3, 4), 1.5))
    with pytest.raises(ValueError, match="5 users: expected 4"):
        World(weighting_settings(), np.full((3, 5), 1))
    with pytest.raises(ValueError, match="at least one user"):
        World(weighting_settings(), np.zeros((3, 4), dtype=int))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda updates, noise: updates[0].__setitem__(0, np.nan), "updates hold NaN"),
        (lambda updates, noise: updates[0].__setitem__(0, 1.0001), "updates reach a magnitude"),
        (lambda updates, noise: noise.__setitem__(0, np.inf), "noise hold NaN"),
        (lambda updates, noise: noise.__setitem__(0, -10.1), "noise reach a magnitude"),
        (lambda updates, noise: updates.__setitem__(0, np.zeros(4)), r"updates of shape \(4,\)"),
        (lambda updates, noise: updates.pop(0), r"updates of users \[0\]"),
        (lambda updates, noise: updates.__setitem__(9, np.zeros(5)), r"updates of users \[9\]"),
    ],
)
def test_unfit_values_are_refused_before_the_round_is_used(rng, change, match):
    world = World(weighting_settings(), np.ones((3, 4), dtype=int))
    message = world.server.open_round(1)
    updates, noise = world.draw(rng)
    own, own_noise = world.own(0, updates), noise[0].copy()
    own = {user: values.copy() for user, values in own.items()}
    change(own, own_noise)
    with pytest.raises(ValueError, match=match):
        world.silos[0].weigh(message, own, own_noise)
    assert world.server.close_round(world.weigh(message, updates, noise)) == pytest.approx(
        world.plain(updates, noise), abs=1e-10
    )


def test_noise_of_another_shape_is_refused(rng):
    world = World(weighting_settings(), np.ones((3, 4), dtype=int))
    updates, _ = world.draw(rng)
    with pytest.raises(ValueError, match=r"noise of shape \(\)"):
        world.silos[0].weigh(world.server.open_round(1), world.own(0, updates), 0.0)


def test_a_missing_silo_leaves_the_sum_masked_and_the_round_open(world, rng):
    updates, noise = world.draw(rng)
    sums = world.weigh(world.server.open_round(1), updates, noise)
    with pytest.raises(IncompleteRound, match=r"silos \[1\] sent nothing"):
        world.server.close_round([sums[0], sums[2]])
    assert world.server.close_round(sums) == pytest.approx(world.plain(updates, noise), abs=1e-10)


def test_a_round_that_was_given_up_is_followed_by_a_later_one(world, rng):
    updates, noise = world.draw(rng)
    stale = world.weigh(world.server.open_round(1), updates, noise)
    sums = world.weigh(world.server.open_round(2), updates, noise)
    with pytest.raises(ProtocolError, match="sum of round 1: expected round 2"):
        world.server.close_round([*sums[:2], stale[2]])
    assert world.server.close_round(sums) == pytest.approx(world.plain(updates, noise), abs=1e-10)


def test_rounds_are_used_once(world, rng):
    updates, noise = world.draw(rng)
    message = world.server.open_round(3)
    sums = world.weigh(message, updates, noise)
    world.server.close_round(sums)
    with pytest.raises(ProtocolError, match="no round is open"):
        world.server.close_round(sums)
    for number in (3, 2, 0, -1):
        with pytest.raises(ProtocolError, match="expected a number above 3"):
            world.server.open_round(number)
        again = dataclasses.replace(message, round_number=number)
        with pytest.raises(ProtocolError, match="expected a number above 3"):
            world.silos[0].weigh(again, world.own(0, updates), noise[0])


def test_malformed_sums_are_refused_and_the_round_stays_open(world, rng):
    updates, noise = world.draw(rng)
    good = world.weigh(world.server.open_round(1), updates, noise)
    public = key().public
    size = world.settings.ciphertext_bytes
    tail = good[0].ciphertexts[size:]

    def with_first(number):
        return int(number).to_bytes(size, "big") + tail

    for ciphertexts in (
        b"",
        good[0].ciphertexts[:-1],
        good[0].ciphertexts + b"\0",
        with_first(0),
        with_first(public.n_squared),
        with_first(public.n),
        with_first(key().p),
    ):
        wrong = dataclasses.replace(good[0], ciphertexts=ciphertexts)
        with pytest.raises(ValueError, match="ciphertext"):
            world.server.close_round([wrong, *good[1:]])
    for senders in ([good[0], *good], [*good, dataclasses.replace(good[0], silo=3)]):
        with pytest.raises(ValueError, match="expected one each|silo=3: expected an integer"):
            world.server.close_round(senders)
    assert world.server.close_round(good) == pytest.approx(world.plain(updates, noise), abs=1e-10)


def test_malformed_weights_are_refused(world, rng):
    updates, noise = world.draw(rng)
    good = world.server.open_round(1)
    size = world.settings.ciphertext_bytes
    for weights in (
        b"",
        good.weights[:-size],
        bytes(size) + good.weights[size:],
        b"\xff" * size + good.weights[size:],
    ):
        with pytest.raises(ValueError, match=r"ciphertext|EncryptedWeights.weights of"):
            world.silos[0].weigh(
                dataclasses.replace(good, weights=weights), world.own(0, updates), noise[0]
            )
    with pytest.raises(ValueError, match="from 0 to 3"):
        world.server.open_round(2, sampled=[4])


def test_steps_out_of_order_are_refused(rng):
    facts = weighting_settings()
    server = WeightingServer(facts, key=key())
    silos = [WeightingSilo(facts, i) for i in range(3)]
    keys = [silo.key for silo in silos]
    early = (
        lambda: server.relay_seed([]),
        lambda: server.receive_counts([]),
        lambda: server.open_round(1),
        lambda: server.close_round([]),
        lambda: silos[0].seal_seed(),
        lambda: silos[1].open_seed(SealedSeed(receiver=1, sealed=bytes(60))),
        lambda: silos[0].mask_counts([1] * 4),
        lambda: silos[0].weigh(EncryptedWeights(round_number=1, weights=b""), {}, []),
    )
    for step in early:
        with pytest.raises(ProtocolError):
            step()
    for wrong in (keys[:2], [*keys, keys[0]], [*keys[:2], SiloKey(silo=5, public=bytes(32))]):
        with pytest.raises(ValueError, match="expected one each|silo=5: expected an integer"):
            server.relay_keys(wrong)
    relayed = server.relay_keys(keys)
    for wrong in (b"", server.public_key.modulus[1:], bytes(64)):
        with pytest.raises(ValueError, match="public key|PaillierKey"):
            silos[0].receive_keys(PaillierKey(modulus=wrong), relayed)
    for silo in silos:
        silo.receive_keys(server.public_key, relayed)
    assert len({silo.fingerprint for silo in silos}) == 1
    seeds = silos[0].seal_seed()
    for wrong in (seeds[:1], [*seeds, seeds[0]]):
        with pytest.raises(ValueError, match="expected one each"):
            server.relay_seed(wrong)
    server.relay_seed(seeds)
    with pytest.raises(ValueError, match="seed for silo 2"):
        silos[1].open_seed(seeds[1])
    with pytest.raises(ValueError, match="sealed message"):
        silos[1].open_seed(dataclasses.replace(seeds[1], receiver=1))
    for silo, seed in zip(silos[1:], seeds, strict=True):
        silo.open_seed(seed)
    blinded = [silo.mask_counts([1, 2, 3, 0]) for silo in silos]
    with pytest.raises(IncompleteRound, match=r"silos \[2\]"):
        server.receive_counts(blinded[:2])
    size = facts.count_bytes
    for counts in (b"", blinded[0].counts[size:], b"\xff" * 4 * size):
        with pytest.raises(ValueError, match="counts"):
            server.receive_counts([MaskedCounts(silo=0, counts=counts), *blinded[1:]])
    server.receive_counts(blinded)
    late = (
        lambda: server.relay_keys(keys),
        lambda: server.relay_seed(seeds),
        lambda: server.receive_counts(blinded),
        lambda: silos[0].receive_keys(server.public_key, relayed),
        lambda: silos[0].seal_seed(),
        lambda: silos[1].open_seed(seeds[0]),
        lambda: silos[0].mask_counts([1] * 4),
        lambda: server.close_round([]),
    )
    for step in late:
        with pytest.raises(ProtocolError):
            step()


@pytest.mark.parametrize("changes", [{}, {"allowed_totals": (10,)}])
def test_silos_refuse_a_modulus_whose_factors_a_total_may_have(changes):
    """Otherwise the key holder reads the total modulo that factor from the blinded total."""
    facts = weighting_settings(**changes)
    silo, other = WeightingSilo(facts, 0), WeightingSilo(facts, 1)
    keys = [silo.key, other.key, WeightingSilo(facts, 2).key]
    modulus = 59 * next_prime(mpz(63) << 500)
    with pytest.raises(ValueError, match="a factor of 60 or less"):
        silo.receive_keys(PaillierKey.of(PublicKey(modulus), facts), keys)
    silo.receive_keys(PaillierKey.of(key().public, facts), keys)


def test_silos_that_were_told_different_moduli_cannot_share_a_seed():
    facts = weighting_settings()
    silos = [WeightingSilo(facts, i) for i in range(3)]
    keys = [silo.key for silo in silos]
    for silo, number in zip(silos, (0, 0, 1), strict=True):
        silo.receive_keys(PaillierKey.of(key(number=number).public, facts), keys)
    assert silos[0].fingerprint == silos[1].fingerprint != silos[2].fingerprint
    seeds = silos[0].seal_seed()
    silos[1].open_seed(seeds[0])
    with pytest.raises(ValueError, match="in this run"):
        silos[2].open_seed(seeds[1])


def test_only_silo_0_seals_and_it_opens_nothing(rng):
    facts = weighting_settings()
    server = WeightingServer(facts, key=key())
    silos = [WeightingSilo(facts, i) for i in range(3)]
    relayed = server.relay_keys([silo.key for silo in silos])
    for silo in silos:
        silo.receive_keys(server.public_key, relayed)
    with pytest.raises(ProtocolError, match="seal_seed: silo 1 opens the seed that silo 0 sealed"):
        silos[1].seal_seed()
    with pytest.raises(ProtocolError, match="open_seed: silo 0 creates the seed"):
        silos[0].open_seed(SealedSeed(receiver=0, sealed=bytes(60)))
    with pytest.raises(ValueError, match="index=3"):
        WeightingSilo(facts, 3)


def test_parties_of_different_settings_cannot_share_a_seed():
    server = WeightingServer(weighting_settings(), key=key())
    silos = [
        WeightingSilo(weighting_settings(run="other" if i == 2 else "test"), i) for i in range(3)
    ]
    relayed = server.relay_keys([silo.key for silo in silos])
    for silo in silos:
        silo.receive_keys(server.public_key, relayed)
    seeds = silos[0].seal_seed()
    silos[1].open_seed(seeds[0])
    with pytest.raises(ValueError, match="in this run"):
        silos[2].open_seed(seeds[1])


def test_a_silo_goes_on_from_its_state_and_never_uses_a_round_again(rng):
    saved = []
    facts = weighting_settings()
    world = World(facts, draw_counts(rng, facts), save=saved.append)
    stages = [json.loads(state)["stage"] for state in saved[-facts.silos :]]
    assert stages == ["COUNTED"] * 3  # before counts left the silos
    saved.clear()
    updates, noise = world.draw(rng)
    world.run_round(5, updates, noise)
    assert [json.loads(state)["last_round"] for state in saved] == [5, 5, 5]
    message = dataclasses.replace(world.server.open_round(6), round_number=5)
    restarted = WeightingSilo.from_state(saved[1], save=saved.append)
    with pytest.raises(ProtocolError, match="expected a number above 5"):
        restarted.weigh(message, world.own(1, updates), noise[1])
    world.silos = [WeightingSilo.from_state(state) for state in saved[:3]]
    assert [silo.index for silo in world.silos] == [0, 1, 2]
    assert world.run_round(7, updates, noise) == pytest.approx(
        world.plain(updates, noise), abs=1e-10
    )


def restarted(silo):
    """Return a party restored from its state only, which the restoration does not change."""
    state = silo.export_state()
    again = WeightingSilo.from_state(state)
    assert again.export_state() == state
    return again


def test_a_silo_may_restart_after_every_step(rng):
    facts = weighting_settings()
    counts = draw_counts(rng, facts)
    world = World(facts, counts)
    world.server = server = WeightingServer(facts, key=key())
    silos = [restarted(WeightingSilo(facts, i)) for i in range(3)]
    relayed = server.relay_keys([silo.key for silo in silos])
    for silo in silos:
        silo.receive_keys(server.public_key, relayed)
    silos = [restarted(silo) for silo in silos]
    seeds = server.relay_seed(silos[0].seal_seed())
    for silo, seed in zip(silos[1:], seeds, strict=True):
        silo.open_seed(seed)
    silos = [restarted(silo) for silo in silos]
    for silo in silos:
        with pytest.raises(ProtocolError, match="is seeded: expected it to be new"):
            silo.receive_keys(server.public_key, relayed)
    server.receive_counts([s.mask_counts(c) for s, c in zip(silos, counts, strict=True)])
    world.silos = silos
    for number in (1, 2):
        world.silos = [restarted(silo) for silo in world.silos]
        updates, noise = world.draw(rng)
        assert world.run_round(number, updates, noise) == pytest.approx(
            world.plain(updates, noise), abs=1e-10
        )


def test_a_sum_can_be_checked_before_the_others_are_there(world, rng):
    updates, noise = world.draw(rng)
    sums = world.weigh(world.server.open_round(1), updates, noise)
    for message in sums:
        world.server.check_sum(message)
    with pytest.raises(ProtocolError, match="sum of round 2: expected round 1"):
        world.server.check_sum(dataclasses.replace(sums[0], round_number=2))
    with pytest.raises(ValueError, match="ciphertext"):
        world.server.check_sum(dataclasses.replace(sums[0], ciphertexts=sums[0].ciphertexts[:-1]))
    world.server.close_round(sums)
    with pytest.raises(ProtocolError, match="no round is open"):
        world.server.check_sum(sums[0])


def test_nothing_leaves_when_the_state_cannot_be_saved(rng):
    def fail(state):
        raise OSError("disk is full")

    world = World(weighting_settings(), np.ones((3, 4), dtype=int))
    updates, noise = world.draw(rng)
    world.silos[0].save = fail
    with pytest.raises(OSError, match="disk is full"):
        world.silos[0].weigh(world.server.open_round(1), world.own(0, updates), noise[0])


def test_states_of_other_protocols_and_other_bytes_are_refused(world):
    state = world.silos[0].export_state()
    values = json.loads(state)
    changed = [
        {**values, "stage": "DONE"},
        {**values, "settings": values["settings"].replace("paillier", "another")},
        {**values, "settings": "{}"},
        {**values, "seed": "no digits"},
        {**values, "surplus": 1},
    ]
    for wrong in (b"", b"{}", b"[]", state[:-1], *(json.dumps(one).encode() for one in changed)):
        with pytest.raises(ValueError, match="state: expected|settings: expected"):
            WeightingSilo.from_state(wrong)


def test_a_server_of_another_key_size_is_refused():
    with pytest.raises(ValueError, match="public key of 256 bits: expected 512"):
        WeightingServer(weighting_settings(), key=key(256))


def test_a_silo_without_records_and_users_without_records_take_part(rng):
    world = World(weighting_settings(), np.array([[0, 0, 0, 0], [0, 3, 0, 0], [0, 1, 0, 2]]))
    updates, noise = world.draw(rng)
    assert world.run_round(1, updates, noise) == pytest.approx(
        world.plain(updates, noise), abs=1e-10
    )


def test_progress_is_reported(world, rng):
    updates, noise = world.draw(rng)
    seen = []
    world.silos[0]._watch = lambda work: lambda *at: seen.append((work, *at))
    world.silos[0].weigh(world.server.open_round(1), world.own(0, updates), noise[0])
    coordinates = world.settings.coordinates
    assert seen[-1] == ("silo 0, round 1: coordinates", coordinates, coordinates)


def test_messages_hold_bytes_and_integers_only(world, rng):
    updates, noise = world.draw(rng)
    world.run_round(1, updates, noise)
    for message in world.sent:
        for value in vars(message).values():
            assert type(value) in (bytes, int)
    assert isinstance(world.sent[-1], MaskedSum)
    assert not isinstance(world.sent[-1].silo, mpz)
