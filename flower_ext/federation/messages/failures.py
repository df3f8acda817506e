"""Error replies of clients: their codes, and the texts about them that the server may log."""

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, LogRecord, getLogger
from typing import TypeVar

from flwr.app import Error

log = getLogger("flwr")

R = TypeVar("R")

CLIENT_APP_RAISED = 2
"""Error code of a reply whose ClientApp raised an exception, as in Flower's own engines."""
MOD_REFUSED = 6
"""Error code by which a Flower mod refuses a message without the entries of the mod's strategy."""
REASON_SENT = 100
"""Error code of a reply whose text does not depend on the client's data."""
REASON_WITHHELD = "the client failed; the reason is in its own log"


@contextmanager
def unlogged(*texts: str) -> Iterator[None]:
    """During the block, keep errors that contain one of ``texts`` out of Flower's log.

    Flower's simulation runs in the ServerApp's process and logs each exception of a ClientApp
    twice, with its traceback, even an exception that the server provokes on purpose.
    """

    def keep(record: LogRecord) -> bool:
        text = record.getMessage()
        return record.levelno < ERROR or not any(part in text for part in texts)

    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


def public_reason(error: Error) -> str:
    """Return what the server may log about an error reply: the last line of its text, if any."""
    if error.code == CLIENT_APP_RAISED:
        # If the ClientApp is not of this package, Flower sends the exception's text, and this text
        # may contain a training record.
        return REASON_WITHHELD
    *_, last = (error.reason or "").strip().splitlines() or [str(error.code)]
    if error.code == MOD_REFUSED:
        return (
            "a mod of the ClientApp refused the message; remove mods that belong to a different "
            f"strategy from ClientApp(mods=...): {printable(last)}"
        )
    return f"the client failed: {printable(last)}"


def printable(text: str) -> str:
    """Return a client's text in one line, with unprintable characters escaped.

    A terminal would obey raw control characters, which could hide or forge lines of the log.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
