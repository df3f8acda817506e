"""A sum whose updates cannot be encrypted: by real sums of a Paillier silo."""

import numpy as np
import pytest

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.weighting.paillier_settings import PaillierSum
from flower_ext.secure.weighting.silo_sum import SumOrZeros
from tests.support.weighting import World, weigh, weighting_settings

COUNTS = np.array([[1, 2, 0, 3], [2, 0, 1, 1], [0, 0, 0, 4]])


@pytest.mark.parametrize("odd", [np.full(5, np.nan), np.full(5, 1.1), np.zeros(4)])
def test_the_sum_of_a_silo_with_an_unusual_update_is_that_of_zeros(odd):
    world = World(weighting_settings(), COUNTS)
    updates, noise = world.draw(np.random.default_rng(3))
    message = world.begin(1)
    *others, silo = world.silos
    sums = [weigh(one, message, world.own(i, updates), noise[i]) for i, one in enumerate(others)]
    total = SumOrZeros(lambda: silo.open_sum(1, message.to_bytes()))
    total.add({3: odd})
    total.add({3: updates[2, 3]})  # later updates do not undo the error
    sums.append(PaillierSum.from_bytes(total.finish(noise[2]), world.settings))
    updates[2] = 0.0
    result = world.server.close_round(sums)
    assert result == pytest.approx(world.plain(updates, noise), abs=1e-9)


def test_a_used_round_and_unusable_noise_are_no_reason_for_zeros():
    world = World(weighting_settings(), COUNTS)
    updates, noise = world.draw(np.random.default_rng(3))
    data = world.begin(1).to_bytes()
    silo = world.silos[2]
    total = SumOrZeros(lambda: silo.open_sum(1, data))
    other = SumOrZeros(lambda: silo.open_sum(1, data))
    total.add({3: updates[2, 3]})
    with pytest.raises(InvalidValue, match="noise hold NaN"):
        total.finish(np.full(5, np.nan))
    total.finish(noise[2])
    with pytest.raises(ProtocolError, match="round"):
        other.finish(noise[2])
