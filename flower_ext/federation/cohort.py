"""Which nodes there are, and which of them a round asks.

Cohorts are drawn over *partition ids* 0 … N−1, which are the same in every run, and only once
all N nodes are there: in simulation nodes register while the ServerApp already runs, and a cohort
drawn from the few that are up would have another sampling rate than the one accounted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid

from flower_ext.errors import FlowerExtError, InvalidValue, tellable
from flower_ext.federation._flower_private import message_like, record_of, replies, simulates
from flower_ext.federation.failures import said

log = getLogger("flwr")

PARTITION = "partition-id"
"""What a node is told of itself: its number among all, from 0."""
IDENTITY = "query.identity"
"""Message type of the question "which partition are you?"."""
_IDENTITY_RECORD = "identity"
"""Record of the answer; in a plain training message, which a mod sees, it is the question."""
_NO_PARTITION = str(None)
"""Answer of a node whose owner gave it no partition."""
_ADDRESS = "address"
_SAY_EVERY = 10.0
"""Seconds between two lines in the log while nodes are missing."""
_SAY_HOW_AFTER = 5.0
"""Seconds after which the log says how there are more nodes; a simulation's are there by then."""


class FederationNotReady(FlowerExtError, RuntimeError):
    """The nodes that the plan counts on are not there."""


def wait_for_nodes(grid: Grid, expected: int, *, timeout: float, poll: float = 0.2) -> list[int]:
    """Node ids, sorted, once ``expected`` of them are connected.

    Raises
    ------
    FederationNotReady
        Fewer (after ``timeout`` seconds) or more nodes than expected: the sampling rate would
        not be the one accounted.
    """
    started = said = time.monotonic()
    deadline, told = started + timeout, False
    while len(nodes := sorted(grid.get_node_ids())) < expected:
        if time.monotonic() >= said:
            log.info("waiting for nodes: %d of %d are connected", len(nodes), expected)
            said += _SAY_EVERY
        if not told and time.monotonic() >= started + _SAY_HOW_AFTER:
            log.warning(
                "%d of %d nodes are connected: %s", len(nodes), expected, _how(grid, expected)
            )
            told = True
        if time.monotonic() > deadline:
            raise FederationNotReady(
                f"{len(nodes)} of {expected} nodes connected after {timeout:.0f} s; start more "
                f"SuperNodes (in simulation: --federation-config num-supernodes={expected}), or "
                "lower the plan's population"
            )
        time.sleep(poll)
    if len(nodes) > expected:
        raise FederationNotReady(
            f"{len(nodes)} nodes are connected but the plan counts on a population of {expected}; "
            "set the population to the number of nodes"
        )
    return nodes


def _how(grid: Grid, expected: int) -> str:
    """Return what to do for more nodes to be there."""
    if simulates(grid):
        return (
            "end this run and start it again with as many as the plan counts on: "
            f'flwr run … --federation-config "num-supernodes={expected}"'
        )
    return "start more SuperNodes, or lower the plan's population"


def refuse_foreign(
    method: str, said: str, *, any_client_app: bool, client_protects: bool, mod: bool = False
) -> None:
    """Refuse ClientApps that know nothing of this package where they have to.

    Parameters
    ----------
    method : str
        Name of the strategy.
    said : str
        The first error in place of an answer.
    any_client_app : bool
        The method trains as every ClientApp does.
    client_protects : bool
        The plan leaves noise to the clients, and they have no mod that adds it.
    mod : bool
        `client_level_dp_mod` can do what the plan asks.

    Raises
    ------
    FederationNotReady
        Says how to build one that does.
    """
    said = f" (the first to fail said: {said})" if said else ""
    fix = f"build the ClientApp with {method}.client_app(task)"
    if not any_client_app:
        raise FederationNotReady(
            f"the ClientApp does not know {method}, which trains in its own way on the clients: "
            f"{fix}{said}"
        )
    if client_protects:
        mods = "give it mods=[flower_ext.federation.client_level_dp_mod()], " if mod else ""
        raise FederationNotReady(
            "the plan leaves noise to the clients, but the ClientApp does not know how: "
            f"{mods}{fix}, or take a ReleasePlan with noise_placement='server'{said}"
        )
    log.info("foreign ClientApp: it gets plain train and evaluate messages")


