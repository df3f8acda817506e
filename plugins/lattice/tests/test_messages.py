"""Messages of private weighting over ring-LWE survive their bytes; other bytes are refused."""

import numpy as np
import pytest
from lattice_world import LatticeWorld, draw_counts, lattice_settings

from flower_ext.errors import InvalidValue


@pytest.fixture(scope="module")
def world():
    rng = np.random.default_rng(0)
    world = LatticeWorld(lattice_settings(), draw_counts(rng, lattice_settings()))
    world.run_round(1, *world.draw(rng))
    return world


def of_every_kind(world):
    return list({type(message): message for message in world.sent}.values())


def test_messages_come_back_from_their_bytes(world):
    kinds = of_every_kind(world)
    assert len(kinds) == 3
    for message in kinds:
        assert type(message).from_bytes(message.to_bytes(), world.settings) == message


def test_bytes_of_a_wrong_length_or_kind_are_refused(world):
    kinds = of_every_kind(world)
    for message in kinds:
        data = message.to_bytes()
        for wrong in (data[:-1], data + b"x", b"", data[:3]):
            with pytest.raises(InvalidValue, match=type(message).__name__):
                type(message).from_bytes(wrong, world.settings)
        with pytest.raises(InvalidValue, match="begin with"):
            type(message).from_bytes(b"XXXX" + data[4:], world.settings)
    assert len({type(message).kind for message in kinds}) == len(kinds)


def test_messages_of_other_sizes_are_refused(world):
    other = lattice_settings(users=5, coordinates=5000, silo_record_limits=(20, 20, 21))
    refused = 0
    for message in of_every_kind(world):
        try:
            type(message).from_bytes(message.to_bytes(), other)
        except InvalidValue:
            refused += 1
    assert refused == 2  # weights and sums
