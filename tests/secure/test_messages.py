"""Messages survive their bytes; bytes of a wrong length or kind are refused."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from flower_ext.errors import InvalidValue
from flower_ext.secure.messages import ProtocolMessage
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


@dataclass(frozen=True, kw_only=True)
class Note(ProtocolMessage):
    """A message whose module keeps annotations as types, not as strings."""

    kind = b"N"
    number: int
    text: bytes
    entries: Mapping[int, bytes]

    @classmethod
    def _lengths(cls, settings):
        return {"text": 3, "entries": 2}


def test_a_message_may_be_in_a_module_that_keeps_annotations_as_types():
    note = Note(number=7, text=b"abc", entries={1: b"xy", 4: b"zw"})
    assert Note.from_bytes(note.to_bytes(), None) == note
