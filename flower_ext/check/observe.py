"""Run an app for a few rounds, watch each message, and change what one client's code returns.

A mod at the innermost place of a ClientApp sees what the app's function returns, before all other
mods. In a *held* run the function is not called: the mod answers with the received model moved by
a small public step. What leaves then depends on mods and noise alone, and on nobody's data.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_ext.check.vectors import Vector, direction, held_step, vector
from flower_ext.data import Examples, SiloData, trees
from flower_ext.federation import InProcessGrid, records
from flower_ext.federation import _flower_private as private
from flower_ext.federation.client.client_method import ClientWork
from flower_ext.federation.client.cohort_app import CohortApp, answer_all
from flower_ext.federation.client.preparing import NO_DATA
from flower_ext.federation.client.requests import ClientRequest
from flower_ext.federation.failures import CLIENT_APP_RAISED
from flower_ext.federation.roster import asks_identity, is_rehearsal
from flower_ext.federation.sums.weighted_silo import HiddenSum
from flower_ext.privacy.mechanisms.bounds import BoundedSum
from flower_ext.privacy.mechanisms.protections import ClipSteps, Protection

Change = Literal["", "huge", "huge and heavy", "nan", "zero", "raise"]
"""Change of one client in each round: its update, its weight too, or its absence."""

HUGE, HEAVY = 1e4, 1000
"""Norm of a huge update, and factor of a heavy client's metrics."""
_SLOW = 1e-6
"""Factor of the learning rate under which noised steps show their noise alone."""
_LEARNERS = 20
"""Clients of this package that learn from their data in the first run."""
TRAIN = "train"


class Enough(BaseException):
    """The app has run for as many rounds as are observed."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One message that left a client."""

    kind: str
    round: int
    partition: int
    error: bool
    records: tuple[tuple[str, str], ...]
    """Kind and name of each record."""
    metrics: Mapping[str, Any]
    upload: Vector | None
    """Difference to the received model; None without an array record that fits it."""
    integers: bool
    scalars: bool
    """True if an array of integers, or a floating-point array without axes, left."""


@dataclass(kw_only=True)
class Observed:
    """Everything that one run showed."""

    asked: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """Kind of each batch of messages, with the partitions that got one."""
    trainings: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """For each training round, the partitions that its first batch went to."""
    beside: set[str] = field(default_factory=set)
    """Kinds of messages that a strategy of Flower did not send, although one ran the rounds."""
    starts: int = 0
    replies: list[Reply] = field(default_factory=list)
    releases: list[Vector] = field(default_factory=list)
    """The initial model, and each model that followed it."""
    means: dict[int, Vector] = field(default_factory=dict)
    """By training round, the mean from which a strategy of this package makes the next model."""
    planned: int = 0
    """Number of training rounds for which strategies were started."""
    ended: str = ""
    """Type and place of the error that ended the run."""
    client_errors: list[str] = field(default_factory=list)
    template: dict[str, RecordDict] = field(default_factory=dict)
    facts: Any = None
    log: str = ""

    def uploads(self, round: int) -> dict[int, Vector]:
        """Return the uploads of a training round, by partition."""
        return {
            reply.partition: reply.upload
            for reply in self.replies
            if reply.kind == TRAIN and reply.round == round and reply.upload is not None
        }

    def target(self, round: int) -> int | None:
        """Return the partition that a change concerns in a round."""
        return next(iter(self.cohort(round)), None)

    def cohort(self, round: int) -> tuple[int, ...]:
        """Return the partitions that were asked in a training round."""
        return [*self.trainings.values(), ()][min(round - 1, self.rounds)]

    def step(self, round: int) -> Vector | None:
        """Return what a training round released: the mean, or else the difference of two models."""
        if self.means:
            step = self.means.get(round)
        elif len(self.releases) <= round:
            return None
        else:
            step = self.releases[round].minus(self.releases[round - 1])
        return step if step is not None and step.finite else None

    @property
    def rounds(self) -> int:
        """Number of training rounds."""
        return len(self.trainings)

    @property
    def planned_trainings(self) -> int:
        """Number of training rounds of the whole run."""
        return max(self.planned, self.rounds)


