"""Messages that the server refuses, and rounds in which it gives no sum."""

from dataclasses import replace

import pytest

from flower_ext.errors import IncompleteRound, InvalidValue, ProtocolError
from tests.support.secure_sum import Round, round_context


def test_repeated_and_late_messages_are_refused_and_the_sum_stays_right():
    one = Round(round_context(6, 5, 2, 3))
    deliveries = one.share(one.advertise())
    late = one.members[5].mask(deliveries[5], one.vectors[5])
    first = one.members[0].mask(deliveries[0], one.vectors[0])
    one.server.add_masked(first)
    with pytest.raises(ProtocolError, match="before"):
        one.server.add_masked(first)
    for index in range(1, 5):
        one.server.add_masked(one.members[index].mask(deliveries[index], one.vectors[index]))
    question = one.server.question()
    with pytest.raises(ProtocolError, match="revealed shares now"):
        one.server.add_masked(late)
    assert (one.unmask(question) == one.plain_sum()).all()
    assert 5 not in one.server.answered


@pytest.mark.parametrize("owner", [1, 5], ids=["seed", "mask key"])
def test_a_wrong_share_discards_the_round(owner):
    one = Round(round_context(6, 5, 2, 3))
    question = one.mask(one.share(one.advertise()), lost=(5,))
    for index in range(5):
        revealed = one.members[index].unmask(question)
        if index == 0:
            share = revealed.shares[owner]
            wrong = share[:-1] + bytes([share[-1] ^ 1])
            revealed = replace(revealed, shares={**revealed.shares, owner: wrong})
        one.server.add_revealed(revealed)
    with pytest.raises(IncompleteRound, match="do not fit"):
        one.server.total()


def test_the_other_kind_of_share_is_refused():
    one = Round(round_context(6, 5, 2, 3))
    question = one.mask(one.share(one.advertise()))
    revealed = one.members[0].unmask(question)
    swapped = {**revealed.shares, 1: b"k" + revealed.shares[1][1:]}
    with pytest.raises(InvalidValue, match="kinds"):
        one.server.add_revealed(replace(revealed, shares=swapped))


def test_a_key_that_another_member_has_is_refused():
    one = Round(round_context())
    advert = one.members[0].advertise()
    one.server.add_advert(advert)
    with pytest.raises(InvalidValue, match="two keys that nobody else sent"):
        one.server.add_advert(replace(advert, member=1))


def test_members_without_enough_neighbours_leave_until_all_have_enough():
    one = Round(round_context(10, 4, 2, 2))
    order = one.context.order
    keys = one.advertise(lost={order[place] for place in (0, 1, 3, 4)})
    assert set(keys) == set(order[5:])  # nobody is left for order[2]
    for index in keys:
        assert len(set(one.context.graph[index]) & set(keys)) >= 2
    deliveries = one.share(keys)
    assert (one.unmask(one.mask(deliveries)) == one.plain_sum()).all()
