"""One user's effect on the published sum, measured against the bound that enters the ledger."""

import numpy as np
import pytest
from lattice_world import LatticeWorld, lattice_settings

from flower_ext_lattice import weights
from flower_ext_lattice.encrypted_sum import EncryptedSum, decrypted
from flower_ext_lattice.messages import LatticeSum
from flower_ext_lattice.samplers import Stream
from flower_ext_lattice.settings import CLIPPING_SLACK

COORDINATES = 4000
RECORDS = 7


def halfway(settings) -> np.ndarray:
    """Return an update of full norm, with slack, whose coordinates lie halfway between steps."""
    longest = settings.clipping_norm * (1 + CLIPPING_SLACK)
    steps = np.floor(longest / np.sqrt(COORDINATES) / settings.step) - 0.5
    signs = np.where(np.arange(COORDINATES) % 3, 1, -1)
    return signs * steps * settings.step


def effect(monkeypatch, settings, update, *, drawn=True) -> float:
    """Return the L2 norm by which a user moves the sum under the same randomness."""
    world = LatticeWorld(settings, np.array([[RECORDS], [0]]))
    silo, results = world.silos[0], []
    opened = silo.opened(world.begin(1, None if drawn else []).weights)
    noise = np.random.default_rng(0).standard_normal(COORDINATES)
    with monkeypatch.context() as patch:
        patch.setattr(Stream, "fresh", classmethod(lambda cls: cls(bytes(32))))
        for own in (update, np.zeros(COORDINATES)):
            total = EncryptedSum(settings, silo.public)
            total.add([own], [RECORDS], opened.encryptions([0]))
            first, second = total.words(noise, [])
            message = LatticeSum(round_number=1, silo=0, first=first, second=second)
            results.append(decrypted(settings, world.server._secret, [message]))
    return float(np.linalg.norm(results[0] - results[1]))


@pytest.fixture
def settings():
    return lattice_settings(
        users=1, silos=2, silo_record_limits=(RECORDS, RECORDS), coordinates=COORDINATES
    )


def test_no_update_moves_the_sum_further_than_the_bound(monkeypatch, settings):
    bound = settings.sensitivity * settings.clipping_norm
    moved = effect(monkeypatch, settings, halfway(settings))
    assert settings.clipping_norm - 1e-6 < moved <= bound


def test_rounding_and_carry_are_within_their_part_of_the_bound(monkeypatch, settings):
    """For an update of half a step per coordinate, rounding and carries move the sum most."""
    update = np.where(np.arange(COORDINATES) % 2, 0.51, -0.51) * settings.step
    moved = effect(monkeypatch, settings, update)
    excess = moved - np.linalg.norm(update)
    assert 0.2 * np.sqrt(COORDINATES) * settings.step < excess
    without_update = settings.sensitivity - (1 + CLIPPING_SLACK)
    assert excess <= without_update * settings.clipping_norm


def test_weights_that_sum_to_more_than_one_rise_above_the_bound(monkeypatch, settings):
    """The planted fault: a table that is one place off, so that 7 records weigh a sixth each."""
    table = weights.weight_table
    monkeypatch.setattr(weights, "weight_table", lambda choices: np.roll(table(choices), 1))
    moved = effect(monkeypatch, settings, halfway(settings))
    assert moved > settings.sensitivity * settings.clipping_norm


def test_a_user_not_drawn_moves_the_sum_by_at_most_the_errors(monkeypatch, settings):
    """The errors change a few carries at most, with a probability that grows with their size."""
    moved = effect(monkeypatch, settings, halfway(settings), drawn=False)
    assert moved <= settings.error_bound + 3 * settings.step
