"""Rounds of private weighting over Paillier give the plain weighted sum."""

import dataclasses
import json

import numpy as np
import pytest
from gmpy2 import mpz, next_prime

from flower_ext.errors import IncompleteRound, ProtocolError
from flower_ext.secure.keys_and_ciphers import public_of
from flower_ext.secure.messages import pack_numbers
from flower_ext.secure.weighting.paillier import PublicKey
from flower_ext.secure.weighting.paillier_server import PaillierServer
from flower_ext.secure.weighting.paillier_settings import (
    PaillierSum,
    PaillierWeights,
)
from flower_ext.secure.weighting.paillier_silo import PaillierSilo
from tests.support.grids import grid
from tests.support.weighting import World, close, draw_counts, key, weigh, weighting_settings


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def world(rng):
    return World(weighting_settings(), draw_counts(rng, weighting_settings()))


@pytest.mark.parametrize("seed", grid(range(50), lambda seed: seed < 1))
def test_the_result_is_the_plain_weighted_sum_within_the_precision(seed):
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
        slots=None if seed % 3 else 1,
    )
    world = World(facts, draw_counts(rng, facts))
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
    facts = weighting_settings(coordinates=12, slots=2)
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
        world = World(weighting_settings(slots=slots), counts)
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
    with pytest.raises(ValueError, match="5 users: expected counts of 4"):
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
        (lambda updates, noise: updates.__setitem__(9, np.zeros(5)), r"updates of users \[9\]"),
    ],
)
def test_unfit_values_are_refused_before_the_round_is_used(rng, change, match):
    world = World(weighting_settings(), np.ones((3, 4), dtype=int))
    message = world.begin(1)
    updates, noise = world.draw(rng)
    updates_of_silo, own_noise = world.updates_of(0, updates), noise[0].copy()
    updates_of_silo = {user: values.copy() for user, values in updates_of_silo.items()}
    change(updates_of_silo, own_noise)
    with pytest.raises(ValueError, match=match):
        weigh(world.silos[0], message, updates_of_silo, own_noise)
    assert close(world.server, world.weigh(message, updates, noise)) == pytest.approx(
        world.plain(updates, noise), abs=1e-10
    )


def test_a_user_without_an_update_counts_as_zero(rng):
    world = World(weighting_settings(), np.ones((3, 4), dtype=int))
    message = world.begin(1)
    updates, noise = world.draw(rng)
    others = {user: update for user, update in world.updates_of(0, updates).items() if user != 2}
    sums = [weigh(world.silos[0], message, others, noise[0])]
    sums += [
        weigh(world.silos[at], message, world.updates_of(at, updates), noise[at]) for at in (1, 2)
    ]
    updates[0, 2] = 0
    assert close(world.server, sums) == pytest.approx(world.plain(updates, noise), abs=1e-10)


def test_noise_of_another_shape_is_refused(rng):
    world = World(weighting_settings(), np.ones((3, 4), dtype=int))
    updates, _ = world.draw(rng)
    with pytest.raises(ValueError, match=r"noise of shape \(\)"):
        weigh(world.silos[0], world.begin(1), world.updates_of(0, updates), 0.0)


def test_a_missing_silo_leaves_the_sum_masked_and_the_round_open(world, rng):
    updates, noise = world.draw(rng)
    sums = world.weigh(world.begin(1), updates, noise)
    with pytest.raises(IncompleteRound, match=r"silos \[1\] sent nothing"):
        close(world.server, [sums[0], sums[2]])
    assert close(world.server, sums) == pytest.approx(world.plain(updates, noise), abs=1e-10)


def test_a_round_that_was_given_up_is_followed_by_a_later_one(world, rng):
    updates, noise = world.draw(rng)
    stale = world.weigh(world.begin(1), updates, noise)
    sums = world.weigh(world.begin(2), updates, noise)
    with pytest.raises(ProtocolError, match="sum of round 1: expected round 2"):
        close(world.server, [*sums[:2], stale[2]])
    assert close(world.server, sums) == pytest.approx(world.plain(updates, noise), abs=1e-10)


def test_rounds_are_used_once(world, rng):
    updates, noise = world.draw(rng)
    message = world.begin(3)
    sums = world.weigh(message, updates, noise)
    close(world.server, sums)
    with pytest.raises(ProtocolError, match="no round is open"):
        close(world.server, sums)
    for number in (3, 2, 0, -1):
        with pytest.raises(ProtocolError, match="expected a number above 3"):
            world.begin(number)
    for number in (3, 2, 0):
        again = dataclasses.replace(message, round_number=number)
        with pytest.raises(ProtocolError, match="expected a number above 3"):
            weigh(world.silos[0], again, world.updates_of(0, updates), noise[0])


