"""Many clients on one node: fewer and larger messages, and what is trained together is a batch.

A message costs Flower 7 to 25 ms before anything is learned. A `VirtualGrid` shows a strategy
``clients_per_node`` clients for every node, packs the messages to clients of one node into one,
and takes the reply apart; a `CohortApp` on the node answers it for all of them. Neither the
strategy nor a client notices: each client has its own partition, state, noise and errors.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from logging import getLogger
from math import inf
from typing import Any

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
    UserConfig,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flower_ext.errors import InvalidValue, tellable
from flower_ext.federation import _flower_private as private
from flower_ext.federation.cohort import partition_of
from flower_ext.federation.failures import failed
from flower_ext.federation.uploads import Upload, UploadReply, payload_bytes
from flower_ext.runs.settings import integer
from flower_ext.training import MEMORY_LIMIT

log = getLogger(__name__)

_TOGETHER = "together"
"""Last part of the type of a message to several clients, and the record that lists them."""
_FIRST_ID = 1_000
"""Ids of virtual clients leave room for the server's own."""
_UNREADABLE = 1

_SHARE_OF_REPLIES = 4
"""Replies that wait to be used may take one part in so many of the memory that trainings may."""

Record = ArrayRecord | ConfigRecord | MetricRecord
Answer = RecordDict | Upload | Exception
"""One client's answer among those of others."""


