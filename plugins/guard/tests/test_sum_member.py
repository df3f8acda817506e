"""Guards that join secure sums: real node APIs, real apps in real processes, one server."""

import time
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from guarding import needs_namespaces, write_sum_policy
from plain_app.plain.client_app import MARK
from plain_app.plain.client_app import app as plain_app
from supernode import LoopbackSuperNode

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import FederatedStrategy, FederationNotReady, InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.federation.messages.failures import REASON_WITHHELD
from flower_ext.federation.messages.for_mods import FOR_MODS, REHEARSAL
from flower_ext.federation.sums.masked import MASKED_SUM
from flower_ext.privacy import (
    AdversaryView,
    FullParticipation,
    NeighboringRelation,
    Release,
    SecureSum,
    privacy_loss_of,
)
from flower_ext.privacy.account_entries import CHARGE
from flower_ext.privacy.mechanisms.noise import largest_noised_norm
from flower_ext.privacy.shared_ledger import entries_of
from flower_ext_guard import service
from flower_ext_guard.flower_runtime import Runtime
from flower_ext_guard.policy import read_policy
from flower_ext_guard.service import Guard
from tests.support.identities import write_identities
from tests.support.plans import release_plan

pytestmark = [pytest.mark.timeout(300)]

SITES = 3
SIGNED = SecureSum(colluding=0.0, dropouts=0.0, signed=True)
MULTIPLIER = 1.0  # of the sum, so a share has 1/sqrt(3) = 0.577
LEAST = 0.5


class GuardedSites(InProcessGrid):
    """A grid that hands each message to a SuperNode's real API, behind which a guard serves it."""

    def __init__(self, nodes, guards):
        super().__init__(plain_app, num_clients=SITES)
        self.nodes, self.guards, self.received = nodes, guards, []

    def send_and_receive(self, messages, *, timeout=None):
        for message in messages:
            site = message.metadata.dst_node_id - min(self.get_node_ids())
            node, metadata = self.nodes[site], message.metadata
            node.send_content(message.content, metadata.message_type, metadata.group_id)
            self.guards[site].serve_one()
            (answer,) = node.replies()
            body = answer.error if answer.has_error() else answer.content
            self.received.append(answer)
            yield Message(body, reply_to=message)


