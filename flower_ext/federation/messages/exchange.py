"""Send messages to the clients of a run by partition number, and take one reply to each.

The round, type, node and message id of a reply must match its request; a stale upload therefore
never counts. The server refuses a reply that fails this check, or whose content cannot be read (see
`replies`). The server counts and reports a refused reply, and never adds it to a sum. For the
privacy plan, the client is a dropout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from flower_ext.errors import FlowerExtError
from flower_ext.federation import _flower_private
from flower_ext.federation._flower_private import message_like, simulates
from flower_ext.federation.messages import records
from flower_ext.federation.messages.addresses import addressed
from flower_ext.federation.messages.failures import printable, public_reason, unlogged
from flower_ext.federation.messages.for_mods import FOR_MODS
from flower_ext.federation.messages.replies import LONGEST_REASON, RefusedReply
from flower_ext.federation.messages.roster import FederationNotReady, Roster
from flower_ext.federation.messages.upload_reply import UploadReply, payload_bytes, sender_of
from flower_ext.federation.progress import Progress

log = getLogger("flwr")

T = TypeVar("T")
Content = Mapping[str, ArrayRecord | ConfigRecord]

MOST_REASONS = 100
"""Largest number of refused replies whose reasons a run keeps."""
_EXPECTED = (
    "No query function registered with name 'identity'",
    "An exception was raised when processing a message by RayBackend",
)
"""Errors in Flower's log when a ClientApp that knows nothing of this package is asked for its
partition."""


class Clients:
    """The clients of one run; every message to them passes through this class.

    Messages belong to the rounds, or carry questions of the method or of its sums. The run makes
    the object; a method gets it as `Connected.clients`.
    """

    def __init__(self, method: str, progress: Progress, *, timeout: float) -> None:
        self.method, self.progress, self.timeout = method, progress, timeout
        self.withdrawn_users: Collection[int] = ()
        """Users whose records silos leave out of their answers to questions."""
        self.refusals: list[str] = []
        """The reasons of the first refusals."""
        self.refused = 0
        self.roster = Roster()
        self.grid: Grid | None = None
        """The grid for messages outside the rounds."""
        self.nodes: Mapping[int, int] = {}
        """Node ids by partition, sorted; empty before `connect`."""
        self._partitions: Mapping[int, int] = {}

    def connect(
        self, grid: Grid, population: int, *, mods: bool = False, absent: Collection[int] = ()
    ) -> Roster:
        """Return the roster of nodes; at the first call, make it by `Roster.connect`."""
        self.grid = grid
        if not self.roster.nodes:
            with unlogged(*_EXPECTED):
                self.roster = Roster.connect(
                    grid, population, timeout=self.timeout, mods=mods, absent=absent
                )
            self.nodes = dict(sorted(self.roster.nodes.items()))
            self._partitions = {node: partition for partition, node in self.nodes.items()}
        return self.roster

    def leave(self, partitions: Collection[int]) -> None:
        """Never ask these partitions again."""
        self.nodes = {p: node for p, node in self.nodes.items() if p not in partitions}

    def request(self, kind: str, contents: Mapping[int, Content], server_round: int) -> Requests:
        """Return a message for each partition; ``kind`` is ``train``, ``evaluate`` or ``query``."""
        requests = Requests(self, kind, server_round, self.messages(kind, contents, server_round))
        messages = requests.messages
        self.progress.count_messages(kind, len(messages), payload_bytes(messages))
        return requests

    def messages(
        self, kind: str, contents: Mapping[int, Content], server_round: int
    ) -> dict[int, Message]:
        """Return the messages of `request` by partition, without counting them.

        In simulation, partitions with the same content object share one RecordDict. Elsewhere each
        message names the partition that it is for.
        """
        built = {id(content): content for content in contents.values()}
        if self.roster.foreign:
            # Flower calls an app's mods only for types of messages that the app has a function for,
            # and an app may have no function for queries.
            kind = "train" if kind == "query" else kind
            built = {key: _for_any_app(kind, content) for key, content in built.items()}
        shared = {key: RecordDict(dict(content)) for key, content in built.items()}
        like = Message(
            RecordDict(),
            dst_node_id=0,
            message_type=kind if self.roster.foreign else f"{kind}.{self.method}",
            group_id=str(server_round),
        )
        assert self.grid is not None
        # Simulated nodes cannot change partitions, so they need no address and can share contents.
        addresses = self.roster.known and not simulates(self.grid)
        messages = {}
        for partition, content in contents.items():
            whole, node = shared[id(content)], self.nodes[partition]
            whole = addressed(whole, partition) if addresses else whole
            messages[partition] = message_like(like, whole, dst_node_id=node)
        return messages

    def ask(
        self, contents: Mapping[int, Content], server_round: int, read: Callable[[Message], T]
    ) -> Iterator[tuple[int, T]]:
        """Send messages of type ``query``, and yield each partition with its well-formed answer."""
        requests = self.request("query", contents, server_round)
        return requests.accepted(self.replies(requests.messages), read)

    def ask_all(
        self, contents: Mapping[int, Content], read: Callable[[Message], T]
    ) -> dict[int, T]:
        """Send each client a message of type ``query``, and return the answers by partition.

        Raise `FederationNotReady` if a node does not answer, or if ``read`` refuses its answer.
        """
        if users := sorted(self.withdrawn_users):
            record = {records.WITHDRAWN: ConfigRecord({"users": users})}
            contents = {partition: {**content, **record} for partition, content in contents.items()}
        requests = self.request("query", contents, 0)
        answers = dict(sorted(requests.accepted(self.replies(requests.messages), read)))
        if missing := sorted(set(contents) - set(answers)):
            reasons = "; ".join(requests.refusals) or "no answer"
            raise FederationNotReady(f"partitions {missing} cannot take part: {reasons}")
        return answers

    def refuse(self, reason: str) -> None:
        """Count a refused reply; keep its reason, for checkpoints, if it is among the first."""
        self.refused += 1
        if len(self.refusals) < MOST_REASONS:
            self.refusals.append(reason)

    def replies(self, messages: Iterable[Message]) -> Iterable[Message]:
        """Send messages to the clients, and return each reply as soon as it arrives."""
        assert self.grid is not None
        return _flower_private.replies(self.grid, messages, timeout=self.timeout)

    def partition_of(self, reply: Message) -> int:
        """Return the partition of the node that sent a reply; -1 for an unknown node."""
        return self._partitions.get(sender_of(reply), -1)


@dataclass(frozen=True)
class Requests:
    """The messages of one phase of a round, by partition; each message accepts one answer."""

    clients: Clients
    kind: str
    server_round: int
    by_partition: Mapping[int, Message]
    refusals: list[str] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """The messages to send."""
        return [*self.by_partition.values()]

    def accepted(
        self, replies: Iterable[Message], read: Callable[[Message], T]
    ) -> Iterator[tuple[int, T]]:
        """Yield one well-formed answer from each partition; count and report all other replies.

        The function yields answers in the order of partitions, so that sums do not depend on which
        client answers first. A reply that arrives early waits for the replies of lower partitions,
        as long as these may still arrive. The function keeps no reply that it has yielded, so the
        replies of a thousand clients need not fit into memory.
        """
        clients, refusals, number, size = self.clients, self.refusals, 0, 0
        waiting, missing = set(self.by_partition), set(self.by_partition)
        due, early, refused = deque(sorted(waiting)), dict[int, T](), set[int]()
        for reply in replies:
            number, partition = number + 1, clients.partition_of(reply)
            # Refuse a reply that provokes any error, so that a hostile client cannot end the run.
            try:
                size += payload_bytes([reply])
                if partition in waiting:
                    fault = origin_fault(reply, self.by_partition[partition])
                elif reply.has_error():  # the SuperLink answers in place of a node
                    fault = f"an error came in place of a reply: {public_reason(reply.error)}"
                else:
                    fault = "the node was not asked in this round, or has answered already"
                if fault:
                    raise RefusedReply(fault)
                early[partition] = read(reply)
            except Exception as error:
                origin = f"round {self.server_round}, node {sender_of(reply)}"
                refusals.append(f"{origin}: {_reason(error)}"[:LONGEST_REASON])
                clients.refuse(refusals[-1])
                # Higher partitions need not wait for this one, although it may yet answer.
                refused |= {partition} & waiting
            else:
                waiting.remove(partition)
            # Yield answers up to the first gap in the order of partitions, and keep only the rest.
            while due and (due[0] in early or due[0] in refused):
                if (first := due.popleft()) in early:
                    missing.remove(first)
                    yield first, early.pop(first)
        clients.progress.count_replies(self.kind, number, size, refusals)
        for partition in sorted(early):  # lower partitions never answered
            missing.remove(partition)
            yield partition, early.pop(partition)
        if missing:
            clients.progress.missing(self.kind, self.server_round, sorted(missing), refusals)


def origin_fault(reply: Message, request: Message) -> str:
    """Return why a reply does not answer ``request`` in its round; empty if it does."""
    if isinstance(reply, UploadReply) and reply.request is request:
        return ""  # made in this process, for this message
    received, expected = reply.metadata, request.metadata
    if received.group_id != expected.group_id:
        return f"answers round {received.group_id}, expected {expected.group_id}"
    if received.message_type != expected.message_type:
        return f"answers {received.message_type!r}, expected {expected.message_type!r}"
    if expected.message_id and received.reply_to_message_id != expected.message_id:
        return "answers a different message of this round"
    return ""


def _reason(error: Exception) -> str:
    """Return why a reply is refused: one short line, because a client wrote part of the text."""
    reason = str(error)
    if not isinstance(error, FlowerExtError):
        log.debug("a reply cannot be read", exc_info=error)
        reason = f"the reply cannot be read: {type(error).__name__}: {error}"
    return printable(reason[:LONGEST_REASON])


def _for_any_app(kind: str, content: Content) -> Content:
    """Return ``content`` as Flower's own strategies send it: a model and a record of settings."""
    # Some apps and mods refuse messages with more records. In a training message, the settings
    # therefore also hold what the server says about the round; only this package's mods read that.
    # A message of a sum has a third record, which such a mod takes out before the app runs.
    settings: dict[str, Any] = dict(content.get(records.CONFIG, {}))
    if kind == "train":
        round_entries: dict[str, Any] = dict(content.get(records.ROUND, {}))
        settings |= {f"{FOR_MODS}{name}": value for name, value in round_entries.items()}
    arrays = {n: r for n, r in content.items() if n == records.MODEL or n.startswith(records.SUM)}
    return {**arrays, records.CONFIG: ConfigRecord(settings)}
