import numpy as np
import pytest

from flower_ext.errors import InvalidValue
from tests.support.weighting import World, weighting_settings


@pytest.fixture(scope="module", params=[None, 3], ids=["named", "drawn in secret"])
def world(request):
    settings = weighting_settings(draw_choices=request.param)
    world = World(settings, np.ones((3, 4), int))
    world.run_round(1, *world.draw(np.random.default_rng(0)))
    return world


def of_every_kind(world):
    messages = [*world.sent]
    return list({type(message): message for message in messages}.values())


def test_messages_come_back_from_their_bytes(world):
    kinds = of_every_kind(world)
    assert len(kinds) == 2
    for message in kinds:
        data = message.to_bytes()
        assert len(data) == type(message).size(world.settings)
        assert type(message).from_bytes(data, world.settings) == message
    assert len({type(message).kind for message in kinds}) == len(kinds)


def test_bytes_of_a_wrong_length_or_kind_are_refused(world):
    for message in of_every_kind(world):
        data = message.to_bytes()
        for wrong in (data[:-1], data + b"x", b"", data[:3]):
            with pytest.raises(InvalidValue, match=type(message).__name__):
                type(message).from_bytes(wrong, world.settings)
        with pytest.raises(InvalidValue, match="begin with"):
            type(message).from_bytes(b"XXXX" + data[4:], world.settings)
