"""Run an app for a few rounds, and watch each message.

The check adds its own mod to the ClientApp, inside all other mods. This mod sees what the app's
function returns before any other mod changes it. In a held run the mod does not call the function:
`HeldRun` answers in its place.
"""

import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_ext.data import ClientData
from flower_ext.federation import InProcessGrid
from flower_ext.federation.client import assignment
from flower_ext.federation.client.app import CohortApp, answer_all
from flower_ext.federation.client.assignment import NO_DATA
from flower_ext.federation.client.requests import ClientRequest
from flower_ext.federation.engines.in_process import run_server
from flower_ext.federation.messages import records
from flower_ext.federation.messages.failures import CLIENT_APP_RAISED
from flower_ext.federation.messages.for_mods import asks_identity, is_rehearsal
from flower_ext.federation.server.round import Round
from flower_ext.training import Task
from flower_ext_check.app_folder import AppFolder
from flower_ext_check.held_run import TRAIN, HeldRun, category_of, received_like
from flower_ext_check.observed import Observed, Reply
from flower_ext_check.vectors import Vector, summarize
from flower_ext_check.wrapping import Patch, wrap

_LEARNERS = 20
"""Number of clients of this package that learn from their data in the first run."""


class Enough(BaseException):
    """Ends a run, because the app has run for as many rounds as the check observes."""


@dataclass(kw_only=True)
class Watch:
    """The observer of one run of an app."""

    app: AppFolder
    seed: int
    rounds: int
    held: HeldRun | None = None
    """None if clients learn from their data."""
    observed: Observed = field(default_factory=Observed)
    in_strategy: bool = False
    kind: str = ""
    """Kind of the messages that clients answer."""
    answering: int = -1
    _turns: dict[int, int] = field(default_factory=dict)

    def note_requests(self, messages: Sequence[Message], partitions: tuple[int, ...]) -> None:
        """Record messages for the clients ``partitions``, before these clients answer them."""
        if not messages:
            return
        first, cohorts = messages[0], self.observed.cohorts
        kind = self.kind = _kind(first)
        # A round of a secure sum has several batches, all of one group.
        group = first.metadata.group_id or f"batch {len(cohorts)}"
        is_new = kind == TRAIN and group not in cohorts
        if is_new and len(cohorts) >= self.rounds and not self.in_strategy:
            raise Enough
        if not self.in_strategy:
            self.observed.outside_strategy.add(kind)
        if kind in (TRAIN, "evaluate") and all(_same(m.content, first.content) for m in messages):
            self.note_model(_arrays(first.content).values())
        if self.held is not None:
            self.held.begin(kind, target=partitions[0])
        if kind == TRAIN:
            cohorts.setdefault(group, partitions)

    def note_model(self, arrays: Iterable[np.ndarray]) -> None:
        """Record a model that the server released, unless it equals the last recorded model."""
        known, sent = self.observed.releases, summarize(arrays)
        if sent is None or (known and known[-1].size != sent.size):
            return
        if not known or not np.array_equal(known[-1].sample, sent.sample, equal_nan=True):
            known.append(sent)

    def answer(self, app: ClientApp, message: Message, context: Context) -> Message:
        """Run one client under seeded global random generators, record its reply and return it."""
        partition = self.answering = _partition(context)
        if self.held is not None:
            self.held.answering = partition
        turn = self._turns[partition] = self._turns.get(partition, 0) + 1
        content, is_ours = message.content, isinstance(app, CohortApp)
        try:
            with _seeded(self.seed, partition, turn):
                if is_ours:
                    (reply,) = answer_all(app, [message], [context])
                else:
                    message.content = deepcopy(content)  # the app may write into what it gets
                    reply = app(message, context)
        except Exception as error:  # whatever the app raises becomes an error reply, as in Flower
            self.observed.client_errors.append(self.app.described(error))
            reply = Message(Error(code=CLIENT_APP_RAISED, reason=""), reply_to=message)
        message.content = content
        if is_ours and self.held is not None:
            reply = self.held.changed_reply(message, reply)
        self.note_reply(message, reply, partition)
        return reply

    def reply_inside_mods(self, message: Message, context: Context, call_next: Any) -> Message:
        """Return a client's reply as it is before any mod of the app sees it.

        The app's function makes the reply. In a held run, `HeldRun` makes it.
        """
        category = category_of(message)
        if self.held is not None and category in self.held.template:
            return self.held.answer(message)
        reply: Message = call_next(message, context)
        if reply.has_content():
            self.observed.template.setdefault(category, deepcopy(reply.content))
        return reply

    def patches(self) -> list[Patch]:
        """Return the functions of this package to replace in this run."""
        held = [] if self.held is None else self.held.patches()
        return [
            (assignment, "checked_data", self._load_or_withhold_data),
            (Round, "close", self._close_and_note_mean),
            *held,
        ]

    def _load_or_withhold_data(
        self, load: Callable[..., ClientData], task: Task, request: ClientRequest, partition: int
    ) -> ClientData:
        """Return a client's data, or no data if the client must train without.

        In the first run, `_LEARNERS` clients train with their data, because no comparison needs
        more. In a held run no client trains with its data, except in a run that measures how far
        one unit moves the result: there, every client does.
        """
        learns = partition < _LEARNERS
        if self.held is not None:
            learns = self.held.shows_unit(request.round.protection)
        if request.kind == TRAIN and request.hides_missing_data and not learns:
            return NO_DATA
        return load(task, request, partition)

    def _close_and_note_mean(
        self, close: Callable[..., Any], round: Round, replies: Any, **options: Any
    ) -> Any:
        """Record the mean that a round of a strategy of this package releases."""
        mean = close(round, replies, **options)
        if mean is not None and round.kind == TRAIN:
            summary = summarize(np.asarray(array) for array in mean.value.values())
            if summary is not None:
                self.observed.means[self.observed.rounds] = summary
        return mean

    def note_reply(self, message: Message, reply: Message, partition: int) -> None:
        """Record what a client sent."""
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
                kind=self.kind,
                round=self.observed.rounds,
                partition=partition,
                error=reply.has_error(),
                records=tuple((type(record).__name__, name) for name, record in content.items()),
                metrics=metrics,
                upload=_upload(message.content, content),
                integers=any(array.dtype.kind in "iub" for array in arrays.values()),
                scalars=any(a.ndim == 0 and a.dtype.kind == "f" for a in arrays.values()),
            )
        )