@dataclass(kw_only=True)
class Watch:
    """One run: its seed, the change of one client, and what was observed so far."""

    seed: int
    rounds: int
    change: Change = ""
    quiet: bool = False
    """True if the noise sources of this package add nothing, so that bounds show exactly."""
    template: Mapping[str, RecordDict] | None = None
    """By category, what the app's function returned in an earlier run; it makes this run held."""
    place: Callable[[str, int], str] = lambda file, line: f"{file}:{line}"
    observed: Observed = field(default_factory=Observed)
    in_strategy: bool = False
    answering: int = -1
    _unit: int | None = None
    _turns: dict[int, int] = field(default_factory=dict)

    def ask(self, messages: Sequence[Message]) -> None:
        """Note a batch of messages before clients answer."""
        if not messages:
            return
        kind, trainings = _kind(messages[0]), self.observed.trainings
        # A round of a secure sum has several batches, all of one group.
        group = messages[0].metadata.group_id or f"batch {len(self.observed.asked)}"
        is_new = kind == TRAIN and group not in trainings
        if is_new and len(trainings) >= self.rounds and not self.in_strategy:
            raise Enough
        if not self.in_strategy:
            self.observed.beside.add(kind)
        sent = vector(_arrays(messages[0].content).values())
        same = all(
            message.content is messages[0].content or _same(message.content, messages[0].content)
            for message in messages[1:]
        )
        if sent is not None and same and kind in (TRAIN, "evaluate"):
            self.release(sent)
        partitions = tuple(_partition(message) for message in messages)
        self.observed.asked.append((kind, partitions))
        if kind == TRAIN:
            trainings.setdefault(group, partitions)

    def release(self, sent: Vector) -> None:
        """Note a model if it differs from the one before."""
        known = self.observed.releases
        if known and known[-1].size != sent.size:
            return
        if not known or not np.array_equal(known[-1].sample, sent.sample, equal_nan=True):
            known.append(sent)

    def mean(self, arrays: Mapping[str, Any]) -> None:
        """Note the mean that a round of this package's strategy released."""
        if (mean := vector(np.asarray(array) for array in arrays.values())) is not None:
            self.observed.means[self.observed.rounds] = mean

    def finish(self, result: Any) -> None:
        """Note the last model."""
        arrays = getattr(result, "arrays", None)
        if arrays and (last := vector(a.numpy() for a in arrays.values())) is not None:
            self.release(last)

    def answer(self, app: ClientApp, message: Message, context: Context) -> Message:
        """Return one client's reply, under random numbers of its own."""
        partition = self.answering = _partition(message)
        turn = self._turns[partition] = self._turns.get(partition, 0) + 1
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - apps draw from it
        seed_all(self.seed, partition, turn)
        is_ours = isinstance(app, CohortApp)
        try:
            if is_ours:
                reply = answer_all(app, [message], [context])[0]
            else:
                content, message.content = message.content, deepcopy(message.content)
                try:
                    reply = app(message, context)
                finally:
                    message.content = content
        except Exception as error:  # whatever the app raises becomes an error reply, as in Flower
            self.observed.client_errors.append(self.described(error))
            reply = Message(Error(code=CLIENT_APP_RAISED, reason=""), reply_to=message)
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002 - apps draw from it
            torch.set_rng_state(before[2])
        if is_ours and self._is_changed(message) and self.change in ("nan", "raise"):
            reply = self._changed_reply(message, reply)
        self.note(message, reply)
        return reply

    def inner(self, message: Message, context: Context, call_next: Any) -> Message:
        """Answer in place of the app's function, or call it and note what it returns."""
        category = message.metadata.message_type.partition(".")[0]
        if self.template is None or category not in self.template:
            reply: Message = call_next(message, context)
            if reply.has_content():
                self.observed.template.setdefault(category, deepcopy(reply.content))
            return reply
        content = deepcopy(self.template[category])
        if category == TRAIN:
            change: Change = self.change if self._is_changed(message) else ""
            if change == "raise":
                raise RuntimeError("the check lets this client fail")
            for name, record in content.array_records.items():
                if (received := _like(record, message.content)) is not None:
                    content[name] = _moved(received, change)
            if change == "huge and heavy":
                for metrics in content.metric_records.values():
                    for name, value in metrics.items():
                        if isinstance(value, int | float):
                            metrics[name] = value * HEAVY
        return Message(content, reply_to=message)

    def contribution(self, update: Any, received: Mapping[str, Any], protection: Protection) -> Any:
        """Return, in a held run, a public update in the place of a client's own one.

        Updates stay as they are if the noise is in the training. Sums over units stay, too: a held
        client has the records of no unit, or of one.
        """
        if (
            self.template is None
            or not protection.hides_failures
            or isinstance(update, BoundedSum | HiddenSum)
        ):
            return update
        change: Change = self.change if self._is_target(self.answering) else ""
        numbers = {name: np.asarray(part) for name, part in update.items()}
        start = {name: np.zeros_like(part) for name, part in numbers.items()}
        if protection.bounds_models:
            start |= {name: np.asarray(received[name]) for name in numbers.keys() & received.keys()}
        moved = moved_arrays(start, change)
        return {
            name: torch.as_tensor(moved[name]) if torch.is_tensor(part) else moved[name]
            for name, part in update.items()
        }

    def holds_data(self, request: ClientRequest, partition: int) -> bool:
        """Return True if a client of this package trains without data: all in a held run.

        In the first run, whose updates no comparison uses, a few clients learn from their data.
        """
        held = self.template is not None or partition >= _LEARNERS
        held = held and not self._shows_unit(request.protection)
        return held and request.kind == TRAIN and request.hides_missing_data

    def work(self, work: ClientWork) -> ClientWork:
        """Return, in a held run, work without the data that a client would learn from.

        If the noise is in the local steps, they stay, and hardly move. In a quiet run one real step
        is left, whose first record a changed client makes huge.
        """
        protection, phase = work.protection, work.method.upload_phase
        if self.template is None or not (protection.hides_failures or phase):
            return work
        if self._shows_unit(protection):
            return self._of_one_unit(work)
        if protection.hides_failures:
            return replace(work, data=NO_DATA)
        if not isinstance(protection, ClipSteps) or phase is None:
            return work
        none = {name: replace(t, epochs=0, steps=None) for name, t in work.training.items()}
        training, data = work.training[phase], work.data
        if self.quiet:
            size = min(training.batch_size, len(data.train))
            training = replace(training, steps=1, batch_size=size)
            examples = data.train.subset(range(size))
            if self.change.startswith("huge") and self._is_target(work.policy.partition):
                examples = _with_huge_record(examples)
            data = replace(data, train=examples)
        else:
            training = replace(training, learning_rate=training.learning_rate * _SLOW)
        request = replace(work.request, training={**none, phase: training})
        return replace(work, request=request, data=data)

    def _shows_unit(self, protection: Protection) -> bool:
        """Return True if a huge change concerns a unit whose records lie with several clients."""
        return protection.of_units and self.quiet and self.change.startswith("huge")

    def _of_one_unit(self, work: ClientWork) -> ClientWork:
        """Return work on one unit's records alone, the same for all clients, by a huge step."""
        data = work.data
        if not isinstance(data, SiloData) or not len(data.owners):
            return work
        if self._unit is None:
            self._unit = int(data.owners[0])
        rows = np.flatnonzero(data.owners.cpu().numpy() == self._unit)
        data = replace(data, train=data.train.subset(rows), owners=data.owners[rows])
        phases = {
            name: replace(t, steps=1, learning_rate=t.learning_rate * HUGE, tolerance=0.0)
            for name, t in work.training.items()
        }
        return replace(work, data=data, request=replace(work.request, training=phases))

    def _is_target(self, partition: int) -> bool:
        return bool(self.change) and self.observed.asked[-1][1][0] == partition

    def _is_changed(self, message: Message) -> bool:
        return self.observed.asked[-1][0] == TRAIN and self._is_target(_partition(message))

    def _changed_reply(self, message: Message, reply: Message) -> Message:
        """Return a changed reply of an app whose function the check cannot replace."""
        if self.change == "raise" or not reply.has_content():
            return Message(Error(code=CLIENT_APP_RAISED, reason=""), reply_to=message)
        content = reply.content.copy()
        for name, record in content.array_records.items():
            content[name] = _moved(record, self.change)
        return Message(content, reply_to=message)

    def note(self, message: Message, reply: Message) -> None:
        """Note what leaves a client."""
        kind, _ = self.observed.asked[-1]
        content = reply.content if reply.has_content() else RecordDict()
        metrics = {
            name: value
            for record in content.values()
            if isinstance(record, MetricRecord | ConfigRecord)
            for name, value in record.items()
        }
        arrays = _arrays(content)
        self.observed.replies.append(
            Reply(
                kind=kind,
                round=self.observed.rounds,
                partition=_partition(message),
                error=reply.has_error(),
                records=tuple((type(record).__name__, name) for name, record in content.items()),
                metrics=metrics,
                upload=_upload(message.content, content),
                integers=any(array.dtype.kind in "iub" for array in arrays.values()),
                scalars=any(a.ndim == 0 and a.dtype.kind == "f" for a in arrays.values()),
            )
        )

    def described(self, error: BaseException) -> str:
        """Return type and place of an error, but not its text, which may hold data."""
        frames = traceback.extract_tb(error.__traceback__)
        places = [self.place(frame.filename, frame.lineno or 0) for frame in frames]
        last = next((p for p in reversed(places) if "/" in p), places[-1] if places else "")
        return f"{type(error).__name__} at {last}"


