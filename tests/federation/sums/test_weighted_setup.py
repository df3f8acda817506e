"""A silo's set-up of a weighted sum by itself; whole runs are in tests/algorithms/uldp."""

import numpy as np
import pytest
from flwr.app import RecordDict

from flower_ext.algorithms.uldp import UldpAvg, UldpGroup, UldpNaive
from flower_ext.errors import InvalidValue
from flower_ext.federation import client_app, records
from flower_ext.federation._flower_private import message_like
from flower_ext.federation.state.memory import ClientVault
from flower_ext.federation.sums.weighted_setup import counts_of
from tests.support.private_silos import fresh_context, make, start
from tests.support.silos import USERS, histogram, silos, task
from tests.support.travelling import Recorder


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
        if m.metadata.dst_node_id == 1_001 and "begin" in m.content.get(records.WEIGHTED_SUM, {})
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
    ("arrays", "said"),
    [
        ({}, "the message has arrays {}: expected one array of bytes (uint8)"),
        (
            {"begin": np.zeros(3, np.uint8), "keys": np.zeros(3, np.uint8)},
            "one array of bytes (uint8)",
        ),
        ({"begin": np.zeros(3)}, "{'begin': 'float64(3,)'}: expected one array of bytes (uint8)"),
        ({"end": np.zeros(3, np.uint8)}, "{'end': 'uint8(3,)'}: expected one array of bytes"),
        ({"keys": np.zeros(3, np.uint8)}, "silo 1 has no keys of this run"),
    ],
)
def test_a_silo_names_what_is_wrong_with_a_message(arrays, said, first_step):
    content = RecordDict({records.WEIGHTED_SUM: records.to_record(arrays)})
    reply, stored = reply_of(UldpAvg, first_step, content)
    assert said in reply.error.reason
    assert stored is None
