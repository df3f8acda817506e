"""A ClientApp for one or several methods: it trains, evaluates, and answers questions.

A method supplies two functions (`ClientMethod`), written for one client. `work_of` prepares their
input from a message. `upload_of` runs them, bounds their results and adds noise before anything
leaves the client, so no method can forget one of these steps. The memory that a method returns
cannot reach a reply.

If many clients live in one process, their functions run `side_by_side`: whenever all of them wait
for a local training, these trainings form one batch (`training.train_each`). If the plan bounds
uploads, no bit that one client sends depends on the other clients: not on their data, their errors
or their presence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict

from flower_ext.data import ClientData, SiloData
from flower_ext.errors import InvalidValue, knowing_no_data
from flower_ext.federation import records
from flower_ext.federation.client.client_method import ClientMethod, ClientWork, Question
from flower_ext.federation.client.cohort_app import Answer, CohortApp
from flower_ext.federation.client.evaluating import (
    WorkView,
    masked_vector,
    query_of,
    scores_of,
    scores_record,
)
from flower_ext.federation.client.node import NodePolicy
from flower_ext.federation.client.preparing import NO_DATA, data_of, work_of
from flower_ext.federation.client.protecting import upload_of
from flower_ext.federation.client.requests import read_each
from flower_ext.federation.client.user_draws import draw_fingerprint, draws_vault
from flower_ext.federation.failures import attempt_each, attempt_in_turn
from flower_ext.federation.roster import IDENTITY, check_addressee, identity
from flower_ext.federation.state.memory import ClientMemory, ClientVault, forget_client
from flower_ext.federation.sums import masked, weighted_setup
from flower_ext.privacy import SecureScores
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
        """Train, protect, store memory and reply, in this order, so an error changes no memory.

        An error replaces the reply of its client only. ``alone`` means that the node trains no
        other client at the same time.
        """
        works = self._works(messages, contexts, alone=alone)
        return side_by_side(attempt_in_turn(upload_of, works), memory_limit=memory_limit)

    def _works(
        self, messages: Sequence[Message], contexts: Sequence[Context], *, alone: bool
    ) -> list[ClientWork | Exception]:
        """Return the input of each client's functions, or its error; all clients share one task."""
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


class MethodsApp(CohortApp):
    """A ClientApp for several methods; ``sides`` maps a method's name to its client side."""

    def __init__(self) -> None:
        super().__init__()
        self.sides: dict[str, ClientSide] = {}


def client_app(
    *methods: ClientMethod,
    task: Task | Callable[[Context], Task],
    allow_seeded_noise: bool = False,
    queries: Sequence[type[VectorQuery]] = (),
) -> MethodsApp:
    """Return a ClientApp that answers the messages of one or several methods.

    Parameters
    ----------
    *methods : ClientMethod
    task : Task | Callable[[Context], Task]
        The task, or a function that builds it from the run's configuration. All clients share one
        task; each client asks it for the data of the client's partition.
    allow_seeded_noise : bool
        True if the server may ask for reproducible noise. Use it for simulation only, because
        anybody who knows the seed can remove the noise. The owner of a SuperNode can forbid such
        noise by ``--node-config "require-secure-noise=true"``.
    queries : Sequence[type[VectorQuery]]
        Kinds of queries that clients answer, in addition to `SecureScores`.
    """
    app = MethodsApp()
    kinds: dict[str, type[VectorQuery]] = {"scores": SecureScores}
    kinds |= {kind.name: kind for kind in queries}

    @app.query("identity")
    def _(message: Message, context: Context) -> Message:
        return Message(identity(context.node_config), reply_to=message)

    app.cohort_answers[IDENTITY] = _identities

    for method in methods:
        side = app.sides[method.name] = ClientSide(method, task, allow_seeded_noise, kinds)
        app.cohort_answers[f"train.{method.name}"] = side.train
        app.cohort_answers[f"evaluate.{method.name}"] = side.score

        @app.train(method.name)
        def _(message: Message, context: Context, side: ClientSide = side) -> Message:
            return _reply(message, side.train([message], [context], alone=True))

        @app.evaluate(method.name)
        def _(message: Message, context: Context, side: ClientSide = side) -> Message:
            return _reply(message, side.score([message], [context]))

        @app.query(method.name)
        def _(message: Message, context: Context, side: ClientSide = side) -> Message:
            return _answer_question(side, message, context)

    return app


def _identities(
    messages: Sequence[Message], contexts: Sequence[Context], *, memory_limit: int
) -> list[RecordDict | Exception]:
    return [identity(context.node_config) for context in contexts]


