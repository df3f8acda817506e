"""Silos whose own data fail, or hold more records than the limits, in private weighting."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from flower_ext.algorithms.uldp import UldpAvg, averaging
from flower_ext.algorithms.uldp.weights import user_weights
from flower_ext.data import SiloData
from flower_ext.federation import InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.training import Task
from tests.support.grids import grid as grid_of
from tests.support.private_faults import in_turn
from tests.support.private_silos import (
    EVERY,
    INSTALLED,
    METHOD,
    SMALL,
    difference,
    make,
    make_openly,
    name_of,
    start,
)
from tests.support.silos import ROUNDS, SEED, SILOS, USERS, histogram, silos, task
from tests.support.worlds import Net


def nan(data):
    data.train.features[:] = torch.nan
    return data


def labels(data):
    data.train.targets[:] = 99
    return data


def raising(data):
    raise MemoryError("too little memory for these records")


def other_users(data):
    """Leave no user but one whom this silo did not count in the set-up."""
    unknown = sorted(set(range(USERS)) - set(data.owners.tolist()))[0]
    return SiloData(train=data.train, test=data.test, owners=torch.full_like(data.owners, unknown))


def fewer_users(data):
    kept = torch.nonzero(data.owners != data.owners[0])[:, 0].tolist()
    train = data.train.subset(kept)
    return SiloData(train=train, test=data.test, owners=data.owners[kept])


def nobody(data):
    return SiloData(train=data.train.subset([]), test=data.test, owners=data.owners[:0])


def failing_from_round_2(change):
    """Return a task whose silo 1 has changed data after its first training."""
    held, trained = silos(), []

    def data(number):
        if number != 1 or "failing" not in trained:
            return held[number]
        one = silos()[1]
        return change(one)

    return Task(model=Net, data=data, device="cpu"), trained


def run_with(strategy, change):
    """Return the final model and the replies of a run whose silo 1 fails after round 1."""
    replies = []
    world, trained = failing_from_round_2(change)

    class Failing(InProcessGrid):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            if messages and messages[0].metadata.group_id == "2":
                trained.append("failing")
            received = list(super().send_and_receive(messages, timeout=timeout))
            if messages and messages[0].metadata.message_type == f"train.{METHOD}":
                replies.append(received)
            return received

    app = strategy.method.client_app(world, allow_seeded_noise=True)
    grid = Failing(app, num_clients=SILOS)
    initial = ArrayRecord(task().initial_params(SEED))
    result = strategy.start(grid, initial, num_rounds=ROUNDS)
    return records.to_arrays(result.arrays), replies


@pytest.mark.parametrize(
    ("protocol", "change"),
    grid_of(
        [
            pytest.param(protocol, change, id=f"{name_of(protocol)}-{change.__name__}")
            for protocol in INSTALLED
            for change in (nan, labels, raising, nobody)
        ],
        lambda name: name.startswith("paillier") != name.endswith("raising"),
    ),
)
def test_a_silo_whose_data_fail_sends_a_sum_like_any_other(protocol, change):
    strategy = make(protocol=protocol, evaluate_every=0)
    model, replies = run_with(strategy, change)
    assert strategy.refusals == []
    shapes = {
        tuple((name, a.shape, a.dtype) for name, a in sorted(records.to_arrays(r).items()))
        for received in replies
        for reply in received
        for r in [reply.content["update"]]
    }
    assert len(replies) == ROUNDS
    assert len(shapes) == 1
    assert len({tuple(reply.content) for received in replies for reply in received}) == 1
    expected, _ = run_with(make_openly(UldpAvg, evaluate_every=0), change)
    assert difference(model, expected) <= ROUNDS * SMALL.precision


@in_turn("change", [other_users, fewer_users])
def test_users_that_appear_or_leave_after_the_set_up_count_as_zero(protocol, change):
    strategy = make(protocol=protocol, evaluate_every=0)
    model, _ = run_with(strategy, change)
    assert strategy.refusals == []
    plain = make_openly(UldpAvg, evaluate_every=0)
    if change is other_users:  # plain weights of the set-up give the newcomer none as well
        expected, _ = run_with(plain, change)
        assert difference(model, expected) <= ROUNDS * SMALL.precision


def too_little_memory(monkeypatch, protocol, step, silo=1):
    """Let one silo's sum of updates fail in ``step``; sums of zeros need less memory."""
    opened = protocol.silo_type.open_sum

    def open_sum(self, number, weights):
        into = opened(self, number, weights)
        if self.index != silo:
            return into
        add, finish, seen = into.add, into.finish, []

        def failing_add(updates):
            add(updates)
            seen.extend(update for update in updates.values() if np.any(update))
            if step == "add" and seen:
                raise MemoryError

        def failing_finish(noise):
            if step == "finish" and seen:
                raise MemoryError
            return finish(noise)

        into.add, into.finish = failing_add, failing_finish
        return into

    monkeypatch.setattr(protocol.silo_type, "open_sum", open_sum)


@in_turn("step", ["add", "finish"])
def test_a_silo_that_cannot_encrypt_its_updates_encrypts_zeros(protocol, step, monkeypatch, logged):
    too_little_memory(monkeypatch, protocol, step)
    strategy = make(protocol=protocol, evaluate_every=0)
    _, model = start(strategy)
    assert strategy.refusals == []
    assert "the updates of this silo cannot be encrypted (MemoryError)" in logged.text

    def without_silo_1(*source):
        weights = user_weights(*source)
        weights[1] = 0
        return weights

    monkeypatch.setattr(averaging, "user_weights", without_silo_1)
    expected = make_openly(UldpAvg, evaluate_every=0)
    assert difference(model, start(expected)[1]) <= ROUNDS * SMALL.precision


@EVERY
def test_a_user_beyond_a_silos_limit_counts_at_the_limit_unseen(protocol, logged, monkeypatch):
    limits = (3, 4, 5)
    strategy = make(protocol=replace(protocol, silo_record_limits=limits), evaluate_every=0)
    _, model = start(strategy)
    assert strategy.refusals == []
    held = histogram(silos(), USERS)
    for counts, limit in zip(held, limits, strict=True):
        above = int((counts > limit).sum())
        assert above
        assert f"{above} users have more records in this silo than the {limit}" in logged.text

    def limited(weighting, histogram):
        return user_weights(weighting, np.minimum(histogram, np.array(limits)[:, None]))

    monkeypatch.setattr(averaging, "user_weights", limited)
    expected = make_openly(UldpAvg, evaluate_every=0)
    assert difference(model, start(expected)[1]) <= ROUNDS * SMALL.precision
