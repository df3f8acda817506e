"""A Grid that runs ClientApps in this process: the same Strategy and ClientApp, without Ray.

For tests and research on one machine. Each client keeps its own Context; a client that raises
answers with an error and its changes to its state are undone, as in Flower's simulation. A
ClientApp of this package answers a whole cohort at once, which trains its clients in batches.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterable, Mapping
from itertools import count
from logging import getLogger
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flower_ext.federation import _flower_private as private
from flower_ext.federation.client import CohortApp
from flower_ext.training import MEMORY_LIMIT

log = getLogger(__name__)

CLIENT_APP_RAISED = 2
"""Error code of a reply whose ClientApp raised, as Flower's own engines number it."""


class InProcessGrid(Grid):
    """Virtual clients 0 … ``num_clients``−1 around one ClientApp.

    Parameters
    ----------
    client_app : ClientApp
    num_clients : int
    run_config : Mapping, optional
        What clients see as ``context.run_config``.
    memory_limit : int
        Bytes that one batch of local trainings may take (see `training.train_many`).
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        run_config: Mapping[str, bool | float | int | str] | None = None,
        memory_limit: int = MEMORY_LIMIT,
    ) -> None:
        if num_clients < 1:
            raise ValueError(f"num_clients={num_clients!r}: expected an integer >= 1")
        self._app = client_app
        self._memory_limit = memory_limit
        self._ids = count(1)
        self._replies: dict[str, Message] = {}
        self.set_run(private.empty_run(run_id=1))
        # Node ids leave room for the server's own.
        self.contexts = {
            partition + 1_000: Context(
                run_id=1,
                node_id=partition + 1_000,
                node_config={"partition-id": partition, "num-partitions": num_clients},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for partition in range(num_clients)
        }

    def set_run(self, run: Any) -> None:
        """Take part in ``run``; this process may then create its messages."""
        self._run = run
        private.become_server_of(run.run_id)

    @property
    def run(self) -> Any:
        """The run that this grid belongs to."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message of this run."""
        return Message(
            content,
            dst_node_id=dst_node_id,
            message_type=message_type,
            group_id=group_id,
            ttl=ttl,
        )

    def get_node_ids(self) -> Iterable[int]:
        """All clients are always there."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run the clients at once; replies wait to be pulled."""
        messages, ids = list(messages), []
        for message in messages:
            ids.append(str(next(self._ids)))
            private.set_message_id(message, ids[-1])
        self._replies |= zip(ids, self._answers(messages), strict=True)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies to ``message_ids``, each handed out once."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Run each message's client and collect the replies; nothing waits for ``timeout``."""
        return self.pull_messages(self.push_messages(messages))

    def _answers(self, messages: list[Message]) -> list[Message]:
        """Replies in the order of ``messages``; a cohort at once where the ClientApp can."""
        kinds = {message.metadata.message_type for message in messages}
        nodes = [message.metadata.dst_node_id for message in messages]
        if (
            isinstance(self._app, CohortApp)
            and len(kinds) == 1
            and kinds <= set(self._app.together)
            and len(set(nodes)) == len(nodes)
        ):
            contexts = [self.contexts[node] for node in nodes]
            before = [RecordDict(dict(context.state)) for context in contexts]
            try:
                return self._app.answer(messages, contexts, memory_limit=self._memory_limit)
            except Exception:  # one of them: who it is shows when each answers alone
                log.debug("clients answer one by one", exc_info=True)
                for context, state in zip(contexts, before, strict=True):
                    context.state = state
        return [self._answer(message) for message in messages]

    def _answer(self, message: Message) -> Message:
        context = self.contexts[message.metadata.dst_node_id]
        before = RecordDict(dict(context.state))
        message.content = RecordDict(dict(message.content))  # several may share one
        try:
            return self._app(message, context)
        except Exception:  # whatever a ClientApp raises becomes an error reply
            context.state = before
            error = Error(code=CLIENT_APP_RAISED, reason=traceback.format_exc(limit=-3))
            return Message(error, reply_to=message)


def run_in_process(
    server_app: ServerApp,
    client_app: ClientApp,
    *,
    num_clients: int,
    run_config: Mapping[str, bool | float | int | str] | None = None,
    memory_limit: int = MEMORY_LIMIT,
) -> InProcessGrid:
    """Run a whole Flower app in this process and return its grid (with the clients' contexts)."""
    config = dict(run_config or {})
    grid = InProcessGrid(client_app, num_clients, config, memory_limit)
    context = Context(
        run_id=1,
        node_id=private.SERVER_NODE_ID,
        node_config={},
        state=RecordDict(),
        run_config=config,
    )
    # A round makes thousands of small objects. The collections that they set off would each walk
    # through all imported modules, a fifth of a second, but for this.
    gc.collect()
    gc.freeze()
    try:
        server_app(grid, context)
    finally:
        gc.unfreeze()
    return grid
