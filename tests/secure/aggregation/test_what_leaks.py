"""The server's view of a single upload, and the threshold of a collusion."""

from contextlib import suppress

import numpy as np
import pytest
from scipy.stats import chi2

from flower_ext.errors import InvalidValue
from flower_ext.secure.aggregation import masks, member
from flower_ext.secure.aggregation.masks import apply_mask, self_mask_key
from flower_ext.secure.aggregation.shamir import combine
from tests.support.secure_sum import Round, round_context


def looks_uniform(data):
    """Return False if bytes are not uniform; a uniform stream fails once in 10^9 times."""
    counts = np.bincount(np.frombuffer(data, dtype=np.uint8), minlength=256)
    expected = counts.sum() / 256
    return chi2.sf(((counts - expected) ** 2 / expected).sum(), 255) > 1e-9


def upload(monkeypatch, *, left_out):
    """Return the upload of zeros, with the masks whose place is in ``left_out`` missing."""
    calls = iter(range(100))

    def some(key, values, *, subtract=False):
        if next(calls) not in left_out:
            apply_mask(key, values, subtract=subtract)

    one = Round(round_context(length=100_000))
    delivery = one.share(one.advertise())[0]
    monkeypatch.setattr(member, "apply_mask", some)
    return one.members[0].mask(delivery, np.zeros(100_000, dtype=np.uint32)).values


def test_a_single_upload_is_uniform_and_without_masks_it_is_not(monkeypatch):
    assert looks_uniform(upload(monkeypatch, left_out=()))
    assert not looks_uniform(upload(monkeypatch, left_out=range(100)))


def residue(one, *, knows_pairs):
    """Return member 0's upload less the masks that the server can compute."""
    deliveries = one.share(one.advertise())
    seed = one.members[0]._state.seed
    private = one.members[0]._state.mask_private
    keys = one.members[0]._state.keys
    data = one.members[0].mask(deliveries[0], np.zeros(one.context.length, np.uint32)).values
    left = np.frombuffer(data, dtype=np.uint32).copy()
    apply_mask(self_mask_key(one.context.digest, seed, 0), left, subtract=True)
    for other in list(keys)[: None if knows_pairs else -1]:
        key = masks.pair_mask_key(
            one.context.digest, private, member=0, other=other, other_public=keys[other][:32]
        )
        apply_mask(key, left, subtract=other > 0)
    return left.tobytes()


def test_one_honest_neighbours_mask_hides_the_upload_and_none_does_not():
    assert looks_uniform(residue(Round(round_context(length=100_000)), knows_pairs=False))
    assert not any(residue(Round(round_context(length=100_000)), knows_pairs=True))


def test_t_colluding_neighbours_rebuild_a_mask_key_and_fewer_do_not():
    one = Round(round_context(8, 7, threshold=4))
    deliveries = one.share(one.advertise())
    private = one.members[0]._state.mask_private
    for index in range(1, 5):
        one.members[index].mask(deliveries[index], one.vectors[index])
    held = {i + 1: one.members[i]._state.held[0][33:] for i in range(1, 5)}
    assert combine(held, 4) == private
    held.popitem()
    with pytest.raises(InvalidValue):
        combine(held, 4)
    with suppress(InvalidValue):  # the polynomial through three shares may exceed 2^256 at zero
        assert combine(held, 3) != private


def test_no_two_streams_of_rounds_and_members_have_one_key(monkeypatch):
    used = []
    monkeypatch.setattr(
        member, "apply_mask", lambda key, values, *, subtract=False: used.append((key, subtract))
    )
    for number in (1, 2):
        source = np.random.default_rng(0)  # the same secrets again
        one = Round(round_context(number=number), token_bytes=source.bytes)
        one.mask(one.share(one.advertise()))
    assert len(set(used)) == len(used) == 2 * 6 * 5
    assert len({key for key, _ in used}) == 2 * (6 + 6 * 4 // 2)
