"""Worker processes that each answer for a part of the clients, so that one run uses many cores.

The server's process forks the worker processes, so they share the objects that it has loaded. A
client with a state stays in its process for the whole run. A client without a state goes to its
usual process, or to the process with the least work if the usual one has its share already. Each
process has one thread, because many small trainings gain more from processes than from threads.

The server's process also runs its part of the clients. It alone checks each update, adds it to the
sum in the order of partitions, and then discards the update. Memory therefore stays bounded, and no
bit of the sum depends on the number of processes.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from flwr.app import Context, Error, Message, RecordDict

from flower_ext.checks import require_at_least_one
from flower_ext.errors import FlowerExtError, InvalidValue
from flower_ext.federation.client.app import reply_of
from flower_ext.federation.client.hidden_errors import hidden_errors
from flower_ext.federation.messages.upload_reply import Update, UploadReply


class WorkerLost(FlowerExtError, RuntimeError):
    """A worker process has ended, and its clients' state is lost; the message names the process."""


class Workers:
    """The server's process and its workers, which start when the first messages are sent.

    ``count`` is the number of processes, including this one. ``answer`` runs clients in the process
    that calls it, and returns their replies. ``contexts`` has each client's context by its node id.
    """

    def __init__(
        self,
        count: int,
        answer: Callable[[Sequence[Message]], list[Message]],
        contexts: Mapping[int, Context],
    ) -> None:
        require_at_least_one("workers", count)
        if count > 1 and "fork" not in multiprocessing.get_all_start_methods():
            raise InvalidValue(
                f"workers={count!r}: expected 1, because this system cannot fork processes"
            )
        self.count, self._answer, self._contexts = count, answer, contexts
        # Clients with neighbouring numbers share a process. A cohort is sorted, so it begins with
        # the clients of this process, whose replies come first.
        self._usual = {
            node: number * count // len(contexts) for number, node in enumerate(contexts)
        }
        self._homes: dict[int, int] = {}  # process of each client with a state
        self._others: list[_Worker] = []
        self._threads = torch.get_num_threads()  # to restore when the workers have ended

    def ask(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Return an iterator over the replies, in the order of ``messages``.

        This process answers its part before the function returns, while the other processes work.
        When the caller takes the first reply of another process, the iterator waits for it. If a
        process has ended, the iterator raises `WorkerLost`.
        """
        if self.count == 1:
            return iter(self._answer(messages))
        if not self._others:
            self._fork()
        for worker in self._others:
            self._replies_of(worker)  # discard replies to earlier messages that nobody took
        first, *shares = self._divided(messages)
        for worker, share in zip(self._others, shares, strict=True):
            worker.ask(share)
        replies = {id(m): reply for m, reply in zip(first, self._answer(first), strict=True)}
        self._homes |= dict.fromkeys(self._with_state(first), 0)
        return self._in_order(messages, replies)

    def _in_order(
        self, messages: Sequence[Message], replies: dict[int, Message]
    ) -> Iterator[Message]:
        workers = iter(self._others)
        for message in messages:
            while id(message) not in replies:
                replies |= self._replies_of(next(workers))
            yield replies.pop(id(message))

    def _replies_of(self, worker: _Worker) -> dict[int, Message]:
        """Wait for a worker's replies to its last messages; return them by ``id(message)``."""
        messages, worker.unanswered = worker.unanswered, ()
        if not messages:
            return {}
        answers, stateful, hidden = worker.receive()
        self._homes |= dict.fromkeys(stateful, worker.number)
        hidden_errors.update(hidden)
        return {id(m): reply_of(m, answer) for m, answer in zip(messages, answers, strict=True)}

    def _divided(self, messages: Sequence[Message]) -> list[list[Message]]:
        """Divide messages among the processes, with about as much work for each.

        A client with a state goes to the process that holds it. Most other clients go to the same
        process every time, because it may hold their data already.
        """
        by_node: dict[int, list[Message]] = defaultdict(list)
        for message in messages:
            by_node[message.metadata.dst_node_id].append(message)
        shares: list[list[Message]] = [[] for _ in range(self.count)]
        for node in self._homes.keys() & by_node:
            shares[self._homes[node]] += by_node.pop(node)
        # A client with a state cannot change its process, so the other clients even out the shares.
        part = math.ceil(len(messages) / self.count)
        for node in list(by_node):
            if len(usual := shares[self._usual[node]]) < part:
                usual += by_node.pop(node)
        for messages_of_node in by_node.values():
            min(shares, key=len).extend(messages_of_node)
        return shares

    def _with_state(self, messages: Sequence[Message]) -> list[int]:
        """Return the node ids of those receivers of ``messages`` whose state is in this process."""
        nodes = [message.metadata.dst_node_id for message in messages]
        return [node for node in nodes if self._contexts[node].state]

    def gather(self) -> None:
        """End the other processes and take over the states of their clients."""
        for worker in self._others:
            self._replies_of(worker)
            worker.send(None)
            for node, state in worker.receive().items():
                self._contexts[node].state = state
            worker.process.join()
        self.abandon()

    def abandon(self) -> None:
        """End the other processes that still run, without waiting for their replies."""
        for worker in self._others:
            worker.process.terminate()
            worker.process.join()
            worker.channel.close()
        if self._others:
            torch.set_num_threads(self._threads)
        self._others.clear()

    def _fork(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                f"workers={self.count}: expected 1, because this process already uses a GPU, which "
                "forked processes cannot use"
            )
        torch.set_num_threads(1)
        context = multiprocessing.get_context("fork")
        for number in range(1, self.count):
            our_end, their_end = context.Pipe()
            memory = _file()
            ours, theirs = _Channel(our_end, memory), _Channel(their_end, memory)
            name = f"worker-{number} of {self.count}"
            process = context.Process(
                target=self._serve, args=(theirs, ours), name=name, daemon=True
            )
            process.start()
            their_end.close()
            self._others.append(_Worker(number, process, ours))
        if not all(worker.receive() for worker in self._others):
            self.abandon()
            raise RuntimeError(
                f"workers={self.count}: expected 1, because PyTorch computes no gradients in "
                "forks of a process that sees a GPU and has trained: "
                "start the run in a new process, or hide the GPU (CUDA_VISIBLE_DEVICES=)"
            )

    def _serve(self, channel: _Channel, other_end: _Channel) -> None:
        """Answer for this process's clients until the server's process ends or asks to stop."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server's process,
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which ends the workers by SIGTERM
        torch.seed()  # so that processes draw different numbers
        for other in (other_end, *(earlier.channel for earlier in self._others)):
            other.connection.close()  # else this process would never see the server's end close
        channel.write(_has_gradients())
        nodes: set[int] = set()
        while True:
            try:
                messages = pickle.loads(channel.connection.recv_bytes())
            except EOFError:
                return
            if messages is None:
                break
            before = hidden_errors.copy()
            answers = [*map(_answer_in, self._answer(messages))]
            stateful = self._with_state(messages)
            nodes.update(stateful)
            try:
                channel.write((answers, stateful, hidden_errors - before))
            except BrokenPipeError:  # the server's process has ended
                return
        channel.write({node: self._contexts[node].state for node in nodes})


@dataclass
class _Worker:
    """The server's record of one worker process, and the connection to it.

    ``unanswered`` are the messages that the worker has still to answer.
    """

    number: int
    process: BaseProcess
    channel: _Channel
    unanswered: Sequence[Message] = ()

    def ask(self, messages: Sequence[Message]) -> None:
        """Send messages to the process, if there are any."""
        if messages:
            self.send(messages)
            self.unanswered = messages

    def send(self, content: object) -> None:
        """Send an object; raise `WorkerLost` if the process has ended."""
        try:
            self.channel.connection.send_bytes(pickle.dumps(content, protocol=5))
        except OSError as error:
            raise self._lost() from error

    def receive(self) -> Any:
        """Return the next object that the process sends; raise `WorkerLost` if it has ended."""
        try:
            return self.channel.read()
        except (EOFError, OSError) as error:
            raise self._lost() from error

    def _lost(self) -> WorkerLost:
        self.process.join(timeout=5)
        return WorkerLost(
            f"{self.process.name} has ended (exit code {self.process.exitcode}), and the state of "
            "its clients is lost: see its error above; after exit code -9, take fewer workers, "
            "because the system may have run out of memory"
        )


def _has_gradients() -> bool:
    """Return False if PyTorch refuses to compute gradients in this process."""
    try:
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def _answer_in(reply: Message) -> Error | RecordDict | Update:
    if reply.has_error():
        return reply.error
    update = reply.update if isinstance(reply, UploadReply) else None
    return reply.content if update is None else update


class _Channel:
    """A connection to a process, and an unnamed file for its answers, which are large.

    The file is in memory if the system supports it. Each answer overwrites the previous one.
    """

    def __init__(self, connection: Connection, memory: int) -> None:
        self.connection, self._memory = connection, memory

    def write(self, content: object) -> None:
        """Send an object through the file, and tell the other side that it is there."""
        with open(self._memory, "wb", closefd=False) as file:
            file.seek(0)
            pickle.dump(content, file, protocol=5)
        self.connection.send_bytes(b"written")

    def read(self) -> Any:
        """Return the object that the other side sent by `write`."""
        self.connection.recv_bytes()
        with open(self._memory, "rb", closefd=False) as file:
            file.seek(0)
            return pickle.load(file)

    def close(self) -> None:
        """Close this end of the channel; neither process can use the channel afterwards."""
        self.connection.close()
        os.close(self._memory)


def _file() -> int:
    """Return the descriptor of a file that disappears with the processes that have it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("flower_ext")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
