"""An adversary's view of runs: the uploads on the grid, and the released models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

from flower_ext.federation import FederationNotReady, InProcessGrid
from flower_ext.federation.engines.in_process import modules_uncollected
from flower_ext.federation.messages import records
from flower_ext.federation.messages.addresses import partition_of
from flower_ext.federation.messages.for_mods import asks_identity
from flower_ext.federation.messages.upload_reply import UploadReply
from flower_ext_audit.experiment import NEXT_NORM, Arrays, Experiment, Observation, World
from flower_ext_audit.secure_rounds import SecureTranscript, is_secure


def observe(
    experiment: Experiment, world: World, *, trials: int
) -> Iterator[tuple[Observation, Strategy]]:
    """Run one world ``trials`` times; yield each run's observation and strategy.

    Clients forget each run before the next one, so that the runs are independent.
    """
    grid = _Listener(world.client_app, world.num_clients, world.run_config)
    with _undisturbed():
        for _ in range(trials):
            yield _trial(experiment, world, grid)


def _trial(experiment: Experiment, world: World, grid: _Listener) -> tuple[Observation, Strategy]:
    grid.start(experiment.on_round)
    initial = records.to_arrays(experiment.initial)
    models: dict[int, Arrays] = {0: _wide(initial)}

    strategy, metrics = world.strategy(), {}
    run = getattr(strategy, "run", None)  # None for a strategy that is not of this package

    def note(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        state = {} if run is None else run.mechanism.state
        norm = {NEXT_NORM: np.log([state["adaptive_norm"]])} if state else {}
        models[number] = {**_wide(records.to_arrays(arrays)), **norm}
        if number < experiment.rounds:
            grid.begin(number + 1)
        return None

    grid.begin(1)
    try:
        result = strategy.start(
            grid, records.to_record(initial), num_rounds=experiment.rounds, evaluate_fn=note
        )
        metrics = result.evaluate_metrics_clientapp
    except FederationNotReady:
        if not any(grid.uploads):
            raise  # otherwise the server refused uploads, which the adversary saw nevertheless
    like = initial if run is None else run.mechanism.upload_like(initial)
    released = [models[0]]
    for number in range(1, experiment.rounds + 1):  # a round without release keeps the model
        released.append(models.get(number, released[-1]))
    scores = [
        {name: value for name, value in metrics.get(number, {}).items() if isinstance(value, float)}
        for number in range(1, experiment.rounds + 1)
    ]
    observation = Observation(
        models=released,
        sent=grid.sent,
        uploads=grid.uploads,
        scores=scores,
        sums=[transcript.sum(like) for transcript in grid.secure],
        bare=[grid.by_partition(transcript.bare(like)) for transcript in grid.secure],
    )
    return observation, strategy


class _Listener(InProcessGrid):
    """A grid that records the models that clients receive, their uploads, and secure sums."""

    def start(self, on_round: Callable[[int], None] | None) -> None:
        """Start a trial with empty records and new clients."""
        self._on_round = on_round
        self.sent: list[dict[int, Arrays]] = []
        self.uploads: list[dict[int, Arrays]] = []
        self.secure: list[SecureTranscript] = []
        # Clients must not remember an earlier trial, or trials would not be independent.
        for context in self.contexts.values():
            context.state = RecordDict()

    def begin(self, number: int) -> None:
        """Open an empty record for round ``number``, unless that round has begun already."""
        if number > len(self.uploads):
            self.sent.append({})
            self.uploads.append({})
            self.secure.append(SecureTranscript())
            if self._on_round is not None:
                self._on_round(number)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Run each message's client, and record the training messages and replies."""
        requests = list(messages)
        # A training message without a model only asks a mod for its partition.
        trains = [
            m
            for m in requests
            if m.metadata.message_type.partition(".")[0] == "train" and not asks_identity(m)
        ]
        secure = any(map(is_secure, requests))
        if not trains and not secure:
            return super().send_and_receive(requests, timeout=timeout)
        sent = {m.metadata.dst_node_id: _arrays(m.content.get(records.MODEL)) for m in trains}
        replies = list(super().send_and_receive(requests, timeout=timeout))
        if secure:
            self.secure[-1].record(requests, replies)
        self.sent[-1].update(self.by_partition(sent))
        for reply in replies:
            node = reply.metadata.src_node_id
            if node in sent and (upload := _upload(reply, sent[node])) is not None:
                self.uploads[-1][self._partition(node)] = upload
        return replies

    def by_partition(self, by_node: Mapping[int, Arrays]) -> dict[int, Arrays]:
        """Return the values of ``by_node``, with each node's partition as the key."""
        return {self._partition(node): arrays for node, arrays in by_node.items()}

    def _partition(self, node: int) -> int:
        return partition_of(self.contexts[node].node_config)


def _upload(reply: Message, sent: Arrays) -> Arrays | None:
    """Return a client's update, or its model minus the model it received; None for an error."""
    if reply.has_error():
        return None
    # Do not read ``content``: that would turn the upload into records, and the server would then
    # read the reply in another way.
    if isinstance(reply, UploadReply) and (update := reply.update) is not None:
        return _wide(update.arrays)
    if records.UPDATE in reply.content:
        return _arrays(reply.content[records.UPDATE])
    model = _arrays(reply.content.get(records.MODEL))
    return {name: value - sent.get(name, 0.0) for name, value in model.items()}


def _arrays(record: object) -> Arrays:
    return _wide(records.to_arrays(record)) if isinstance(record, ArrayRecord) else {}


def _wide(arrays: Mapping[str, np.ndarray]) -> Arrays:
    return {name: np.array(array, dtype=np.float64) for name, array in arrays.items()}


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Silence Flower's log in the block, and keep the garbage collector from scanning modules."""
    log = logging.getLogger("flwr")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with modules_uncollected():
            yield
    finally:
        log.setLevel(before)