def test_malformed_sums_are_refused_and_the_round_stays_open(world, rng):
    updates, noise = world.draw(rng)
    good = world.weigh(world.begin(1), updates, noise)
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
        with pytest.raises(ValueError, match="ciphertext|PaillierSum of"):
            close(world.server, [wrong, *good[1:]])
    strange = dataclasses.replace(good[0], silo=3)
    with pytest.raises(ValueError, match="silo=3: expected an integer|silo 3: expected silo 0"):
        world.server.add_sum(0, strange.to_bytes())
    world.server.add_sum(0, good[0].to_bytes())
    with pytest.raises(ProtocolError, match="silo 0 has already sent its sum: expected one"):
        world.server.add_sum(0, good[0].to_bytes())
    assert close(world.server, good) == pytest.approx(world.plain(updates, noise), abs=1e-10)


def test_malformed_weights_are_refused(world, rng):
    updates, noise = world.draw(rng)
    good = world.begin(1)
    size = world.settings.ciphertext_bytes
    for weights in (
        b"",
        good.weights[:-size],
        bytes(size) + good.weights[size:],
        b"\xff" * size + good.weights[size:],
    ):
        with pytest.raises(ValueError, match=r"ciphertext|PaillierWeights of"):
            weigh(
                world.silos[0],
                dataclasses.replace(good, weights=weights),
                world.updates_of(0, updates),
                noise[0],
            )
    with pytest.raises(ValueError, match="from 0 to 3"):
        world.begin(2, places=[4])


def silos_of(settings, **options):
    return [PaillierSilo(settings, at, **options) for at in range(settings.silos)]


def public_keys(silos) -> bytes:
    return b"".join(public_of(silo.private) for silo in silos)


def keyed(silos, server_key=None) -> list[bytes]:
    """Let silos take the step ``keys``, and return the seeds that silo 0 seals for the others."""
    message = (server_key or key().public).n
    question = public_keys(silos) + pack_numbers([message], silos[0].settings.count_bytes)
    sealed = [silo.answer("keys", question) for silo in silos]
    assert sealed[1:] == [b""] * (len(silos) - 1)
    return [sealed[0][at : at + 60] for at in range(0, len(sealed[0]), 60)]


ONES = [1] * 4


def test_a_silo_refuses_steps_out_of_order():
    silos = silos_of(weighting_settings())
    weights = PaillierWeights(round_number=1, offer=b"", weights=b"")
    offer = bytes(40)
    for step, question in (("count", bytes(60)), ("draw", offer), ("open", b"")):
        with pytest.raises(ProtocolError):
            silos[1].answer(step, question, ONES)
    with pytest.raises(ProtocolError, match="in stage new: expected stage counted"):
        weigh(silos[0], weights, {}, [])
    assert len({silo.answer("begin", b"") for silo in silos}) == 3
    seeds = keyed(silos)
    assert len({silo.fingerprint for silo in silos}) == 1
    for step in ("begin", "keys", "draw"):
        with pytest.raises(ProtocolError, match="in stage keyed: expected stage"):
            silos[1].answer(step, offer)
    silos[1].answer("count", seeds[0], ONES)
    for step in ("begin", "keys", "count"):
        with pytest.raises(ProtocolError, match="in stage counted: expected stage"):
            silos[1].answer(step, seeds[0], ONES)


def test_a_silo_refuses_malformed_keys_and_seeds():
    settings = weighting_settings()
    silos = silos_of(settings)
    server_key, keys = pack_numbers([key().public.n], settings.count_bytes), public_keys(silos)
    for wrong, message in (
        (b"", "server's key of 0 bytes"),
        (keys[:-32] + server_key, "server's key of 32 bytes: expected 64"),
        (keys + server_key + bytes(32), "server's key of 96 bytes"),
        (keys + bytes(64), "public key of 0 bits"),
        (keys[32:] + keys[:32] + server_key, "the public key of this silo"),
        (keys[:32] + keys[:32] + keys[64:] + server_key, "a different key for every silo"),
        (keys[:32] + bytes(32) + keys[64:] + server_key, "low order"),
    ):
        with pytest.raises(ValueError, match=message):
            silos[0].answer("keys", wrong)
    seeds = keyed(silos)
    for wrong in (seeds[1], seeds[0][:-1], b"", bytes(60)):  # the first is for silo 2
        with pytest.raises(ValueError, match="sealed message from silo 0 cannot be opened"):
            silos[1].answer("count", wrong, ONES)
    silos[1].answer("count", seeds[0], ONES)


