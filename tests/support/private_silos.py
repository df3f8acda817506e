"""Small runs of Uldp-FL with encrypted weights, and the equal runs without encryption."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, RecordDict

from flower_ext.algorithms.uldp import PrivateWeighting, UldpAvg, UldpSgd
from flower_ext.federation import InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.federation.storage.memory import ClientVault
from flower_ext.privacy import FullParticipation
from flower_ext.secure.weighting.protocol import load_protocol, protocols
from tests.support.silos import COMMON, LOCAL, ROUNDS, SEED, SILOS, USERS, plan, task
from tests.support.strategies import private_strategy_of, strategy_of

METHOD = UldpAvg.client.name
SMALL = PrivateWeighting(
    key_bits=512,
    allow_insecure_key_size=True,
    max_records_per_user=60,
    precision=1e-6,  # far above the rounding of float32 models
)


def name_of(protocol):
    return protocol.silo_type.settings_type.kind


INSTALLED = [
    SMALL,
    *(
        load_protocol(name)(silo_record_limits=(12, 12, 12))
        for name in sorted(protocols())
        if name != "paillier"
    ),
]
EVERY = pytest.mark.parametrize("protocol", INSTALLED, ids=name_of)
"""Runs a test under Paillier, and under each protocol of an installed plug-in."""


def make(method=UldpAvg, protocol=SMALL, **changes):
    """Return a run whose weights no party learns."""
    return private_strategy_of(method, protocol=protocol, **_options(method, changes))


def make_openly(method=UldpAvg, **changes):
    """Return the equal run in which the server knows the weights."""
    return strategy_of(method, **{"weighting": "by-records", **_options(method, changes)})


def _options(method, changes):
    rest = {"sampling": FullParticipation(USERS), "ledger": None, "plan": {}, **changes}
    local = {} if issubclass(method, UldpSgd) else {"local": LOCAL}
    return {"plan": plan(rest.pop("sampling"), **rest.pop("plan")), **local, **COMMON, **rest}


def start(strategy, grid_of=InProcessGrid, data=None, rounds=ROUNDS, **options):
    """Return the grid and the final model."""
    app = strategy.method.client_app(task(data), allow_seeded_noise=True)
    grid = grid_of(app, num_clients=SILOS, **options)
    initial = ArrayRecord(task().initial_params(SEED))
    result = strategy.start(grid, initial, num_rounds=rounds)
    return grid, records.to_arrays(result.arrays)


def difference(one, other):
    return max(float(np.abs(one[n] - other[n]).max()) for n in other)


def vault(grid, number):
    return ClientVault(grid.contexts[1_000 + number], METHOD)


class Meddler(InProcessGrid):
    """Changes the replies to one kind of message; ``meddle`` takes and returns a list of them."""

    def __init__(self, *args, meddle, kind="train", groups=("2",), **options):
        super().__init__(*args, **options)
        self.meddle, self.kind, self.groups, self.asked = meddle, kind, groups, []
        self.earlier = []

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        self.asked += messages
        replies = list(super().send_and_receive(messages, timeout=timeout))
        chosen = messages and messages[0].metadata.message_type.startswith(self.kind)
        if chosen and messages[0].metadata.group_id in self.groups:
            replies = self.meddle(replies, self)
        if chosen:
            self.earlier += replies
        return replies


class FreshProcesses(InProcessGrid):
    """Every message reaches a new process, which knows the stored context alone."""

    def _answer_in_process(self, messages):
        replies = []
        for message in messages:
            context = self.contexts[message.metadata.dst_node_id]
            stored = vault(self, context.node_id - 1_000).load()
            context.state = RecordDict()
            if stored is not None:
                vault(self, context.node_id - 1_000).store(bytes(stored))
            replies += super()._answer_in_process([message])
        return replies


class Forgetful(InProcessGrid):
    """Silo 1 loses its state before round 2."""

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        if messages and messages[0].metadata.group_id == "2":
            self.contexts[1_001].state = RecordDict()
        return super().send_and_receive(messages, timeout=timeout)


class Owned(Forgetful):
    """Every silo keeps its secrets in a folder of its own."""

    def __init__(self, *args, folder, **options):
        super().__init__(*args, **options)
        for context in self.contexts.values():
            context.node_config["state-folder"] = str(folder / str(context.node_id))


def fresh_context():
    """Return the context of silo 1, which has stored nothing."""
    node = {"partition-id": 1}
    return Context(run_id=1, node_id=1_001, node_config=node, state=RecordDict(), run_config={})
