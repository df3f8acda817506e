"""Send messages to the clients of a run by partition number, and read and check their replies.

The round, type, node and message id of a reply must match its request; a stale upload therefore
never counts. `records` reads only NumPy's format, so no reply can run code. The server refuses a
reply that fails a check. It counts and reports the reply, never aggregates it, and treats its
client as a dropout in the privacy plan.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from logging import getLogger
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from flower_ext.errors import FlowerExtError, InvalidValue
from flower_ext.federation import _flower_private, records
from flower_ext.federation._flower_private import in_simulation, message_like
from flower_ext.federation.failures import printable, public_reason, unlogged
from flower_ext.federation.progress import Progress
from flower_ext.federation.records import Arrays, Update, UploadReply, read_array
from flower_ext.federation.roster import FOR_MODS, FederationNotReady, Roster, addressed
from flower_ext.privacy.mechanisms.updates import check_like

log = getLogger("flwr")

T = TypeVar("T")
Content = Mapping[str, ArrayRecord | ConfigRecord]

_EXPECTED = (
    "No query function registered with name 'identity'",
    "An exception was raised when processing a message by RayBackend",
)
"""Errors in Flower's log when a ClientApp that knows nothing of this package is asked for its
partition."""


LARGEST_VALUE = 1e15
"""Largest accepted weight or score. Sums and squares of such numbers fit a float32."""
LARGEST_SIZE = 2**40
"""Largest number of examples that a client may report; a reply with more is refused."""
LONGEST_NAME = 100
"""Largest number of characters in a metric's name."""
LONGEST_REASON = 1_000
"""Largest number of characters in a refusal's text, because a client wrote part of the text."""


class RefusedReply(InvalidValue):
    """A reply that must not be aggregated; the message says why."""


class Clients:
    """The clients of one run; every message to them passes through this class.

    These are the messages of the rounds, and the questions that the method and its sums ask. The
    run makes the object; a method gets it as `Connected.clients`.
    """

    def __init__(self, method: str, progress: Progress, *, timeout: float) -> None:
        self.method, self.progress, self.timeout = method, progress, timeout
        self.withdrawn_users: Collection[int] = ()
        """Users whose records silos leave out of their answers to queries."""
        self.refusals: list[str] = []
        self.roster = Roster()
        self.grid: Grid | None = None
        """The grid for messages outside the rounds."""
        self.nodes: Mapping[int, int] = {}
        """Node ids by partition, sorted; empty before `connect`."""
        self._partitions: Mapping[int, int] = {}

    def connect(
        self, grid: Grid, population: int, *, mods: bool = False, absent: Collection[int] = ()
    ) -> Roster:
        """Return the roster of nodes; at the first call, wait until the nodes are connected."""
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
        self.progress.count_messages(kind, requests.messages)
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
        # Simulated nodes cannot change partitions, so they need no address and can share contents.
        addresses = self.roster.known and not in_simulation()
        messages = {}
        for partition, content in contents.items():
            whole, node = shared[id(content)], self.nodes[partition]
            whole = addressed(whole, partition) if addresses else whole
            messages[partition] = message_like(like, whole, dst_node_id=node)
        return messages

    def ask(
        self, contents: Mapping[int, Content], server_round: int, read: Callable[[Message], T]
    ) -> Iterator[tuple[int, T]]:
        """Send queries outside the rounds, and yield each partition with its well-formed answer."""
        requests = self.request("query", contents, server_round)
        return requests.accepted(self.replies(requests.messages), read)

    def query(self, contents: Mapping[int, Content], read: Callable[[Message], T]) -> dict[int, T]:
        """Send each client a query, and return the answers by partition.

        Raise `FederationNotReady` if a node does not answer, or if ``read`` refuses its answer.
        """
        refused_before = len(self.refusals)
        if users := sorted(self.withdrawn_users):
            record = {records.WITHDRAWN: ConfigRecord({"users": users})}
            contents = {partition: {**content, **record} for partition, content in contents.items()}
        answers = dict(sorted(self.ask(contents, 0, read)))
        if missing := sorted(set(contents) - set(answers)):
            raise FederationNotReady(
                f"partitions {missing} cannot take part: "
                + ("; ".join(self.refusals[refused_before:]) or "no answer")
            )
        return answers

    def replies(self, messages: Iterable[Message]) -> Iterable[Message]:
        """Send messages outside the rounds, and return each reply as soon as it arrives."""
        assert self.grid is not None
        return _flower_private.replies(self.grid, messages, timeout=self.timeout)

    def partition_of(self, reply: Message) -> int:
        """Return the partition of the node that sent a reply; -1 for an unknown node."""
        return self._partitions.get(records.sender_of(reply), -1)


