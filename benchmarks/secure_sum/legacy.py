# ruff: noqa: TID251  (what is measured is the legacy)
"""Flower's legacy SecAgg+, by its own functions.

The clients take the four steps of `secaggplus_mod`, and the server those of `SecAggPlusWorkflow`.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common import Code, FitRes, Parameters, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import (
    SecAggPlusWorkflow,
    WorkflowState,
)

from benchmarks.secure_sum.ours import MEASURED
from flower_ext.federation._flower_private import become_server_of

RING, TARGET, CLIPPING, EXAMPLES = 2**32, 2**22, 8.0, 1000
MOST_MASKED = 3e7
"""The most numbers that all clients mask in a round, each for every neighbour; see `Clients`."""
# The package exports a function of the same name, so import the module by its path.
client_mod = import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Processor seconds of one client and of the server; bytes of a masked vector's message."""

    client: float
    server: float
    vector_bytes: int


class Clients:
    """All clients of a round, as a grid that runs them and times one of them.

    Parameters
    ----------
    whole : bool
        True if all clients mask their vectors. Otherwise they send the vector of the timed client,
        which costs the server as much.
    """

    def __init__(self, config: dict[str, Any], members: int, length: int, *, whole: bool) -> None:
        self.seconds = self.outside = 0.0
        self.vector_bytes = 0
        self._states = {index: client_mod.SecAggPlusState(nid=index) for index in range(members)}
        self._keys = {
            n: self._timed(n, client_mod._setup, ConfigRecord(config)) for n in self._states
        }
        self._parameters = ndarrays_to_parameters([np.ones(length, dtype=np.float32)])
        self._whole = whole
        self._masked: dict[str, Any] = {}

    @property
    def public_keys(self) -> dict[int, list[bytes]]:
        """Return both public keys of each client."""
        return {
            n: [keys[Key.PUBLIC_KEY_1], keys[Key.PUBLIC_KEY_2]] for n, keys in self._keys.items()
        }

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Answer the server's messages; every tenth client is lost after sharing."""
        start = time.process_time()
        replies = [self._reply(message) for message in messages]
        self.outside += time.process_time() - start
        return replies

    def _reply(self, message: Message) -> Message:
        request = message.content.config_records[RECORD_KEY_CONFIGS]
        stage, node = request.pop(Key.STAGE), message.metadata.dst_node_id
        content = RecordDict()
        if stage == "share_keys":
            answer = self._timed(node, client_mod._share_keys, request)
        elif stage == "unmask":
            answer = self._timed(node, client_mod._unmask, request)
        elif node % 10 == 0:
            return Message(Error(code=0), reply_to=message)
        else:
            if node == 1 or self._whole or not self._masked:
                self._masked = self._collected(node, request)
                self.vector_bytes = sum(map(len, self._masked[Key.MASKED_PARAMETERS]))
            else:
                self._open(node, request)
            answer = self._masked
            empty = Parameters(tensors=[], tensor_type="")
            content = fitres_to_recorddict(
                FitRes(Status(Code.OK, ""), empty, EXAMPLES, {}), keep_input=False
            )
        content.config_records[RECORD_KEY_CONFIGS] = ConfigRecord(answer, False)
        return Message(content, reply_to=message)

    def _timed(self, node: int, step: Any, *arguments: Any) -> dict[str, Any]:
        start = time.process_time()
        answer: dict[str, Any] = step(self._states[node], *arguments)
        if node == 1:
            self.seconds += time.process_time() - start
        return answer

    def _collected(self, node: int, request: ConfigRecord) -> dict[str, Any]:
        """Mask one client's vector; time it as often as our clients."""
        collect, before = client_mod._collect_masked_vectors, self.seconds
        for _ in range(MEASURED if node == 1 else 1):
            answer = self._timed(node, collect, request, EXAMPLES, self._parameters)
        self.seconds = before + (self.seconds - before) / MEASURED
        return answer

    def _open(self, node: int, request: ConfigRecord) -> None:
        """Let a client that masks nothing keep its neighbours' shares."""
        state: Any = self._states[node]
        sources: Any = request[Key.SOURCE_LIST]
        texts: Any = request[Key.CIPHERTEXT_LIST]
        for source, sealed in zip(sources, texts, strict=True):
            text = client_mod.decrypt(state.ss2_dict[source], sealed)
            _, _, seed, key = client_mod.share_keys_plaintext_separate(text)
            state.rd_seed_share_dict[source], state.sk1_share_dict[source] = seed, key


def round_cost(members: int, num_neighbors: int, threshold: int, length: int) -> Cost:
    """Run a round in which every tenth member is lost after sharing."""
    num_shares = num_neighbors + 1  # a client is its own neighbour
    config: dict[str, Any] = {
        Key.SAMPLE_NUMBER: members,
        Key.SHARE_NUMBER: num_shares,
        Key.THRESHOLD: threshold,
        Key.CLIPPING_RANGE: CLIPPING,
        Key.TARGET_RANGE: TARGET,
        Key.MOD_RANGE: RING,
        Key.MAX_WEIGHT: float(EXAMPLES),
    }
    whole = members * num_shares * length <= MOST_MASKED
    clients = Clients(config, members, length, whole=whole)
    server, means = _run_server(clients, members, num_shares, threshold)
    if whole:  # clients send ones, so their mean is one, up to rounding to 2⁻¹⁸
        assert np.allclose(means[0], 1, atol=1e-4), means
    return Cost(client=clients.seconds, server=server, vector_bytes=clients.vector_bytes)


def _run_server(
    clients: Clients, members: int, num_shares: int, threshold: int
) -> tuple[float, list[np.ndarray]]:
    """Run the server's stages; return its CPU seconds, and the mean of the clients' arrays."""
    workflow = SecAggPlusWorkflow(num_shares=num_shares, reconstruction_threshold=threshold)
    half, ring = num_shares // 2, np.random.default_rng().permutation(members).tolist()
    state = WorkflowState(
        nid_to_proxies=dict.fromkeys(range(members)),  # type: ignore[arg-type]
        nid_to_fitins={node: RecordDict() for node in range(members)},
        sampled_node_ids=set(range(members)),
        active_node_ids=set(range(members)),
        num_shares=num_shares,
        threshold=threshold,
        clipping_range=CLIPPING,
        quantization_range=TARGET,
        mod_range=RING,
        max_weight=float(EXAMPLES),
        nid_to_neighbours={
            node: {ring[(place + step) % members] for step in range(-half, half + 1)}
            for place, node in enumerate(ring)
        },
        nid_to_publickeys=clients.public_keys,
    )
    means: list[np.ndarray] = []

    def aggregate_fit(_: int, results: Any, __: Any) -> tuple[None, dict[str, Any]]:
        means.extend(client_mod.parameters_to_ndarrays(results[0][1].parameters))
        return None, {}

    context: Any = SimpleNamespace(
        state=RecordDict({MAIN_CONFIGS_RECORD: ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})}),
        strategy=SimpleNamespace(aggregate_fit=aggregate_fit),
    )
    become_server_of(1)  # needed to create messages
    clients.outside, start, grid = 0.0, time.process_time(), clients
    for stage in (
        workflow.share_keys_stage,
        workflow.collect_masked_vectors_stage,
        workflow.unmask_stage,
    ):
        assert stage(grid, context, state), stage  # type: ignore[arg-type]
    return time.process_time() - start - clients.outside, means
