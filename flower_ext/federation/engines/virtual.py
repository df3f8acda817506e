"""Many clients on one node, with fewer and larger messages and training in batches.

Flower takes 7 to 25 ms for a message, without any training. A `VirtualGrid` therefore presents each
node to the strategy as ``clients_per_node`` clients. It packs the messages to the clients of one
node into one message, and unpacks the reply. A `CohortApp` on the node answers for all its clients.
The strategy and the clients work as if each client had its own node.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from logging import getLogger
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from flower_ext.checks import require_at_least_one
from flower_ext.errors import InvalidValue
from flower_ext.federation import _flower_private as private
from flower_ext.federation.engines.client_grid import ClientGrid, replies_in_memory
from flower_ext.federation.messages.exchange import origin_fault
from flower_ext.federation.messages.packing import pack, unpack
from flower_ext.training import MEMORY_LIMIT

log = getLogger("flwr")


def clients_of(grid: Grid, clients_per_node: int) -> Grid:
    """Return a grid with ``clients_per_node`` clients on each node of ``grid``; 0 means 1."""
    return grid if clients_per_node in (0, 1) else VirtualGrid(grid, clients_per_node)


class VirtualGrid(ClientGrid):
    """A grid that presents every node as ``clients_per_node`` clients.

    Parameters
    ----------
    grid : Grid
        A grid whose nodes run a `client_app` of this package. The node with partition i holds the
        clients i · ``clients_per_node`` to (i + 1) · ``clients_per_node`` − 1.
    clients_per_node : int
    """

    def __init__(self, grid: Grid, clients_per_node: int) -> None:
        require_at_least_one("clients_per_node", clients_per_node)
        self._grid, self.clients_per_node = grid, clients_per_node
        self._nodes: dict[int, int] = {}

    def set_run(self, run: Any) -> None:
        """Set the run of the wrapped grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run that the wrapped grid belongs to."""
        return self._grid.run

    @property
    def simulates_nodes(self) -> bool:
        """True if the nodes of the wrapped grid are simulated."""
        return private.simulates(self._grid)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the clients of all connected nodes."""
        connected = set(self._grid.get_node_ids())
        for node in sorted(connected - set(self._nodes.values())):
            self._nodes[len(self._nodes)] = node
        return [
            private.FIRST_CLIENT_ID + number * self.clients_per_node + slot
            for number, node in self._nodes.items()
            if node in connected
            for slot in range(self.clients_per_node)
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Refuse to send messages without waiting for replies; call `send_and_receive`."""
        raise NotImplementedError("VirtualGrid has no push_messages: call send_and_receive")

    def pull_messages(self, *arguments: Any, **options: Any) -> Iterable[Message]:
        """Refuse to fetch replies separately; call `send_and_receive`, which waits for them."""
        raise NotImplementedError("VirtualGrid has no pull_messages: call send_and_receive")

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Ask all clients, and yield their replies. If a node is silent, so are all its clients.

        If the replies of all clients of a node do not fit into memory, the grid first asks as many
        of these clients as fit. It asks the next ones when the caller has taken the first replies.
        """
        messages = list(messages)
        most = replies_in_memory(messages[0], MEMORY_LIMIT) if messages else 1
        exchanges = self._exchanges(messages, most)
        answers = (self._answered(by_node, timeout) for by_node in exchanges)
        return chain(iter(next(answers, [])), chain.from_iterable(answers))

    def _exchanges(
        self, messages: Sequence[Message], most: int
    ) -> list[Mapping[int, Sequence[Message]]]:
        """Divide messages into exchanges; return the messages of each exchange by node.

        An exchange sends one packed message to each node and waits for the replies. If no client
        has two messages, a packed message holds at most ``most`` messages; otherwise it may hold a
        few more. No exchange asks a client twice.
        """
        exchanges: dict[int, dict[int, list[Message]]] = defaultdict(lambda: defaultdict(list))
        earlier: Counter[int] = Counter()
        sent: Counter[int] = Counter()
        for message in messages:
            client, node = message.metadata.dst_node_id, self._place(message)[0]
            # A client's second message waits for the next exchange, because the node stores the
            # client's state only at the end of an exchange.
            exchanges[earlier[client] + sent[node] // most][node].append(message)
            earlier[client] += 1
            sent[node] += 1
        return [exchanges[number] for number in sorted(exchanges)]

    def _answered(
        self, by_node: Mapping[int, Sequence[Message]], timeout: float | None
    ) -> list[Message]:
        """Send one packed message to each node; return the replies of the clients that answered."""
        waiting: dict[int, Message] = {}
        for node, messages in by_node.items():
            slots = [self._place(message)[1] for message in messages]
            waiting[node] = pack(messages, node, slots, self.clients_per_node)
        answers: list[Message] = []
        for reply in private.replies(self._grid, list(waiting.values()), timeout=timeout):
            node = reply.metadata.src_node_id
            # Unpacked replies look like answers to our messages, so unpack only real answers.
            if node in waiting and not origin_fault(reply, waiting[node]):
                del waiting[node]
                answers += unpack(reply, by_node[node])
            else:
                log.warning(
                    "node %d: the server ignores a reply, because it answers no message that waits "
                    "for a reply",
                    node,
                )
        return answers

    def _place(self, message: Message) -> tuple[int, int]:
        """Return the node of the client that a message is for, and the client's slot on it."""
        number, slot = divmod(
            message.metadata.dst_node_id - private.FIRST_CLIENT_ID, self.clients_per_node
        )
        if number not in self._nodes:
            raise InvalidValue(
                f"dst_node_id={message.metadata.dst_node_id}: expected an id from get_node_ids"
            )
        return self._nodes[number], slot
