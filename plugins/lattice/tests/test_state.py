"""Silos that are killed right after they stored their state, at every step."""

import contextlib
import json

import numpy as np
import pytest
from lattice_world import LatticeWorld, Opening, draw_counts, lattice_settings, open_sum, weigh

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext_lattice.messages import LatticeWeights
from flower_ext_lattice.server import LatticeServer
from flower_ext_lattice.silo import LatticeSilo
from tests.support.weighting import close, play


class Killed(BaseException):
    """Stands for the end of a process."""


class Disk:
    """Keep all states; raise `Killed` after storing one more than ``left`` states."""

    def __init__(self, left=None):
        self.left, self.states = left, []

    def __call__(self, state):
        self.states.append(state)
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed


@pytest.fixture
def world():
    rng = np.random.default_rng(3)
    facts = lattice_settings(silos=2, users=2)
    world = LatticeWorld(facts, draw_counts(rng, facts))
    world.updates, world.noise = world.draw(rng)
    return world


def restored(silo):
    return LatticeSilo.from_bytes(silo.to_bytes())


def weigh_first(world, opening):
    return weigh(world.silos[0], opening, world.updates_of(0, world.updates), world.noise[0])


def test_silos_go_on_from_their_states_at_every_step():
    """After each step of a whole run, every silo is replaced by one restored from its state."""
    facts = lattice_settings(silos=2, users=2)
    server, silos = LatticeServer(facts), [LatticeSilo(facts, i) for i in range(2)]

    def restart():
        return [restored(silo) for silo in silos]

    counts = np.array([[3, 0], [1, 5]])
    dialogue, answers = server.set_up(), None
    with contextlib.suppress(StopIteration):
        while True:
            step = dialogue.send(answers)
            silos = restart()
            answers = {
                at: silos[at].answer(step.name, question, counts[at])
                for at, question in step.questions.items()
            }
    rng = np.random.default_rng(0)
    for number in (1, 2):
        data = play(server.begin_round(number, range(2)), silos, counts, [], [])
        opening = Opening(number, LatticeWeights.from_bytes(data, facts))
        for silo in silos:
            open_sum(silo, opening)
        silos = restart()
        noise = rng.standard_normal((2, 5))
        update = np.full(5, 0.1)
        sums = [
            weigh(silo, opening, dict.fromkeys(np.flatnonzero(counts[at]), update), noise[at])
            for at, silo in enumerate(silos)
        ]
        result = close(server, sums)
        assert result == pytest.approx(2 * update + noise.sum(0), abs=1e-8)
        silos = restart()


def test_a_silo_killed_in_a_round_never_sends_under_its_masks_again(world):
    opening = world.begin(1)
    open_sum(world.silos[0], opening)  # stores the epoch
    disk = Disk(left=0)
    world.silos[0].save = disk
    with pytest.raises(Killed):
        weigh_first(world, opening)
    world.silos[0] = LatticeSilo.from_bytes(disk.states[-1])
    with pytest.raises(ProtocolError, match="expected a number above 1"):
        weigh_first(world, opening)
    result = world.run_round(2, world.updates, world.noise)
    assert result == pytest.approx(world.plain(world.updates, world.noise), abs=1e-8)


def test_a_silo_killed_before_its_round_is_stored_has_sent_nothing(world):
    """The same round may therefore continue after the restart."""
    opening = world.begin(1)
    weighing = open_sum(world.silos[0], opening)
    state = world.silos[0].to_bytes()
    weighing.add(world.updates_of(0, world.updates))
    world.silos[0] = LatticeSilo.from_bytes(state)
    sums = world.weigh(opening, world.updates, world.noise)
    result = close(world.server, sums)
    assert result == pytest.approx(world.plain(world.updates, world.noise), abs=1e-8)


def test_a_silo_killed_in_an_epoch_takes_no_other_weights_of_it(world):
    disk = Disk(left=0)
    world.silos[0].save = disk
    opening = world.begin(1, places=[0])
    with pytest.raises(Killed):
        open_sum(world.silos[0], opening)
    silo = LatticeSilo.from_bytes(disk.states[-1])
    world.server._last_round = 0  # a server that lost its state
    other = world.begin(1, places=[1])
    assert other.weights.epoch == opening.weights.epoch
    with pytest.raises(ProtocolError, match="epoch 1: expected a number above"):
        open_sum(silo, other)
    open_sum(silo, opening)


def test_states_are_stored_before_anything_leaves(world):
    """Each step stores a state that already counts the step."""
    disk = world.silos[0].save = Disk()
    world.run_round(1, world.updates, world.noise)
    epoch, used = (json.loads(state) for state in disk.states)
    assert (epoch["last_epoch"], epoch["last_round"]) == (1, 0)
    assert (used["last_epoch"], used["last_round"]) == (1, 1)


def test_states_of_other_protocols_and_other_bytes_are_refused(world):
    state = world.silos[0].to_bytes()
    for wrong in (b"", b"{}", b"[]", state[:-1], state.replace(b"counts", b"count")):
        with pytest.raises(InvalidValue, match="LatticeSilo.*: expected"):
            LatticeSilo.from_bytes(wrong)
    with pytest.raises(InvalidValue, match="LatticeSilo.*: expected"):
        LatticeSilo.from_bytes(state.replace(b'"lattice"', b'"paillier"'))