@dataclass(frozen=True)
class Requests:
    """The messages of one phase of a round, by partition; each message accepts one answer."""

    clients: Clients
    kind: str
    server_round: int
    by_partition: Mapping[int, Message]

    @property
    def messages(self) -> list[Message]:
        """The messages to send."""
        return [*self.by_partition.values()]

    def sent(self, reply: Message) -> Arrays:
        """Return the model that the server sent to the client that replied."""
        content = self.by_partition[self.clients.partition_of(reply)].content
        return records.to_arrays(records.of_kind(content, ArrayRecord)[records.MODEL])

    def accepted(
        self, replies: Iterable[Message], read: Callable[[Message], T]
    ) -> Iterator[tuple[int, T]]:
        """Yield one well-formed answer from each partition; count and report all other replies.

        The function yields answers in the order of partitions, so that sums do not depend on which
        client answers first. A reply that arrives early waits for the replies of lower partitions,
        as long as these may still arrive. The function drops a reply once it has yielded it, so the
        replies of a thousand clients need not fit into memory.
        """
        clients, refusals, number, size = self.clients, list[str](), 0, 0
        waiting, missing = set(self.by_partition), set(self.by_partition)
        due, early, refused = deque(sorted(waiting)), dict[int, T](), set[int]()
        for reply in replies:
            number, size = number + 1, size + records.payload_bytes([reply])
            partition = clients.partition_of(reply)
            # Refuse a reply that provokes any error, so that a hostile client cannot end the run.
            try:
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
                origin = f"round {self.server_round}, node {records.sender_of(reply)}"
                refusals.append(f"{origin}: {_reason(error)}"[:LONGEST_REASON])
                clients.refusals.append(refusals[-1])
                refused |= {partition} & waiting  # stop waiting for it, though it may answer again
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


def origin_fault(reply: Message, question: Message) -> str:
    """Return why a reply does not answer ``question`` in its round; empty if it does."""
    if isinstance(reply, UploadReply) and reply.question is question:
        return ""  # made in this process, for this message
    received, expected = reply.metadata, question.metadata
    if received.group_id != expected.group_id:
        return f"answers round {received.group_id}, expected {expected.group_id}"
    if received.message_type != expected.message_type:
        return f"answers {received.message_type!r}, expected {expected.message_type!r}"
    if expected.message_id and received.reply_to_message_id != expected.message_id:
        return "answers a different message of this round"
    return ""


def _reason(error: Exception) -> str:
    """Return why a reply is refused, in one line of limited length: a client wrote part of it."""
    reason = str(error)
    if not isinstance(error, FlowerExtError):
        log.debug("a reply cannot be read", exc_info=error)
        reason = f"the reply cannot be read: {type(error).__name__}: {error}"
    return printable(reason[:LONGEST_REASON])


def _for_any_app(kind: str, content: Content) -> Content:
    """Return ``content`` as Flower's own strategies send it: a model and a record of settings."""
    # Some apps and mods refuse messages with more records. In a training message, the settings
    # therefore also hold what the server says about the round; only this package's mods read that.
    # A message of a secure sum has a third record, which such a mod takes out before the app runs.
    settings: dict[str, Any] = dict(content.get(records.CONFIG, {}))
    if kind == "train":
        round_entries: dict[str, Any] = dict(content.get(records.ROUND, {}))
        settings |= {f"{FOR_MODS}{name}": value for name, value in round_entries.items()}
    arrays = {n: content[n] for n in (records.MODEL, records.SECURE_SUM) if n in content}
    return {**arrays, records.CONFIG: ConfigRecord(settings)}


def read_update(reply: Message, *, base: Mapping[str, np.ndarray], trust_models: bool) -> Update:
    """Return the update in a training reply; refuse one without names, shapes, dtypes of ``base``.

    If ``trust_models`` is True, accept a whole model (record ``arrays``) in place of an update, so
    that any ClientApp can take part. Use it only if the server bounds the updates and adds the
    noise.
    """
    if isinstance(reply, UploadReply) and (update := reply.update) is not None:
        return Update(_checked(update.arrays, base), _checked_metrics(update.metrics.items()))
    content = _content(reply)
    if isinstance(record := content.get(records.UPDATE), ArrayRecord):
        arrays = _checked(record, base)
    elif trust_models and isinstance(model := content.get(records.MODEL), ArrayRecord):
        arrays = moved_by(model, base)
    else:
        expected = (
            f"{records.UPDATE!r} or {records.MODEL!r}" if trust_models else f"{records.UPDATE!r}"
        )
        raise RefusedReply(f"no array record {expected}: the reply has {sorted(content.keys())}")
    return Update(arrays, _metrics(content))


