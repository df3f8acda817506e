"""Read and check the server's requests to a client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from flower_ext.errors import InvalidValue, knowing_no_data
from flower_ext.federation.client.hidden_errors import attempt_each
from flower_ext.federation.messages import records
from flower_ext.federation.messages.addresses import check_addressee
from flower_ext.federation.messages.round_entries import RoundEntries
from flower_ext.federation.sums.summation import ClientSum, SumMessage
from flower_ext.privacy.mechanisms.updates import check_like, require_finite
from flower_ext.training import LocalTraining, Params, Task

T = TypeVar("T")


@dataclass(kw_only=True)  # a frozen class takes six times as long to make
class ClientRequest:
    """A request of the server, as read from its message.

    It holds the model, other arrays, the phases of training, and the entries of the round. The
    round's protection and the sum say how the client's answer leaves the client.
    """

    kind: str = "train"
    received: Params = field(default_factory=dict)
    training: Mapping[str, LocalTraining] = field(default_factory=dict)
    state: Mapping[str, Params] = field(default_factory=dict)
    settings: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    round: RoundEntries = field(default_factory=lambda: RoundEntries(number=1, seed=0))
    sum_type: type[ClientSum] = ClientSum
    """The client's end of the round's sum."""
    sum_message: SumMessage = field(default_factory=SumMessage)
    """The server's message for the sum."""
    query: Mapping[str, Any] = field(default_factory=dict)
    """Name and fields of a query that is answered by a noised sum; empty without one."""

    @property
    def is_summed(self) -> bool:
        """True if a secure sum hides the client's whole answer, and no number leaves beside it."""
        of_round = self.round
        if of_round.report_size or of_round.diagnostics or of_round.training_loss:
            return False
        return self.sum_type.is_secure and (self.kind == "train" or bool(self.query))

    @property
    def hides_missing_data(self) -> bool:
        """True if the client hides from the server that it could not load its data."""
        if self.kind == "evaluate":
            return bool(self.query)  # summed under noise
        return self.round.protection.hides_missing_data


def sum_of(
    content: RecordDict, sums: Mapping[str, type[ClientSum]]
) -> tuple[type[ClientSum], SumMessage]:
    """Return the client's end of the sum for which the server sends a message, and the message.

    Without a message for a sum, return `ClientSum` and an empty message.

    Raises
    ------
    InvalidValue
        The message is for a sum that is not in ``sums``, or for several sums.
    """
    arrays = records.of_kind(content, ArrayRecord)
    names = [name for name in arrays if name.startswith(records.SUM)]
    if not names:
        return ClientSum, SumMessage()
    with knowing_no_data():
        if len(names) > 1 or names[0] not in sums:
            raise InvalidValue(
                f"the server's message is for {names}: expected one of the sums {sorted(sums)}; "
                "give the client's end of any other sum to client_app(sums=…)"
            )
        message = records.single_message(records.to_arrays(arrays[names[0]]))
        return sums[names[0]], SumMessage(*message)


def read_each(
    task: Task,
    sums: Mapping[str, type[ClientSum]],
    messages: Sequence[Message],
    contexts: Sequence[Context],
) -> list[ClientRequest | Exception]:
    """Return each client's request, or its error; read a record that messages share only once.

    A client has an error if the message is for another partition, an entry of the round is
    malformed (see `RoundEntries`), or the model does not fit ``task`` or is not finite.
    """
    requests: dict[int, ClientRequest] = {}
    params: dict[int, Params] = {}

    def read(message: Message, context: Context) -> ClientRequest:
        check_addressee(message, context)
        key = id(message.content)
        if key not in requests:
            # Build a model outside the block below: its errors may depend on the client's data.
            _ = task.shapes, task.template
            with knowing_no_data():
                requests[key] = _request(task, sums, message, params)
        return requests[key]

    return attempt_each(read, messages, contexts)


def _request(
    task: Task, sums: Mapping[str, type[ClientSum]], message: Message, params: dict[int, Params]
) -> ClientRequest:
    """Return a message's request; keep each record's arrays in ``params``, by the record's id."""
    content = message.content
    sum_type, sum_message = sum_of(content, sums)
    arrays_of = records.of_kind(content, ArrayRecord)
    arrays_of.pop(sum_type.name, None)
    for record in arrays_of.values():
        if id(record) not in params:
            received = records.to_params(record)
            # Refuse arrays on which training would fail, before the next client can reuse them.
            require_finite(
                received, "in the server's message", "the server's model may have diverged"
            )
            known = {name: p for name, p in received.items() if name in task.template}
            check_like(known, {name: task.template[name] for name in known}, types=True)
            params[id(record)] = received
    arrays = {name: params[id(record)] for name, record in arrays_of.items()}
    if extra := sorted(set(arrays[records.MODEL]) - set(task.shapes)):
        tied = task.factory.facts.tied
        known_as = [f"{name!r} is tied to {tied[name]!r}" for name in extra if name in tied]
        raise InvalidValue(
            f"the server's model has {extra}: expected only parameters of this task's model, "
            "as in ArrayRecord(task.initial_params(0))"
            + (f"; {', '.join(known_as)}: send it under that name only" if known_as else "")
        )
    configs = records.of_kind(content, ConfigRecord)
    return ClientRequest(
        kind=message.metadata.message_type.partition(".")[0],
        round=RoundEntries.of(configs[records.ROUND]),
        received=arrays.pop(records.MODEL),
        state=_Named(arrays),
        sum_type=sum_type,
        sum_message=sum_message,
        training=_Named(records.read_trainings(content)),
        settings=_Named(configs.get(records.SETTINGS, {})),  # type: ignore[arg-type]
        config=dict(configs.get(records.CONFIG, {})),
        query=dict(configs.get(records.QUERY, {})),
    )


class _Named(dict[str, T]):
    """Values in the server's message, by name. The server may see the error of a missing name."""

    def __missing__(self, name: str) -> T:
        raise InvalidValue.tellable(f"the server's message has no {name!r}")
