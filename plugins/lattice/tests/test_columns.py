"""Draws of users over ring-LWE that neither the server nor the silos know."""

import dataclasses

import numpy as np
import pytest
from lattice_world import LatticeWorld, draw_counts, draw_receiver, lattice_settings, open_sum
from scipy import stats

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.weighting.oblivious import POINT_BYTES, SEAL_BYTES, Sender
from flower_ext_lattice import columns, ring, weights
from flower_ext_lattice.messages import LatticeWeights
from flower_ext_lattice.silo import LatticeSilo

ENTRY = 12
SEALED = 33 + SEAL_BYTES


def facts(**changes):
    return lattice_settings(**{"users": 5, "draw_choices": 3, **changes})


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.fixture
def world(rng):
    return LatticeWorld(facts(), draw_counts(rng, facts()))


def opened_columns(silo, message):
    """Return the number and the key of the column that a silo takes, by place."""
    chosen = draw_receiver(silo.settings, silo.seed, message.epoch, message.offer)
    return columns.open_columns(chosen, message.sealed_columns)


class Watch:
    """Record the server's columns: only a test, which acts for all parties, knows the draw."""

    def __init__(self, monkeypatch):
        self.made = None
        made = columns.draw_columns

        def watched(settings):
            self.made = made(settings)
            return self.made

        monkeypatch.setattr(columns, "draw_columns", watched)

    def drawn(self, world, message):
        """Return the drawn places."""
        taken = opened_columns(world.silos[1], message)
        own = zip(self.made.drawn, taken, strict=True)
        return [place for place, (drawn, (column, _)) in enumerate(own) if drawn[column]]


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


def test_the_sum_is_that_of_the_users_whom_all_silos_took(world, watch, rng):
    sizes = set()
    for number in range(1, 6):
        updates, noise = world.draw(rng)
        result = world.run_round(number, updates, noise)
        message = next(sent for sent in world.sent[::-1] if isinstance(sent, LatticeWeights))
        users = [world.order[place] for place in watch.drawn(world, message)]
        assert np.abs(result - world.plain(updates, noise, users)).max() < 1e-7
        sizes.add(tuple(users))
    assert len(sizes) > 1


@pytest.mark.full
@pytest.mark.parametrize(("hits", "choices"), [(1, 2), (1, 4), (3, 4)])
def test_each_user_is_drawn_with_the_probability_of_the_plan(hits, choices, watch):
    own = facts(users=8, silos=2, draw_choices=choices, winning_choices=hits)
    world = LatticeWorld(own, np.full((2, 8), 3))
    samples = [watch.drawn(world, world.begin(number).weights) for number in range(1, 11)]
    counts = np.array([[place in sample for place in range(8)] for sample in samples])
    assert stats.binomtest(int(counts.sum()), counts.size, hits / choices).pvalue > 1e-6
    assert len({tuple(row) for row in counts.tolist()}) > 3


@pytest.mark.full
def test_the_place_of_the_drawn_column_does_not_reveal_the_draw(monkeypatch, watch):
    """Each user is drawn equally often even if the server always lets the first choices win."""
    first = type("First", (), {"sample": staticmethod(lambda places, hits: places[:hits])})
    monkeypatch.setattr("secrets.SystemRandom", first)
    world = LatticeWorld(facts(users=8, silos=2), np.full((2, 8), 3))
    rounds = range(1, 11)
    count = sum(len(watch.drawn(world, world.begin(number).weights)) for number in rounds)
    assert stats.binomtest(count, 80, 1 / 3).pvalue > 1e-6


def server_guesses(monkeypatch, settings, receiver_of=draw_receiver):
    """Return how often a server guesses right that expects silos to take the first text.

    The server knows which choices draw a user. Its guess is right if the first choice draws the
    user and the user is drawn, or if neither holds.
    """
    hits = []

    class Watched:
        def sample(self, places, count):
            hits.append(np.random.default_rng(len(hits)).permutation(len(places))[:count].tolist())
            return hits[-1]

    made, sender = columns.draw_columns(settings), Sender(settings.context)
    chosen = receiver_of(settings, bytes(32), 1, sender.public)
    with monkeypatch.context() as patch:
        patch.setattr("secrets.SystemRandom", Watched)
        sealed = columns.seal_columns(settings, made, sender, chosen.answer)
    taken = columns.open_columns(chosen, sealed)
    drawn = [own[column] for own, (column, _) in zip(made.drawn, taken, strict=True)]
    return sum((0 in own) == y for own, y in zip(hits, drawn, strict=True))


def test_the_server_learns_the_draw_only_if_it_knows_the_choices(monkeypatch):
    settings = facts(users=40, draw_choices=2)
    assert stats.binomtest(server_guesses(monkeypatch, settings), 40, 0.5).pvalue > 1e-6

    def first(*arguments, **options):  # the planted fault: silos always take the first text
        chosen = draw_receiver(*arguments, **options)
        chosen.choices = [0 for _ in chosen.choices]
        return chosen

    assert server_guesses(monkeypatch, settings, first) == 40


def guesses(settings, monkeypatch, made=None):
    """Return how often a silo's column number is y_u, over all users of one draw."""
    if made is not None:
        monkeypatch.setattr(columns, "draw_columns", made)
    order = columns.draw_columns(settings)
    sender = Sender(settings.context)
    chosen = draw_receiver(settings, bytes(32), 1, sender.public)
    sealed = columns.seal_columns(settings, order, sender, chosen.answer)
    taken = columns.open_columns(chosen, sealed)
    return sum(own[column] == column for own, (column, _) in zip(order.drawn, taken, strict=True))


