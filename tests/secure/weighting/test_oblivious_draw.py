"""Random draws of users that neither the server nor the silos know."""

import dataclasses

import numpy as np
import pytest
from gmpy2 import mpz
from scipy import stats

from flower_ext.errors import ProtocolError
from flower_ext.secure.weighting.oblivious import POINT_BYTES, SEAL_BYTES, Sender
from flower_ext.secure.weighting.paillier_settings import (
    PaillierSum,
    PaillierWeights,
)
from flower_ext.secure.weighting.paillier_silo import PaillierSilo
from tests.support.grids import grid
from tests.support.weighting import World, close, draw_counts, key, weigh, weighting_settings

ROUNDS = 4


def facts(**changes):
    return weighting_settings(**{"users": 5, "draw_choices": 3, **changes})


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def opened(world, message, silo=0):
    """Return the values that a silo decrypts from ``message``, by place."""
    size = world.settings.ciphertext_bytes
    data = world.silos[silo]._opened(message)
    taken = [mpz.from_bytes(data[at : at + size], "big") for at in range(0, len(data), size)]
    return key().decrypt(taken)


def drawn(world, number):
    """Return a round that begins but is not answered."""
    return world.begin(number)


def users_in(world, message):
    """Return the users whose weight was taken; only a test, which acts for all parties, knows."""
    return [world.silos[0]._order[at] for at, weight in enumerate(opened(world, message)) if weight]


def test_the_sum_is_that_of_the_users_whom_all_silos_took(rng, monkeypatch):
    world = World(facts(), draw_counts(rng, facts()))
    seen, weights = [], PaillierSilo.encrypted_weights

    def watched(self, message):
        seen.append(opened(world, message, self.index))
        return weights(self, message)

    monkeypatch.setattr(PaillierSilo, "encrypted_weights", watched)
    samples = []
    for number in range(1, ROUNDS + 1):
        updates, noise = world.draw(rng)
        result = world.run_round(number, updates, noise)
        assert seen[-1] == seen[-2] == seen[-3]  # all silos took the same
        order = world.silos[0]._order
        users = [order[at] for at, weight in enumerate(seen[-1]) if weight]
        samples.append(tuple(users))
        assert result == pytest.approx(world.plain(updates, noise, users), abs=1e-10)
    assert len(set(samples)) > 1


@pytest.mark.parametrize(
    ("hits", "choices"), grid([(1, 2), (1, 4), (3, 4)], lambda odds: odds == (1, 2))
)
def test_each_user_is_drawn_with_the_probability_of_the_plan(hits, choices):
    settings = facts(users=8, silos=2, draw_choices=choices, winning_choices=hits)
    world = World(settings, np.full((2, 8), 3))
    samples = [users_in(world, drawn(world, number)) for number in range(1, 11)]
    counts = np.array([[user in sample for user in range(8)] for sample in samples])
    assert stats.binomtest(int(counts.sum()), counts.size, hits / choices).pvalue > 1e-6
    assert len({tuple(row) for row in counts.tolist()}) > 3


def test_for_a_draw_the_server_receives_only_fresh_group_elements():
    world = World(facts(), np.full((3, 5), 2))
    for number in (1, 2, 3):
        world.begin(number)
    answers = world.answers("draw")
    assert [len(answer) for answer in answers] == [5 * POINT_BYTES] * 3
    pieces = [a[at : at + POINT_BYTES] for a in answers for at in range(0, 160, POINT_BYTES)]
    assert len(set(pieces)) == len(pieces) == 15


def test_a_silo_cannot_learn_its_choice_or_open_other_weights():
    """There is one ciphertext per user, all differ, and none was sent in another round."""
    world = World(facts(), np.full((3, 5), 2))
    messages = [drawn(world, number) for number in (1, 2)]
    size = world.settings.ciphertext_bytes
    taken = [
        world.silos[1]._opened(message)[at : at + size]
        for message in messages
        for at in range(0, 5 * size, size)
    ]
    assert len(set(taken)) == 10
    sealed = messages[0].weights
    assert len(sealed) == 5 * 3 * (size + SEAL_BYTES)
    assert not any(text in sealed for text in taken)
    silo, public = world.silos[1], messages[0].offer
    receiver = silo._draw_receiver(1, public)
    receiver.open(sealed, size)
    for user in range(5):
        receiver.choices[user] = (receiver.choices[user] + 1) % 3
        with pytest.raises(ValueError, match="sealed texts: expected texts that"):
            receiver.open(sealed, size)
        receiver.choices[user] = (receiver.choices[user] - 1) % 3


