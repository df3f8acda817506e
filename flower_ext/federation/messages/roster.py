"""The nodes of a run, and the partitions that they hold.

Cohorts are drawn over *partition ids* 0 … N−1, which are the same in every run. The server draws
only once all N nodes are connected. In simulation, nodes register while the ServerApp already runs;
a cohort drawn from the first few would have a different sampling rate than the accounted one.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import getLogger

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from flower_ext.errors import FlowerExtError
from flower_ext.federation._flower_private import message_like, replies, simulates
from flower_ext.federation.messages import records
from flower_ext.federation.messages.addresses import IDENTITY, IDENTITY_RECORD, NO_PARTITION
from flower_ext.federation.messages.failures import CLIENT_APP_RAISED, MOD_REFUSED, public_reason
from flower_ext.federation.messages.for_mods import FOR_MODS, PARTITION_QUESTION

log = getLogger("flwr")

_ADVISE_AFTER, _ADVISE_EVERY = 5.0, 60.0
"""Seconds of waiting until the log first says how to add nodes, and seconds between repetitions.
The nodes of a simulation usually connect before the log says this."""


class FederationNotReady(FlowerExtError, RuntimeError):
    """The connected nodes cannot take part in the run; the message says why."""


def wait_for_nodes(grid: Grid, expected: int, *, least: int, timeout: float) -> list[int]:
    """Wait until at least ``least`` nodes are connected; return their sorted ids.

    More nodes than ``expected`` are refused: the sampling rate would not be the accounted one.
    """
    started = time.monotonic()
    advise_at = started + _ADVISE_AFTER
    advice = "start more SuperNodes, or lower the plan's population"
    if simulates(grid):
        advice = (
            "end this run and start it again with as many nodes as the plan counts on: "
            f'flwr run … --federation-config "num-supernodes={expected}"'
        )
    while len(nodes := sorted(grid.get_node_ids())) < least:
        if time.monotonic() >= advise_at:
            log.warning("%d of %d nodes are connected: %s", len(nodes), expected, advice)
            advise_at += _ADVISE_EVERY
        if time.monotonic() > started + timeout:
            raise FederationNotReady(
                f"{len(nodes)} of {expected} nodes connected after {timeout:.0f} s: {advice}"
            )
        time.sleep(0.2)
    if len(nodes) > expected:
        raise FederationNotReady(
            f"{len(nodes)} nodes are connected but the plan counts on a population of {expected}; "
            "set the population to the number of nodes"
        )
    return nodes


@dataclass(frozen=True)
class Roster:
    """Node ids by partition; empty before the nodes are connected.

    Parameters
    ----------
    known : bool
        True if the nodes reported their partitions. Otherwise they are numbered in the order of
        their ids, for this run only.
    first_error : str
        Last line of the first error that a node sent in place of an answer.
    foreign : bool
        True if the ClientApp is not of this package; it then gets messages as Flower's own
        strategies send them.
    protects : bool
        True if a foreign ClientApp has a mod that bounds and noises its uploads.
    """

    nodes: Mapping[int, int] = field(default_factory=dict)
    known: bool = False
    first_error: str = ""
    foreign: bool = False
    protects: bool = False

    @classmethod
    def connect(
        cls,
        grid: Grid,
        population: int,
        *,
        timeout: float,
        mods: bool = False,
        absent: Collection[int] = (),
    ) -> Roster:
        """Wait for ``population`` nodes and ask each node once for its partition.

        If a node runs several clients (see `VirtualGrid`), ask only its first client. The ids and
        partitions of its other clients follow in order. If ``mods`` is True and no ClientApp of
        this package answers, ask for a mod of this package. The nodes of ``absent`` partitions may
        be missing, because their clients withdrew.

        Raise an error if two nodes claim one partition, if a partition is out of range, or if only
        some of the nodes answer. Only a node's first answer counts.
        """
        if not (least := population - len(absent)):
            raise FederationNotReady("all clients withdrew: expected at least one that takes part")
        nodes = wait_for_nodes(grid, population, least=least, timeout=timeout)
        log.info("asking the nodes which partitions they hold")
        kind, question = IDENTITY, RecordDict()
        reported, error = _ask_identities(grid, nodes, kind, question, timeout=timeout)
        foreign = not reported
        if foreign and mods:
            log.info("asking the nodes for client_level_dp_mod (a ClientApp without it fails here)")
            # A ClientApp without the mod cannot train on a training message without a model. Send
            # the settings of every training message, because mods before ours may read these.
            settings = ConfigRecord({"server-round": 0, FOR_MODS + PARTITION_QUESTION: True})
            kind, question = "train", RecordDict({records.CONFIG: settings})
            reported, error = _ask_identities(grid, nodes, kind, question, timeout=timeout)
            # An answer without a partition is not from our mod.
            reported = {node: place for node, place in reported.items() if place is not None}
        numbered = dict(enumerate(nodes))
        if not reported:
            return cls(numbered, first_error=error, foreign=True)
        clients_per_node = getattr(grid, "clients_per_node", 1)
        if foreign and len(reported) == len(nodes) and set(reported.values()) == {NO_PARTITION}:
            return cls(numbered, foreign=True, protects=True)
        answers = _by_partition(reported, population, clients_per_node)
        needed = set(range(population)) - set(absent)
        # The node of a client that withdrew may have connected before a node that is needed.
        late_nodes = _late_nodes(grid, nodes, population, timeout=timeout)
        while needed - set(answers) and (late := next(late_nodes, [])):
            try:
                more, error = _ask_identities(grid, late, kind, question, timeout=timeout)
            except FederationNotReady as reason:  # the nodes that are needed may still connect
                more, error = {}, str(reason)
            reported = {**reported, **more}
            answers = _by_partition(reported, population, clients_per_node)
        if missing := sorted(needed - set(answers)):
            raise FederationNotReady(
                f"no node answered for partitions {missing[:10]}"
                + (f": {error}" if error else "; start a SuperNode for each")
            )
        return cls(answers, known=True, foreign=foreign, protects=foreign)


def _late_nodes(
    grid: Grid, nodes: list[int], population: int, *, timeout: float
) -> Iterator[list[int]]:
    """Yield nodes each time that more connect; end at ``population`` or more, or a timeout."""
    while len(nodes) < population:
        try:
            connected = wait_for_nodes(grid, population, least=len(nodes) + 1, timeout=timeout)
        except FederationNotReady as reason:
            log.warning("%s", reason)
            return
        late = [node for node in connected if node not in nodes]
        nodes = [*nodes, *late]
        yield late


def _ask_identities(
    grid: Grid, nodes: Sequence[int], kind: str, question: RecordDict, *, timeout: float
) -> tuple[dict[int, object], str]:
    """Return the partition that each node reports, and the first error that a node reports.

    Raise `FederationNotReady` if no node's ClientApp received the question, because the answers
    then do not show whether the ClientApp is of this package.
    """
    like = Message(RecordDict(), dst_node_id=nodes[0], message_type=kind)
    first_clients = nodes[:: getattr(grid, "clients_per_node", 1)]
    questions = [message_like(like, question, dst_node_id=node) for node in first_clients]
    # Simulated nodes run one ClientApp, so ask one node first: a failure then occurs only once.
    first, others = (questions[:1], questions[1:]) if simulates(grid) else (questions, [])
    reported: dict[int, object] = {}
    received = False
    waiting, first_error = {message.metadata.dst_node_id for message in questions}, ""

    def answers() -> Iterator[Message]:
        yield from replies(grid, first, timeout=timeout)
        if reported and others:
            yield from replies(grid, others, timeout=timeout)

    for reply in answers():
        node = reply.metadata.src_node_id
        received |= not reply.has_error() or reply.error.code in (CLIENT_APP_RAISED, MOD_REFUSED)
        if reply.has_error() and not first_error:
            first_error = public_reason(reply.error)
        if reply.has_error() or not reply.has_content() or node not in waiting:
            continue
        waiting.remove(node)
        record = reply.content.get(IDENTITY_RECORD)
        reported[node] = record.get("partition") if isinstance(record, ConfigRecord) else None
    if not reported and not received:
        reason = first_error or f"no reply within {timeout:.0f} s; the machine may be too busy"
        raise FederationNotReady(
            f"no node's ClientApp answered the first question ({reason}): look at the nodes' logs"
        )
    return reported, first_error


def _by_partition(
    partitions: Mapping[int, object], population: int, clients_per_node: int
) -> dict[int, int]:
    """Return the node id of each partition; refuse a partition that is impossible or held twice."""
    answers: dict[int, int] = {}
    for node, partition in partitions.items():
        if type(partition) is not int or not 0 <= partition <= population - clients_per_node:
            raise FederationNotReady(
                f"node {node} says it holds partition {partition!r}: "
                f"set partition-id in its node config to 0 … {population - clients_per_node}"
            )
        held = {partition + slot: node + slot for slot in range(clients_per_node)}
        if twice := sorted(answers.keys() & held):
            raise FederationNotReady(
                f"nodes {answers[twice[0]]} and {held[twice[0]]} both hold partition "
                f"{twice[0]}; give each SuperNode its own partition-id in --node-config"
            )
        answers |= held
    return answers