def _reply(message: Message, answers: Sequence[Answer]) -> Message:
    (answer,) = answers
    if isinstance(answer, Exception):
        raise answer
    content = answer.content() if isinstance(answer, records.Update) else answer
    return Message(content, reply_to=message)


def _answer_question(side: ClientSide, message: Message, context: Context) -> Message:
    """Return the reply to a question; the message has a record that names the kind of question."""
    check_addressee(message, context)
    if records.SECURE_SUM in message.content:
        return masked.answer(message, context, side.method.name)
    answers = (answer for record, answer in _ANSWERS.items() if record in message.content)
    answer = next(answers, _state)
    return Message(RecordDict({records.ANSWER: answer(side, message, context)}), reply_to=message)


def _of_method(side: ClientSide, message: Message, context: Context) -> ArrayRecord:
    """Answer a question that the server asks for the method."""
    if side.method.answer is None:
        raise InvalidValue.tellable(
            f"{side.method.name}: the server sent a question, but this ClientMethod answers "
            "none; create it with ClientMethod(answer=...)"
        )
    policy = side.policy(context)
    policy.check_way_out("an answer", in_sum=False)
    task = policy.task(side.task)
    question = Question(
        task=task,
        data=_data(task, message, policy.partition),
        values=dict(message.content.config_records[records.QUESTION]),
        training=records.read_trainings(message.content),
        draw_fingerprint=partial(draw_fingerprint, task, draws_vault(context, side.method.name)),
    )
    return records.to_record(side.method.answer(question))


def _of_weighted_sum(side: ClientSide, message: Message, context: Context) -> ArrayRecord:
    """Answer one step of a protocol: the set-up of a weighted sum, or a secret draw of users."""
    if not side.method.takes_weighted_sums:
        raise InvalidValue.tellable(
            f"{side.method.name} takes no part in weighted sums: run UldpAvg or UldpSgd"
        )
    policy = side.policy(context)
    policy.check_way_out("a weighted sum", in_sum=False)
    return weighted_setup.answer(
        records.to_arrays(message.content.array_records[records.WEIGHTED_SUM]),
        _data(policy.task(side.task), message, policy.partition),
        policy.partition,
        ClientVault(context, side.method.name),
        may_simulate=policy.may_simulate,
    )


def _data(task: Task, message: Message, partition: int) -> ClientData:
    """Return a client's data without the users who, as the message says, have withdrawn."""
    data = data_of(task, partition, hide_errors=True)
    named = message.content.config_records.get(records.WITHDRAWN)
    if named is None or data is NO_DATA or not isinstance(data, SiloData):
        return data
    with knowing_no_data():
        users: list[Any] = list(named["users"])  # type: ignore[arg-type]
        if any(type(user) is not int for user in users):
            raise TypeError("withdrawn users in the server's message: expected integers")
    return data.without(users)


def _state(side: ClientSide, message: Message, context: Context) -> ArrayRecord:
    """Return the training round in which this client last stored memory, or 0 if it has none.

    The client loads the memory to make sure that it is readable. With ``report-size``, the answer
    includes the number of training examples, as a reply to a training message does. With
    ``forget``, the client first deletes everything that it remembers of the named runs.
    """
    round_entries = message.content.config_records[records.ROUND]
    if "forget" in round_entries:
        side.policy(context).check_forgetting()
        forget_client(context, list(round_entries["forget"]))  # type: ignore[arg-type]
        return records.to_record({"version": np.array(0, dtype=np.int64)})
    before = int(round_entries["number"]) + 1  # type: ignore[arg-type]
    memory = ClientMemory(context, side.method.name, str(round_entries["run"]))
    numbers = {"version": memory.newest(before) if memory.load(before) is not None else 0}
    if round_entries.get("report-size"):
        policy = side.policy(context)
        policy.check_way_out("the number of examples", in_sum=False)
        data = policy.task(side.task).data(policy.partition)
        numbers["num-examples"] = len(data.train)
    return records.to_record({n: np.array(v, dtype=np.int64) for n, v in numbers.items()})


def _frozen(side: ClientSide, message: Message, context: Context) -> ArrayRecord:
    """Confirm that this node's model has the frozen part that the server names."""
    expected = message.content.config_records[records.FROZEN]["fingerprint"]
    if (fingerprint := side.task_of(context).fingerprint) != expected:
        raise InvalidValue.tellable(
            f"the frozen part of this node's model has the fingerprint {fingerprint!r}: "
            f"expected {expected!r}; install the same base model on all nodes"
        )
    return records.to_record({records.FROZEN: np.array(1, dtype=np.int64)})


# Answers by the record that poses the question. A message with none of these asks for the state.
_ANSWERS = {
    records.QUESTION: _of_method,
    records.WEIGHTED_SUM: _of_weighted_sum,
    records.FROZEN: _frozen,
}
