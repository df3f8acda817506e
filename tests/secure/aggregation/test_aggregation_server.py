"""Messages that the server refuses, and rounds in which it gives no sum."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from flower_ext.errors import IncompleteRound, InvalidValue, ProtocolError
from flower_ext.secure.aggregation import member
from flower_ext.secure.aggregation.aggregation_server import ShareFault
from tests.support.grids import grid
from tests.support.secure_sum import LOW_ORDER, Round, round_context


def test_repeated_and_late_messages_are_refused_and_the_sum_stays_right():
    one = Round(round_context(6, 5, 2, 3))
    deliveries = one.share(one.advertise())
    late = one.members[5].mask(deliveries[5], one.vectors[5])
    first = one.members[0].mask(deliveries[0], one.vectors[0])
    one.server.add(first)
    with pytest.raises(ProtocolError, match="already"):
        one.server.add(first)
    for index in range(1, 5):
        one.server.add(one.members[index].mask(deliveries[index], one.vectors[index]))
    unmask_requests = one.server.unmask_requests()
    with pytest.raises(ProtocolError, match="now expects revealed shares"):
        one.server.add(late)
    assert (one.unmask(unmask_requests) == one.plain_sum()).all()
    assert 5 not in one.server.answered


def wrong_shares(one, unmask_requests, liars):
    """Let ``liars`` reveal wrong shares of everybody, and the others right ones."""
    for index in sorted(one.server.answered):
        revealed = one.members[index].unmask(unmask_requests[index])
        if index in liars:
            wrong = {o: s[:-1] + bytes([s[-1] ^ 1]) for o, s in revealed.shares.items()}
            revealed = replace(revealed, shares=wrong)
        one.server.add(revealed)


@pytest.mark.parametrize(
    ("lost", "liars"),
    grid(
        product([(), (19,)], [(0,), (18,), (3, 5), range(8)]),
        [((), (0,)), ((19,), (18,)), ((), (3, 5)), ((19,), range(8))].__contains__,
    ),
)
def test_wrong_shares_do_not_spoil_a_sum_and_name_their_senders(liars, lost):
    one = Round(round_context(20, 19, 10, 12))
    wrong_shares(one, one.mask(one.share(one.advertise()), lost=lost), liars)
    assert (one.server.total() == one.plain_sum()).all()
    assert set(one.server.faults) == {(liar, ShareFault.WRONG) for liar in liars}


@pytest.mark.parametrize("lost", [(), (5,)], ids=["seeds", "and a mask key"])
def test_one_wrong_share_is_found_with_a_single_one_to_spare(lost):
    one = Round(round_context(6, 5, 3, 3))
    wrong_shares(one, one.mask(one.share(one.advertise()), lost=lost), liars=(0,))
    assert (one.server.total() == one.plain_sum()).all()
    assert set(one.server.faults) == {(0, ShareFault.WRONG)}


def test_too_many_wrong_shares_discard_the_round():
    one = Round(round_context(20, 19, 10, 12))
    wrong_shares(one, one.mask(one.share(one.advertise())), liars=range(10))
    with pytest.raises(IncompleteRound, match="at least 10 valid shares, but 9 arrived"):
        one.server.total()


@pytest.mark.parametrize("lost", [(), (5,)], ids=["seeds", "and a mask key"])
def test_shares_of_no_secret_discard_the_round_and_their_owner_is_named(lost, monkeypatch):
    one, dealt = Round(round_context(6, 5, 3, 3)), member.split_secret
    keys = one.advertise()

    def other_secrets(secret, *arguments):
        if secret in (one.members[5].seed, one.members[5].mask_private):
            secret = bytes(32)
        return dealt(secret, *arguments)

    monkeypatch.setattr(member, "split_secret", other_secrets)
    wrong_shares(one, one.mask(one.share(keys), lost=lost), liars=())
    with pytest.raises(IncompleteRound, match="of member 5: expected shares of a secret that fits"):
        one.server.total()
    assert one.server.faults == {(5, ShareFault.UNFIT): set()}


@pytest.mark.parametrize(("spared", "is_enough"), [(3, True), (2, False)])
@pytest.mark.parametrize("lost", [(), (5,)], ids=["seeds", "and a mask key"])
def test_an_owner_with_wrong_hashes_can_lose_but_not_spoil_the_round(
    spared, is_enough, lost, monkeypatch
):
    hashed = member.share_hash

    def forged(*share, owner, holder, kind):
        if owner == 5 and holder >= spared:
            return bytes(32)
        return hashed(*share, owner=owner, holder=holder, kind=kind)

    monkeypatch.setattr(member, "share_hash", forged)
    one = Round(round_context(6, 5, 3, 3))
    requests = one.mask(one.share(one.advertise()), lost=lost)
    if is_enough:
        assert (one.unmask(requests) == one.plain_sum()).all()
    else:
        with pytest.raises(
            IncompleteRound, match="of member 5: expected at least 3 valid shares, but 2 arrived"
        ):
            one.unmask(requests)
    assert one.server.faults == {(holder, ShareFault.WRONG): {5} for holder in range(spared, 5)}


def test_the_other_kind_of_share_is_refused():
    one = Round(round_context(6, 5, 2, 3))
    unmask_requests = one.mask(one.share(one.advertise()))
    revealed = one.members[0].unmask(unmask_requests[0])
    swapped = {**revealed.shares, 1: b"k" + revealed.shares[1][1:]}
    with pytest.raises(InvalidValue, match="kinds"):
        one.server.add(replace(revealed, shares=swapped))


def test_a_key_that_another_member_has_is_refused():
    one = Round(round_context())
    advert = one.members[0].advertise()
    one.server.add(advert)
    with pytest.raises(InvalidValue, match="two different keys that no other member sent"):
        one.server.add(replace(advert, member=1))


@pytest.mark.parametrize("value", LOW_ORDER)
@pytest.mark.parametrize("at", [0, 32])
def test_a_key_of_low_order_or_with_a_second_encoding_is_refused(value, at):
    one = Round(round_context())
    advert = one.members[0].advertise()
    keys = advert.keys[:at] + value + advert.keys[at + 32 :]
    with pytest.raises(InvalidValue, match="low order"):
        one.server.add(replace(advert, keys=keys))
    one.server.add(advert)  # a refused message changes nothing


def test_members_without_enough_neighbours_leave_until_all_have_enough():
    one = Round(round_context(10, 4, 2, 2))
    order = np.random.default_rng(1).permutation(10).tolist()
    keys = one.advertise(lost={order[place] for place in (0, 1, 3, 4)})
    assert set(keys) == set(order[5:])  # nobody is left for order[2]
    for index in keys:
        assert len(set(one.graph[index]) & set(keys)) >= 2
    deliveries = one.share(keys)
    assert (one.unmask(one.mask(deliveries)) == one.plain_sum()).all()
