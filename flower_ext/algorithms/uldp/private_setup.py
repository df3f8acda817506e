"""Set-up of the private weighting over Flower's messages: keys, the silos' seed, blinded counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import getLogger

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flower_ext.algorithms.uldp import keeping
from flower_ext.algorithms.uldp.private_silo import (
    BEGIN,
    COUNT,
    COUNTS,
    KEY,
    KEYS,
    SEED,
    SEEDS,
    SERVER_KEY,
    SILO_KEYS,
    STEP,
)
from flower_ext.federation import FederatedStrategy, records
from flower_ext.secure import (
    BlindedCounts,
    SealedSeed,
    SiloKey,
    WeightingServer,
    WeightingSettings,
    estimate_round,
)

log = getLogger("flwr")

_KEY_BYTES = 32
_SEALED_BYTES = 60


def set_up(strategy: FederatedStrategy, grid: Grid, settings: WeightingSettings) -> WeightingServer:
    """Setup (a)–(f) of Protocol 1: the server, which knows all that it needs for the rounds.

    Raises
    ------
    FederationNotReady
        A silo does not answer, or not what the protocol says.
    """
    _log_estimate(settings)
    server = WeightingServer(settings, workers=keeping.cores())
    begin = ConfigRecord({STEP: BEGIN, **keeping.settings_to_facts(settings)})
    keys = ask_bytes(strategy, grid, begin, KEY, _KEY_BYTES)
    relayed = server.relay_keys([SiloKey(silo=s, public=key) for s, key in keys.items()])
    public = {
        SERVER_KEY: records.to_bytes_array(server.public_key),
        SILO_KEYS: np.stack([records.to_bytes_array(key.public) for key in relayed]),
    }
    shared = {silo: {KEYS: records.to_record(public)} for silo in keys}
    step, length = ConfigRecord({STEP: KEYS}), _SEALED_BYTES * (settings.silos - 1)
    sealed = ask_bytes(strategy, grid, step, SEEDS, length, own=shared, only=(0,))[0]
    parts = [sealed[at : at + _SEALED_BYTES] for at in range(0, length, _SEALED_BYTES)]
    seeds = server.relay_seed(
        [SealedSeed(receiver=s, sealed=part) for s, part in enumerate(parts, start=1)]
    )
    for_one = {
        seed.receiver: {SEED: records.to_record({SEED: records.to_bytes_array(seed.sealed)})}
        for seed in seeds
    }
    step, length = ConfigRecord({STEP: COUNT}), settings.users * settings.residue_bytes
    counts = ask_bytes(strategy, grid, step, COUNTS, length, own=for_one)
    server.receive_counts([BlindedCounts(silo=s, counts=c) for s, c in counts.items()])
    return server


def ask_bytes(
    strategy: FederatedStrategy,
    grid: Grid,
    question: ConfigRecord,
    name: str,
    length: int,
    *,
    own: Mapping[int, Mapping[str, ArrayRecord]] | None = None,
    only: Sequence[int] | None = None,
    asked: Sequence[int] | None = None,
) -> dict[int, bytes]:
    """Bytes of that name and length from each ``asked`` silo, or from ``only`` some of them."""
    nodes = strategy.exchange.nodes
    speakers = {nodes[silo] for silo in only or nodes}

    def read(reply: Message) -> bytes:
        arrays = records.read_answer(reply)
        if reply.metadata.src_node_id not in speakers:
            return b""
        return records.read_bytes(arrays, name, length)

    return strategy.exchange.ask_everyone(grid, question, read, own, partitions=asked)


def _log_estimate(settings: WeightingSettings) -> None:
    guess = estimate_round(settings, prepared=keeping.pool_pays(settings))
    log.info(
        "private weighting: on one core a round takes %.0f s in a silo that has all %d users "
        "(%.0f s less while nobody is drawn, %.0f s more in the first) and %.0f s in the "
        "server, which has %d cores; a silo sends %.1f MB and receives %.1f MB",
        guess.silo,
        settings.users,
        guess.fold + guess.tables,
        guess.prepare,
        guess.server,
        keeping.cores(),
        guess.upload_bytes / 1e6,
        guess.download_bytes / 1e6,
    )
