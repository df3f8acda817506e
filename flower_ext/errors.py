"""Errors whose message is all that people need; and those whose message may travel to the server.

What an error of a client says, and even its type, may depend on a record. So it stays in the
client's own process, unless it is marked as `tellable`: then it is of a check that knows no data.
"""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=Exception)

_TELLABLE = "_flower_ext_tellable"


class FlowerExtError(Exception):
    """Base class of the errors that commands print as one line."""


class InvalidValue(FlowerExtError, ValueError):
    """A value that the package refuses; the message says what it expected and what to change."""


class ProtocolError(FlowerExtError, RuntimeError):
    """A step of a cryptographic protocol out of order, repeated, or without what it needs."""


class IncompleteRound(ProtocolError):
    """A silo's message is missing. Without it the sum stays masked, and nothing is decrypted."""


def tellable(error: E) -> E:
    """Mark an error whose message depends on no data of a client, and return it."""
    vars(error)[_TELLABLE] = True
    return error


def is_tellable(error: Exception) -> bool:
    """Return True for an error that is marked as `tellable`."""
    return _TELLABLE in vars(error)


class knowing_no_data:
    """Mark all errors of a block as `tellable`: nothing in it may know any data of a client."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            tellable(error)
