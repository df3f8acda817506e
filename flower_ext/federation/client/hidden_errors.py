"""Hide a client's errors from the server and from other clients, or report them without its data.

The message of an exception, and even its type, may depend on a record. So the reply carries a fixed
sentence, and the exception itself stays in the log of the client's own process. If a check uses no
data, `errors.tellable` marks its error, and the reply carries the error's message.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging import getLogger
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod

from flower_ext.errors import is_tellable
from flower_ext.federation.messages.failures import CLIENT_APP_RAISED, REASON_SENT, REASON_WITHHELD
from flower_ext.privacy import NonFiniteUpdate
from flower_ext.training.isolation import attempted

log = getLogger("flwr")

R = TypeVar("R")

_logged_places: WeakKeyDictionary[Any, set[tuple[str, int]]] = WeakKeyDictionary()
"""For each app or mod, the lines of code whose tracebacks are logged already."""
hidden_errors: Counter[tuple[str, int]] = Counter()
"""Number of errors that this process and its workers have hidden, by the line that raised them."""


def failed(app: ClientApp | Mod, message: Message, context: Context, error: Exception) -> Message:
    """Return the error reply of a client's app or mod, and log the error on the client."""
    is_told = is_tellable(error)
    partition = context.node_config.get("partition-id", context.node_id)
    where, shown = raised_at(error), _logged_places.setdefault(app, set())
    if where in shown:  # log one traceback per line of code, not one per client and round
        log.debug("client %s failed like an earlier client", partition, exc_info=error)
    elif is_told:
        log.warning("client %s takes no part in this round: %s", partition, error)
    else:
        log.error("client %s failed", partition, exc_info=error)
    shown.add(where)
    if not is_told:
        return Message(Error(CLIENT_APP_RAISED, REASON_WITHHELD), reply_to=message)
    reason = " ".join(str(error).split()) or type(error).__name__
    return Message(Error(REASON_SENT, reason), reply_to=message)


@contextmanager
def hide_errors(if_allowed: bool) -> Iterator[None]:
    """If the block raises an error, log it on the client and continue after the block.

    If the block ends with ``return``, code after the block runs only if an error was hidden.
    ``if_allowed`` is True if the client's protection hides errors. If it is False, raise the error
    nevertheless. Raise a `tellable` error in any case, because it depends on no data.
    """
    try:
        yield
    except Exception as error:
        if not if_allowed or is_tellable(error):
            raise
        log_hidden(error)


def log_hidden(error: Exception) -> None:
    """Log an error for the client's operator; the server receives an upload as usual."""
    if isinstance(error, NonFiniteUpdate):
        hidden_errors[raised_at(error)] += 1
        log.warning(
            "a local training diverged (its model is not finite), so its model stays unchanged: "
            "take a smaller learning rate if many trainings diverge, or check this client's data"
        )
    else:
        log_once(
            "a local training failed (%s), so its model stays unchanged: check this client's data, "
            "or the task if no client trains",
            error,
        )


def log_once(text: str, error: Exception) -> None:
    """Log ``text`` with an error's type, and one traceback for each line of code that fails."""
    where = raised_at(error)
    log.warning(text, type(error).__name__, exc_info=None if where in hidden_errors else error)
    hidden_errors[where] += 1


def attempt_each(step: Callable[..., R], *columns: Sequence[Any]) -> list[R | Exception]:
    """Apply ``step`` to the arguments of each client, and return the results or errors.

    Each column holds one argument for every client. If a client's argument is an exception, an
    earlier step failed for this client, and the exception is its result.
    """
    return list(attempt_in_turn(step, *columns))


def attempt_in_turn(step: Callable[..., R], *columns: Sequence[Any]) -> Iterator[R | Exception]:
    """Yield the results of `attempt_each` one by one.

    The next client's step begins only when the caller asks for its result.
    """
    for row in zip(*columns, strict=True):
        for value in row:
            if isinstance(value, Exception):
                yield value
                break
        else:
            yield attempted(step, *row)


def raised_at(error: Exception) -> tuple[str, int]:
    """Return the file and the line that raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return ("", 0) if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