def test_a_silos_column_does_not_reveal_the_drawn_users(monkeypatch):
    settings = facts(users=40, draw_choices=2)
    assert stats.binomtest(guesses(settings, monkeypatch), 40, 0.5).pvalue > 1e-6

    def in_order(settings):  # the planted fault: columns in the order of y
        made = columns_of(settings)
        return dataclasses.replace(made, drawn=[(0, 1)] * settings.users)

    columns_of = columns.draw_columns
    assert guesses(settings, monkeypatch, in_order) == 40


def test_a_silo_can_open_one_column_of_one_entry_of_each_user(world):
    """Other entries, opened with the silo's keys, give numbers that are not in the table."""
    message = world.begin(1).weights
    silo, own = world.silos[0], world.settings
    q, constants = ring.PRIMES[0].value, silo.opened(message)._constants[0]
    table = {int(w) % q for w in weights.weight_table(own.table_size)}
    candidates = table | {-w % q for w in table}
    raw = np.frombuffer(message.sealed, np.uint8).reshape(own.users, own.table_size, 2, ENTRY)
    label = weights._label(message.epoch, message.nonce)
    for place, (column, key) in enumerate(opened_columns(silo, message)):
        shift = silo.shifts[place]
        entry_key = silo._entry_keys[place]
        of_column = weights._column_pad(own, key, label, place)
        for choice in range(own.table_size):
            pads = weights._pad(own, entry_key, label, place, choice)
            pads = np.frombuffer(pads, np.uint8).reshape(2, ENTRY)
            for other in range(2):
                found = raw[place, choice, other] ^ pads[other] ^ of_column[choice]
                word = int.from_bytes(found[:6].tobytes(), "little")
                difference = (word - int(constants[place])) % q
                if (choice, other) == (shift, column):
                    assert difference == 0
                else:
                    assert difference not in candidates


def test_a_silo_cannot_open_the_columns_that_it_did_not_choose(world):
    message = world.begin(1).weights
    silo, own = world.silos[1], world.settings
    chosen = draw_receiver(own, silo.seed, message.epoch, message.offer)
    for user in range(own.users):
        other = draw_receiver(own, silo.seed, message.epoch, message.offer)
        other.choices[user] = (chosen.choices[user] + 1) % 3
        with pytest.raises(InvalidValue, match="sealed texts"):
            columns.open_columns(other, message.sealed_columns)


def test_choices_are_fresh_in_every_epoch_even_for_the_same_offer(world):
    own, seed = facts(users=200), world.silos[0].seed
    public = Sender(b"run").public
    first, second = (draw_receiver(own, seed, epoch, public).choices for epoch in (1, 2))
    same = sum(a == b for a, b in zip(first, second, strict=True))
    assert stats.binomtest(same, 200, 1 / 3).pvalue > 1e-6


def test_the_server_receives_another_answer_of_group_elements_each_time(world):
    for number in (1, 2, 3):
        world.begin(number)
    answers = world.answers("draw")
    pieces = [a[at : at + POINT_BYTES] for a in answers for at in range(0, 160, POINT_BYTES)]
    assert len(set(pieces)) == len(pieces) == 15
    offers = [
        of_silo for name, asked in world.asked if name == "draw" for of_silo in asked.values()
    ]
    assert [int.from_bytes(offer[:8], "big") for offer in offers] == [1, 2, 3]


def test_weights_have_the_length_that_the_settings_say(world):
    message, own = world.begin(1).weights, world.settings
    assert len(message.to_bytes()) == LatticeWeights.size(own)
    assert len(message.sealed_columns) == 5 * 3 * SEALED
    entries = 5 * own.table_size * ENTRY
    plain = LatticeWeights.size(lattice_settings(users=5))
    assert LatticeWeights.size(own) == plain + entries + POINT_BYTES + 5 * 3 * SEALED


def test_columns_of_another_draw_are_refused(world):
    message, again = world.begin(1).weights, world.begin(2).weights
    for wrong in (
        dataclasses.replace(again, sealed_columns=message.sealed_columns),
        dataclasses.replace(again, offer=message.offer),
    ):
        with pytest.raises(InvalidValue, match="sealed texts"):
            LatticeSilo.from_bytes(world.silos[1].to_bytes()).opened(wrong)


def test_a_silo_answers_no_draw_of_a_used_epoch(world):
    open_sum(world.silos[0], world.begin(1))
    (offer,) = world.asked[-1][1].values()
    with pytest.raises(ProtocolError, match="expected a number above 1"):
        world.silos[0].answer("draw", offer)


def test_a_restored_silo_opens_the_same_columns(world):
    message = world.begin(1).weights
    opened = world.silos[1].opened(message)
    again = LatticeSilo.from_bytes(world.silos[1].to_bytes()).opened(message)
    assert (again._constants == opened._constants).all()


def test_settings_with_and_without_a_secret_draw_do_not_mix(rng, world):
    known = LatticeWorld(lattice_settings(), draw_counts(rng, lattice_settings()))
    with pytest.raises(ProtocolError, match="places: expected None"):
        world.begin(1, [0])
    offer = (1).to_bytes(8, "big") + Sender(b"run").public
    with pytest.raises(ProtocolError, match="step='draw': expected settings with draw_choices"):
        known.silos[0].answer("draw", offer)


@pytest.mark.parametrize(("choices", "hits"), [(1, 1), (3, 0), (3, 3), (3, -1)])
def test_a_draw_that_is_none_is_refused(choices, hits):
    with pytest.raises(InvalidValue, match="winning_choices="):
        lattice_settings(draw_choices=choices, winning_choices=hits)
