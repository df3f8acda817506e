"""A silo's end of a weighted sum by itself; whole runs are in tests/algorithms/uldp."""

import numpy as np
import torch

from flower_ext.federation.state.memory import ClientVault
from flower_ext.federation.sums.weighted import LOST, WEIGHTS
from flower_ext.federation.sums.weighted_silo import open_part
from tests.support.private_silos import fresh_context
from tests.support.silos import USERS


def test_a_silo_without_keys_trains_nobody_and_says_that_it_lost_them():
    weights = {WEIGHTS: np.zeros(8, np.uint8)}
    part = open_part(weights, ClientVault(fresh_context(), "m"), 1, USERS, 0.5, {})
    assert not any(map(part.counts, range(USERS)))
    assert part.value.bound == 0.5
    reply = part.value.encrypt({"weight": torch.ones(2)})
    assert {name: array.tolist() for name, array in reply.items()} == {LOST: [0]}


def test_without_the_servers_message_the_method_weighs_its_users():
    assert open_part(None, ClientVault(fresh_context(), "m"), 1, USERS, 0.5, {}) is None
