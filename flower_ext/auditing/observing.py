"""An adversary's view of runs: uploads, as they pass over the grid, and released models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from flower_ext.auditing.experiment import Arrays, Experiment, Observation, World
from flower_ext.federation import FederationNotReady, InProcessGrid, records, run_in_process
from flower_ext.federation.cohort import partition_of


def observe(
    experiment: Experiment,
    world: World,
    take: Callable[[Observation, Strategy], None],
    *,
    trials: int,
) -> None:
    """Hand over what an adversary sees in each trial, and the strategy; clients begin afresh."""
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        assert isinstance(grid, InProcessGrid)
        for _ in range(trials):
            for own in grid.contexts.values():
                own.state = RecordDict()
            take(*_trial(experiment, world, grid))

    with _quiet():
        run_in_process(
            server, world.client_app, num_clients=world.num_clients, run_config=world.run_config
        )


def _trial(
    experiment: Experiment, world: World, grid: InProcessGrid
) -> tuple[Observation, Strategy]:
    listener = _Listener(grid, experiment.on_round)
    initial = records.to_arrays(experiment.initial)
    models: dict[int, Arrays] = {0: _wide(initial)}

    def note(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        models[number] = _wide(records.to_arrays(arrays))
        if number < experiment.rounds:
            listener.begin(number + 1)
        return None

    strategy = world.strategy()
    listener.begin(1)
    try:
        strategy.start(
            listener,
            records.to_record(initial),
            num_rounds=experiment.rounds,
            evaluate_fn=note,
        )
    except FederationNotReady:
        if not any(listener.uploads):
            raise  # else all uploads were refused, which have been seen all the same
    released = [models[0]]
    for number in range(1, experiment.rounds + 1):  # one that released nothing left the model
        released.append(models.get(number, released[-1]))
    seen = Observation(models=released, sent=listener.sent, uploads=listener.uploads)
    return seen, strategy


class _Listener(Grid):
    """A grid that notes what clients upload in training."""

    def __init__(self, grid: InProcessGrid, on_round: Callable[[int], None] | None) -> None:
        self._grid, self._on_round = grid, on_round
        self.sent: list[dict[int, Arrays]] = []
        self.uploads: list[dict[int, Arrays]] = []

    def begin(self, number: int) -> None:
        """Begin a round, in which perhaps nobody is asked."""
        if number > len(self.uploads):
            self.sent.append({})
            self.uploads.append({})
            if self._on_round is not None:
                self._on_round(number)

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        return self._grid.run

    def create_message(self, *args: Any, **options: Any) -> Message:
        return self._grid.create_message(*args, **options)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        asked = list(messages)
        trains = [m for m in asked if m.metadata.message_type.partition(".")[0] == "train"]
        if not trains:
            return self._grid.send_and_receive(asked, timeout=timeout)
        sent = {m.metadata.dst_node_id: _arrays(m.content.get(records.MODEL)) for m in trains}
        replies = list(self._grid.send_and_receive(asked, timeout=timeout))
        self.sent[-1].update({self._partition(node): base for node, base in sent.items()})
        for reply in replies:
            node = reply.metadata.src_node_id
            if (own := _upload(reply, sent.get(node, {}))) is not None:
                self.uploads[-1][self._partition(node)] = own
        return replies

    def _partition(self, node: int) -> int:
        return partition_of(self._grid.contexts[node].node_config)


def _upload(reply: Message, sent: Arrays) -> Arrays | None:
    """Return the model that a client sent minus the one it received; None for other replies."""
    if reply.has_error():
        return None
    if records.UPDATE in reply.content:
        return _arrays(reply.content[records.UPDATE])
    model = _arrays(reply.content.get(records.MODEL))
    return {name: value - sent.get(name, 0.0) for name, value in model.items()}


def _arrays(record: object) -> Arrays:
    return _wide(records.to_arrays(record)) if isinstance(record, ArrayRecord) else {}


def _wide(arrays: Arrays) -> Arrays:
    return {name: np.asarray(array, dtype=np.float64) for name, array in arrays.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Thousands of runs would each log their rounds."""
    log = logging.getLogger("flwr")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
