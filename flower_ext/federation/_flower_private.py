"""The private names of Flower that the in-process engine needs, in one place.

Each is exercised by tests of `in_process` and `virtual`, which fail loudly on a Flower
version that moves them.
"""

from __future__ import annotations

import sys
from copy import copy

from flwr.app import Message, RecordDict
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

SERVER_NODE_ID = 1


def empty_run(run_id: int) -> Run:
    """A Run with nothing but its id."""
    return Run.create_empty(run_id)


_simulated_here = False


def become_server_of(run_id: int) -> None:
    """Let this process create messages, which Flower allows only to the task of a run."""
    global _simulated_here
    _simulated_here = True
    TaskIdentity.task_id = 1
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = SERVER_NODE_ID


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message the id that Flower's SuperLink would give it."""
    message.metadata.__dict__["_message_id"] = message_id


def message_like(message: Message, content: RecordDict, message_type: str) -> Message:
    """A message that differs from one received in content and type alone."""
    metadata = copy(message.metadata)
    metadata.message_type = message_type
    like: Message = Message(content, metadata=metadata)  # type: ignore[call-overload]
    return like


def in_simulation() -> bool:
    """Whether the clients of this process are simulated: here, or by Flower's engine on Ray."""
    ray = sys.modules.get("ray")
    return _simulated_here or (ray is not None and bool(ray.is_initialized()))
