"""Messages and requests that a member refuses."""

from dataclasses import replace

import numpy as np
import pytest

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.aggregation import Keys, Member
from tests.support.secure_sum import Round, round_context, stored


@pytest.fixture
def asked():
    """Return a round in which member 5 was lost, and the server's next question."""
    one = Round(round_context(6, 5, 2, 3))
    question = one.mask(one.share(one.advertise()), lost=(5,))
    return one, question


def test_a_question_for_both_kinds_is_refused(asked):
    one, question = asked
    both = replace(question, lost={**question.lost, 2: b""})
    with pytest.raises(ProtocolError, match="both answered and lost"):
        one.members[0].unmask(both)


def test_the_same_question_gets_the_same_answer_and_another_is_refused(asked):
    one, question = asked
    first = one.members[0].unmask(question)
    again = stored(one.members[0], one.context)
    assert again.unmask(question) == first
    other = replace(question, answered=dict.fromkeys(range(4), b""), lost={4: b"", 5: b""})
    with pytest.raises(ProtocolError, match="answered before"):
        again.unmask(other)


def test_a_member_that_answered_keeps_no_share_of_the_other_kind(asked):
    one, question = asked
    held = one.members[0]._state.held
    one.members[0].unmask(question)
    state = one.members[0].to_bytes()
    assert all(held[other][33:].hex().encode() not in state for other in range(1, 5))
    assert held[5][:33].hex().encode() not in state


@pytest.mark.parametrize(
    ("answered", "lost", "message"),
    [
        ((0, 1), (2, 3, 4, 5), "least_answers=3"),
        ((1, 2, 3, 4), (0, 5), "expected member 0"),
        ((0, 1, 2, 3), (), "expected all that shared"),
    ],
)
def test_a_question_that_does_not_fit_is_refused(asked, answered, lost, message):
    one, question = asked
    wrong = replace(question, answered=dict.fromkeys(answered, b""), lost=dict.fromkeys(lost, b""))
    with pytest.raises(ProtocolError, match=message):
        one.members[0].unmask(wrong)


def test_a_member_masks_one_input_a_round():
    one = Round(round_context())
    deliveries = one.share(one.advertise())
    one.members[0].mask(deliveries[0], one.vectors[0])
    with pytest.raises(ProtocolError, match="take each step once"):
        stored(one.members[0], one.context).mask(deliveries[0], one.vectors[1])


def test_an_altered_own_key_is_refused():
    one = Round(round_context())
    keys = one.advertise()[0]
    with pytest.raises(ProtocolError, match="this member's own"):
        one.members[0].share(replace(keys, keys={**keys.keys, 0: bytes(64)}))


def test_too_few_neighbours_and_strangers_are_refused():
    one = Round(round_context(12, 4, 3))
    keys = one.advertise()
    near = one.context.graph[0]
    few = {0: keys[0].keys[0], near[0]: keys[0].keys[near[0]]}
    with pytest.raises(ProtocolError, match="threshold=3"):
        one.members[0].share(replace(keys[0], keys=few))
    far = next(m for m in range(1, 12) if m not in near)
    with pytest.raises(InvalidValue, match="expected only neighbours"):
        one.members[0].share(replace(keys[0], keys={**keys[0].keys, far: bytes(range(64))}))


@pytest.mark.parametrize("at", [0, 40, 93])
def test_shares_changed_on_the_way_are_refused_and_change_nothing(at):
    one = Round(round_context())
    delivery = one.share(one.advertise())[0]
    other, sealed = next(iter(delivery.sealed.items()))
    changed = sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]
    before = one.members[0].to_bytes()
    with pytest.raises(InvalidValue, match=f"shares from member {other}"):
        one.members[0].mask(
            replace(delivery, sealed={**delivery.sealed, other: changed}), one.vectors[0]
        )
    assert one.members[0].to_bytes() == before


def test_a_message_or_state_of_another_round_is_refused():
    first, second = Round(round_context(number=1)), Round(round_context(number=2))
    keys = first.advertise()[0]
    second.advertise()
    with pytest.raises(ProtocolError, match="round 2"):
        second.members[0].share(keys)
    with pytest.raises(ProtocolError, match="Keys of round 2"):
        Keys.from_bytes(keys.to_bytes(), second.context)
    with pytest.raises(InvalidValue, match="round 2"):
        Member.from_bytes(first.members[0].to_bytes(), second.context)


def test_values_of_another_type_are_refused_and_never_changed():
    one = Round(round_context())
    delivery = one.share(one.advertise())[0]
    with pytest.raises(InvalidValue, match="uint32"):
        one.members[0].mask(delivery, one.vectors[0].astype(np.uint64))
    before = one.vectors[0].copy()
    one.members[0].mask(delivery, one.vectors[0])
    np.testing.assert_array_equal(one.vectors[0], before)


def test_a_restored_member_sends_the_same_bytes():
    def wire(kept):
        source = np.random.default_rng(3)
        one = Round(round_context(), token_bytes=source.bytes)
        if kept:
            one.restore = lambda: None
        one.run([(), (), (2,), ()])
        return one.wire

    assert wire(kept=True) == wire(kept=False)
