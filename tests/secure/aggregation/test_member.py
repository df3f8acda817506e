"""Messages and requests that a member refuses."""

import secrets
from dataclasses import replace

import numpy as np
import pytest

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.aggregation.aggregation_messages import OF_KEY, OF_SEED, Keys
from flower_ext.secure.aggregation.aggregation_server import ShareFault
from flower_ext.secure.aggregation.member import Member
from tests.support.secure_sum import LOW_ORDER, Round, graph_for, member_of, round_context, stored


@pytest.fixture
def requested():
    """Return a round in which member 5 was lost, and the server's next request to member 0."""
    one = Round(round_context(6, 5, 2, 3))
    unmask_requests = one.mask(one.share(one.advertise()), lost=(5,))
    return one, unmask_requests[0]


def test_the_same_question_gets_the_same_answer_and_another_is_refused(requested):
    one, request = requested
    first = one.members[0].unmask(request)
    again = stored(one.members[0])
    assert again.unmask(request) == first
    other = replace(request, kinds={**request.kinds, 4: OF_KEY})
    with pytest.raises(ProtocolError, match="answered before"):
        again.unmask(other)


def test_a_member_that_answered_keeps_no_share_of_the_other_kind(requested):
    one, request = requested
    held = one.members[0].held
    one.members[0].unmask(request)
    state = one.members[0].to_bytes()
    assert all(held[other][33:].hex().encode() not in state for other in range(1, 5))
    assert held[5][:33].hex().encode() not in state


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"answers": 2}, ProtocolError, "least_answers=3"),
        ({"answers": 7}, InvalidValue, "expected 0 to 6"),
        ({"kinds": dict.fromkeys((1, 2, 3), OF_SEED)}, ProtocolError, "that sent shares to"),
        ({"kinds": dict.fromkeys(range(6), OF_SEED)}, ProtocolError, "that sent shares to"),
        ({"kinds": dict.fromkeys(range(1, 6), b"b")}, InvalidValue, "expected b's' or b'k'"),
    ],
)
def test_a_question_that_does_not_fit_is_refused(requested, changes, error, message):
    one, request = requested
    before = one.members[0].to_bytes()
    with pytest.raises(error, match=message):
        one.members[0].unmask(replace(request, **changes))
    assert one.members[0].to_bytes() == before


@pytest.mark.parametrize("step", ["secrets", "signature"])
def test_a_member_that_cannot_advertise_stays_new_and_advertises_later(step, monkeypatch):
    fails = [True]

    def token_bytes(size):
        if step == "secrets" and fails[0]:
            raise OSError("no randomness")
        return bytes(range(size))

    class Identity:
        def sign(self, context, member, keys):
            if fails[0]:
                raise OSError("no key")
            return bytes(96)

    context = replace(round_context(num_neighbors=5, threshold=4), signed=step == "signature")
    member = member_of(context, 0, graph_for(num_neighbors=5)[0])
    monkeypatch.setattr(secrets, "token_bytes", token_bytes)
    options = {"identities": Identity()} if context.signed else {}
    before = member.to_bytes()
    with pytest.raises(OSError, match="no "):
        member.advertise(**options)
    assert member.to_bytes() == before
    fails[0] = False
    assert member.advertise(**options).member == 0


def test_a_member_masks_one_input_a_round():
    one = Round(round_context())
    deliveries = one.share(one.advertise())
    one.members[0].mask(deliveries[0], one.vectors[0])
    with pytest.raises(ProtocolError, match="take each step once"):
        stored(one.members[0]).mask(deliveries[0], one.vectors[1])


def test_a_member_refuses_its_key_if_altered():
    one = Round(round_context())
    keys = one.advertise()[0]
    with pytest.raises(ProtocolError, match="keys that this member sent"):
        one.members[0].share(replace(keys, keys={**keys.keys, 0: bytes(64)}))