class WatchedGrid(InProcessGrid):
    """A grid in this process that shows every message to a `Watch`."""

    watch: Watch
    app: ClientApp

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Note the messages, then run the clients."""
        self.watch.ask(messages := list(messages))
        return super().push_messages(messages)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Note the messages, then run the clients."""
        self.watch.ask(messages := list(messages))
        return list(super().send_and_receive(messages, timeout=timeout))

    def _answer_here(self, messages: Sequence[Message]) -> list[Message]:
        if self.watch.template is None and isinstance(self.app, CohortApp):
            replies = super()._answer_here(messages)  # in batches, as the app would run
            for message, reply in zip(messages, replies, strict=True):
                self.watch.note(message, reply)
            return replies
        return [
            self.watch.answer(self.app, message, self.contexts[message.metadata.dst_node_id])
            for message in messages
        ]


def observe(
    server: ServerApp,
    client: ClientApp,
    config: Mapping[str, Any],
    clients: int,
    watch: Watch,
) -> Observed:
    """Run an app once, and return what was observed, also if the app raises."""
    grid = WatchedGrid(client, clients, config)
    grid.watch, grid.app = watch, client
    context = Context(
        run_id=1,
        node_id=private.SERVER_NODE_ID,
        node_config={},
        state=RecordDict(),
        run_config=dict(config),
    )
    seed_all(watch.seed, 0, 0)
    try:
        server(grid, context)
    except Enough:
        pass
    except BaseException as error:  # also SystemExit of the app
        if not isinstance(error.__context__, Enough):
            watch.observed.ended = watch.described(error)
            traceback.print_exc()
    return watch.observed