def moved_by(model: ArrayRecord, base: Mapping[str, np.ndarray]) -> Arrays:
    """Return a trained model, which may have more arrays, minus the received ``base``."""
    if missing := sorted(base.keys() - model.keys()):
        names = [repr(name[:LONGEST_NAME]) for name in sorted(model)]
        shown = names[:3] + ["…"] * (len(names) > 3)
        raise RefusedReply(
            f"the ClientApp returned {', '.join(shown) or 'no arrays'}, but no {missing[0]!r}: "
            "expected every array that it received; if the ClientApp wraps the model, as with "
            "Opacus, torch.compile or DataParallel, let it return the state_dict of the model "
            "itself"
        )
    trained = _checked({name: model[name] for name in base}, base)
    return {name: np.asarray(trained[name] - base[name]) for name in base}


def read_metrics(reply: Message) -> dict[str, float]:
    """Return the finite scalar metrics of a reply; lists of numbers are left out."""
    return _metrics(_content(reply))


def _metrics(content: RecordDict) -> dict[str, float]:
    numbers = records.of_kind(content, MetricRecord).values()
    return _checked_metrics(item for record in numbers for item in record.items())


def _checked_metrics(items: Iterable[tuple[str, object]]) -> dict[str, float]:
    merged: dict[str, float] = {}
    for name, value in items:
        if not (name.isprintable() and 0 < len(name) <= LONGEST_NAME):
            raise RefusedReply(
                f"metric {name!r}: expected a name of 1 … {LONGEST_NAME} printable characters"
            )
        # Flower's own strategies average lists. A list is no score, so skip it and keep the reply.
        if isinstance(value, list) and name != "num-examples":
            continue
        # Compare, because neither NumPy nor float() accepts every integer.
        if not isinstance(value, int | float) or not -math.inf < value < math.inf:
            raise RefusedReply(f"metric {name!r} is {value!r}: expected a finite number")
        if abs(value) > LARGEST_VALUE:
            raise RefusedReply(
                f"metric {name!r} is {value!r}: expected a number from -{LARGEST_VALUE:g} to "
                f"{LARGEST_VALUE:g}"
            )
        merged[name] = float(value)
    size = merged.get("num-examples", 0.0)
    if not (0 <= size <= LARGEST_SIZE and size.is_integer()):
        raise RefusedReply(f"num-examples={size!r}: expected an integer, 0 … {LARGEST_SIZE}")
    return merged


def read_scores(reply: Message) -> dict[str, float]:
    """Return the metrics of an evaluation; refuse a reply without any."""
    scores = read_metrics(reply)
    if not scores:
        raise RefusedReply("the reply has no metric: expected at least one")
    return scores


def read_answer(reply: Message, record: str = records.ANSWER) -> Arrays:
    """Return the arrays in a record of a reply; by default, those of a client's answer."""
    answered = _content(reply).get(record)
    if not isinstance(answered, ArrayRecord):
        raise RefusedReply(f"no array record {record!r}")
    try:
        return records.to_arrays(answered)
    except Exception as error:  # a hostile payload may provoke any error
        raise RefusedReply(f"the answer cannot be read: {error}") from error


def _content(reply: Message) -> RecordDict:
    if reply.has_error():
        raise RefusedReply(public_reason(reply.error))
    if not reply.has_content():
        raise RefusedReply("the reply is empty")
    return reply.content


def _checked(
    record: Mapping[str, Array] | Mapping[str, np.ndarray], base: Mapping[str, np.ndarray]
) -> Arrays:
    try:
        arrays = {
            name: sent if isinstance(sent, np.ndarray) else read_array(sent)
            for name, sent in record.items()
        }
        check_like(arrays, base, types=True)
    except Exception as error:  # a hostile payload may provoke any error
        raise RefusedReply(f"the arrays cannot be read: {error}") from error
    for name, array in arrays.items():
        most = _largest(array.dtype)
        if float(np.vdot(array, array)) <= most**2:  # then all values are in range; a faster test
            continue
        if not max(array.max(), -array.min()) <= most:  # true also for NaN
            raise RefusedReply(
                f"{name!r} holds NaN or infinite values, or values above {most:g}: local training "
                "diverges, or the client is hostile; try a smaller learning rate"
            )
    return {name: arrays[name] for name in base}


@lru_cache(maxsize=64)
def _largest(dtype: np.dtype) -> float:
    return min(LARGEST_VALUE, float(np.finfo(dtype).max) / 16)
