"""A silo's end of a weighted sum by itself; whole runs are in tests/algorithms/uldp."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from flower_ext.algorithms.uldp import UldpAvg, UldpGroup, UldpNaive
from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.federation import client_app
from flower_ext.federation._flower_private import message_like
from flower_ext.federation.messages import records
from flower_ext.federation.storage.memory import ClientVault
from flower_ext.federation.sums import weighted_silo
from flower_ext.federation.sums.summation import SumMessage
from flower_ext.federation.sums.weighted import LOST, SUM, WEIGHTED_SUM, WEIGHTS
from flower_ext.federation.sums.weighted_silo import HiddenSum, counts_of
from flower_ext.secure.weighting.paillier_settings import PaillierSum
from tests.support.private_silos import fresh_context, make, start
from tests.support.silos import USERS, histogram, silos, task
from tests.support.travelling import Recorder
from tests.support.weighting import World, close, weigh, weighting_settings


def test_counts_are_those_of_the_owners_up_to_the_limit():
    held = histogram(silos(), USERS)[1]
    assert counts_of(silos()[1], USERS, most=1000) == held.tolist()
    assert counts_of(silos()[1], USERS, most=2) == np.minimum(held, 2).tolist()
    with pytest.raises(InvalidValue, match="owners: found user 10, expected users 0 … 2"):
        counts_of(silos()[1], 3, most=2)


@pytest.fixture(scope="module")
def first_step():
    """Return the message that begins the set-up at silo 1."""
    grid, _ = start(make(evaluate_every=0), Recorder, rounds=1)
    (message,) = (
        m
        for m in grid.sent
        if m.metadata.dst_node_id == 1_001 and "begin" in m.content.get(WEIGHTED_SUM, {})
    )
    return message


def reply_of(method, message, content=None):
    """Return the answer of a method's client, and what the client stored."""
    app = client_app(method.client, task=task(), allow_seeded_noise=True)
    sent = message_like(
        message, content or message.content, message_type=f"query.{method.client.name}"
    )
    context = fresh_context()
    return app(sent, context), ClientVault(context, method.client.name).load()


@pytest.mark.parametrize("method", [UldpGroup, UldpNaive])
def test_only_methods_that_open_their_part_take_part_in_the_set_up(method, first_step):
    reply, stored = reply_of(UldpAvg, first_step)
    assert not reply.has_error()
    assert stored is not None
    reply, stored = reply_of(method, first_step)
    assert "takes no part in weighted sums" in reply.error.reason
    assert stored is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "the message has arrays {}: expected one array of bytes (uint8)"),
        (
            {"begin": np.zeros(3, np.uint8), "keys": np.zeros(3, np.uint8)},
            "one array of bytes (uint8)",
        ),
        ({"begin": np.zeros(3)}, "{'begin': 'float64(3,)'}: expected one array of bytes (uint8)"),
        ({"end": np.zeros(3, np.uint8)}, "the step 'end': expected one of ('begin', 'keys',"),
        ({"keys": np.zeros(3, np.uint8)}, "silo 1 has no keys of this run"),
    ],
)
def test_a_silo_names_what_is_wrong_with_a_message(arrays, message, first_step):
    content = RecordDict({WEIGHTED_SUM: records.to_record(arrays)})
    reply, stored = reply_of(UldpAvg, first_step, content)
    assert message in reply.error.reason
    assert stored is None


COUNTS = np.array([[1, 2, 0, 3], [2, 0, 1, 1], [0, 0, 0, 4]])


def hidden_sum(silo, message=b"", users=USERS, bound=0.5, size=2):
    weights, like = SumMessage(WEIGHTS, message), {"weight": torch.zeros(size)}
    return HiddenSum(silo, weights, training_round=1, users=users, bound=bound, like=like)


def upload(total, noise):
    """Return the name and the content of the only array that leaves a silo."""
    source = SimpleNamespace(gaussian=lambda zeros, stddev: {"weight": noise})
    ((name, array),) = total.noised(source, 1.0, None).items()
    return name, array.tobytes()


def test_a_silo_without_keys_trains_nobody_and_says_that_it_lost_them():
    total = hidden_sum(None)
    assert not any(map(total.includes, range(USERS)))
    assert total.value.bound == 0.5
    assert upload(total, torch.ones(2)) == (LOST, bytes(1))


def test_a_round_with_another_number_of_users_is_refused():
    silo = World(weighting_settings(), COUNTS).silos[0]
    with pytest.raises(ProtocolError, match="a round with 12 users: expected 4"):
        hidden_sum(silo)


def of_silo_2(world, message):
    """Return the empty sum of silo 2, which has records of user 3 only."""
    return hidden_sum(world.silos[2], message.to_bytes(), users=4, bound=100.0, size=5)


@pytest.mark.parametrize("odd", [np.full(5, np.nan), np.full(5, 1.1), np.zeros(4)])
def test_a_silo_with_an_unusual_update_sends_a_sum_of_zeros(odd, monkeypatch):
    world = World(weighting_settings(), COUNTS)
    updates, noise = world.draw(np.random.default_rng(3))
    message = world.begin(1)
    *others, _ = world.silos
    sums = [
        weigh(one, message, world.updates_of(i, updates), noise[i]) for i, one in enumerate(others)
    ]
    total = of_silo_2(world, message)
    monkeypatch.setattr(weighted_silo, "clip_each_row", lambda rows, norm: rows)
    total.add([3], {"weight": torch.from_numpy(odd)[None]})
    total.add([3], {"weight": torch.from_numpy(updates[2, 3:4])})  # which undoes no error
    name, data = upload(total, torch.from_numpy(noise[2]))
    assert name == SUM
    sums.append(PaillierSum.from_bytes(data, world.settings))
    updates[2] = 0.0
    result = close(world.server, sums)
    assert result == pytest.approx(world.plain(updates, noise), abs=1e-9)


def test_a_used_round_and_unusable_noise_are_no_reason_for_zeros():
    world = World(weighting_settings(), COUNTS)
    updates, noise = world.draw(np.random.default_rng(3))
    message = world.begin(1)
    total, other = of_silo_2(world, message), of_silo_2(world, message)
    total.add([3], {"weight": torch.from_numpy(updates[2, 3:4])})
    with pytest.raises(InvalidValue, match="noise hold NaN"):
        upload(total, torch.full((5,), np.nan))
    upload(total, torch.from_numpy(noise[2]))
    with pytest.raises(ProtocolError, match="round"):
        upload(other, torch.from_numpy(noise[2]))