def seed_all(*path: int) -> None:
    """Seed the global generators, which apps draw from."""
    seed = int(np.random.SeedSequence(path).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - apps draw from it
    torch.default_generator.manual_seed(seed)  # without a stack trace for other devices


def _kind(message: Message) -> str:
    """Return the category of a message; for two kinds that look like training, another name."""
    if asks_identity(message):
        return "identity"
    if is_rehearsal(message):
        return "rehearsal"
    return message.metadata.message_type.partition(".")[0]


def _partition(message: Message) -> int:
    return int(message.metadata.dst_node_id) - 1_000


def _arrays(content: RecordDict) -> dict[tuple[str, str], np.ndarray]:
    return {
        (name, key): array.numpy()
        for name, record in content.array_records.items()
        for key, array in record.items()
    }


def _same(one: RecordDict, other: RecordDict) -> bool:
    left, right = _arrays(one), _arrays(other)
    return left.keys() == right.keys() and all(
        np.array_equal(array, right[key]) for key, array in left.items()
    )


def _like(record: ArrayRecord, content: RecordDict) -> ArrayRecord | None:
    """Return the received record with the same arrays; None if there is none."""
    shapes = {key: tuple(array.shape) for key, array in record.items()}
    for received in content.array_records.values():
        if shapes == {key: tuple(array.shape) for key, array in received.items()}:
            return received
    return None


def _upload(received: RecordDict, sent: RecordDict) -> Vector | None:
    differences: list[np.ndarray] = []
    for name, record in sent.array_records.items():
        arrays = {key: array.numpy() for key, array in record.items()}
        if name == records.UPDATE:  # of this package: already a difference
            differences.extend(arrays.values())
        elif (model := _like(record, received)) is not None:
            differences.extend(
                np.asarray(array, np.float64) - model[key].numpy()
                for key, array in arrays.items()
                if array.dtype.kind == "f"
            )
    return vector(differences)


def _moved(record: ArrayRecord, change: Change) -> ArrayRecord:
    """Return a record, moved by a held update or by that of a changed client."""
    moved = moved_arrays({key: array.numpy() for key, array in record.items()}, change)
    return ArrayRecord({key: Array(np.asarray(array)) for key, array in moved.items()})


def _with_huge_record(examples: Examples) -> Examples:
    """Return examples whose first record has huge numbers, as far as its features are numbers."""

    def enlarged(part: torch.Tensor) -> torch.Tensor:
        part = part.clone()
        if part.is_floating_point():
            part[0] = HUGE * torch.where(part[0] == 0, 1, part[0])
        return part

    return replace(examples, features=trees.mapped(enlarged, examples.features))


def moved_arrays(arrays: Mapping[str, np.ndarray], change: Change) -> dict[str, np.ndarray]:
    """Return arrays, moved by a held update or by that of a changed client."""
    size = sum(array.size for array in arrays.values() if array.dtype.kind == "f")
    move = np.zeros(size) if change == "zero" or not size else held_step(size)
    if change.startswith("huge"):
        move = HUGE * direction(size)
    elif change == "nan":
        move = np.full(size, np.nan)
    start, moved = 0, {}
    for key, array in arrays.items():
        if array.dtype.kind == "f":
            part = move[start : start + array.size].reshape(array.shape)
            start += array.size
            array = np.asarray(array + part, array.dtype)
        moved[key] = array
    return moved
