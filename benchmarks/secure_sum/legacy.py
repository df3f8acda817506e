# ruff: noqa: TID251  (what is measured is the legacy)
"""Flower's legacy SecAgg+, by its own functions.

A client takes the four steps of `secaggplus_mod` among its neighbours. The server's `unmask_stage`
does the same for every secret and mask; one of each is timed, and multiplied by their numbers.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import numpy as np
from flwr.common import ConfigRecord, ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.ndarrays_arithmetic import parameters_subtraction
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

RING = 2**32
# The package exports a function of the same name, so the module is found by its path.
mod = import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")


def round_cost(members: int, neighbours: int, threshold: int, length: int) -> tuple[float, float]:
    """Return CPU seconds of one client, and of the server with every tenth member lost."""
    clock = time.process_time
    near = min(neighbours, members - 1)
    states = [mod.SecAggPlusState(nid=index) for index in range(near + 1)]
    config: dict[str, Any] = {
        Key.SAMPLE_NUMBER: members,
        Key.SHARE_NUMBER: near + 1,
        Key.THRESHOLD: threshold,
        Key.CLIPPING_RANGE: 8.0,
        Key.TARGET_RANGE: 2**22,
        Key.MOD_RANGE: RING,
        Key.MAX_WEIGHT: 1000.0,
    }
    start = clock()
    keys: dict[str, Any] = {"0": list(mod._setup(states[0], ConfigRecord(config)).values())}
    client = clock() - start
    for state in states[1:]:
        keys[str(state.nid)] = list(mod._setup(state, ConfigRecord(config)).values())
    start = clock()
    mod._share_keys(states[0], ConfigRecord(keys))
    client += clock() - start
    sealed = []
    for state in states[1:]:
        out = mod._share_keys(state, ConfigRecord(keys))
        sealed.append(out[Key.CIPHERTEXT_LIST][out[Key.DESTINATION_LIST].index(0)])
    delivery = ConfigRecord(
        {Key.SOURCE_LIST: list(range(1, near + 1)), Key.CIPHERTEXT_LIST: sealed}
    )
    parameters = ndarrays_to_parameters([np.zeros(length, dtype=np.float32)])
    start = clock()
    mod._collect_masked_vectors(states[0], delivery, 1000, parameters)
    question: dict[str, Any] = {
        Key.ACTIVE_NODE_ID_LIST: list(range(near + 1)),
        Key.DEAD_NODE_ID_LIST: [],
    }
    mod._unmask(states[0], ConfigRecord(question))
    client += clock() - start

    shares = mod.create_shares(bytes(range(32)), threshold, near + 1)
    vector = [np.zeros(length, dtype=np.int64)]
    start = clock()
    seed = combine_shares(shares[near // 10 :])  # a tenth of them is lost
    of_secret = clock() - start
    start = clock()
    parameters_subtraction(vector, pseudo_rand_gen(seed, RING, [(length,)]))
    of_mask = clock() - start
    lost = len(range(0, members, 10))
    masks = members - lost + lost * near
    return client, members * of_secret + masks * of_mask
