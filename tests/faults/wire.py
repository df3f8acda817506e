"""Search every message of a run, byte by byte, for a client's memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp

from flower_ext.federation import FederatedStrategy, InProcessGrid
from flower_ext.federation.messages import records
from tests.faults.worlds import CLIENTS, initial, task

WINDOW = 12
"""Number of bytes that must match together: three neighbouring parameters."""


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The amount of memory and messages that was searched, and the matches."""

    name: str
    personal_bytes: int
    wire_bytes: int
    messages: int
    found_bytes: int
    found_names: int


class TappedGrid(InProcessGrid):
    """A grid that keeps the bytes of every message, and the clients' memory after each."""

    def __init__(self, app: ClientApp, num_clients: int) -> None:
        super().__init__(app, num_clients)
        self.wire: list[bytes] = []
        self.names: set[str] = set()
        self.memories: dict[bytes, str] = {}
        self.unsent: dict[str, set[bytes]] = {}
        """Sequences of numbers in clients' memories, by name, that no server had sent before."""
        self._sent: set[bytes] = set()
        self.messages = self._untapped = 0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages as `InProcessGrid` does, and record everything."""
        messages = list(messages)
        replies = list(super().send_and_receive(messages, timeout=timeout))
        self._tap_all(messages)
        self._sent.update(*map(_windows, self.wire[self._untapped :]))
        self._tap_all(replies)
        self._untapped = len(self.wire)
        for context in self.contexts.values():
            for record in context.state.array_records.values():
                for name, array in records.to_arrays(record).items():
                    if (data := array.tobytes()) not in self.memories:
                        self.memories[data] = name
                        self.unsent.setdefault(name, set()).update(_windows(data) - self._sent)
        return replies

    def _tap_all(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.messages += 1
            if message.has_content():
                self._tap(message)

    def _tap(self, message: Message) -> None:
        for record in message.content.values():
            if isinstance(record, ArrayRecord):
                self.names |= set(record)
                self.wire += [bytes(array.data) for array in record.values()]
            else:
                self.wire.append(repr(dict(record)).encode())
                self.wire.append(b"".join(np.float32(v).tobytes() for v in _numbers(record)))


def _numbers(record: object) -> list[float]:
    values: Iterable[object] = getattr(record, "values", list)()
    return [float(v) for v in values if isinstance(v, int | float)]


def search(name: str, strategy: FederatedStrategy, *, rounds: int) -> Searched:
    """Run a method and search for every three neighbouring numbers of any client's memory.

    Numbers that the server had sent before are not the client's own: a unit that is never active
    stays in the personal model as it was received.
    """
    grid = TappedGrid(strategy.method.client_app(task(), allow_seeded_noise=True), CLIENTS)
    strategy.start(grid, initial(), num_rounds=rounds)
    windows = set().union(*grid.unsent.values())
    seen = {window for data in grid.wire for window in _windows(data)}
    shared = set(strategy.run.model)
    return Searched(
        name=name,
        personal_bytes=sum(map(len, grid.memories)),
        wire_bytes=sum(map(len, grid.wire)),
        messages=grid.messages,
        found_bytes=WINDOW * len(windows & seen),
        found_names=len(({*grid.memories.values()} - shared) & grid.names),
    )


def _windows(data: bytes) -> set[bytes]:
    """Return the sequences of `WINDOW` bytes at every fourth offset whose numbers differ."""
    runs = {data[at : at + WINDOW] for at in range(0, len(data) - WINDOW + 1, 4)}
    return {run for run in runs if len({run[at : at + 4] for at in range(0, WINDOW, 4)}) > 1}
