"""The server's view of a single upload, and the threshold of a collusion."""

import secrets
from contextlib import suppress
from itertools import product

import numpy as np
import pytest
from scipy.stats import chi2

from flower_ext.errors import InvalidValue
from flower_ext.privacy import SecureSum
from flower_ext.secure.aggregation import mask_streams, member
from flower_ext.secure.aggregation.aggregation_messages import (
    OF_KEY,
    OF_SEED,
    SEALED_BYTES,
    Delivery,
    Keys,
    UnmaskRequest,
)
from flower_ext.secure.aggregation.mask_streams import apply_mask, self_mask_key
from flower_ext.secure.aggregation.shamir import SHARE_BYTES, combine
from tests.support.secure_sum import Round, graph_for, member_of, round_context


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
    seed = one.members[0].seed
    private = one.members[0].mask_private
    keys = one.members[0].keys
    data = one.members[0].mask(deliveries[0], np.zeros(one.context.length, np.uint32)).values
    left = np.frombuffer(data, dtype=np.uint32).copy()
    apply_mask(self_mask_key(one.context.digest, seed, 0), left, subtract=True)
    for other in list(keys)[: None if knows_pairs else -1]:
        key = mask_streams.pair_mask_key(
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
    private = one.members[0].mask_private
    for index in range(1, 5):
        one.members[index].mask(deliveries[index], one.vectors[index])
    held = {i + 1: one.members[i].held[0][33:] for i in range(1, 5)}
    assert combine(held, 4) == private
    held.popitem()
    with pytest.raises(InvalidValue):
        combine(held, 4)
    with suppress(InvalidValue):  # the polynomial through three shares may exceed 2^256 at zero
        assert combine(held, 3) != private


def test_equal_shares_of_other_rounds_owners_holders_and_kinds_have_other_hashes():
    """Equal hashes would tell the server that two shares are equal."""
    labels = [*product((b"1" * 32, b"2" * 32), range(3), range(3), (OF_SEED, OF_KEY))]
    hashes = {
        mask_streams.share_hash(digest, bytes(33), owner=owner, holder=holder, kind=kind)
        for digest, owner, holder, kind in labels
    }
    assert len(hashes) == len(labels)


def test_the_hashes_of_shares_reach_nobody_but_the_server():
    one = Round(round_context())
    deliveries = one.share(one.advertise())
    published = [
        data[SEALED_BYTES:] for m in one.server._shared.values() for data in m.sealed.values()
    ]
    everything = b"".join(delivery.to_bytes() for delivery in deliveries.values())
    hashes = {half for both in published for half in (both[:32], both[32:])}
    assert len(hashes) == 2 * sum(map(len, one.graph))
    assert not any(hashed in everything for hashed in hashes)


def test_no_two_streams_of_rounds_and_members_have_one_key(monkeypatch):
    used = []
    monkeypatch.setattr(
        member, "apply_mask", lambda key, values, *, subtract=False: used.append((key, subtract))
    )
    for number in (1, 2):
        same_secrets = np.random.default_rng(0).bytes
        monkeypatch.setattr(secrets, "token_bytes", same_secrets)
        one = Round(round_context(number=number))
        one.mask(one.share(one.advertise()))
    assert len(set(used)) == len(used) == 2 * 6 * 5
    assert len({key for key, _ in used}) == 2 * (6 + 6 * 4 // 2)


class Equivocating:
    """A server that keeps everything, and tells each member around member 0 another story."""

    def __init__(self, parameters):
        self.context = context = round_context(
            parameters.members,
            parameters.num_neighbors,
            parameters.threshold,
            parameters.least_answers,
            length=8,
        )
        self.graph = graph = graph_for(context.members, context.num_neighbors, context.round_number)
        circles = [{0}]
        for _ in range(3):
            circles.append(circles[-1].union(*(graph[index] for index in circles[-1])))
        self.near, self.around, everybody = circles[1:]
        self.values = np.arange(8, dtype=context.dtype)
        self.members = {index: member_of(context, index, graph[index]) for index in everybody}
        self.public = {index: one.advertise().keys for index, one in self.members.items()}
        sealed = {}
        for index in self.around:
            keys = {other: self.public[other] for other in (index, *graph[index])}
            sealed[index] = self.members[index].share(Keys(digest=context.digest, keys=keys)).sealed
        self.masking = set()
        for index in self.around:
            shares = {
                other: sealed[other][index][:SEALED_BYTES]
                for other in {*graph[index]} & self.around
            }
            if len(shares) < parameters.threshold:
                continue
            masked = self.members[index].mask(
                Delivery(digest=context.digest, sealed=shares), self.values
            )
            self.masking.add(index)
            if index == 0:
                self.upload = np.frombuffer(masked.values, dtype=context.dtype).copy()
        self.seeds, self.keys = {}, {}

    def ask(self, index, lost):
        """Keep what one member reveals to a request that names these members as lost."""
        sharing = self.members[index].held.keys()
        kinds = {other: OF_KEY if other in lost else OF_SEED for other in sharing}
        answers = self.context.members - len(lost & sharing)
        request = UnmaskRequest(digest=self.context.digest, answers=answers, kinds=kinds)
        for owner, share in self.members[index].unmask(request).shares.items():
            kept = self.seeds if share[:1] == OF_SEED else self.keys
            kept.setdefault(owner, {})[index + 1] = share[1:]

    def corrupt(self, index):
        """Keep both shares that a colluding member holds of each secret of its neighbours."""
        for owner, both in self.members[index].held.items():
            self.seeds.setdefault(owner, {})[index + 1] = both[:SHARE_BYTES]
            self.keys.setdefault(owner, {})[index + 1] = both[SHARE_BYTES:]

    def opens(self, owners):
        """Return True if member 0's seed and the mask keys of ``owners`` open its upload."""
        context, left = self.context, self.upload.copy()
        with suppress(InvalidValue):
            seed = combine(self.seeds[0], context.threshold)
            apply_mask(self_mask_key(context.digest, seed, 0), left, subtract=True)
            for other in self.graph[0]:
                owner, public_owner = (0, other) if owners == {0} else (other, 0)
                key = mask_streams.pair_mask_key(
                    context.digest,
                    combine(self.keys[owner], context.threshold),
                    member=owner,
                    other=public_owner,
                    other_public=self.public[public_owner][:32],
                )
                apply_mask(key, left, subtract=other > 0)
        return bool(np.array_equal(left, self.values))


@pytest.mark.parametrize(
    ("colluding", "num_neighbors"),
    [(0.05, 0), pytest.param(0.1, 2, marks=pytest.mark.full)],
    ids=["the server", "with two of 22"],
)
def test_calling_a_member_answered_and_lost_reveals_only_one_secret(colluding, num_neighbors):
    """Planted: the smaller thresholds that suffice for a server that tells all the same."""
    for resist in (True, False):
        sums = SecureSum(colluding=colluding, dropouts=0.1, resist_equivocation=resist)
        parameters = sums.for_cohort(100)
        server = Equivocating(parameters)
        near = server.graph[0]
        most = 2 * parameters.threshold - parameters.num_neighbors - 1  # one more has it all
        colluders = near[: most if resist else num_neighbors]
        for index in colluders:
            server.corrupt(index)
        for place, index in enumerate(near[len(colluders) :]):
            server.ask(index, {0} if place % 2 else set())
        assert server.opens({0}) is not resist


def test_no_threshold_stops_a_server_that_declares_all_neighbours_lost():
    """The documentation names this limit: nobody's two secrets are revealed."""
    parameters = SecureSum(colluding=0.0, dropouts=0.1).for_cohort(300)
    server = Equivocating(parameters)
    near = server.near - {0}
    assert len(near) - 1 <= 300 - parameters.least_answers  # so every request passes
    for index in server.masking - {0}:
        server.ask(index, near)
    assert server.opens(near)
    assert 0 not in server.keys
    assert not near & {owner for owner, shares in server.seeds.items() if owner in server.keys}
