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
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Error, Message

from flower_ext.errors import FlowerExtError, InvalidValue
from flower_ext.federation import _flower_private as private


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
        self._usual = {node: number % count for number, node in enumerate(contexts)}
        self._homes: dict[int, int] = {}  # where the states are of those that have one
        self._others: list[tuple[BaseProcess, _Channel]] = []
        self._threads = torch.get_num_threads()  # of this process, before and afterwards

    def __call__(self, messages: Sequence[Message]) -> list[Message]:
        """Replies in the order of ``messages``.

        Raises
        ------
        WorkerLost
        """
        if self.count == 1:
            return self._answer(messages)
        if not self._others:
            self._fork()
        shares = self._divided(messages)
        others = [number for number in range(1, self.count) if shares[number]]
        for number in others:
            self._send(number, shares[number])
        own = self._answer(shares[0])
        replies = {id(message): reply for message, reply in zip(shares[0], own, strict=True)}
        self._homes |= dict.fromkeys(self._with_state(shares[0]), 0)
        for number in others:
            told, stateful = self._receive(number)
            for message, each in zip(shares[number], told, strict=True):
                replies[id(message)] = (
                    Message(each, reply_to=message)
                    if isinstance(each, Error)
                    else private.reply_to(message, each)
                )
            self._homes |= dict.fromkeys(stateful, number)
        return [replies[id(message)] for message in messages]

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
        kept: set[int] = set()
        while True:
            try:
                messages = pickle.loads(channel.connection.recv_bytes())
            except EOFError:
                return
            if messages is None:
                break
            replies = self._answer(messages)
            told = [reply.error if reply.has_error() else reply.content for reply in replies]
            stateful = self._with_state(messages)
            kept.update(stateful)
            channel.share((told, stateful))
        channel.share({node: self._contexts[node].state for node in kept})

    def _send(self, number: int, messages: Sequence[Message] | None) -> None:
        try:
            self._others[number - 1][1].connection.send_bytes(pickle.dumps(messages, protocol=5))
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