@pytest.mark.full
def test_the_place_of_the_weights_does_not_reveal_the_draw(monkeypatch):
    """A server that always puts the weights first draws every user equally often, too."""
    monkeypatch.setattr(
        "flower_ext.secure.weighting.paillier_server.SystemRandom",
        lambda: type("First", (), {"sample": staticmethod(lambda places, hits: places[:hits])}),
    )
    world = World(facts(users=8, silos=2), np.full((2, 8), 3))
    counts = [len(users_in(world, drawn(world, number))) for number in range(1, 11)]
    assert stats.binomtest(sum(counts), 80, 1 / 3).pvalue > 1e-6


def test_users_without_records_are_drawn_and_add_nothing(rng):
    counts = np.array([[0, 2, 0, 1, 3], [0, 1, 0, 0, 1], [0, 0, 5, 0, 0]])
    world = World(facts(), counts)
    updates, noise = world.draw(rng)
    assert np.isfinite(world.run_round(1, updates, noise)).all()


def test_a_draw_of_a_used_round_is_refused(rng):
    world = World(facts(), draw_counts(rng, facts()))
    message = world.begin(1)
    (offer,) = world.asked[-1][1].values()
    updates, noise = world.draw(rng)
    close(world.server, world.weigh(message, updates, noise))
    for wrong in (offer[:-1], offer + b"\0", b""):
        with pytest.raises(ValueError, match="offer of"):
            world.silos[0].answer("draw", wrong)
    with pytest.raises(ProtocolError, match="expected a number above 1"):
        world.silos[0].answer("draw", offer)
    with pytest.raises(ProtocolError, match="expected a number above 1"):
        world.begin(1)


def test_weights_sealed_for_another_answer_are_refused_before_using_the_round(rng):
    world = World(facts(), draw_counts(rng, facts()))
    updates, noise = world.draw(rng)
    message = drawn(world, 1)
    again = dataclasses.replace(message, offer=Sender(b"test").public)
    for wrong, expected in (
        (again, "sealed texts"),
        (dataclasses.replace(message, weights=message.weights[:-1]), "cut off"),
        (dataclasses.replace(message, weights=bytes(len(message.weights))), "sealed texts"),
        (dataclasses.replace(message, offer=bytes(32)), "offer: expected points"),
        (dataclasses.replace(message, round_number=2), "sealed texts"),
    ):
        with pytest.raises(ValueError, match=expected):
            weigh(world.silos[1], wrong, world.updates_of(1, updates), noise[1])
    assert np.isfinite(close(world.server, world.weigh(message, updates, noise))).all()


def test_settings_with_and_without_a_hidden_draw_do_not_mix(rng):
    hidden, known = (
        World(facts(), np.ones((3, 5), int)),
        World(weighting_settings(users=5), np.ones((3, 5), int)),
    )
    with pytest.raises(ProtocolError, match="places: expected None"):
        hidden.begin(1, places=[0])
    with pytest.raises(ProtocolError, match="step='draw': expected settings with draw_choices"):
        known.silos[0].answer("draw", (1).to_bytes(8, "big") + bytes(32))
    updates, noise = hidden.draw(rng)
    for world, message in ((hidden, known.begin(1)), (known, hidden.begin(1))):
        with pytest.raises(ValueError, match="PaillierWeights of"):
            weigh(world.silos[0], message, world.updates_of(0, updates), noise[0])


@pytest.mark.parametrize(("choices", "hits"), [(1, 1), (3, 0), (3, 3), (0, 0)])
def test_a_draw_that_is_none_is_refused(choices, hits):
    with pytest.raises(ValueError, match="winning_choices="):
        weighting_settings(draw_choices=choices, winning_choices=hits)


def test_every_number_of_drawn_rounds_is_fresh(rng):
    world = World(facts(), np.full((3, 5), 2))
    updates, noise = world.draw(rng)
    for number in (1, 2, 3):
        world.run_round(number, updates, noise)
    pieces = []
    for message in world.sent:
        if isinstance(message, PaillierWeights):
            size = world.settings.ciphertext_bytes + SEAL_BYTES
            pieces += [
                message.weights[at : at + size] for at in range(0, len(message.weights), size)
            ]
        if isinstance(message, PaillierSum):
            size = world.settings.ciphertext_bytes
            pieces += [
                message.ciphertexts[at : at + size]
                for at in range(0, len(message.ciphertexts), size)
            ]
    pieces += [
        offer for name, questions in world.asked if name == "draw" for offer in questions.values()
    ]
    assert len(pieces) == 3 * (15 + 3 * world.settings.ciphertexts + 1)
    assert len(set(pieces)) == len(pieces)