@pytest.fixture
def sites(tmp_path):
    """Return a function that starts guards of all sites and returns their grid."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(LoopbackSuperNode(partition=p)) for p in range(SITES)]
        identities = write_identities(tmp_path, SITES)

        def start(**demands):
            guards = []
            for site, (node, identity) in enumerate(zip(nodes, identities, strict=True)):
                path = tmp_path / f"site-{site}" / "guard.toml"
                policy = read_policy(write_sum_policy(path, identity, **demands))
                runtime = Runtime(node.address, root_certificates=None, secret=b"secret")
                guards.append(Guard(policy, runtime, tell=lambda line: None))
            return GuardedSites(nodes, guards)

        yield start


def run(grid, *, way="honest", **plan):
    fields = {"clipping_norm": 1.0, "noise_multiplier": MULTIPLIER, "rounds": 1, "delta": 1e-6}
    chosen = release_plan(SITES, **{**fields, "noise_placement": SIGNED, **plan})
    strategy = FederatedStrategy(DPFedAvg(), chosen, evaluate_every=0)
    start = ArrayRecord({"vector": Array(np.zeros(4, np.float32))})
    config = ConfigRecord({"way": way})
    return strategy, strategy.start(grid, start, num_rounds=1, train_config=config)


def charges(grid):
    ledgers = [entries_of(guard.policy.ledger) for guard in grid.guards]
    return [[entry for entry in entries if entry["kind"] == CHARGE] for entries in ledgers]


LEAKS = "in-metrics in-another-record in-the-context in-log-lines in-a-huge-norm"


@needs_namespaces
@pytest.mark.parametrize("way", [LEAKS, pytest.param("in-an-error", marks=pytest.mark.full)])
def test_of_a_hostile_app_the_server_gets_nothing_but_masked_bytes(sites, way):
    grid = sites()
    strategy, result = run(grid, way=way)
    assert strategy.refusals == []
    for answer in grid.received:
        if answer.has_error():  # the question of this package's own apps
            assert "query.identity" in answer.error.reason
            continue
        assert MARK.encode() not in b"".join(
            array.data
            for record in answer.content.array_records.values()
            for array in record.values()
        )
        assert set(answer.content) <= {"identity", records.UPDATE, records.ANSWER}
    model = result.arrays["vector"].numpy()
    assert np.linalg.norm(model) * SITES <= largest_noised_norm(SITES, MULTIPLIER, 4)
    assert np.linalg.norm(model) > 0
    # Each site charges what the sum protects, and what its share of the noise protects alone.
    for (charge,) in charges(grid):
        claims = {AdversaryView(claim["view"]): claim["epsilon"] for claim in charge["claims"]}
        for view, honest in ((AdversaryView.SUM_ONLY, SITES), (AdversaryView.EACH_UPLOAD, 1)):
            noise = Release(
                sampling=FullParticipation(1),
                noise_multiplier=LEAST * np.sqrt(honest),
                relation=NeighboringRelation.REPLACE_ONE,
            )
            assert claims[view] == pytest.approx(privacy_loss_of([noise], delta=1e-6).epsilon)


@pytest.mark.parametrize(
    ("plan", "demands", "words"),
    [
        ({"noise_multiplier": 0.8}, {}, "requires least-noise-multiplier=0.5"),
        ({"noise_placement": "client"}, {}, "set require-secure-sum=true"),
        pytest.param(
            {"noise_placement": "server"},
            {},
            "requires least-noise-multiplier=0.5",
            marks=pytest.mark.full,
        ),
        (
            {"noise_placement": SecureSum(colluding=0.0, dropouts=0.0)},
            {},
            "this round is not signed",
        ),
        ({}, {"colluders": 1}, "requires least-honest-answers=3"),
        ({}, {"epsilon": 1.0}, "budget of this site is spent"),
    ],
)
def test_requests_that_the_policy_forbids_are_refused_at_no_cost(sites, plan, demands, words):
    grid = sites(**demands)
    with pytest.raises((FederationNotReady, RuntimeError)) as failure:
        run(grid, **plan)
    refusals = [a.error.reason for a in grid.received if a.has_error()]
    assert words in str(failure.value) + " ".join(refusals)
    assert charges(grid) == [[], [], []]


@pytest.mark.parametrize("record", [None, ArrayRecord()], ids=["missing", "empty"])
def test_a_message_that_no_mod_reads_ends_no_guard(sites, record):
    grid = sites()
    rehearsal = {"config": ConfigRecord({f"{FOR_MODS}{REHEARSAL}": True, "flower-ext/number": "x"})}
    grid.nodes[0].send_content(RecordDict({**rehearsal, **({"arrays": record} if record else {})}))
    assert grid.guards[0].serve_one()
    (answer,) = grid.nodes[0].replies()
    assert answer.error.reason == f"flower-ext guard: {REASON_WITHHELD}"


@needs_namespaces
def test_a_sum_that_refuses_hides_how_long_the_app_ran(sites, monkeypatch):
    grid, waits = sites(), []
    for guard in grid.guards:
        guard.policy = replace(guard.policy, reply_after=1e6)
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda s: waits.append(s) if s > 9e5 else sleep(s))
    real = GuardedSites.send_and_receive

    def spoiled(sites, messages, **options):
        messages = list(messages)
        for message in messages:
            if {records.MODEL, MASKED_SUM} <= set(message.content):
                (name,) = message.content[MASKED_SUM]
                message.content[MASKED_SUM][name] = Array(np.zeros(3, np.uint8))
        return real(sites, messages, **options)

    monkeypatch.setattr(GuardedSites, "send_and_receive", spoiled)
    with pytest.raises((FederationNotReady, RuntimeError)):
        run(grid)
    assert len(waits) == SITES
    assert charges(grid) == [[], [], []]


@needs_namespaces
def test_a_site_whose_guard_died_after_masking_answers_no_second_time(sites, monkeypatch):
    """Two vectors under one mask would show their difference."""
    grid = sites()
    real, masked = service.reply_bytes, []

    def dying(request, body):
        content = body if isinstance(body, RecordDict) else {}
        if list(content.get(records.UPDATE, ())) == ["message"] and not masked:
            masked.append(request.message)
            raise KeyboardInterrupt
        return real(request, body)

    monkeypatch.setattr(service, "reply_bytes", dying)
    with pytest.raises(KeyboardInterrupt):
        run(grid)
    (message,) = masked
    assert grid.nodes[0].replies() == []
    grid.nodes[0].send_content(message.content, group_id=message.metadata.group_id)
    grid.guards[0].serve_one()
    (answer,) = grid.nodes[0].replies()
    assert "flower-ext guard" in answer.error.reason
    assert charges(grid) == [[], [], []]
