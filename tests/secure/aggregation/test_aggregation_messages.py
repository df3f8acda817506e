"""Refused messages, contexts and graphs."""

from dataclasses import replace

import numpy as np
import pytest

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.aggregation.aggregation_messages import (
    Advert,
    Delivery,
    Keys,
    MaskedInput,
    Revealed,
    SealedShares,
    UnmaskRequest,
)
from flower_ext.secure.aggregation.aggregation_server import SumServer
from flower_ext.secure.aggregation.context import RoundContext, degree, graph_digest, graph_of
from tests.support.secure_sum import Round, graph_for, round_context


def test_every_message_survives_the_wire_and_no_other_length_does():
    one = Round(round_context())
    one.run([(), (), (1,), ()])
    for data in one.wire:
        with pytest.raises((InvalidValue, ProtocolError)):
            MaskedInput.from_bytes(data[:-1], one.context)
    keys = one.wire[6]
    for wrong in (keys[:-1], keys + b"\0", keys[:34]):
        with pytest.raises(InvalidValue):
            Keys.from_bytes(wrong, one.context)


KINDS = (Advert, Keys, SealedShares, Delivery, MaskedInput, UnmaskRequest, Revealed)


def mutated(data, rng):
    """Return bytes with a few places changed, removed, added or repeated, mostly after the kind."""
    data = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(33 if rng.random() < 0.9 else 0, len(data) + 1))
        span = int(rng.choice([1, 4, 8, 40]))
        change = int(rng.integers(5))
        if change == 0:
            data[at : at + span] = rng.bytes(span)
        elif change == 1:
            del data[at : at + span]
        elif change == 2:
            data[at:at] = rng.bytes(span)
        elif change == 3:
            data[at : at + span] = bytes([int(rng.choice([0, 255]))]) * span
        else:
            data[at:at] = data[at : at + span]
        if len(data) < 34:
            break
    return bytes(data)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_mutated_bytes_of_every_message_are_refused_or_are_another_message(kind):
    one = Round(round_context(6, 5, 2, 3, length=10))
    one.run([(), (), (1,), ()])
    sound = [data for data in one.wire if data[:1] == kind.kind]
    assert sound
    rng = np.random.default_rng(len(kind.__name__))
    refused = 0
    for _ in range(1_500):
        data = mutated(sound[rng.integers(len(sound))], rng)
        try:
            message = kind.from_bytes(data, one.context)
        except (InvalidValue, ProtocolError):
            refused += 1
        else:
            assert message.to_bytes() == data
    assert 500 < refused < 1_500


def test_a_message_claims_only_as_much_memory_as_its_bytes():
    context = round_context(length=2**40)
    data = b"M" + context.digest + bytes(8) + b"\xff" * 100
    with pytest.raises(InvalidValue, match="cut off"):
        MaskedInput.from_bytes(data, context)


def test_members_that_the_round_has_not_are_refused():
    context = round_context(6)
    with pytest.raises(InvalidValue, match="member 6: expected 0 to 5"):
        Advert(digest=context.digest, member=6, keys=bytes(64)).check(context)


def test_a_vector_of_another_length_is_refused():
    context = round_context(length=10)
    with pytest.raises(InvalidValue, match="values of 44 bytes"):
        MaskedInput(digest=context.digest, member=0, values=bytes(44)).check(context)


def test_every_fact_of_a_round_changes_its_digest():
    context = round_context(8, 4, 2, 3)
    changes = [
        {"run": b"other"},
        {"round_number": 2},
        {"members": 9},
        {"graph": bytes(32)},
        {"bits": 64},
        {"length": 51},
        {"num_neighbors": 6},
        {"threshold": 3},
        {"least_answers": 4},
        {"colluders": 1},
    ]
    digests = {replace(context, **change).digest for change in changes} | {context.digest}
    assert len(digests) == 11
    assert RoundContext.from_bytes(context.to_bytes()) == context


@pytest.mark.parametrize(
    "change",
    [{"bits": 16}, {"threshold": 0}, {"threshold": 5}, {"least_answers": 1}, {"num_neighbors": 3}],
)
def test_a_context_that_cannot_work_is_refused(change):
    with pytest.raises(InvalidValue, match=next(iter(change))):
        replace(round_context(8, 4, 2, 3), **change)


@pytest.mark.parametrize(("members", "wanted"), [(2, 1), (7, 3), (10, 4), (11, 9), (101, 15)])
def test_the_graph_is_symmetric_and_everybody_has_as_many_neighbours(members, wanted):
    graph, num_neighbors = graph_for(members, wanted), degree(members, wanted)
    assert wanted <= num_neighbors or num_neighbors == members - 1
    for member, near in enumerate(graph):
        assert len(set(near) - {member}) == len(near) == num_neighbors
        assert sorted(near) == list(near)
        assert all(member in graph[other] for other in near)


def test_the_neighbours_are_those_next_to_a_member_on_the_circle():
    assert graph_of((3, 0, 4, 1, 2, 5), 2) == ((3, 4), (2, 4), (1, 5), (0, 5), (0, 1), (2, 3))
    assert graph_of((2, 0, 1), 2) == ((1, 2), (0, 2), (0, 1))


def test_another_graph_has_another_digest_and_the_server_refuses_it():
    graph = graph_for()
    other = graph_for(number=2)
    assert graph_digest(graph) != graph_digest(other)
    with pytest.raises(InvalidValue, match="expected the graph whose digest"):
        SumServer(round_context(), other)


def test_masks_are_the_same_in_one_piece_and_across_blocks():
    from flower_ext.secure.aggregation.mask_streams import apply_mask

    for kind in (np.uint32, np.uint64):
        long, short = np.zeros(100_000, kind), np.zeros(777, kind)
        apply_mask(bytes(range(32)), long)
        apply_mask(bytes(range(32)), short)
        np.testing.assert_array_equal(long[:777], short)
        apply_mask(bytes(range(32)), long, subtract=True)
        assert not long.any()