def together(message: Message, memory_limit: int) -> int:
    """Return how many replies fit into memory that are as large as what is asked with a message."""
    return max(1, memory_limit // _SHARE_OF_REPLIES // max(1, payload_bytes([message])))


class CohortApp(ClientApp):
    """A ClientApp that can also answer for several clients of this process at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.together: dict[str, Callable[..., Sequence[Answer]]] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message: for one client, or for all that a `VirtualGrid` packed into it.

        An error is a reply, which says no more than `failed` lets it.
        """
        if message.metadata.message_type.endswith(f".{_TOGETHER}"):
            return _answered(self, message, context, partial(_answer_packed, self))
        return _answered(self, message, context, self._answer_alone)

    def _answer_alone(self, message: Message, context: Context) -> Message:
        kind = message.metadata.message_type
        if not private.answers(self, kind):
            raise tellable(InvalidValue(f"this ClientApp answers no {kind!r}"))
        return super().__call__(message, context)

    def answer(
        self, messages: Sequence[Message], contexts: Sequence[Context], *, memory_limit: int
    ) -> list[Message]:
        """Replies in the order of ``messages``, all of one type that is in ``together``."""
        before = [context.state.copy() if context.state else None for context in contexts]
        answer = self.together[messages[0].metadata.message_type]
        contents: Sequence[Answer]
        try:
            contents = answer(messages, contexts, memory_limit=memory_limit)
        except Exception as error:  # of what all share, as their task
            contents = [error] * len(messages)
        replies = []
        for message, context, state, own in zip(messages, contexts, before, contents, strict=True):
            if isinstance(own, Exception):
                context.state = RecordDict() if state is None else state
                replies.append(failed(self, message, context, own))
            elif isinstance(own, Upload):
                replies.append(UploadReply(message, own))
            else:
                replies.append(private.reply_to(message, own))
        return replies


def answer_all(
    app: ClientApp,
    messages: Sequence[Message],
    contexts: Sequence[Context],
    *,
    memory_limit: int = MEMORY_LIMIT,
) -> list[Message]:
    """Replies in the order of ``messages``; a cohort at once where the ClientApp can.

    A client that raises answers with an error, and its changes to its state are undone; nothing
    that the others answer depends on it.
    """
    kinds = {message.metadata.message_type for message in messages}
    if (
        isinstance(app, CohortApp)
        and len(kinds) == 1
        and kinds <= set(app.together)
        and len({id(context) for context in contexts}) == len(contexts)
    ):
        return app.answer(messages, contexts, memory_limit=memory_limit)
    return [_answer(app, *each) for each in zip(messages, contexts, strict=True)]


def _answer(app: ClientApp, message: Message, context: Context) -> Message:
    message.content = message.content.copy()  # several may share one
    return _answered(app, message, context, app)


def _answered(
    app: ClientApp,
    message: Message,
    context: Context,
    answer: Callable[[Message, Context], Message],
) -> Message:
    before = context.state.copy()
    try:
        return answer(message, context)
    except Exception as error:  # whatever a ClientApp raises becomes an error reply
        context.state = before
        return failed(app, message, context, error)


def clients_of(grid: Grid, config: UserConfig) -> Grid:
    """Return the clients of an app: ``clients-per-node`` (0: one) of them on each of its nodes."""
    per_node = integer({"clients-per-node": 1, **config}, "clients-per-node", least=0) or 1
    return grid if per_node == 1 else VirtualGrid(grid, per_node)


class VirtualGrid(Grid):
    """A grid on which every node is ``clients_per_node`` clients.

    Parameters
    ----------
    grid : Grid
        Its nodes run a `client_app` of this package. The node with partition i holds the clients
        i · ``clients_per_node`` to (i + 1) · ``clients_per_node`` − 1.
    clients_per_node : int
    """

    def __init__(self, grid: Grid, clients_per_node: int) -> None:
        if clients_per_node < 1:
            raise InvalidValue(f"clients_per_node={clients_per_node!r}: expected an integer >= 1")
        self._grid, self.clients_per_node = grid, clients_per_node
        self._nodes: dict[int, int] = {}
        self._packed: dict[str, dict[str, Message]] = {}
        self._replies: dict[str, Message] = {}
        self._ids = count(1)

    def set_run(self, run: Any) -> None:
        """As the grid below."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run that the grid below belongs to."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message of this run."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Ids of the clients of all nodes that are connected."""
        connected = set(self._grid.get_node_ids())
        for node in sorted(connected - set(self._nodes.values())):
            self._nodes[len(self._nodes)] = node
        return [
            _FIRST_ID + number * self.clients_per_node + place
            for number, node in self._nodes.items()
            if node in connected
            for place in range(self.clients_per_node)
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send, in one message a node and turn; ids of the single messages."""
        messages, ids = list(messages), []
        parcels: dict[tuple[int, int], dict[str, Message]] = defaultdict(dict)
        for message, parcel in zip(messages, self._parcels(messages), strict=True):
            ids.append(f"virtual-{next(self._ids)}")
            parcels[parcel][ids[-1]] = message
        packed = [self._pack(node, list(own.values())) for (_, node), own in parcels.items()]
        self._packed |= zip(self._grid.push_messages(packed), parcels.values(), strict=True)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies that are there, each handed out once."""
        for reply in self._grid.pull_messages(list(self._packed)):
            asked = self._packed.pop(reply.metadata.reply_to_message_id, {})
            self._replies |= zip(asked, self._unpack(reply, list(asked.values())), strict=True)
        return [self._replies.pop(own) for own in message_ids if own in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Ask all clients; those on nodes that do not answer in time do not either.

        Of large models some clients of a node are asked at a time: the first at once, others when
        the replies of those before them are taken.
        """
        messages = list(messages)
        most = together(messages[0], MEMORY_LIMIT) if messages else 1
        turns: dict[int, dict[int, list[Message]]] = defaultdict(lambda: defaultdict(list))
        for message, (turn, node) in zip(messages, self._parcels(messages, most), strict=True):
            turns[turn][node].append(message)
        answers = (self._answered(turns[turn], timeout) for turn in sorted(turns))
        return chain(iter(next(answers, [])), chain.from_iterable(answers))

    def _parcels(self, messages: Sequence[Message], most: float = inf) -> list[tuple[int, int]]:
        """In which turn each message goes to which node: no client is asked twice in a turn.

        About ``most`` messages go to a node in a turn.
        """
        turns: Counter[int] = Counter()
        sent: Counter[int] = Counter()
        parcels = []
        for message in messages:
            client, node = message.metadata.dst_node_id, self._place(message)[0]
            parcels.append((turns[client] + int(sent[node] // most), node))
            turns[client] += 1
            sent[node] += 1
        return parcels

    def _answered(
        self, by_node: Mapping[int, Sequence[Message]], timeout: float | None
    ) -> list[Message]:
        packed = {node: self._pack(node, own) for node, own in by_node.items()}
        singles: list[Message] = []
        for reply in private.replies(self._grid, list(packed.values()), timeout=timeout):
            node = reply.metadata.src_node_id
            # What is taken apart looks like answers to what was asked: only those may be.
            if node in packed and _answers(reply, packed[node]):
                del packed[node]
                singles += self._unpack(reply, by_node[node])
            else:
                log.warning("node %d: a reply to no open message is left out", node)
        return singles

    def _place(self, message: Message) -> tuple[int, int]:
        """Node of the client that a message is for, and which of its clients that is."""
        number, place = divmod(message.metadata.dst_node_id - _FIRST_ID, self.clients_per_node)
        if number not in self._nodes:
            raise InvalidValue(f"no client has the id {message.metadata.dst_node_id}")
        return self._nodes[number], place

    def _pack(self, node: int, messages: Sequence[Message]) -> Message:
        places = [self._place(message)[1] for message in messages]
        facts = {
            "clients-per-node": self.clients_per_node,
            "place": places,
            "type": [message.metadata.message_type for message in messages],
        }
        kind = messages[0].metadata.message_type.partition(".")[0]
        return Message(
            _packed([message.content for message in messages], facts),
            dst_node_id=node,
            message_type=f"{kind}.{_TOGETHER}",
            group_id=messages[0].metadata.group_id,
        )

    def _unpack(self, reply: Message, asked: Sequence[Message]) -> list[Message]:
        """What each client that was asked answers; an error of the node is one of each."""
        if reply.has_error():
            return [Message(reply.error, reply_to=message) for message in asked]
        try:
            contents, facts = _unpacked(reply.content)
            codes, reasons = list(facts["error-code"]), list(facts["error-reason"])
            answers: list[RecordDict | Error] = [
                Error(code=code, reason=reason) if code else content
                for content, code, reason in zip(contents, codes, reasons, strict=True)
            ]
            return [Message(each, reply_to=m) for each, m in zip(answers, asked, strict=True)]
        except Exception as error:  # whatever a hostile node sends
            unreadable = Error(code=_UNREADABLE, reason=f"the node's reply cannot be read: {error}")
            return [Message(unreadable, reply_to=message) for message in asked]


def _answers(reply: Message, question: Message) -> bool:
    """Whether this is a reply to ``question`` and no other message or round."""
    own, asked = reply.metadata, question.metadata
    return (
        own.group_id == asked.group_id
        and own.message_type == asked.message_type
        and asked.message_id in ("", own.reply_to_message_id)
    )


def _check_packed(facts: Mapping[str, Any]) -> None:
    per_node, places, kinds = facts["clients-per-node"], facts["place"], facts["type"]
    numbers = all(type(place) is int and 0 <= place < per_node for place in places)
    if not numbers or len(set(places)) < len(places):
        raise InvalidValue(f"places {places} of {per_node}: expected each once, below the number")
    if any(kind.endswith(f".{_TOGETHER}") for kind in kinds):
        raise InvalidValue("a message to several clients holds another such message")


def _answer_packed(app: CohortApp, message: Message, context: Context) -> Message:
    """One reply for all clients that a message is for; each has its own part of the state."""
    contents, facts = _unpacked(message.content)
    _check_packed(facts)
    per_node, places = int(facts["clients-per-node"]), list(facts["place"])
    node = partition_of(context.node_config)
    nodes = int(context.node_config.get("num-partitions", node + 1))
    states = {str(place): RecordDict() for place in places}
    held = [key for key in context.state if key.partition("/")[0] in states]
    for key in held:
        number, _, name = key.partition("/")
        states[number][name] = context.state[key]
    contexts = [
        Context(
            run_id=context.run_id,
            node_id=context.node_id + place,
            node_config={
                **context.node_config,
                "partition-id": node * per_node + place,
                "num-partitions": nodes * per_node,
            },
            state=states[str(place)],
            run_config=context.run_config,
        )
        for place in places
    ]
    messages = [
        private.message_like(message, content, message_type=kind)
        for content, kind in zip(contents, facts["type"], strict=True)
    ]
    replies = answer_all(app, messages, contexts)
    for key in held:
        del context.state[key]
    for own, place in zip(contexts, places, strict=True):
        for name, record in own.state.items():
            context.state[f"{place}/{name}"] = record
    told = {
        "error-code": [reply.error.code if reply.has_error() else 0 for reply in replies],
        "error-reason": [reply.error.reason if reply.has_error() else "" for reply in replies],
    }
    answers = [RecordDict() if reply.has_error() else reply.content for reply in replies]
    return Message(_packed(answers, told), reply_to=message)


def _packed(contents: Sequence[RecordDict], facts: Mapping[str, Any]) -> RecordDict:
    """Contents and facts as one content; a record that several share travels once."""
    numbers: dict[int, int] = {}
    packed: dict[str, Record] = {}
    names: list[str] = []
    for content in contents:
        for record in content.values():
            if id(record) not in numbers:
                numbers[id(record)] = len(numbers)
                packed[str(numbers[id(record)])] = record
        names.append("\n".join(f"{numbers[id(record)]} {name}" for name, record in content.items()))
    packed[_TOGETHER] = ConfigRecord({**facts, "records": names})
    return RecordDict(packed)


def _unpacked(content: RecordDict) -> tuple[list[RecordDict], Mapping[str, Any]]:
    """Undo `_packed`; contents that held the same records are one object."""
    facts: Mapping[str, Any] = content.config_records[_TOGETHER]
    known: dict[str, RecordDict] = {}
    for names in facts["records"]:
        if names not in known:
            pairs = (line.partition(" ") for line in names.splitlines())
            known[names] = RecordDict({name: content[number] for number, _, name in pairs})
    return [known[names] for names in facts["records"]], facts
