"""A Grid that runs ClientApps in this process, unchanged and without Ray.

Use it for tests and for research on one machine. Each client keeps its own Context. If a client
raises an error, its reply is an error and its changes to its state are undone, as in Flower's
simulation. A ClientApp of this package answers for a whole cohort at once, and trains its clients
in batches.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from secrets import randbits
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_ext.checks import require_at_least_one
from flower_ext.federation import _flower_private as private
from flower_ext.federation.client.app import answer_all
from flower_ext.federation.client.hidden_errors import hidden_errors
from flower_ext.federation.engines.client_grid import ClientGrid, replies_in_memory
from flower_ext.federation.engines.workers import Workers
from flower_ext.federation.messages import failures
from flower_ext.training import MEMORY_LIMIT

_GC_THRESHOLD = 10_000
"""Number of new objects after which Python's garbage collector looks at them."""


class InProcessGrid(ClientGrid):
    """A grid of virtual clients 0 … ``num_clients``−1, which all run one ClientApp.

    Parameters
    ----------
    client_app : ClientApp
    num_clients : int
    run_config : Mapping, optional
        The clients' ``context.run_config``.
    memory_limit : int
        Bytes that local trainings may take at a time (see `training.train_each`). Replies that the
        caller has not yet taken may use a quarter of it.
    workers : int
        Number of processes that share the clients (see `engines.workers`).
    """

    simulates_nodes = True
    """Read by `_flower_private.simulates`."""

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        run_config: Mapping[str, bool | float | int | str] | None = None,
        memory_limit: int = MEMORY_LIMIT,
        workers: int = 1,
    ) -> None:
        require_at_least_one("num_clients", num_clients)
        self._app = client_app
        self._ids = count(1)
        self._replies: dict[str, Message] = {}
        self._failed: set[str] = set()
        # Random, like Flower's run ids, so that a resumed run draws its own users and makes its own
        # keys.
        run_id = randbits(62)
        self.set_run(private.empty_run(run_id))
        first = private.FIRST_CLIENT_ID
        self.contexts: dict[int, Context] = {
            node: private.SimulatedContext(
                run_id=run_id,
                node_id=node,
                node_config={"partition-id": partition, "num-partitions": num_clients},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for partition, node in enumerate(range(first, first + num_clients))
        }
        self._memory_limit = memory_limit // max(1, workers)
        self.workers = Workers(workers, self._answer_in_process, self.contexts)

    def set_run(self, run: Any) -> None:
        """Take part in ``run``; this process may then create its messages."""
        self._run = run
        private.become_server_of(run.run_id)

    @property
    def run(self) -> Any:
        """The run that this grid belongs to."""
        return self._run

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all clients. All are always connected."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run the clients, and return the message ids; `pull_messages` returns the replies."""
        messages = list(messages)
        replies = self._replies_to(messages)
        ids = [message.metadata.message_id for message in messages]
        self._replies.update(zip(ids, replies, strict=True))
        return ids

    def pull_messages(  # type: ignore[override, unused-ignore] # Flower since 1.43
        self,
        reply_to_message_ids: Iterable[str] | None = None,
        *,
        message_ids: Iterable[str] | None = None,
    ) -> Iterable[Message]:
        """Return the replies to these messages; without ids, all replies not returned before."""
        wanted = message_ids if reply_to_message_ids is None else reply_to_message_ids
        wanted = [*self._replies] if wanted is None else wanted
        return [self._replies.pop(name) for name in wanted if name in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Run the clients in parts whose replies fit into memory, and return the replies.

        The first part of the messages is answered at once. Each further part is answered when the
        caller has taken all replies of the previous part. ``timeout`` has no effect.
        """
        messages = list(messages)
        limit = self._memory_limit * self.workers.count
        most = replies_in_memory(messages[0], limit) if messages else 1
        parts = (messages[start : start + most] for start in range(0, len(messages), most))
        replies, errors = map(self._replies_to, parts), hidden_errors.total()
        first = next(replies, ())
        return self._judged(chain(first, chain.from_iterable(replies)), messages, errors)

    def _judged(
        self, replies: Iterable[Message], messages: Sequence[Message], before: int
    ) -> Iterator[Message]:
        """Yield the replies; then log an error if probably no client's answer holds a result.

        Log it once per kind of message. ``before`` is the number of errors that clients hid before
        these messages. The server of a deployment must not learn this number. Here, one person runs
        server and clients.
        """
        yield from replies
        kinds, errors = {m.metadata.message_type for m in messages}, hidden_errors.total()
        if kinds - self._failed and errors - before >= len(messages):
            self._failed |= kinds
            text = (
                "%d clients hid %d errors in answers to %s, so the result is probably noise alone: "
                "see the clients' errors in the log above"
            )
            failures.log.error(text, len(messages), errors - before, *kinds)

    def _replies_to(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Give messages their ids, as Flower's server does, and return the clients' replies."""
        for message in messages:
            private.set_message_id(message, str(next(self._ids)))
        return self.workers.ask(messages)

    def _answer_in_process(self, messages: Sequence[Message]) -> list[Message]:
        """Run clients in this process, the server's or a worker's, and return the replies."""
        contexts = [self.contexts[message.metadata.dst_node_id] for message in messages]
        return answer_all(self._app, messages, contexts, memory_limit=self._memory_limit)


def run_in_process(
    server_app: ServerApp,
    client_app: ClientApp,
    *,
    num_clients: int,
    run_config: Mapping[str, bool | float | int | str] | None = None,
    memory_limit: int = MEMORY_LIMIT,
    workers: int = 1,
) -> InProcessGrid:
    """Run a whole Flower app in this process, and return its grid with the clients' contexts."""
    grid = InProcessGrid(client_app, num_clients, run_config, memory_limit, workers)
    run_server(server_app, grid, run_config or {})
    return grid


def run_server(
    server_app: ServerApp, grid: InProcessGrid, run_config: Mapping[str, bool | float | int | str]
) -> None:
    """Run a ServerApp until it returns; the clients of ``grid`` answer it."""
    context = Context(
        run_id=grid.run.run_id,
        node_id=private.SERVER_NODE_ID,
        node_config={},
        state=RecordDict(),
        run_config=dict(run_config),
    )
    try:
        with modules_uncollected():
            server_app(grid, context)
            grid.workers.gather()
    finally:
        grid.workers.abandon()


@contextmanager
def modules_uncollected() -> Iterator[None]:
    """Keep the garbage collector from walking through existing objects, such as imported modules.

    A round makes thousands of small objects. They start the collector, which takes a fifth of a
    second each time if it walks through everything. Most small objects are gone after the round, so
    this function also raises the number of objects at which the collector starts. It changes
    nothing if the caller has already set a number as high, or has frozen objects (`gc.freeze`).
    """
    # Compare the threshold first, because Python takes 50 ms to count a million frozen objects.
    if gc.get_threshold()[0] >= _GC_THRESHOLD or gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    usual = gc.get_threshold()
    gc.set_threshold(_GC_THRESHOLD, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()