class WatchedGrid(InProcessGrid):
    """A grid in this process that shows every message to a `Watch`."""

    app: ClientApp
    watch: Watch

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Note the messages, then run the clients."""
        self._note(messages := list(messages))
        return super().push_messages(messages)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Note the messages, then run the clients."""
        self._note(messages := list(messages))
        return list(super().send_and_receive(messages, timeout=timeout))

    def _note(self, messages: Sequence[Message]) -> None:
        self.watch.note_requests(messages, tuple(map(_partition, self._receivers(messages))))

    def _receivers(self, messages: Sequence[Message]) -> list[Context]:
        return [self.contexts[message.metadata.dst_node_id] for message in messages]

    def _answer_in_process(self, messages: Sequence[Message]) -> list[Message]:
        # Clients run in batches only if the app runs them so, and if they learn from their data.
        contexts = self._receivers(messages)
        if self.watch.held is not None or not isinstance(self.app, CohortApp):
            pairs = zip(messages, contexts, strict=True)
            return [self.watch.answer(self.app, *pair) for pair in pairs]
        replies = super()._answer_in_process(messages)
        for message, reply, context in zip(messages, replies, contexts, strict=True):
            self.watch.note_reply(message, reply, _partition(context))
        return replies


def observe(
    server: ServerApp, client: ClientApp, config: Mapping[str, Any], clients: int, watch: Watch
) -> Observed:
    """Run an app once, and return everything that ``watch`` observes.

    Call this function in a fork, because it replaces functions of this process. It returns the
    observations even if the app raises an error.
    """
    grid = WatchedGrid(client, clients, config)
    grid.app, grid.watch = client, watch
    for patch in watch.patches():
        wrap(*patch)
    _seed(watch.seed, 0, 0)
    try:
        run_server(server, grid, config)
    except Enough:
        pass
    except BaseException as error:  # also SystemExit of the app
        if not isinstance(error.__context__, Enough):
            watch.observed.error = watch.app.described(error)
            traceback.print_exc()
    return watch.observed


@contextmanager
def _seeded(*path: int) -> Iterator[None]:
    """Seed the global random generators for the block, as `_seed` does; restore them afterwards."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - apps draw from it
    _seed(*path)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002 - apps draw from it
        torch.set_rng_state(before[2])


def _seed(*path: int) -> None:
    """Seed the global random generators, from which apps draw, with a hash of the integers."""
    seed = int(np.random.SeedSequence(path).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - apps draw from it
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also stores a stack trace


def _partition(context: Context) -> int:
    return int(context.node_config["partition-id"])


def _kind(message: Message) -> str:
    """Return a message's category, such as "train".

    Return "identity" or "rehearsal" for two kinds of messages that only look like training.
    """
    if asks_identity(message):
        return "identity"
    return "rehearsal" if is_rehearsal(message) else category_of(message)


def _arrays(content: RecordDict) -> dict[tuple[str, str], np.ndarray]:
    return {
        (name, key): array.numpy()
        for name, record in content.array_records.items()
        for key, array in record.items()
    }


def _same(one: RecordDict, other: RecordDict) -> bool:
    if one is other:
        return True
    left, right = _arrays(one), _arrays(other)
    return left.keys() == right.keys() and all(
        np.array_equal(array, right[key]) for key, array in left.items()
    )


def _upload(received: RecordDict, sent: RecordDict) -> Vector | None:
    differences: list[np.ndarray] = []
    for name, record in sent.array_records.items():
        arrays = {key: array.numpy() for key, array in record.items()}
        if name == records.UPDATE:  # this package's clients send a difference already
            differences.extend(arrays.values())
        elif (model := received_like(record, received)) is not None:
            differences.extend(
                np.asarray(array, np.float64) - model[key].numpy()
                for key, array in arrays.items()
                if array.dtype.kind == "f"
            )
    return summarize(differences)
