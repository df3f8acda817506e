"""Train and evaluate the clients of a process, many at a time, by one method.

If many clients live in one process, their functions run `side_by_side`: whenever all of them wait
for a local training, these trainings form one batch (`training.train_each`). If the plan bounds
uploads, no bit that one client sends depends on the other clients: not on their data, their errors
or their presence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from flwr.app import Context, Message, RecordDict

from flower_ext.federation import records
from flower_ext.federation.client.client_method import ClientMethod, ClientWork
from flower_ext.federation.client.evaluating import (
    WorkView,
    masked_vector,
    query_of,
    scores_of,
    scores_record,
)
from flower_ext.federation.client.node import NodePolicy
from flower_ext.federation.client.preparing import work_of
from flower_ext.federation.client.protecting import upload_of
from flower_ext.federation.client.requests import read_each
from flower_ext.federation.failures import attempt_each, attempt_in_turn
from flower_ext.privacy.queries.vector_query import VectorQuery
from flower_ext.training import MEMORY_LIMIT, Params, Task
from flower_ext.training.side_by_side import Steps, check_whole, completed, side_by_side


@dataclass(frozen=True)
class ClientSide:
    """Answers messages of one method, for any number of clients at a time, one message each.

    Parameters
    ----------
    method : ClientMethod
    task : Task | Callable[[Context], Task]
    allow_seeded_noise : bool
        As in `client_app`.
    queries : Mapping[str, type[VectorQuery]]
        Kinds of queries that clients answer, by name.
    """

    method: ClientMethod
    task: Task | Callable[[Context], Task]
    allow_seeded_noise: bool
    queries: Mapping[str, type[VectorQuery]]

    def train(
        self,
        messages: Sequence[Message],
        contexts: Sequence[Context],
        *,
        memory_limit: int = MEMORY_LIMIT,
        alone: bool = False,
    ) -> list[records.Update | Exception]:
        """Train each client, and return its protected update, or its error.

        A client trains, protects its update, and then stores its memory, so an error changes no
        memory. An error replaces the result of its client only. ``alone`` means that the node
        trains no other client at the same time.
        """
        works = self._works(messages, contexts, alone=alone)
        return side_by_side(attempt_in_turn(upload_of, works), memory_limit=memory_limit)

    def _works(
        self, messages: Sequence[Message], contexts: Sequence[Context], *, alone: bool
    ) -> list[ClientWork | Exception]:
        """Return the input of each client's functions, or the client's error.

        All inputs share one task.
        """
        policies = attempt_each(self.policy, contexts)
        known = [policy for policy in policies if isinstance(policy, NodePolicy)]
        if not known:
            return [policy for policy in policies if isinstance(policy, Exception)]
        task = known[0].task(self.task)
        requests = read_each(task, messages, contexts)
        return attempt_each(partial(work_of, self.method, task, alone=alone), policies, requests)

    def score(
        self,
        messages: Sequence[Message],
        contexts: Sequence[Context],
        *,
        memory_limit: int = MEMORY_LIMIT,
    ) -> list[RecordDict | Exception]:
        """Return each client's scores of the model that it would use, or its error.

        If the messages carry a query, the server asks for a noised sum of the scores. Each client
        is then evaluated by itself, so that no bit that it adds to the sum depends on the other
        clients.
        """
        works = self._works(messages, contexts, alone=True)
        if any(isinstance(work, ClientWork) and work.request.query for work in works):
            return attempt_each(self._masked_vector, works)
        models = self._used(works, memory_limit)
        wanted = attempt_each(lambda work: bool(work.request.entries.get("training-loss")), works)
        scores = scores_of(works, models, also_training=True in wanted)
        return attempt_each(scores_record, works, scores)

    def _masked_vector(self, work: ClientWork) -> RecordDict:
        query = query_of(work.request, self.queries)
        view = WorkView(work, lambda: self._used([work], MEMORY_LIMIT)[0])
        return masked_vector(query, view)

    def used(self, message: Message, context: Context) -> Params:
        """Return the model that this client would use, which is the one that `score` evaluates.

        Raises
        ------
        Exception
            The error that `score` would return.
        """
        works = self._works([message], [context], alone=True)
        (model,) = self._used(works, MEMORY_LIMIT)
        if isinstance(model, Exception):
            raise model
        return model

    def _used(
        self, works: Sequence[ClientWork | Exception], memory_limit: int
    ) -> list[Params | Exception]:
        """Return the whole model that each client would use, or its error."""

        def model_of(work: ClientWork) -> Steps[Params]:
            model = yield from completed(self.method.local_model(work))
            check_whole(model, work.task)
            return model

        return side_by_side(attempt_in_turn(model_of, works), memory_limit=memory_limit)

    def policy(self, context: Context) -> NodePolicy:
        """Return what the node's owner permits; refuse a device that PyTorch does not know."""
        policy = NodePolicy(context, self.allow_seeded_noise)
        _ = policy.device
        return policy

    def task_of(self, context: Context) -> Task:
        """Return the task, on the device that the node's owner names."""
        return self.policy(context).task(self.task)
