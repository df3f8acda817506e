"""Processes that answer for a part of the clients each, so that one run uses many cores.

They are forked from the process of the server and share what it has loaded. A client that has a
state belongs to the one where it is, for the whole run; all others go where there is least to do.
Each has one thread: many small trainings gain more from another process than from another thread.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import ref

import numpy as np
import torch
from flwr.app import Context, Error, Message, RecordDict

from flower_ext.errors import FlowerExtError, InvalidValue
from flower_ext.federation import _flower_private as private
from flower_ext.federation.uploads import Elsewhere, RowElsewhere, Upload, UploadReply
from flower_ext.privacy import PrivacyPlan
from flower_ext.privacy.updates import Layout, Summed

_ROWS = "rows"
"""Asks another process for the updates that it kept."""


class WorkerLost(FlowerExtError, RuntimeError):
    """A process has ended, and with it the state of its clients; the message says which."""


class Workers:
    """A pool of this process and others, which start with the first messages.

    Parameters
    ----------
    count : int
        Processes, this one among them.
    answer : Callable[[Sequence[Message]], list[Message]]
        Replies for clients whose contexts are in ``contexts``.
    contexts : Mapping[int, Context]
        Of all clients, by node id.
    """

    def __init__(
        self,
        count: int,
        answer: Callable[[Sequence[Message]], list[Message]],
        contexts: Mapping[int, Context],
    ) -> None:
        if count < 1:
            raise InvalidValue(f"workers={count!r}: expected an integer >= 1")
        if count > 1 and "fork" not in multiprocessing.get_all_start_methods():
            raise InvalidValue(f"workers={count!r}: this system cannot fork processes; expected 1")
        self.count, self._answer, self._contexts = count, answer, contexts
        # Neighbours share a process: a cohort in order begins with the replies that come first.
        self._usual = {
            node: number * count // len(contexts) for number, node in enumerate(contexts)
        }
        self._homes: dict[int, int] = {}  # where the states are of those that have one
        self._others: list[tuple[BaseProcess, _Channel]] = []
        self._open: dict[int, Sequence[Message]] = {}  # what other processes still have to answer
        self._kept: dict[int, ref[Elsewhere]] = {}
        self._threads = torch.get_num_threads()  # of this process, before and afterwards

    def ask(
        self, messages: Sequence[Message], plan: PrivacyPlan | None = None
    ) -> Iterator[Message]:
        """Return replies in the order of ``messages``; those of other processes come later.

        The share of this process is answered before this returns. The others work meanwhile, and
        are waited for when their first reply is taken.

        Parameters
        ----------
        plan : PrivacyPlan, optional
            Adds up the updates in each of the other processes: they stay there until somebody
            reads one, or the process gets its next messages.

        Raises
        ------
        WorkerLost
        """
        if self.count == 1:
            return iter(self._answer(messages))
        if not self._others:
            self._fork()
        self._settle()
        shares = self._divided(messages)
        home = {id(each): number for number, share in enumerate(shares) for each in share}
        for number in range(1, self.count):
            if shares[number]:
                self._send(number, (shares[number], plan))
                self._open[number] = shares[number]
        own = self._answer(shares[0])
        replies = {id(message): reply for message, reply in zip(shares[0], own, strict=True)}
        self._homes |= dict.fromkeys(self._with_state(shares[0]), 0)
        return self._in_order(messages, home, replies)

    def _in_order(
        self, messages: Sequence[Message], home: Mapping[int, int], replies: dict[int, Message]
    ) -> Iterator[Message]:
        for message in messages:
            if id(message) not in replies:
                replies |= self._heard(home[id(message)])
            yield replies.pop(id(message))

    def _heard(self, number: int) -> dict[int, Message]:
        """Return what another process answers to the messages that it was sent last."""
        messages = self._open.pop(number)
        told, stateful, summed = self._receive(number)
        self._homes |= dict.fromkeys(stateful, number)
        kept = sum(isinstance(each, _Kept) for each in told)
        there = Elsewhere(partial(self._fetched, number), summed, kept)
        if kept:
            self._kept[number] = ref(there)
        replies, index = {}, 0
        for message, each in zip(messages, told, strict=True):
            if isinstance(each, _Kept):
                each, index = each.upload(there, index), index + 1
            replies[id(message)] = _reply(message, each)
        return replies

    def _fetched(self, number: int) -> list[np.ndarray]:
        """Return the updates that another process kept."""
        del self._kept[number]
        self._send(number, _ROWS)
        rows: list[np.ndarray] = self._receive(number)
        return rows

    def _settle(self) -> None:
        """Take from the other processes what somebody may still read, before they forget it."""
        for number in [*self._open]:
            self._heard(number)
        for there in [found for kept in [*self._kept.values()] if (found := kept()) is not None]:
            there.rows()
        self._kept.clear()

    def _divided(self, messages: Sequence[Message]) -> list[list[Message]]:
        """By process: clients with a state where it is, others such that all have as much to do.

        Of these, most are in the same process every time, which may hold their data already.
        """
        by_node: dict[int, list[Message]] = defaultdict(list)
        for message in messages:
            by_node[message.metadata.dst_node_id].append(message)
        shares: list[list[Message]] = [[] for _ in range(self.count)]
        for node in self._homes.keys() & by_node:
            shares[self._homes[node]] += by_node.pop(node)
        part = math.ceil(len(messages) / self.count)
        for node in list(by_node):
            if len(usual := shares[self._usual[node]]) < part:
                usual += by_node.pop(node)
        for own in by_node.values():
            min(shares, key=len).extend(own)
        return shares

    def _with_state(self, messages: Sequence[Message]) -> list[int]:
        """Nodes among those asked that have a state, in this process."""
        nodes = [message.metadata.dst_node_id for message in messages]
        return [node for node in nodes if self._contexts[node].state]

    def gather(self) -> None:
        """End the other processes and take over the states of their clients."""
        self._settle()
        for number, (process, _) in enumerate(self._others, start=1):
            self._send(number, None)
            for node, state in self._receive(number).items():
                self._contexts[node].state = state
            process.join()
        self.abandon()

    def abandon(self) -> None:
        """End the other processes at once, if there are any left."""
        for process, channel in self._others:
            channel.close()
            process.terminate()
            process.join()
        if self._others:
            torch.set_num_threads(self._threads)
        self._others.clear()
        self._open.clear()

    def _fork(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                f"workers={self.count}: this process already uses a GPU, which forked ones could "
                "not; expected 1"
            )
        torch.set_num_threads(1)
        context = multiprocessing.get_context("fork")
        for number in range(1, self.count):
            here, there = context.Pipe()
            memory = _file()
            ours, theirs = _Channel(here, memory), _Channel(there, memory)
            process = context.Process(
                target=self._serve,
                args=(theirs, ours),
                name=f"worker-{number}",
                daemon=True,
            )
            process.start()
            there.close()
            self._others.append((process, ours))

    def _serve(self, channel: _Channel, other_end: _Channel) -> None:
        """Answer for the clients of this process until the server's has ended or asks to stop."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server's process ends the others,
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by this signal
        torch.seed()  # not the numbers that the other processes draw
        for other in (other_end, *(earlier for _, earlier in self._others)):
            other.connection.close()  # else the server's end would never seem closed
        nodes: set[int] = set()
        kept: list[Upload] = []
        while True:
            try:
                asked = pickle.loads(channel.connection.recv_bytes())
            except EOFError:
                return
            if asked is None:
                break
            if asked == _ROWS:
                channel.share([upload.arrays.numbers for upload in kept])
                continue
            messages, plan = asked
            told, summed = [*map(_told, self._answer(messages))], None
            kept = [each for each in told if plan is not None and isinstance(each, Upload)]
            if kept:
                summed = _sum(plan, kept)
            sent = [
                _Kept.of(each, with_norm=plan.client_protects)
                if isinstance(each, Upload) and plan is not None
                else each
                for each in told
            ]
            stateful = self._with_state(messages)
            nodes.update(stateful)
            channel.share((sent, stateful, summed))
        channel.share({node: self._contexts[node].state for node in nodes})

    def _send(self, number: int, asked: object) -> None:
        try:
            self._others[number - 1][1].connection.send_bytes(pickle.dumps(asked, protocol=5))
        except OSError as error:
            raise self._lost(number) from error

    def _receive(self, number: int) -> Any:
        try:
            return self._others[number - 1][1].shared()
        except (EOFError, OSError) as error:
            raise self._lost(number) from error

    def _lost(self, number: int) -> WorkerLost:
        process = self._others[number - 1][0]
        process.join(timeout=5)
        return WorkerLost(
            f"{process.name} of {self.count} has ended (exit code {process.exitcode}) and with it "
            "the state of its clients: its own error is above; if it was killed (-9), there was "
            "too little memory for so many workers"
        )


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """All of an `Upload` but the numbers of its update."""

    layout: Layout
    dtype: np.dtype
    square: float
    norm: float
    metrics: Mapping[str, float]
    payload: int

    @classmethod
    def of(cls, upload: Upload, *, with_norm: bool) -> _Kept:
        row = upload.arrays
        square = row.square
        return cls(
            layout=row.layout,
            dtype=row.dtype,
            square=square,
            norm=row.norm if with_norm and math.isfinite(square) else math.inf,
            metrics=upload.metrics,
            payload=upload.payload,
        )

    def upload(self, there: Elsewhere, index: int) -> Upload:
        row = RowElsewhere(there, index, self.layout, self.dtype, self.square, self.norm)
        return Upload(row, self.metrics, self.payload)


