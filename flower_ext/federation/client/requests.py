"""Read and check the server's requests to a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Context, Message

from flower_ext.errors import InvalidValue, knowing_no_data
from flower_ext.federation import records
from flower_ext.federation.failures import attempt_each
from flower_ext.federation.protection import Unprotected, check_entries
from flower_ext.federation.roster import check_addressee
from flower_ext.federation.sums import masked
from flower_ext.privacy.mechanisms.protections import Protection
from flower_ext.privacy.mechanisms.updates import NamedArrays, check_like, require_finite
from flower_ext.training import LocalTraining, Params, Task

T = TypeVar("T")

_OF_SUMS = (records.SECURE_SUM, records.WEIGHTED_SUM)
"""Array records that hold a protocol's bytes. The arrays of all other records become tensors."""
_IN_THE_CLEAR = ("report-size", "diagnostics", "training-loss")
"""Entries that ask for numbers about the client's data without noise, in addition to the update."""


@dataclass(frozen=True, kw_only=True)
class UploadRequest:
    """The part of a server's request that says how the client's answer leaves the client."""

    kind: str = "train"
    protection: Protection = field(default_factory=Protection)
    entries: Mapping[str, Any] = field(default_factory=lambda: {"number": 1, "seed": 0})
    """Entries of the round's record, including the entries of the protection."""
    sums: Mapping[str, records.Arrays] = field(default_factory=dict)
    """The server's messages for the sum of the round, by the record's name."""
    query: Mapping[str, Any] = field(default_factory=dict)
    """Name and fields of a query that is answered by a noised sum; empty without one."""

    @property
    def is_summed(self) -> bool:
        """True if masks hide the client's whole answer, and no number leaves it in the clear."""
        if any(self.entries.get(name) for name in _IN_THE_CLEAR):
            return False
        is_masked = records.SECURE_SUM in self.sums and self.protection.cell is not None
        return is_masked and (self.kind == "train" or bool(self.query))

    def seal(self, update: NamedArrays, context: Context, method: str) -> records.Arrays:
        """Return a protected update as it leaves the client: masked, if the server asks for masks.

        A client encrypts its part of a weighted sum when it adds the noise (see `HiddenSum`).

        Parameters
        ----------
        update : Mapping[str, array]
            The bounded update with noise, in cells if the protection has a ``cell``.
        context : Context
            The client's context, whose vault has the secrets of a masked sum.
        method : str
            Name of the client method, under which the vault stores them.

        Raises
        ------
        ProtocolError, InvalidValue
            As `masked.seal`; also if the message has no record of the masked sum.
        """
        arrays = records.arrays_of(update)
        if self.protection.cell is None:
            return arrays
        # From here on, the server sees the sum of the cohort alone.
        return masked.seal(arrays, self.sums[records.SECURE_SUM], context, method)


@dataclass(frozen=True, kw_only=True)
class ClientRequest(UploadRequest):
    """A request of the server, as read from its message.

    It holds the model, other arrays, the phases of training, and the entries of the round.
    """

    model: Params
    training: Mapping[str, LocalTraining]
    state: Mapping[str, Params] = field(default_factory=dict)
    settings: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)

    @property
    def hides_missing_data(self) -> bool:
        """True if the server must not learn that this client could not load its data."""
        if self.kind == "evaluate":
            return bool(self.query)  # summed under noise
        return self.protection.hides_missing_data

    @property
    def run(self) -> str:
        """Name of the run, under which the client keeps memory; empty if the server gives none."""
        return str(self.entries.get("run", ""))

    @property
    def round(self) -> int:
        """Number of the training round."""
        return int(self.entries["number"])

    @property
    def seed(self) -> int:
        """Seed of the run; 0 if the run has none."""
        return int(self.entries["seed"])


def read_each(
    task: Task, messages: Sequence[Message], contexts: Sequence[Context]
) -> list[ClientRequest | Exception]:
    """Return each client's request, or its error; read a record of several messages only once.

    The error of a client may be one of these:

    InvalidValue
        The message is for another partition, or the model does not fit ``task``.
    NonFiniteUpdate
        The model has NaN or infinite values.
    TypeError
        An entry of the round has the wrong type (see `check_entries`).
    """
    contents: dict[int, ClientRequest] = {}
    arrays: dict[int, Params] = {}

    def params(record: ArrayRecord) -> Params:
        if id(record) not in arrays:
            received = records.to_params(record)
            _check_received(received, task)  # before the next client can reuse it
            arrays[id(record)] = received
        return arrays[id(record)]

    def request(message: Message) -> ClientRequest:
        content = message.content
        arrays_of = records.of_kind(content, ArrayRecord)
        sums = {n: records.to_arrays(arrays_of.pop(n)) for n in _OF_SUMS if n in arrays_of}
        received = {name: params(record) for name, record in arrays_of.items()}
        configs = records.of_kind(content, ConfigRecord)
        if not set(received[records.MODEL]) <= set(task.shapes):
            extra, tied = (
                sorted(set(received[records.MODEL]) - set(task.shapes)),
                task.factory.facts.tied,
            )
            known = [f"{name!r} is tied to {tied[name]!r}" for name in extra if name in tied]
            raise InvalidValue(
                f"the server's model has {extra}: expected only parameters of this task's model, "
                "as in ArrayRecord(task.initial_params(0))"
                + (f"; {', '.join(known)}: send it under that name only" if known else "")
            )
        round_entries = dict(configs[records.ROUND])
        protection = check_entries(round_entries) or Unprotected()
        return ClientRequest(
            kind=message.metadata.message_type.partition(".")[0],
            protection=protection,
            entries=round_entries,
            model=received.pop(records.MODEL),
            state=_Named(received),
            sums=_Named(sums),
            training=_Named(records.read_trainings(content)),
            settings=_Named(configs.get(records.SETTINGS, {})),  # type: ignore[arg-type]
            config=dict(configs.get(records.CONFIG, {})),
            query=dict(configs.get(records.QUERY, {})),
        )

    def read(message: Message, context: Context) -> ClientRequest:
        check_addressee(message, context)
        key = id(message.content)
        if key not in contents:
            # Build a model outside the block below: its errors may depend on the client's data.
            _ = task.shapes, task.template
            with knowing_no_data():
                contents[key] = request(message)
        return contents[key]

    return attempt_each(read, messages, contexts)


def _check_received(params: Params, task: Task) -> None:
    """Refuse arrays on which training would fail, before their results reach the memory."""
    require_finite(params, "in the server's message", "the server's model may have diverged")
    known = [name for name in params if name in task.template]
    like = {name: task.template[name] for name in known}
    check_like({name: params[name] for name in known}, like, types=True)


class _Named(dict[str, T]):
    """Values in the server's message, by name. The server may see the error of a missing name."""

    def __missing__(self, name: str) -> T:
        raise InvalidValue.tellable(f"the server's message has no {name!r}")