def test_too_few_neighbours_and_strangers_are_refused():
    one = Round(round_context(12, 4, 3))
    keys = one.advertise()
    near = one.graph[0]
    few = {0: keys[0].keys[0], near[0]: keys[0].keys[near[0]]}
    with pytest.raises(ProtocolError, match="threshold=3"):
        one.members[0].share(replace(keys[0], keys=few))
    far = next(m for m in range(1, 12) if m not in near)
    with pytest.raises(InvalidValue, match="expected only this member's neighbours"):
        one.members[0].share(replace(keys[0], keys={**keys[0].keys, far: bytes(range(64))}))


@pytest.mark.parametrize("at", [0, 40, 93])
def test_shares_that_cannot_be_opened_are_reported_and_cost_nobody_the_round(at):
    one = Round(round_context(20, 19, 10, 12))
    deliveries = one.share(one.advertise())
    for index, delivery in deliveries.items():
        if index == 4:
            continue
        sealed = delivery.sealed[4]
        changed = sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]
        if index < 10:  # 9 of 19: there are shares enough of member 4
            delivery = replace(delivery, sealed={**delivery.sealed, 4: changed})
        one.server.add(one.members[index].mask(delivery, one.vectors[index]))
    one.server.add(one.members[4].mask(deliveries[4], one.vectors[4]))
    unmask_requests = one.server.unmask_requests()
    revealed = one.members[0].unmask(unmask_requests[0])
    assert set(revealed.shares) == set(range(1, 20)) - {4}
    np.testing.assert_array_equal(one.unmask(unmask_requests), one.plain_sum())
    assert one.server.faults == {(4, ShareFault.UNOPENED): set(range(10)) - {4}}


@pytest.mark.parametrize("value", LOW_ORDER)
@pytest.mark.parametrize("at", [0, 32])
def test_a_neighbours_key_of_low_order_is_refused_before_anything_is_shared(value, at):
    one = Round(round_context())
    keys = one.advertise()[0]
    near = one.graph[0][0]
    bad = keys.keys[near][:at] + value + keys.keys[near][at + 32 :]
    with pytest.raises(InvalidValue, match="low order"):
        one.members[0].share(replace(keys, keys={**keys.keys, near: bad}))


@pytest.mark.parametrize(
    ("neighbors", "message"),
    [
        ((1, 2, 3), "expected 4"),
        ((1, 2, 3, 3), "expected 4"),
        ((0, 1, 2, 3), "without 0"),
        ((1, 2, 3, 6), "from 0 to 5"),
        ((-1, 2, 3, 4), "from 0 to 5"),
    ],
)
def test_neighbours_that_the_context_does_not_allow_are_refused(neighbors, message):
    with pytest.raises(InvalidValue, match=message):
        member_of(round_context(), 0, neighbors)


def test_a_message_of_another_round_is_refused():
    first, second = Round(round_context(number=1)), Round(round_context(number=2))
    keys = first.advertise()[0]
    second.advertise()
    with pytest.raises(ProtocolError, match="round 2"):
        second.members[0].share(keys)
    with pytest.raises(ProtocolError, match="Keys of round 2"):
        Keys.from_bytes(keys.to_bytes(), second.context)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b"[" * 10_000])
def test_bytes_that_are_no_state_are_refused(data):
    with pytest.raises(InvalidValue, match="Member.*: expected JSON"):
        Member.from_bytes(data)


def test_values_of_another_type_are_refused_and_never_changed():
    one = Round(round_context())
    delivery = one.share(one.advertise())[0]
    with pytest.raises(InvalidValue, match="uint32"):
        one.members[0].mask(delivery, one.vectors[0].astype(np.uint64))
    before = one.vectors[0].copy()
    one.members[0].mask(delivery, one.vectors[0])
    np.testing.assert_array_equal(one.vectors[0], before)


def test_a_restored_member_sends_the_same_bytes(monkeypatch):
    def wire(kept):
        monkeypatch.setattr(secrets, "token_bytes", np.random.default_rng(3).bytes)
        one = Round(round_context())
        if kept:
            one.restore = lambda: None
        one.run([(), (), (2,), ()])
        return one.wire

    assert wire(kept=True) == wire(kept=False)
