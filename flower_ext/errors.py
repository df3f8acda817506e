"""The package's errors, and the mark of errors whose message may travel to the server.

The message of a client's error, and even the error's type, may depend on a record. The error
therefore stays in the client's own process, unless the code that raises the error marks it as
`tellable`. Only a check that reads no client's data may mark its error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self, TypeVar

E = TypeVar("E", bound=Exception)

_TELLABLE = "_flower_ext_tellable"


class FlowerExtError(Exception):
    """Base class of the errors that commands print as one line."""

    @classmethod
    def tellable(cls, message: str) -> Self:
        """Return an error that is marked as safe to send to the server."""
        return tellable(cls(message))


class InvalidValue(FlowerExtError, ValueError):
    """A value that the package refuses; the message says what it expects and what to change."""


class ProtocolError(FlowerExtError, RuntimeError):
    """A cryptographic protocol's step is out of order or repeated, or lacks its input."""


class IncompleteRound(ProtocolError):
    """Messages are missing, so the sum stays masked and the round is discarded."""


def tellable(error: E) -> E:
    """Mark an error as safe to send to the server, and return it.

    The caller vouches that the message depends on no client's data.
    """
    vars(error)[_TELLABLE] = True
    return error


def is_tellable(error: Exception) -> bool:
    """Return True if `tellable` marked the error, so that its message may reach the server."""
    return _TELLABLE in vars(error)


@contextmanager
def knowing_no_data() -> Iterator[None]:
    """Mark every error of a ``with`` block as `tellable`; the block must read no client's data."""
    try:
        yield
    except Exception as error:
        tellable(error)
        raise