def test_a_server_refuses_malformed_answers():
    settings = weighting_settings()

    def forged(step, forge):
        """Set up a server, where ``forge`` changes the answers of all silos to a step."""
        server, silos = PaillierServer(settings, key=key()), silos_of(settings)
        dialogue, answers = server.set_up(), None
        while True:
            try:
                questions = dialogue.send(answers)
            except StopIteration:
                return
            answers = {
                at: silos[at].answer(questions.name, question, ONES)
                for at, question in questions.questions.items()
            }
            if questions.name == step:
                forge(answers)

    size = settings.count_bytes
    for step, forge, message in (
        ("begin", lambda a: a.update({1: a[2]}), "silos 1 and 2 sent the same public key"),
        ("begin", lambda a: a.update({1: bytes(32)}), "silo 1: public key: expected .* low order"),
        ("begin", lambda a: a.update({1: a[1][1:]}), "silo 1: public key: expected the 32 bytes"),
        ("keys", lambda a: a.update({0: a[0][1:]}), "sealed seeds of 119 bytes: expected 120"),
        ("count", lambda a: a.update({0: b""}), "counts of silo 0 of 0 bytes"),
        ("count", lambda a: a.update({0: a[0][size:]}), "counts of silo 0 of"),
        ("count", lambda a: a.update({0: b"\xff" * 4 * size}), "counts of silo 0: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            forged(step, forge)
    forged("count", lambda a: None)


def test_a_server_is_set_up_before_its_first_round():
    server = PaillierServer(weighting_settings(), key=key())
    with pytest.raises(ProtocolError, match="the set-up is not complete"):
        next(server.begin_round(1, None))
    with pytest.raises(ProtocolError, match="no round is open"):
        server.close_round()


@pytest.mark.parametrize("changes", [{}, {"allowed_totals": (10,)}])
def test_silos_refuse_a_modulus_whose_factors_a_total_may_have(changes):
    """Otherwise the key holder reads the total modulo that factor from the blinded total."""
    facts = weighting_settings(**changes)
    silos = silos_of(facts)
    modulus = 59 * next_prime(mpz(63) << 500)
    with pytest.raises(ValueError, match="a factor of 60 or less"):
        keyed(silos, PublicKey(modulus))
    keyed(silos)


def test_silos_that_received_different_moduli_cannot_share_a_seed():
    facts = weighting_settings()
    silos = silos_of(facts)
    keys, sealed = public_keys(silos), []
    for silo, number in zip(silos, (0, 0, 1), strict=True):
        modulus = pack_numbers([key(number=number).public.n], facts.count_bytes)
        sealed.append(silo.answer("keys", keys + modulus))
    assert silos[0].fingerprint == silos[1].fingerprint != silos[2].fingerprint
    silos[1].answer("count", sealed[0][:60], ONES)
    with pytest.raises(ValueError, match="in this run"):
        silos[2].answer("count", sealed[0][60:], ONES)


def test_a_silo_whose_number_the_run_does_not_have_is_refused():
    with pytest.raises(ValueError, match="index=3"):
        PaillierSilo(weighting_settings(), 3)


def test_parties_of_different_settings_cannot_share_a_seed():
    silos = [
        PaillierSilo(weighting_settings(run="other" if at == 2 else "test"), at) for at in range(3)
    ]
    seeds = keyed(silos)
    silos[1].answer("count", seeds[0], ONES)
    with pytest.raises(ValueError, match="in this run"):
        silos[2].answer("count", seeds[1], ONES)


def test_a_silo_resumes_from_its_state_and_never_repeats_a_round(rng):
    saved = []
    facts = weighting_settings()
    world = World(facts, draw_counts(rng, facts), save=saved.append)
    counted = [json.loads(state)["counts"] for state in saved[-facts.silos :]]
    assert counted == world.counts.tolist()  # before counts left the silos
    saved.clear()
    updates, noise = world.draw(rng)
    world.run_round(5, updates, noise)
    assert [json.loads(state)["last_round"] for state in saved] == [5, 5, 5]
    message = dataclasses.replace(world.begin(6), round_number=5)
    restarted = PaillierSilo.from_bytes(saved[1])
    with pytest.raises(ProtocolError, match="expected a number above 5"):
        weigh(restarted, message, world.updates_of(1, updates), noise[1])
    world.silos = [PaillierSilo.from_bytes(state) for state in saved[:3]]
    assert [silo.index for silo in world.silos] == [0, 1, 2]
    assert world.run_round(7, updates, noise) == pytest.approx(
        world.plain(updates, noise), abs=1e-10
    )


def restarted(silo):
    """Return a party restored from its state only, which the restoration does not change."""
    again = PaillierSilo.from_bytes(silo.to_bytes())
    assert again == silo
    return again


def test_a_silo_may_restart_after_every_step(rng):
    class Restarting(World):
        def play(self, dialogue):
            answers = None
            while True:
                try:
                    step = dialogue.send(answers)
                except StopIteration as end:
                    return end.value
                self.silos = [restarted(silo) for silo in self.silos]
                answers = {
                    at: self.silos[at].answer(step.name, question, counts[at])
                    for at, question in step.questions.items()
                }

    facts = weighting_settings()
    counts = draw_counts(rng, facts)
    world = Restarting(facts, counts)
    for number in (1, 2):
        world.silos = [restarted(silo) for silo in world.silos]
        updates, noise = world.draw(rng)
        assert world.run_round(number, updates, noise) == pytest.approx(
            world.plain(updates, noise), abs=1e-10
        )


def test_a_sum_can_be_checked_before_the_others_are_there(world, rng):
    updates, noise = world.draw(rng)
    sums = world.weigh(world.begin(1), updates, noise)
    size = world.settings.ciphertext_bytes
    zero = bytes(size) + sums[0].ciphertexts[size:]
    for wrong, message in (
        (dataclasses.replace(sums[0], round_number=2), "sum of round 2: expected round 1"),
        (dataclasses.replace(sums[0], ciphertexts=sums[0].ciphertexts[:-1]), "cut off"),
        (
            dataclasses.replace(sums[0], ciphertexts=zero),
            "unit",
        ),
        (sums[1], "silo 1: expected silo 0, its sender"),
    ):
        with pytest.raises((ProtocolError, ValueError), match=message):
            world.server.add_sum(0, wrong.to_bytes())
    close(world.server, sums)
    with pytest.raises(ProtocolError, match="no round is open"):
        world.server.add_sum(0, sums[0].to_bytes())


def test_nothing_leaves_when_the_state_cannot_be_saved(rng):
    def fail(state):
        raise OSError("disk is full")

    world = World(weighting_settings(), np.ones((3, 4), dtype=int))
    updates, noise = world.draw(rng)
    world.silos[0].save = fail
    with pytest.raises(OSError, match="disk is full"):
        weigh(world.silos[0], world.begin(1), world.updates_of(0, updates), noise[0])


def test_states_of_other_protocols_and_other_bytes_are_refused(world):
    state = world.silos[0].to_bytes()
    values = json.loads(state)
    changed = [
        {**values, "kind": "another"},
        {**values, "settings": {**values["settings"], "kind": "another"}},
        {**values, "settings": {}},
        {**values, "counts": [1.5]},
        {**values, "index": True},
        {**values, "seed": "no digits"},
        {**values, "surplus": 1},
    ]
    for wrong in (b"", b"{}", b"[]", state[:-1], *(json.dumps(one).encode() for one in changed)):
        with pytest.raises(ValueError, match="Paillier(Silo|Settings).*: expected"):
            PaillierSilo.from_bytes(wrong)


def test_a_server_of_another_key_size_is_refused():
    with pytest.raises(ValueError, match="public key of 256 bits: expected 512"):
        PaillierServer(weighting_settings(), key=key(256))


def test_a_silo_without_records_and_users_without_records_take_part(rng):
    world = World(weighting_settings(), np.array([[0, 0, 0, 0], [0, 3, 0, 0], [0, 1, 0, 2]]))
    updates, noise = world.draw(rng)
    assert world.run_round(1, updates, noise) == pytest.approx(
        world.plain(updates, noise), abs=1e-10
    )


def test_messages_hold_bytes_and_integers_only(world, rng):
    updates, noise = world.draw(rng)
    world.run_round(1, updates, noise)
    assert all(type(data) is bytes for _, sent in world.answered for data in sent.values())
    for message in world.sent:
        for value in vars(message).values():
            assert type(value) in (bytes, int)
    assert isinstance(world.sent[-1], PaillierSum)
    assert not isinstance(world.sent[-1].silo, mpz)
