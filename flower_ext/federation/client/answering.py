"""Answer questions that the server asks outside training and evaluation.

A record in the message names the kind of question: one of the method, a step of a masked or a
weighted sum, the frozen part of the model, or what the client remembers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict

from flower_ext.data import ClientData, SiloData
from flower_ext.errors import InvalidValue, knowing_no_data
from flower_ext.federation import records
from flower_ext.federation.client.client_method import Question
from flower_ext.federation.client.client_side import ClientSide
from flower_ext.federation.client.preparing import NO_DATA, data_of
from flower_ext.federation.client.user_draws import draw_fingerprint, draws_vault
from flower_ext.federation.roster import check_addressee
from flower_ext.federation.state.memory import ClientMemory, ClientVault, forget_client
from flower_ext.federation.sums import masked, weighted_silo
from flower_ext.training import Task


def answer_question(side: ClientSide, message: Message, context: Context) -> Message:
    """Return one client's reply to a question."""
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
    return weighted_silo.answer(
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
