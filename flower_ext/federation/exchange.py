"""The clients of a run: messages to them by partition, and their checked answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from flower_ext.federation import _flower_private, records
from flower_ext.federation._flower_private import in_simulation, messages_like
from flower_ext.federation.failures import said, unlogged
from flower_ext.federation.progress import Progress
from flower_ext.federation.roster import FOR_MODS, REHEARSAL, FederationNotReady, Roster, addressed

_REHEARSALS = 3
"""Clients that may try to train before round 1, until one can."""

_BEFORE_OURS = (
    ". If another mod stands before client_level_dp_mod in ClientApp(mods=...), put "
    "client_level_dp_mod first: the other one would find no metrics, and may change no upload"
)

T = TypeVar("T")
Content = Mapping[str, ArrayRecord | ConfigRecord]

_EXPECTED = (
    "No query function registered with name 'identity'",
    "An exception was raised when processing a message by RayBackend",
)
"""Errors in Flower's log when a ClientApp that knows nothing of this package is asked for its
partition."""


class Clients:
    """The clients of one run, to which methods and sums can send questions of their own.

    All messages of a run pass through this class, which counts traffic and refusals.

    Parameters
    ----------
    method : str
        Name of the client method, for message types.
    progress : Progress
        Counts the traffic.
    timeout : float
        Seconds to wait for nodes to connect, and for answers to queries.
    """

    def __init__(self, method: str, progress: Progress, *, timeout: float) -> None:
        self.method = method
        self.progress = progress
        self.timeout = timeout
        self.refusals: list[str] = []
        self.roster: Roster | None = None
        self.grid: Grid | None = None
        """The grid to which messages beside the rounds go."""
        self.nodes: Mapping[int, int] = {}
        """Node ids by partition, sorted; empty before `connect`."""
        self._questions: dict[str, dict[int, Message]] = {}
        self._partitions: dict[int, int] = {}

    def connect(self, grid: Grid, population: int, *, mods: bool = False) -> Roster:
        """Wait for all nodes, at the first call only. With ``mods``, accept a mod of this package.

        Raises
        ------
        FederationNotReady
            As `Roster.connect`.
        """
        self.grid = grid
        if self.roster is None:
            with unlogged(*_EXPECTED):
                self.roster = Roster.connect(grid, population, timeout=self.timeout, mods=mods)
            self.nodes = dict(sorted(self.roster.nodes.items()))
        return self.roster

    @property
    def knows_partitions(self) -> bool:
        """True if the nodes reported their partitions, which are the same in another run."""
        return self.roster is not None and self.roster.known

    def messages(
        self, kind: str, contents: Mapping[int, Content], server_round: int
    ) -> list[Message]:
        """Return a message for each partition; ``kind`` is ``train``, ``evaluate`` or ``query``.

        In simulation, partitions with the same content object share one RecordDict. Elsewhere each
        message names the partition that it is for.
        """
        self._partitions = {self.nodes[partition]: partition for partition in contents}
        self._questions[kind] = self._by_node(kind, contents, server_round)
        messages = [*self._questions[kind].values()]
        self.progress.asked(kind, messages)
        return messages

    def _by_node(
        self, kind: str, contents: Mapping[int, Content], server_round: int
    ) -> dict[int, Message]:
        """Return a message for each partition, by node."""
        assert self.roster is not None
        built = {id(content): content for content in contents.values()}
        if self.roster.foreign:
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
        by_node: dict[int, RecordDict] = {}
        for partition, content in contents.items():
            whole = shared[id(content)]
            by_node[self.nodes[partition]] = addressed(whole, partition) if addresses else whole
        return messages_like(like, by_node)

    def rehearse(self, content: Content, read: Callable[[Message], object]) -> None:
        """Let a client train before round 1, and drop its update once it was read.

        A ClientApp of another project may be unable to train, for example because it reads a record
        that no message has, or returns arrays of other names. Each round would then spend privacy,
        and nobody would train. One client with odd records must not end a run, so the server asks
        up to three clients in turn.

        Parameters
        ----------
        read : Callable[[Message], object]
            Reads an update as a round does.

        Raises
        ------
        FederationNotReady
            Nobody could train.
        """
        assert self.roster is not None
        rehearsing = {**content, records.ROUND: ConfigRecord({REHEARSAL: True})}
        partitions, reason = list(self.nodes)[:_REHEARSALS], "no answer"
        for partition in partitions:
            messages = self._by_node("train", {partition: rehearsing}, 1)
            for answer in self.replies(messages.values()):
                if answer.has_error():
                    reason = said(answer.error)
                    continue
                try:
                    read(answer)
                except Exception as error:  # whatever a reply provokes
                    reason = str(error)
                else:
                    return
        raise FederationNotReady(
            f"the ClientApp cannot take part: none of {len(partitions)} clients returned a "
            f"usable update for the rehearsal ({reason}). No round began, and no "
            f"privacy was spent{_BEFORE_OURS if self.roster.protects else ''}"
        )

    def ask(
        self,
        question: ConfigRecord,
        read: Callable[[Message], T],
        special: Mapping[int, Content] | None = None,
        *,
        partitions: Sequence[int] | None = None,
    ) -> dict[int, T]:
        """Ask a question of the method, and return the clients' answers by partition.

        Parameters
        ----------
        special : Mapping[int, Content], optional
            Records for one partition only, besides the question.
        partitions : Sequence[int], optional
            Partitions to ask; by default all.

        Raises
        ------
        FederationNotReady
            A node does not answer, or ``read`` refuses its answer.
        """
        content: Content = {records.QUESTION: question}
        contents = dict.fromkeys(self.nodes if partitions is None else partitions, content)
        for partition, more in (special or {}).items():
            contents[partition] = {**content, **more}
        return self.query(contents, read)

    def query(self, contents: Mapping[int, Content], read: Callable[[Message], T]) -> dict[int, T]:
        """Send each client a query, and return the answers by partition.

        Raises
        ------
        FederationNotReady
            A node does not answer, or ``read`` refuses its answer.
        """
        refused_before = len(self.refusals)
        replies = self.replies(self.messages("query", contents, 0))
        answers = self.accepted("query", 0, replies, list(contents), read)
        if missing := sorted(set(contents) - set(answers)):
            raise FederationNotReady(
                f"partitions {missing} cannot take part: "
                + ("; ".join(self.refusals[refused_before:]) or "silent")
            )
        return answers

    def replies(self, messages: Iterable[Message]) -> Iterable[Message]:
        """Send messages outside the rounds, and return the replies as they come."""
        assert self.grid is not None
        return _flower_private.replies(self.grid, messages, timeout=self.timeout)

    def sent(self, reply: Message) -> records.Arrays:
        """Return the model that the sender of a reply to a training message received."""
        question = self._questions["train"][reply.metadata.src_node_id]
        arrays = records.of_kind(question.content, ArrayRecord)
        return records.to_arrays(arrays[records.MODEL])

    def partition_of(self, reply: Message) -> int:
        """Return the partition that sent a reply, among those that were asked last."""
        return self._partitions[reply.metadata.src_node_id]

    def accepted(
        self,
        kind: str,
        server_round: int,
        replies: Iterable[Message],
        partitions: Sequence[int],
        read: Callable[[Message], T],
    ) -> dict[int, T]:
        """Return the values from `heard`, by partition."""
        return dict(sorted(self.heard(kind, server_round, replies, partitions, read)))

    def heard(
        self,
        kind: str,
        server_round: int,
        replies: Iterable[Message],
        partitions: Sequence[int],
        read: Callable[[Message], T],
    ) -> Iterator[tuple[int, T]]:
        """Yield the values that `records.accept` accepts; count and report refusals and dropouts.

        No reply is kept. A caller that uses each value before it asks for the next one needs no
        more memory for a thousand clients than for one.
        """
        missing, refusals = set(partitions), list[str]()

        def refuse(reason: str) -> None:
            refusals.append(reason)
            self.refusals.append(reason)

        accepted = records.accept(
            self.progress.answered(kind, replies, refusals),
            asked={partition: self.nodes[partition] for partition in sorted(partitions)},
            server_round=server_round,
            read=read,
            refuse=refuse,
            questions=self._questions.get(kind),
        )
        for partition, value in accepted:
            missing.remove(partition)
            yield partition, value
        if missing:
            self.progress.missing(kind, server_round, sorted(missing), refusals)


def _for_any_app(kind: str, content: Content) -> Content:
    """Return what Flower's own strategies send: a model, and one record of settings.

    Some apps and mods refuse a second record, so the settings have what mods of this package read.
    """
    settings: dict[str, Any] = dict(content.get(records.CONFIG, {}))
    if kind == "train":
        round_facts: dict[str, Any] = dict(content.get(records.ROUND, {}))
        settings |= {f"{FOR_MODS}{name}": value for name, value in round_facts.items()}
    model = {name: content[name] for name in (records.MODEL,) if name in content}
    return {**model, records.CONFIG: ConfigRecord(settings)}
