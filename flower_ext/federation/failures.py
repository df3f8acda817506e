"""Errors of clients: each belongs to one client, and tells the server nothing of its data.

What an exception says, and even its type, may depend on a record. So a fixed sentence travels in
its place, and the rest stays in the log of the client's own process. Errors of checks that know no
data are marked as `errors.tellable`: their messages travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging import ERROR, LogRecord, getLogger
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from flower_ext.errors import is_tellable
from flower_ext.training.side_by_side import attempted

log = getLogger("flwr")

R = TypeVar("R")

CLIENT_APP_RAISED = 2
"""Error code of a reply whose ClientApp raised, as Flower's own engines number it."""
TOLD = 100
"""Error code of a reply whose text says nothing of the client's data."""
STAYS_THERE = "the client failed; why is in its own log"
_shown: WeakKeyDictionary[Any, set[tuple[str, int]]] = WeakKeyDictionary()
"""By app, or mod, the lines of code whose tracebacks are in the log already."""


def failed(app: ClientApp | Mod, message: Message, context: Context, error: Exception) -> Message:
    """Return the error reply of a client's app, or mod, and log here what is not in it."""
    told = is_tellable(error)
    partition = context.node_config.get("partition-id", context.node_id)
    where, shown = _place(error), _shown.setdefault(app, set())
    if where in shown:  # many clients may fail at one line, in many rounds
        log.debug("client %s failed as one before", partition, exc_info=error)
    elif told:
        log.warning("client %s takes no part: %s", partition, error)
    else:
        log.error("client %s failed", partition, exc_info=error)
    shown.add(where)
    code, reason = (TOLD, _one_line(error)) if told else (CLIENT_APP_RAISED, STAYS_THERE)
    return Message(Error(code=code, reason=reason), reply_to=message)


class ClientFailed(RuntimeError):
    """An error whose message says nothing; why is in the client's own log."""


@contextmanager
def hidden_errors(context: Context) -> Iterator[None]:
    """Log what a block raises here, in the client's process, and raise `ClientFailed` for it."""
    try:
        yield
    except Exception:
        log.exception("client %s failed", context.node_config.get("partition-id", context.node_id))
        raise ClientFailed(STAYS_THERE) from None


@contextmanager
def unlogged(*texts: str) -> Iterator[None]:
    """Drop errors that hold one of ``texts`` from Flower's log in this process, during the block.

    Flower's simulation runs beside the ServerApp, and logs each exception of a ClientApp twice,
    with its traceback: also one that the server has asked for.
    """

    def keep(record: LogRecord) -> bool:
        said = record.getMessage()
        return record.levelno < ERROR or not any(text in said for text in texts)

    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


def said(error: Error) -> str:
    """Return what the server may repeat of an error reply.

    Flower's engines send the text of whatever another ClientApp raised, which may hold a record:
    that is not repeated.
    """
    if error.code == CLIENT_APP_RAISED:
        return STAYS_THERE
    *_, last = (error.reason or "").strip().splitlines() or [str(error.code)]
    return f"the client failed: {last}"


def each(step: Callable[..., R], *columns: Sequence[Any]) -> list[R | Exception]:
    """Apply a step to every client's row of ``columns``; an earlier error of a client stays."""
    made: list[R | Exception] = []
    for row in zip(*columns, strict=True):
        errors = [value for value in row if isinstance(value, Exception)]
        made.append(errors[0] if errors else attempted(step, *row))
    return made


def _place(error: Exception) -> tuple[str, int]:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return ("", 0) if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
