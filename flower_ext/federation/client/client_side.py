"""Train and evaluate the clients of a process, many at a time, and answer the server's questions.

If many clients live in one process, the method's functions for these clients run `side_by_side`:
whenever all of them wait for a local training, these trainings form one batch
(`training.train_each`). If the plan bounds uploads, no bit that one client sends depends on the
other clients: not on their data, their errors or their presence.

The names of the records in a question's message determine the kind of question: a question of the
method, a step of a sum, or a question about the frozen part of the model, the number of examples,
or the client's memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict

from flower_ext.data import ClientData, SiloData
from flower_ext.errors import InvalidValue, knowing_no_data
from flower_ext.federation.client.assignment import NO_DATA, Assignment, assign, data_of
from flower_ext.federation.client.client_method import ClientMethod, Question
from flower_ext.federation.client.evaluating import (
    evaluation_of,
    masked_vector,
    query_of,
    used_model,
)
from flower_ext.federation.client.hidden_errors import attempt_each, attempt_in_turn
from flower_ext.federation.client.node import NodePolicy
from flower_ext.federation.client.requests import read_each, sum_of
from flower_ext.federation.client.upload import upload_of
from flower_ext.federation.client.user_draws import draw_fingerprint, draws_vault
from flower_ext.federation.messages import records
from flower_ext.federation.messages.addresses import check_addressee
from flower_ext.federation.messages.round_entries import RoundEntries
from flower_ext.federation.messages.upload_reply import Update
from flower_ext.federation.storage.memory import ClientMemory, forget_client
from flower_ext.federation.sums.masked import OF_MASKED_SUM
from flower_ext.federation.sums.summation import ClientSum
from flower_ext.privacy.queries.vector_query import VectorQuery
from flower_ext.training import MEMORY_LIMIT, Params, Task
from flower_ext.training.side_by_side import side_by_side


@dataclass(frozen=True)
class ClientSide:
    """Answers messages of one method, for any number of clients at a time, one message each.

    The fields are as in `client_app`; ``queries`` and ``sums`` have all kinds by name.
    """

    method: ClientMethod
    task: Task | Callable[[Context], Task]
    allow_seeded_noise: bool
    queries: Mapping[str, type[VectorQuery]]
    sums: Mapping[str, type[ClientSum]]

    def train(
        self,
        messages: Sequence[Message],
        contexts: Sequence[Context],
        *,
        memory_limit: int = MEMORY_LIMIT,
        alone: bool = False,
    ) -> list[Update | Exception]:
        """Train each client, and return its protected update, or its error.

        A client trains, protects its update, and then stores its memory, so an error changes no
        memory. An error replaces the result of its client only. ``alone`` means that the node
        trains no other client at the same time.
        """
        assignments = self._assignments(messages, contexts, alone=alone)
        return side_by_side(attempt_in_turn(upload_of, assignments), memory_limit=memory_limit)

    def _assignments(
        self, messages: Sequence[Message], contexts: Sequence[Context], *, alone: bool
    ) -> list[Assignment | Exception]:
        """Return each client's assignment, or its error. All assignments share one task."""
        policies = attempt_each(self.policy, contexts)
        known = [policy for policy in policies if isinstance(policy, NodePolicy)]
        if not known:
            return [policy for policy in policies if isinstance(policy, Exception)]
        task = known[0].task(self.task)
        requests = read_each(task, self.sums, messages, contexts)
        return attempt_each(partial(assign, self.method, task, alone=alone), policies, requests)

    def score(
        self,
        messages: Sequence[Message],
        contexts: Sequence[Context],
        *,
        memory_limit: int = MEMORY_LIMIT,
    ) -> list[RecordDict | Exception]:
        """Return each client's scores of the model that it uses for predictions, or its error.

        If the messages carry a query, the server asks for a noised sum of the scores. Each client
        is then evaluated by itself, so that no bit that it adds to the sum depends on the other
        clients.
        """
        assignments = self._assignments(messages, contexts, alone=True)
        if any(isinstance(each, Assignment) and each.request.query for each in assignments):
            return attempt_each(
                lambda each: masked_vector(query_of(each.request, self.queries), each), assignments
            )
        return side_by_side(attempt_in_turn(evaluation_of, assignments), memory_limit=memory_limit)

    def used(self, message: Message, context: Context) -> Params:
        """Return the model that this client uses for predictions, which `score` evaluates."""
        assignments = self._assignments([message], [context], alone=True)
        (model,) = side_by_side(attempt_in_turn(lambda each: used_model(each.work), assignments))
        if isinstance(model, Exception):
            raise model
        return model

    def answer(self, message: Message, context: Context) -> Message:
        """Return one client's reply to a question outside training and evaluation."""
        check_addressee(message, context)
        sum_type, sum_message = sum_of(message.content, self.sums)
        if sum_type.name:
            client_sum = sum_type(sum_message, context, self.method.name)
            content = self._answer_of_sum(client_sum, message, context)
            answer = records.bytes_record(sum_message.step, content)
        elif records.QUESTION in message.content:
            answer = self._answer_of_method(message, context)
        elif records.FROZEN in message.content:
            answer = self._confirmation_of_frozen(message, context)
        elif records.SIZE in message.content:
            answer = self._number_of_examples(context)
        elif records.FORGET in message.content:
            answer = self._confirmation_of_forgetting(message, context)
        else:
            answer = self._version_of_memory(message, context)
        return Message(RecordDict({records.ANSWER: answer}), reply_to=message)

    def _answer_of_method(self, message: Message, context: Context) -> ArrayRecord:
        """Answer a question that the server asks for the method."""
        if self.method.answer is None:
            raise InvalidValue.tellable(
                f"{self.method.name}: the server sent a question, but this ClientMethod cannot "
                "answer; create it with ClientMethod(answer=...)"
            )
        policy = self.policy(context)
        policy.require_secure_sum("an answer", in_sum=False)
        task = policy.task(self.task)
        question = Question(
            task=task,
            data=_data(task, message, policy.partition),
            values=dict(message.content.config_records[records.QUESTION]),
            draw_fingerprint=partial(
                draw_fingerprint, task, draws_vault(context, self.method.name)
            ),
        )
        return records.to_record(self.method.answer(question))

    def _answer_of_sum(self, client_sum: ClientSum, message: Message, context: Context) -> bytes:
        """Answer a message for a sum, such as one step of its set-up."""
        if client_sum.brings_weights and not self.method.takes_weighted_sums:
            raise InvalidValue.tellable(
                f"{self.method.name} takes no part in weighted sums: run UldpAvg or UldpSgd"
            )
        policy = self.policy(context)
        policy.require_secure_sum(f"an answer for {client_sum.name}", in_sum=client_sum.is_secure)

        def data() -> ClientData:
            return _data(policy.task(self.task), message, policy.partition)

        return client_sum.answer(data, may_simulate=policy.may_simulate)

    def _confirmation_of_frozen(self, message: Message, context: Context) -> ArrayRecord:
        """Confirm that this node's model has the frozen part that the server names."""
        expected = message.content.config_records[records.FROZEN]["fingerprint"]
        if (fingerprint := self.task_of(context).fingerprint) != expected:
            raise InvalidValue.tellable(
                f"the frozen part of this node's model has the fingerprint {fingerprint!r}: "
                f"expected {expected!r}; install the same base model on all nodes"
            )
        return _number(records.FROZEN, 1)

    def _number_of_examples(self, context: Context) -> ArrayRecord:
        """Return the number of training examples in this client's data."""
        policy = self.policy(context)
        policy.require_secure_sum("the number of examples", in_sum=False)
        data = policy.task(self.task).data(policy.partition)
        return _number("num-examples", len(data.train))

    def _version_of_memory(self, message: Message, context: Context) -> ArrayRecord:
        """Return the training round in which this client last stored memory; 0 if it never did."""
        of_round = RoundEntries.of(message.content.config_records[records.ROUND])
        memory = ClientMemory(context, self.method.name, of_round.run)
        memory.load(of_round.number + 1)  # raises an error if the memory is not readable
        return _number("version", memory.newest(of_round.number + 1))

    def _confirmation_of_forgetting(self, message: Message, context: Context) -> ArrayRecord:
        """Delete everything that this client remembers of the named runs, and confirm it."""
        self.policy(context).check_forgetting()
        # A run of another study that is computing a masked sum misses the client in this sum.
        runs: Any = message.content.config_records[records.FORGET]["runs"]
        forget_client(context, list(runs), vaults=OF_MASKED_SUM)
        return _number(records.FORGET, 1)

    def policy(self, context: Context) -> NodePolicy:
        """Return what the node's owner permits; refuse a device that PyTorch does not know."""
        policy = NodePolicy(context, self.allow_seeded_noise)
        _ = policy.device
        return policy

    def task_of(self, context: Context) -> Task:
        """Return the task, on the device that the node's owner names."""
        return self.policy(context).task(self.task)


def _number(name: str, value: int) -> ArrayRecord:
    return records.to_record({name: np.array(value, dtype=np.int64)})


def _data(task: Task, message: Message, partition: int) -> ClientData:
    """Return a client's data without the users whom the message lists as withdrawn."""
    data = data_of(task, partition, hide_errors=True)
    named = message.content.config_records.get(records.WITHDRAWN)
    if named is None or data is NO_DATA or not isinstance(data, SiloData):
        return data
    with knowing_no_data():
        users: list[Any] = list(named["users"])  # type: ignore[arg-type]
        if any(type(user) is not int for user in users):
            raise TypeError("withdrawn users in the server's message: expected integers")
    return data.without(users)