@dataclass(frozen=True)
class Roster:
    """Node ids by partition.

    Parameters
    ----------
    nodes : Mapping[int, int]
    known : bool
        The nodes told their partitions. Otherwise they are numbered in the order of their ids, for
        one run only.
    said : str
        The last line of the first error in place of an answer.
    foreign : bool
        The ClientApp is not of this package: it gets plain messages.
    protects : bool
        A foreign ClientApp has a mod that bounds and noises what it sends.
    """

    nodes: Mapping[int, int]
    known: bool
    said: str = ""
    foreign: bool = False
    protects: bool = False

    @classmethod
    def connect(cls, grid: Grid, population: int, *, timeout: float, mods: bool = False) -> Roster:
        """Wait for ``population`` nodes and ask each, once, which partition it holds.

        Of the clients of one node (see `VirtualGrid`) the first is asked: the others follow it, in
        their ids as in their partitions.

        Parameters
        ----------
        mods : bool
            Where no ClientApp of this package answers, ask for a mod that does. The question is a
            training message without a model, which no other ClientApp can train on.

        Raises
        ------
        FederationNotReady
            As `wait_for_nodes`; or two nodes claim one partition, one is out of range, or only
            some nodes answer. A node's first answer counts.
        """
        nodes = wait_for_nodes(grid, population, timeout=timeout)
        log.info("asking the nodes which partitions they hold")
        told, said = _ask_identities(grid, nodes, IDENTITY, RecordDict(), timeout=timeout)
        foreign = not told
        if foreign and mods:
            log.info("asking the nodes for client_level_dp_mod (a ClientApp without it fails here)")
            question = RecordDict({_IDENTITY_RECORD: ConfigRecord()})
            told, said = _ask_identities(grid, nodes, "train", question, timeout=timeout)
            told = {node: own for node, own in told.items() if own is not None}  # by a mod
        numbered = dict(enumerate(nodes))
        if not told:
            return cls(numbered, known=False, said=said, foreign=True)
        together = getattr(grid, "clients_per_node", 1)
        if foreign and len(told) == len(nodes) and set(told.values()) == {_NO_PARTITION}:
            return cls(numbered, known=False, foreign=True, protects=True)
        answers = _by_partition(told, population, together)
        if len(answers) < population:
            missing = sorted(set(range(population)) - set(answers))
            raise FederationNotReady(
                f"no node answered for partitions {missing[:10]}" + (f": {said}" if said else "")
            )
        return cls(answers, known=True, foreign=foreign, protects=foreign)


def _ask_identities(
    grid: Grid, nodes: Sequence[int], kind: str, question: RecordDict, *, timeout: float
) -> tuple[dict[int, object], str]:
    """Return what each node says its partition is, and the first error in place of an answer."""
    like = Message(RecordDict(), dst_node_id=nodes[0], message_type=kind)
    together = getattr(grid, "clients_per_node", 1)
    asked = [message_like(like, question, dst_node_id=node) for node in nodes[::together]]
    # Simulated nodes run one ClientApp: if it fails, it does so once, and not on every node.
    one, others = (asked[:1], asked[1:]) if simulates(grid) else (asked, [])
    told: dict[int, object] = {}
    waiting, first_said = {message.metadata.dst_node_id for message in asked}, ""

    def heard() -> Iterator[Message]:
        yield from replies(grid, one, timeout=timeout)
        if told and others:
            yield from replies(grid, others, timeout=timeout)

    for reply in heard():
        node = reply.metadata.src_node_id
        if reply.has_error() and not first_said:
            first_said = said(reply.error)
        if reply.has_error() or not reply.has_content() or node not in waiting:
            continue
        waiting.remove(node)
        own = reply.content.get(_IDENTITY_RECORD)
        told[node] = own.get("partition") if isinstance(own, ConfigRecord) else None
    return told, first_said


def _by_partition(told: Mapping[int, object], population: int, together: int) -> dict[int, int]:
    """Return node ids by partition, of ``together`` clients a node.

    Raises
    ------
    FederationNotReady
        Two nodes claim one partition, or one is out of range.
    """
    answers: dict[int, int] = {}
    for node, partition in told.items():
        if type(partition) is not int or not 0 <= partition <= population - together:
            raise FederationNotReady(
                f"node {node} says it holds partition {partition!r}; "
                f"expected 0 … {population - together} (node config partition-id)"
            )
        held = {partition + place: node + place for place in range(together)}
        if twice := sorted(answers.keys() & held):
            raise FederationNotReady(
                f"nodes {answers[twice[0]]} and {held[twice[0]]} both hold partition "
                f"{twice[0]}; give each SuperNode its own partition-id in --node-config"
            )
        answers |= held
    return answers


def asks_identity(message: Message) -> bool:
    """Tell whether a plain training message only asks a mod which partition its node holds."""
    return set(message.content) == {_IDENTITY_RECORD}


def identity(node_config: Mapping[str, object]) -> RecordDict:
    """A client's answer to ``query.identity``; what is no partition the server refuses by name."""
    partition = node_config.get(PARTITION)
    known = partition if isinstance(partition, int) else str(partition)
    return record_of(RecordDict, {_IDENTITY_RECORD: ConfigRecord({"partition": known})})


def addressed(content: RecordDict, partition: int) -> RecordDict:
    """A message's content that says which partition it is for (see `check_addressee`)."""
    address = ConfigRecord({"partition": partition})
    return record_of(RecordDict, {**content, _ADDRESS: address})


def check_addressee(message: Message, context: Context) -> None:
    """Refuse a message for another partition.

    A SuperNode that is started again under its key is the same node to Flower, whatever its node
    config says now: two nodes could then train on one client's data, which counts once.

    Raises
    ------
    ValueError
        It is for another one.
    """
    address = message.content.get(_ADDRESS)
    if not isinstance(address, ConfigRecord):
        return
    if address["partition"] != (own := partition_of(context.node_config)):
        raise tellable(
            InvalidValue(
                f"node config partition-id={own}: this node held partition "
                f"{address['partition']!r} when the run asked; start it again with that one, or "
                "stop the run"
            )
        )


def partition_of(node_config: Mapping[str, object]) -> int:
    """Return the partition of a node.

    Raises
    ------
    ValueError
        The node config has no ``partition-id``.
    """
    partition = node_config.get(PARTITION)
    if not isinstance(partition, int):
        raise tellable(
            InvalidValue(
                f"node config partition-id={partition!r}: start the SuperNode with "
                '--node-config "partition-id=0 num-partitions=N"'
            )
        )
    return partition
