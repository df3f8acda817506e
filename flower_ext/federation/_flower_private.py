"""Flower's private names that this package uses; the plug-in `guard` uses a few more.

The tests of `engines` use every name, so these tests fail if a Flower version moves one.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any, TypeVar

from flwr.app import ArrayRecord, Context, Message, Metadata, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

SERVER_NODE_ID = 1
FIRST_CLIENT_ID = 1_000
"""First node id that an engine of this package gives to a client, above the server's id."""

_FIRST_PAUSE, _LONGEST_PAUSE, _PAUSE_SHARE = 0.05, 1.0, 0.1
"""Pause between two polls: a tenth of the time waited so far, within 0.05 s and 1 s."""

_RAY_CLIENT = "flwr.simulation.ray_transport.ray_actor.ClientAppActor.run"
"""Ray's name of the function in which Flower's simulation runs a client."""

R = TypeVar("R", ArrayRecord, MetricRecord, RecordDict)
_EMPTY: Mapping[type, Any] = {kind: kind() for kind in (ArrayRecord, MetricRecord, RecordDict)}


def empty_run(run_id: int) -> Run:
    """Return a Run that has only an id."""
    return Run.create_empty(run_id)


def has_function_for(app: ClientApp, message_type: str) -> bool:
    """Return True if a ClientApp has a function for messages of this type."""
    category, _, action = message_type.partition(".")
    return app._call is not None or f"{category}.{action or 'default'}" in app._registered_funcs


def sent_with_app(app: Path, file: Path, excluded: Iterable[str]) -> bool:
    """Return True if Flower sends ``file``, which lies in the app's folder, to all nodes.

    ``excluded`` are the patterns of the app's ``fab-exclude``.
    """
    from flwr.cli.utils import filter_paths_for_publish  # would slow every client's start

    ignored = app / ".gitignore"
    patterns = [ignored.read_text(encoding="utf-8", errors="replace")] if ignored.is_file() else []
    name = file.relative_to(app).as_posix()
    rules = "\n".join([*patterns, *excluded]).encode()
    return name in filter_paths_for_publish({name: b"", ".gitignore": rules})


def become_server_of(run_id: int) -> None:
    """Turn this process into the server of run ``run_id``, so that it can create messages."""
    TaskIdentity.task_id = 1
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = SERVER_NODE_ID


def set_message_id(message: Message, message_id: str) -> None:
    """Set the id of a message, as Flower's SuperLink would."""
    message.metadata.__dict__["_message_id"] = message_id


def message_like(message: Message, content: RecordDict, **other: object) -> Message:
    """Return a copy of a message with new ``content``; ``other`` replaces fields of metadata."""
    metadata = _copied(message.metadata)
    vars(metadata).update({f"_{name}": value for name, value in other.items()})
    return _message(metadata, content)


def replies(grid: Grid, messages: Iterable[Message], *, timeout: float | None) -> Iterable[Message]:
    """Send messages and return the replies, as ``grid.send_and_receive`` does.

    For Flower's own grids the function yields each reply as soon as it arrives. Flower's method
    would collect all replies first, and sleep for three seconds between two polls of a SuperLink.
    """
    if not type(grid).__module__.startswith("flwr."):
        return grid.send_and_receive(messages, timeout=timeout)
    # A message that could not be sent has no id, and gets no reply.
    return _as_they_come(grid, set(filter(None, grid.push_messages(messages))), timeout)


def _as_they_come(grid: Grid, waiting: set[str], timeout: float | None) -> Iterator[Message]:
    started = monotonic()
    while waiting:
        for reply in grid.pull_messages([*waiting]):
            waiting.discard(reply.metadata.reply_to_message_id)
            yield reply
        passed = monotonic() - started
        if timeout is not None and passed >= timeout:
            return
        if waiting:
            sleep(min(max(_FIRST_PAUSE, _PAUSE_SHARE * passed), _LONGEST_PAUSE))


def reply_to(message: Message, content: RecordDict) -> Message:
    """Return ``Message(content, reply_to=message)``, without Flower's checks, which take time."""
    return _message(reply_metadata(message), content)


def reply_metadata(message: Message) -> Metadata:
    """Return the metadata of a reply to ``message``."""
    request, now = vars(message.metadata), time()
    metadata = _copied(message.metadata)
    vars(metadata).update(
        _message_id="",
        _reply_to_message_id=request["_message_id"],
        _src_node_id=request["_dst_node_id"],
        _dst_node_id=request["_src_node_id"],
        _src_task_id=request["_dst_task_id"],
        _dst_task_id=request["_src_task_id"],
        _created_at=now,
        _ttl=request["_ttl"] - (now - request["_created_at"]),
    )
    return metadata


def _copied(metadata: Metadata) -> Metadata:
    copied = Metadata.__new__(Metadata)
    vars(copied).update(vars(metadata))
    return copied


def _message(metadata: Metadata, content: RecordDict) -> Message:
    message = Message.__new__(Message)
    vars(message).update(_metadata=metadata, _content=content, _error=None)
    return message


def record_of(kind: type[R], items: Mapping[str, object]) -> R:
    """Return a record of ``items``, unchecked by Flower because this package made the items."""
    record: R = _EMPTY[kind].copy()
    vars(record)["_data"].update(items)
    return record


class SimulatedContext(Context):
    """The context of a client that this package simulates."""


def is_simulated(context: Context) -> bool:
    """Return True if this package or Flower's Ray engine simulates the client of a context.

    Anybody may use Ray, for example a task on a SuperNode. Only Flower's simulation runs clients in
    the actor `_RAY_CLIENT`.
    """
    if isinstance(context, SimulatedContext):
        return True
    get_runtime_context = getattr(sys.modules.get("ray"), "get_runtime_context", None)
    if get_runtime_context is None:  # nobody has imported Ray, or not yet all of it
        return False
    worker = get_runtime_context()
    # Outside actors, Ray would log a warning if it were asked for the name of a function.
    return worker.get_actor_id() is not None and worker.get_task_function_name() == _RAY_CLIENT


def simulates(grid: Grid) -> bool:
    """Return True if this package or Flower's Ray engine simulates the nodes of a grid."""
    return getattr(grid, "simulates_nodes", type(grid).__name__ == "InMemoryGrid")