def _told(reply: Message) -> Error | RecordDict | Upload:
    if reply.has_error():
        return reply.error
    upload = reply.upload if isinstance(reply, UploadReply) else None
    return reply.content if upload is None else upload


def _reply(message: Message, told: Error | RecordDict | Upload) -> Message:
    if isinstance(told, Error):
        return Message(told, reply_to=message)
    if isinstance(told, Upload):
        return UploadReply(message, told)
    return private.reply_to(message, told)


def _sum(plan: PrivacyPlan, uploads: Sequence[Upload]) -> Summed | None:
    """Return the sum of updates; None where one of them has none, for the server to refuse it."""
    try:
        return plan.part((upload.arrays for upload in uploads), like=uploads[0].arrays)
    except (ValueError, TypeError):
        return None


class _Channel:
    """Messages one way, arrays and all the other: those go through a file without a name.

    In memory where the system has such files; its pages are there again for the next answer.
    """

    def __init__(self, connection: Connection, memory: int) -> None:
        self.connection, self._memory = connection, memory

    def share(self, content: object) -> None:
        """Send something that holds large arrays."""
        buffers: list[pickle.PickleBuffer] = []
        outline = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
        parts, end = [buffer.raw() for buffer in buffers], 0
        for part in parts:
            written = 0
            while written < part.nbytes:
                written += os.pwrite(self._memory, part[written:], end + written)
            end += written
        sizes = [part.nbytes for part in parts]
        self.connection.send_bytes(pickle.dumps((outline, sizes)))

    def shared(self) -> Any:
        """What was sent by `share`."""
        outline, sizes = pickle.loads(self.connection.recv_bytes())
        memory, read = np.empty(sum(sizes), np.uint8).data, 0
        while read < len(memory):
            read += os.preadv(self._memory, [memory[read:]], read)
        ends = itertools.accumulate(sizes)
        parts = [memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        return pickle.loads(outline, buffers=parts)

    def close(self) -> None:
        """Neither side can use it afterwards."""
        self.connection.close()
        os.close(self._memory)


def _file() -> int:
    """A file that ends with the processes that have it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("flower_ext")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
